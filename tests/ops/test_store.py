"""``store_kv`` in Triton writes the reference's bytes, and no others."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from store_cases import (
    DTYPES,
    POISON_BYTE,
    Case,
    build,
    build_beside_boundaries,
    expected,
    rows_on_boundaries,
)

from slimkv import Codec, CodecSpec, PageLayout, ops
from slimkv.errors import InputError, UnsupportedError
from slimkv.ops import PackedKV
from slimkv.ops.store.api import StoreRequest
from slimkv.ops.store.triton import launch as store_triton
from tail import sample

LLOYD = [*(f"k{b}v{b}" for b in range(1, 8)), "k8v8"]
UNIFORM = [f"ku{b}vu{b}" for b in range(2, 9)]
OTHERS = [
    "kur4vur4",
    "kur3vur8",
    "fp8",
    "krawbf16vrawbf16",
    "krawfp16vrawfp32",
    "turboquant_k8v4",
    "turboquant_4bit_nc",
    "turboquant_3bit_nc",
    "krawbf16v4",
]
DIMS = [16, 64, 80, 96, 112, 128, 192, 256]

TINY = Case(heads=1, tokens=40)
COVERING = [
    *(replace(TINY, format=format, slots=slots) for format in LLOYD for slots in ("scattered", "aligned")),
    *(
        replace(TINY, format=format)
        for format in ("ku2vu3", "ku4vu6", "ku5vu8", "kur4vur7", "fp8", "krawbf16vrawfp32", "turboquant_k8v4")
    ),
    *(replace(TINY, format="ku4vfp8", slots="aligned", page=page) for page in (32, 64)),
    *(replace(TINY, dim=dim, format="k3v5") for dim in (80, 112)),
    *(replace(TINY, dim=dim, format="k1v6", slots="aligned") for dim in (96, 128)),
    replace(TINY, dim=96, value_dim=48, format="k7v2"),
    replace(TINY, dim=192, tokens=20),
    *(replace(TINY, format=format) for format in ("k2v3", "k4v6", "k8v1")),
    *(replace(TINY, dtype=dtype, slots=slots) for dtype, slots in [("fp16", "unaligned"), ("fp32", "scattered")]),
    replace(TINY, heads=3, strided=True, slots="unaligned", slot_dtype="int32"),
    replace(TINY, dim=16, tokens=300, slots="aligned"),
    replace(TINY, dim=16, tokens=2064, slots="aligned", page=128),
    replace(TINY, tokens=1),
]
BASE, PATTERNS = Case(), ("scattered", "aligned", "unaligned")
MATRIX = [
    *(replace(BASE, format=w, slots=s) for w in [*LLOYD, *UNIFORM, *OTHERS] for s in PATTERNS[:2]),
    *(replace(BASE, format=w, dtype="fp32") for w in ("k1v1", "k3v3", "k4v4", "k8v8")),
    *(replace(BASE, dim=d, format=w, slots=s) for d in DIMS for w in ("k4v4", "k3v5") for s in PATTERNS[:2]),
    *(replace(BASE, dim=kd, value_dim=vd) for kd, vd in [(192, 128), (64, 80), (576, 512), (1024, 16)]),
    *(replace(BASE, page=page, slots=s, tokens=300) for page in (16, 32, 64, 128) for s in PATTERNS),
    *(replace(BASE, dtype=d, strided=True, slot_dtype=s) for d in DTYPES for s in ("int32", "int64")),
    *(replace(BASE, tokens=n, slots=s, heads=8, dim=128) for n in (1, 257, 2048, 5000) for s in PATTERNS),
]


def check(case: Case, device: torch.device) -> None:
    key, value, slots, pages, codec = build(case, device)
    want = expected(key, value, slots, pages, codec, case.layout)
    assert not torch.equal(want, pages)
    ops.store_kv(key, value, PackedKV(pages, codec, case.layout), slots, backend="triton")
    assert_same_bytes(pages, want, case.layout)


def assert_same_bytes(got: torch.Tensor, want: torch.Tensor, layout: PageLayout) -> None:
    wrong = (got != want).nonzero()
    if len(wrong):
        block, head, byte = wrong[0].tolist()
        part = (
            "key codes"
            if byte < layout.value.codes_offset
            else "value codes"
            if byte < layout.key.fields_offset
            else "fields"
        )
        pytest.fail(
            f"{len(wrong)} of {want.numel()} bytes differ; first block {block}, head {head}, byte {byte} ({part})"
        )


def as_params(cases: list[Case], always: bool) -> list:
    return [pytest.param(c, id=str(c), marks=() if always else pytest.mark.full) for c in cases]


@pytest.mark.parametrize(
    "case", [*sample(as_params(COVERING, True), 4), *as_params([c for c in MATRIX if c not in COVERING], False)]
)
def test_bytes_are_the_codecs(case, device):
    check(case, device)


@pytest.mark.parametrize(
    "format",
    ["k2v2", "k4v4", pytest.param("k3v3", marks=pytest.mark.full), pytest.param("k6v6", marks=pytest.mark.full)],
)
def test_ties(format, device):
    """Rotated coordinates exactly on a boundary, or just beside it."""
    case = Case(format=format, heads=1)
    codec = Codec(case.layout.spec, device)
    rows, exact = rows_on_boundaries(codec)
    assert exact >= 3
    key = rows[:, None, :].to(device)
    slots = torch.arange(len(rows), device=device)
    pages = torch.zeros(case.layout.blocks_for(len(rows)), 1, case.layout.page_bytes, dtype=torch.uint8, device=device)
    want = expected(key, key, slots, pages, codec, case.layout)
    ops.store_kv(key, key, PackedKV(pages, codec, case.layout), slots, backend="triton")
    assert_same_bytes(pages, want, case.layout)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_products_are_compared_as_they_are(dtype, device):
    """Coordinates closer to a boundary than float32 can represent."""
    case, rows, slots, pages, codec, want = build_beside_boundaries(dtype, device)
    ops.store_kv(rows, rows, PackedKV(pages, codec, case.layout), slots, backend="triton")
    assert_same_bytes(pages, want, case.layout)


@pytest.mark.parametrize("format", sample(["k4v4", "turboquant_k8v4", "kur4vu3", "krawbf16vrawbf16"], 2))
def test_tokens_that_cannot_be_encoded_are_marked_and_their_neighbours_are_not(format, device):
    case = Case(format=format, heads=2, tokens=32, slots="aligned", dtype="bf16")
    _, _, slots, pages, codec = build(case, device)
    key, value = torch.randn(2, case.tokens, case.heads, case.dim, dtype=torch.bfloat16).to(device)
    clean = pages.clone()
    ops.store_kv(key, value, PackedKV(clean, codec, case.layout), slots, backend="triton")
    bad = {3: torch.nan, 9: torch.inf, 17: -torch.inf}
    for token, number in bad.items():
        key[token, 0, 5] = number
        value[token, 1, 63] = number
    want = expected(key, value, slots, pages, codec, case.layout)
    ops.store_kv(key, value, PackedKV(pages, codec, case.layout), slots, backend="triton")
    assert_same_bytes(pages, want, case.layout)
    got_key, got_value = ops.gather_kv(PackedKV(pages, codec, case.layout), slots, backend="reference")
    is_bad = torch.zeros(case.tokens, dtype=torch.bool, device=device)
    is_bad[list(bad)] = True
    assert torch.equal(~got_key[:, 0].isfinite().all(-1), is_bad)
    assert torch.equal(~got_value[:, 1].isfinite().all(-1), is_bad)
    others = ops.gather_kv(PackedKV(clean, codec, case.layout), slots, backend="reference")
    assert torch.equal(got_key[~is_bad], others[0][~is_bad])
    assert torch.equal(got_key[:, 1], others[0][:, 1])
    assert torch.equal(got_value[:, 0], others[1][:, 0])


def test_a_norm_beyond_the_scale_is_marked(device):
    case = Case(heads=1, tokens=16, slots="aligned", dtype="fp32")
    key, value, slots, pages, codec = build(case, device)
    key[4] = 3e38
    want = expected(key, value, slots, pages, codec, case.layout)
    ops.store_kv(key, value, PackedKV(pages, codec, case.layout), slots, backend="triton")
    assert_same_bytes(pages, want, case.layout)
    with pytest.raises(InputError, match="norm beyond"):
        ops.store_kv(key, value, PackedKV(pages, codec, case.layout), slots, backend="reference")


@pytest.mark.parametrize("backend", ["triton", "reference"])
def test_nothing_to_store_writes_nothing(backend, device):
    case = Case(tokens=8)
    key, value, slots, pages, codec = build(case, device)
    for count in (0, 8):
        ops.store_kv(
            key[:count],
            value[:count],
            PackedKV(pages, codec, case.layout),
            torch.full_like(slots[:count], -1),
            backend=backend,
        )
    assert (pages == POISON_BYTE).all()


def test_the_reference_writes_the_same(device):
    case = Case(format="k3v5", dim=80, dtype="fp32")
    key, value, slots, pages, codec = build(case, device)
    want = expected(key, value, slots, pages, codec, case.layout)
    ops.store_kv(key, value, PackedKV(pages, codec, case.layout), slots, backend="reference")
    assert_same_bytes(pages, want, case.layout)


def test_appending_one_by_one_is_storing_at_once(device):
    case = Case(format="k3v2", heads=1, tokens=20, slots="aligned")
    key, value, slots, pages, codec = build(case, device)
    at_once = pages.clone()
    ops.store_kv(key, value, PackedKV(at_once, codec, case.layout), slots, backend="triton")
    for i in range(case.tokens):
        ops.store_kv(
            key[i : i + 1], value[i : i + 1], PackedKV(pages, codec, case.layout), slots[i : i + 1], backend="triton"
        )
    assert_same_bytes(pages, at_once, case.layout)


def test_pages_may_lie_apart(device):
    """Pages inside a larger allocation, as an engine that interleaves layers has them."""
    case = Case(heads=2, slots="aligned")
    key, value, slots, pages, codec = build(case, device)
    wide = torch.full((pages.shape[0], 4, pages.shape[2] + 32), POISON_BYTE, dtype=torch.uint8, device=device)
    apart = wide[:, 1:3, 16 : 16 + pages.shape[2]]
    ops.store_kv(key, value, PackedKV(apart, codec, case.layout), slots, backend="triton")
    assert_same_bytes(apart.contiguous(), expected(key, value, slots, pages, codec, case.layout), case.layout)
    wide[:, 1:3, 16 : 16 + pages.shape[2]] = POISON_BYTE
    assert (wide == POISON_BYTE).all()


def wrong(**changes) -> dict:
    case = Case(heads=2, tokens=4)
    key, value, slots, pages, _ = build(case, torch.device("cpu"))
    kv = PackedKV(changes.pop("pages", pages), Codec(case.layout.spec), case.layout)
    return {"key": key, "value": value, "kv": kv, "slot_mapping": slots, **changes}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"key": torch.zeros(4, 2, 80)}, r"key must be \[tokens, 2, 64\] for these pages, not \[4, 2, 80\]"),
        ({"value": torch.zeros(4, 3, 64)}, r"value must be \[tokens, 2, 64\]"),
        ({"key": torch.zeros(4, 2, 64, dtype=torch.float64)}, "key dtype torch.float64 is not supported"),
        ({"key": torch.zeros(4, 64, 2).mT}, "contiguous in its last axis"),
        ({"slot_mapping": torch.zeros(4)}, "slot_mapping must be int32 or int64"),
        ({"slot_mapping": torch.zeros(3, dtype=torch.int64)}, "4 keys, 4 values and 3 slots do not match"),
        ({"pages": torch.zeros(4, 2, 100, dtype=torch.uint8)}, "pages must be uint8"),
        ({"pages": torch.zeros(4, 2, 1088 + 8, dtype=torch.uint8)[..., :1088]}, "multiples of 16 bytes"),
    ],
)
def test_wrong_arguments_are_named(changes, message):
    layout = Case().layout
    assert layout.page_bytes == 1088
    with pytest.raises(InputError, match=message):
        ops.store_kv(**wrong(**changes))


def test_what_the_kernel_does_not_do_is_refused(device):
    spec = CodecSpec.parse("k4v4", 64)
    rows = PageLayout(spec, 1)
    key = torch.zeros(1, 1, 64, device=device)
    pages = torch.zeros(1, 1, rows.page_bytes, dtype=torch.uint8, device=device)
    slots = torch.zeros(1, dtype=torch.int64, device=device)
    with pytest.raises(UnsupportedError, match="blocks of 1 token"):
        ops.store_kv(key, key, PackedKV(pages, Codec(spec, device), rows), slots, backend="triton")
    raw = PageLayout(CodecSpec.parse("raw", 64), 16)
    request = StoreRequest(key, key, pages, slots, Codec(raw.spec, device), raw)
    assert "stores bfloat16 bit for bit, but the key is torch.float32" in store_triton.supports(request)


@pytest.mark.parametrize("policy", ["plain", "unbiased"])
def test_other_scale_policies_are_left_to_the_reference(policy, device):
    case = replace(TINY, policy=policy, dtype="fp32")
    key, value, slots, pages, codec = build(case, device)
    want = expected(key, value, slots, pages, codec, case.layout)
    with pytest.raises(UnsupportedError, match=f"'triton': kernels encode with .*key_policy='{policy}' needs backend="):
        ops.store_kv(key, value, PackedKV(pages, codec, case.layout), slots, backend="triton")
    ops.store_kv(key, value, PackedKV(pages, codec, case.layout), slots)
    assert_same_bytes(pages, want, case.layout)
