"""The compiled CPU kernels: the reference's bytes, exact attention, and refusals that name what was out of range."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from pathlib import Path

import attention_cases
import pytest
import store_cases
import torch
from torch import Tensor

from slimkv import Codec, CodecSpec, PageLayout, ops
from slimkv.cache import PagedPool
from slimkv.codec import scale16
from slimkv.codec.pack import take_tokens
from slimkv.codec.rotation import block_size
from slimkv.errors import InputError, UnsupportedError
from slimkv.ops import PackedKV, Rounding
from slimkv.ops.attention.api import REGISTRY as ATTEND
from slimkv.ops.cpu import isa, module
from slimkv.ops.cpu.compiler import build_library
from slimkv.ops.gather.api import REGISTRY as GATHER
from slimkv.ops.plan import plan_store
from slimkv.ops.store.api import REGISTRY as STORE
from tail import sample

pytestmark = pytest.mark.skipif(
    module.build_failure() is not None, reason="needs a C++ compiler, which this machine does not have"
)
CPU = torch.device("cpu")
FORMATS = [
    *(f"k{bits}v{bits}" for bits in range(1, 9)),
    *("ku2vu3", "ku4vu5", "ku6vu7", "ku8vu8", "kur2vur4", "kur8vur3"),
    *("fp8", "turboquant_k8v4", "turboquant_4bit_nc", "k3v5"),
    *("krawfp32vrawfp32", "krawfp16vrawbf16", "kfp8vrawbf16"),
]
SIZES = [(64, None), (128, None), (16, 80), (96, 48), (80, 112), (256, None), (576, 512), (1024, 688)]
BLOCKS = [1, 16, 32, 64, 128]


# With SIMDe (apt-get install libsimde-dev) the x86 kernels run on any machine, slowly.
EMULATED = {
    "simde_avx2": isa.InstructionSet("simde_avx2", (), frozenset(), ("-DSLIMKV_SIMDE",)),
    "simde_avx512": isa.InstructionSet(
        "simde_avx512", (), frozenset(), ("-DSLIMKV_SIMDE", "-DSLIMKV_SIMDE_AVX512", "-O1")
    ),
}


HERE = [s.name for s in isa.usable()]  # from the best one to plain C++
BUILDS = [
    *dict.fromkeys((HERE[0], HERE[-1])),
    *(pytest.param(name, marks=pytest.mark.tail) for name in HERE[1:-1]),
    *(pytest.param(name, marks=pytest.mark.slow) for name in EMULATED),
]


@pytest.fixture(params=BUILDS)
def instruction_set(request, monkeypatch):
    """Runs a test with every build that this machine supports."""
    if request.param not in EMULATED:
        chosen = module.library(request.param)
    elif Path("/usr/include/simde").is_dir():
        chosen = module.Library(build_library(EMULATED[request.param]), request.param)
    else:
        pytest.skip("SIMDe is not installed: apt-get install libsimde-dev")
    for operation in ("store", "attention", "gather"):
        monkeypatch.setattr(f"slimkv.ops.{operation}.cpu.library", lambda: chosen)
    return request.param


# -- store -------------------------------------------------------------------------------------------------------------


def check_bytes(case: store_cases.Case) -> None:
    key, value, slots, pages, codec = store_cases.build(case, CPU)
    expected = store_cases.expected(key, value, slots, pages, codec, case.layout)
    ops.store_kv(key, value, PackedKV(pages, codec, case.layout), slots, backend="cpu")
    assert torch.equal(pages, expected), str(case)


@pytest.mark.parametrize(("dims", "format"), sample(itertools.product(SIZES, FORMATS), 4))
def test_store_writes_the_reference_bytes(format, dims):
    dim, value_dim = dims
    for dtype, block in (("bf16", 16), ("fp32", 1), ("fp16", 64)):
        check_bytes(store_cases.Case(format=format, dim=dim, value_dim=value_dim, page=block, dtype=dtype, tokens=34))


@pytest.mark.slow
@pytest.mark.parametrize("format", FORMATS)
def test_store_writes_the_reference_bytes_for_every_head_size(format):
    for dim in range(16, 513, 16):
        for block in BLOCKS:
            check_bytes(store_cases.Case(format=format, dim=dim, page=block, dtype="fp32", tokens=24))


@pytest.mark.parametrize("policy", ["plain", "unbiased"])
def test_store_leaves_other_scale_policies_to_the_reference(policy):
    with pytest.raises(UnsupportedError, match=f"'cpu': kernels encode with .*key_policy='{policy}' needs backend="):
        check_bytes(store_cases.Case(policy=policy))


@pytest.mark.parametrize("format", ["k4v4", "k3v5", "kur4vu8", "fp8", "krawfp32vrawfp32"])
def test_store_on_every_instruction_set(instruction_set, format):
    for block in BLOCKS:
        for slot_dtype in ("int32", "int64"):
            case = store_cases.Case(format=format, page=block, slot_dtype=slot_dtype, strided=True, dtype="fp32")
            check_bytes(case)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_short_rows_beside_a_boundary(instruction_set, dtype):
    case, rows, slots, pages, codec, expected = store_cases.build_beside_boundaries(dtype, CPU)
    ops.store_kv(rows, rows, PackedKV(pages, codec, case.layout), slots, backend="cpu")
    assert torch.equal(pages, expected)


@pytest.mark.parametrize("bits", [4, 6])
def test_rows_on_a_boundary_take_the_lower_level(instruction_set, bits):
    codec = Codec(CodecSpec.parse(f"k{bits}v{bits}", 64))
    rows, exact = store_cases.rows_on_boundaries(codec)
    assert exact > 3
    layout = PageLayout(codec.spec, 16)
    rows = rows[:, None, :]
    pages = torch.zeros(layout.blocks_for(len(rows)), 1, layout.page_bytes, dtype=torch.uint8)
    slots = torch.arange(len(rows))
    expected = store_cases.expected(rows, rows, slots, pages, codec, layout)
    ops.store_kv(rows, rows, PackedKV(pages, codec, layout), slots, backend="cpu")
    assert torch.equal(pages, expected)


@pytest.mark.parametrize("format", ["k1v4", "k4v4", "k5v4", "k8v8"])
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_query_aware_bytes(instruction_set, format, dtype):
    for dim in (64, 80, 128):
        case = store_cases.Case(format=format, dim=dim, dtype=dtype)
        key, value, slots, pages, codec = store_cases.build(case, CPU)
        matrices = store_cases.random_query_aware(case.heads, codec)
        expected = store_cases.expected(key, value, slots, pages, codec, case.layout, matrices)
        kv = PackedKV(pages, codec, case.layout)
        ops.store_kv(key, value, kv, slots, Rounding(matrices), backend="cpu")
        assert torch.equal(pages, expected)
        matrices.neg_()  # a cached transposed copy must be updated
        ops.store_kv(key, value, kv, slots, Rounding(matrices), backend="cpu")
        assert torch.equal(pages, store_cases.expected(key, value, slots, pages, codec, case.layout, matrices))


def test_query_aware_matrices_by_position(instruction_set):
    case = store_cases.Case(dtype="fp32")
    key, value, slots, pages, codec = store_cases.build(case, CPU)
    matrices = torch.stack([store_cases.random_query_aware(case.heads, codec, seed) for seed in range(3)])
    index = torch.arange(len(slots), dtype=torch.int32) % 6 - 1  # below the first and beyond the last
    expected = pages.clone()
    for number, chosen in enumerate(matrices):
        rows = index.clamp(0, 2) == number
        expected = store_cases.expected(key[rows], value[rows], slots[rows], expected, codec, case.layout, chosen)
    rounding, planned = Rounding(matrices, index), pages.clone()
    kv = PackedKV(planned, codec, case.layout)
    plan_store(key, value, kv, slots, rounding, backend="cpu").run(key, value, slots, index)
    ops.store_kv(key, value, replace(kv, pages=pages), slots, rounding, backend="cpu")
    assert torch.equal(pages, expected)
    assert torch.equal(planned, expected)


@pytest.mark.parametrize("format", ["k4v4", "k6v3", "ku4vur8", "fp8"])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf, 3e38])
def test_vectors_that_cannot_be_encoded_are_marked(instruction_set, format, bad):
    case = store_cases.Case(format=format, dtype="fp32")
    key, value, slots, pages, codec = store_cases.build(case, CPU)
    row = int((slots >= 0).nonzero()[5])
    key[row, 1, 3], value[row, 0, 60] = bad, bad
    expected = store_cases.expected(key, value, slots, pages, codec, case.layout)
    ops.store_kv(key, value, PackedKV(pages, codec, case.layout), slots, backend="cpu")
    assert torch.equal(pages, expected)
    encoded = take_tokens(case.layout, pages, slots[row : row + 1].long())
    assert (encoded[0].fields[0, 1] == scale16.INVALID).all()
    assert (encoded[1].fields[0, 0] == scale16.INVALID).all()


def test_a_raw_side_takes_its_own_dtype():
    case = store_cases.Case(format="krawbf16vrawbf16", dtype="bf16")
    key, value, slots, pages, codec = store_cases.build(case, CPU)
    with pytest.raises(UnsupportedError, match="bit for bit"):
        ops.store_kv(key.float(), value, PackedKV(pages, codec, case.layout), slots, backend="cpu")


# -- attend ------------------------------------------------------------------------------------------------------------


def exact(built: attention_cases.Built) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp in float64, from the codes that the pages hold."""
    case, codec = built.case, built.codec
    spec, heads = case.spec, case.num_kv_heads * case.group
    rotations = [
        tables.hadamard / math.sqrt(block_size(dim)) if fmt.rotated else torch.eye(dim, dtype=torch.float64)
        for tables, fmt, dim in (
            (codec.key_tables, spec.key, spec.key_dim),
            (codec.value_tables, spec.value, spec.value_dim),
        )
    ]
    out = torch.zeros(len(built.query), heads, spec.value_dim, dtype=torch.float64)
    lse = torch.full(out.shape[:2], -torch.inf, dtype=torch.float64)
    first = 0
    for i, (length, count) in enumerate(zip(case.lens, case.queries, strict=True)):
        rows, first = slice(first, first + count), first + count
        key, value = take_tokens(built.layout, built.pages, built.positions(i))
        key, value = codec.decode_key(key, rotated=True).double(), codec.decode_value(value, rotated=True).double()
        if built.fresh is not None and count:
            key[length - count :] = built.fresh[0][rows].double() @ rotations[0]
            value[length - count :] = built.fresh[1][rows].double() @ rotations[1]
        query = (built.query[rows].double() @ rotations[0]).unflatten(1, (case.num_kv_heads, case.group))
        scale = spec.key_dim**-0.5 if case.scale is None else case.scale
        scores = torch.einsum("qhgd,khd->qhgk", query, key).flatten(1, 2) * scale
        if case.softcap:
            scores = case.softcap * torch.tanh(scores / case.softcap)
        distance = torch.arange(length - count, length)[:, None] - torch.arange(length)
        hidden = (distance < 0) & case.causal
        if case.window is not None:
            hidden |= distance >= case.window
        scores = scores.masked_fill(hidden[:, None], -torch.inf)
        if built.sinks is not None:
            scores = torch.cat([scores, built.sinks.double()[:, None].expand(count, -1, 1)], -1)
        lse[rows] = scores.logsumexp(-1)
        weights = scores.softmax(-1)[..., :length].unflatten(1, (case.num_kv_heads, case.group))
        out[rows] = torch.einsum("qhgk,khd->qhgd", weights, value).flatten(1, 2) @ rotations[1].T
    return out, lse


def check_attention(case: attention_cases.Case, bound: float = 1e-5) -> None:
    built = attention_cases.build(case, CPU)
    expected, expected_lse = exact(built)
    rows = sum(case.queries)
    out = torch.full(expected.shape, torch.nan)
    lse = torch.empty(out.shape[:2])
    ops.attend(**built.arguments(), out=out, lse=lse, backend="cpu")
    difference = (out[:rows].double() - expected[:rows]).norm(dim=-1)
    assert (difference <= bound * expected[:rows].norm(dim=-1)).all(), str(case)
    same = lse[:rows].double() == expected_lse[:rows]  # infinities
    close = (lse[:rows] - expected_lse[:rows]).abs() <= 1e-5 * (1 + expected_lse[:rows].abs())
    assert (same | close).all(), str(case)
    assert out[rows:].isnan().all()


MIXED = {"lens": (700, 300, 40, 0, 5), "queries": (1, 40, 40, 0, 3), "dtype": "fp32", "group": 3}


HEADS = [(64, None), (128, None), (80, 48), (16, 112)]


@pytest.mark.parametrize(("block", "dims", "format"), sample(itertools.product((1, 16, 128), HEADS, FORMATS), 8))
def test_attention_on_every_format(format, dims, block):
    check_attention(attention_cases.Case(format=format, dim=dims[0], value_dim=dims[1], page=block, **MIXED))


ASKED = [
    {"window": 7},
    {"window": 100, "lens": (900, 60, 7)},
    {"softcap": 5.0},
    {"sinks": True, "window": 3},
    {"causal": False},
    {"scale": 0.3},
    {"fresh": True},
    {"fresh": True, "window": 9, "sinks": True},
    {"padding": 3, "slack": True},
    {"strided": True},
    {"peaked": True},
    {"group": 1},
    {"group": 40},
    {"dtype": "bf16"},
    {"dtype": "fp16"},
    {"value_norm": 1e4},
    {"key_norm": 1e-4},
    {"queries": (3, 8, 1), "lens": (1100, 9, 1)},
    {"queries": (90, 16, 7), "lens": (90, 700, 7), "fresh": True, "softcap": 20.0},
]


ASKING_FORMATS = ["k4v4", "turboquant_4bit_nc", "k5v6", "fp8"]


@pytest.mark.parametrize(("format", "asked"), sample(itertools.product(ASKING_FORMATS, ASKED), 3), ids=str)
def test_attention_as_models_ask_for_it(format, asked):
    for more in ({}, {} if "queries" in asked else {"lens": (60, 700, 1, 1500), "queries": (3, 40, 1, 50)}):
        check_attention(attention_cases.Case(format=format, **{"dtype": "fp32", **asked, **more}))


@pytest.mark.parametrize("format", ["k4v4", "k3v2", "k1v7", "ku4vur8", "fp8", "krawfp16vrawbf16"])
def test_attention_on_every_instruction_set(instruction_set, format):
    for dim, value_dim in ((64, None), (96, 32), (112, 144)):
        check_attention(attention_cases.Case(format=format, dim=dim, value_dim=value_dim, **MIXED))
    check_attention(attention_cases.Case(format=format, fresh=True, sinks=True, softcap=9.0, **MIXED))


def test_results_do_not_depend_on_threads(monkeypatch):
    built = attention_cases.build(attention_cases.Case(lens=(3000, 70), queries=(1, 50), dtype="fp32"), CPU)
    found = []
    for threads in (1, 2, 5):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        found.append(ops.attend(**built.arguments(), backend="cpu"))
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


@pytest.mark.parametrize("format", ["k4v4", "turboquant_4bit_nc", "k6v6"])
def test_a_marked_token_makes_those_who_see_it_nan(instruction_set, format):
    case = attention_cases.Case(format=format, lens=(40, 40), queries=(20, 1), dtype="fp32")
    for side in range(2):
        built = attention_cases.build(case, CPU)
        vectors = [torch.randn(1, case.num_kv_heads, case.dim) for _ in range(2)]
        vectors[side][0, 1, 5] = torch.nan
        slot = built.positions(0)[30:31]
        ops.store_kv(*vectors, built.kv, slot, backend="cpu")
        out = ops.attend(**built.arguments(), backend="cpu")
        marked = out[:, case.group :].isnan().all(-1)
        assert torch.equal(marked[:, 0], torch.arange(21).ge(10) & torch.arange(21).lt(20))
        assert not out[:, : case.group].isnan().any()


def test_a_query_that_is_not_finite_makes_its_own_row_nan(instruction_set):
    for bad in (torch.nan, torch.inf):
        built = attention_cases.build(attention_cases.Case(dtype="fp32"), CPU)
        built.query[1, 3, 0] = bad
        out = ops.attend(**built.arguments(), backend="cpu")
        assert out[1, 3].isnan().all()
        assert int(out.isnan().any(-1).sum()) == 1


# -- gather ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("format", FORMATS)
def test_gather_equals_the_reference(format):
    for dim, value_dim, block in ((64, None, 16), (80, 48, 1), (576, 512, 64)):
        case = store_cases.Case(format=format, dim=dim, value_dim=value_dim, page=block, dtype="fp32")
        key, value, slots, pages, codec = store_cases.build(case, CPU)
        key, value = key.nan_to_num().clamp(-1e4, 1e4), value.nan_to_num().clamp(-1e4, 1e4)
        ops.store_kv(key, value, PackedKV(pages, codec, case.layout), slots, backend="cpu")
        for rotated in (False, True):
            for dtype in (torch.float32, torch.bfloat16, torch.float16):
                kv, how = PackedKV(pages, codec, case.layout), {"rotated": rotated, "dtype": dtype}
                expected = ops.gather_kv(kv, slots, **how, backend="reference")
                found = ops.gather_kv(kv, slots, **how, backend="cpu")
                steps = {torch.float32: 1e-5, torch.bfloat16: 2**-7, torch.float16: 2**-10}[dtype]
                least = 2**-24 if dtype == torch.float16 else 0.0  # the spacing of its subnormals
                for e, f in zip(expected, found, strict=True):
                    size = e.float().norm(dim=-1, keepdim=True)
                    assert ((f.float() - e.float()).abs() <= steps * size + least).all()
                    assert not f[slots < 0].any()


# -- refusals ----------------------------------------------------------------------------------------------------------


def test_slots_beyond_the_pages_are_refused_and_nothing_is_written():
    case = store_cases.Case()
    key, value, slots, pages, codec = store_cases.build(case, CPU)
    before, slots[7] = pages.clone(), pages.shape[0] * case.page
    with pytest.raises(InputError, match=rf"slot {int(slots[7])} of token 7"):
        ops.store_kv(key, value, PackedKV(pages, codec, case.layout), slots, backend="cpu")
    assert torch.equal(pages, before)
    with pytest.raises(InputError, match="token 7"):
        ops.gather_kv(PackedKV(pages, codec, case.layout), slots, backend="cpu")


@pytest.mark.parametrize(
    ("name", "index", "value", "match"),
    [
        ("block_table", (1, 0), 99, r"block_table\[1, 0\] is 99"),
        ("block_table", (0, 2), -1, r"block_table\[0, 2\] is -1"),
        ("seq_lens", 2, 1000, r"seq_lens\[2\] is 1000"),
        ("seq_lens", 0, -3, r"seq_lens\[0\] is -3"),
        ("cu_seqlens_q", 3, 17, r"cu_seqlens_q\[3\] is 17"),
        ("cu_seqlens_q", 1, 3, r"cu_seqlens_q\[2\] is 2"),
        ("cu_seqlens_q", 0, -1, r"cu_seqlens_q\[0\] is -1"),
    ],
)
def test_tables_out_of_range_are_refused(name, index, value, match):
    built = attention_cases.build(attention_cases.Case(), CPU)
    getattr(built.batch, name)[index] = value
    with pytest.raises(InputError, match=match):
        ops.attend(**built.arguments(), backend="cpu")


def test_what_no_query_sees_may_be_anything():
    """Table entries before the window and beyond the length are not read."""
    built = attention_cases.build(attention_cases.Case(lens=(200,), queries=(1,), window=20, slack=True), CPU)
    expected = ops.attend(**built.arguments(), backend="cpu")
    built.batch.block_table[0, :10] = -7
    built.batch.block_table[0, 13:] = 1 << 30
    assert torch.equal(ops.attend(**built.arguments(), backend="cpu"), expected)


# -- choosing ----------------------------------------------------------------------------------------------------------


def test_a_cpu_gets_the_compiled_kernels():
    for registry in (STORE, ATTEND, GATHER):
        assert registry.names[0] == "cpu"
    built = attention_cases.build(attention_cases.Case(), CPU)
    assert torch.equal(ops.attend(**built.arguments()), ops.attend(**built.arguments(), backend="cpu"))


def test_the_pool_plans_repeated_calls():
    spec = CodecSpec.parse("k4v4", 64)
    pool, plain = PagedPool(spec, 4, 2, 16), PagedPool(spec, 4, 2, 16, backend="reference")
    for step in range(5):
        key, value = torch.randn(1, 2, 64), torch.randn(1, 2, 64)
        slots = torch.tensor([step])
        for p in (pool, plain):
            p.store(key, value, slots)
        assert torch.equal(pool.pages, plain.pages)
