"""``gather_kv`` in Triton, compared with the codec's decoding."""

from __future__ import annotations

import pytest
import torch
from store_cases import DTYPES, Case, build

from slimkv import Codec, ops
from slimkv.codec import scale16
from slimkv.codec.key_offset import OFFSET_DTYPE
from slimkv.codec.pack import take_tokens
from slimkv.errors import InputError, UnsupportedError
from slimkv.ops import PackedKV

FORMATS = [*(f"k{b}v{b}" for b in range(1, 8)), "k8v8", "ku3vu7", "kur4vur2", "fp8", "krawbf16vrawfp16", "krawfp32v4"]
SHAPES = [(64, None), (80, None), (128, None), (112, 48)]
FULL_SHAPES = [(16, None), (96, None), (192, 128), (256, None), (576, 512)]


def full(values: list) -> list:
    return [pytest.param(*value, marks=pytest.mark.full) for value in values]


def stored(case: Case, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, Codec]:
    key, value, slots, pages, codec = build(case, device)
    moderate = [(x.double() / x.double().norm(dim=-1, keepdim=True).clamp(min=1e-30)).to(x.dtype) for x in (key, value)]
    ops.store_kv(*moderate, PackedKV(pages, codec, case.layout), slots, backend="reference")
    return pages, slots, codec


def assert_decoded(got, pages, slots, codec, layout, rotated, precision):
    keep = slots >= 0
    key, value = take_tokens(layout, pages, slots[keep].long())
    want = codec.decode_key(key, rotated=rotated), codec.decode_value(value, rotated=rotated)
    for one, right in zip(got, want, strict=True):
        assert (one[~keep] == 0).all()
        norm = right.double().norm(dim=-1).clamp(min=1e-3)
        error = (one[keep].double() - right.double()).norm(dim=-1) / norm
        assert error.max() <= precision, f"{error.max():.1e}"


@pytest.mark.parametrize("rotated", [False, True])
@pytest.mark.parametrize("format", FORMATS)
def test_every_format(format, rotated, device):
    case = Case(format=format, heads=1, tokens=40, dtype="fp32")
    pages, slots, codec = stored(case, device)
    got = ops.gather_kv(PackedKV(pages, codec, case.layout), slots, rotated=rotated, backend="triton")
    assert_decoded(got, pages, slots, codec, case.layout, rotated, 5e-6)


@pytest.mark.parametrize(("dim", "value_dim"), [*SHAPES, *full(FULL_SHAPES)])
@pytest.mark.parametrize("format", ["k3v5", pytest.param("turboquant_4bit_nc", marks=pytest.mark.full)])
def test_every_shape(dim, value_dim, format, device):
    case = Case(format=format, dim=dim, value_dim=value_dim, tokens=33, page=32, slot_dtype="int32")
    pages, slots, codec = stored(case, device)
    got = ops.gather_kv(PackedKV(pages, codec, case.layout), slots, backend="triton")
    assert_decoded(got, pages, slots, codec, case.layout, False, 5e-6)


@pytest.mark.parametrize("rotated", [False, True])
@pytest.mark.parametrize("format", ["k4v8", pytest.param("k2v6", marks=pytest.mark.full)])
def test_large_vectors(format, rotated, device):
    case = Case(format=format, dim=512, heads=1, tokens=20, page=32)
    pages, slots, codec = stored(case, device)
    got = ops.gather_kv(PackedKV(pages, codec, case.layout), slots, rotated=rotated, backend="triton")
    assert_decoded(got, pages, slots, codec, case.layout, rotated, 5e-6)


@pytest.mark.parametrize("rotated", [False, True])
@pytest.mark.parametrize(("format", "dim"), [("k4v4", 64), ("k3v5", 80), ("k4v4", 128), ("fp8", 64), ("k4v8", 512)])
def test_offset_is_added_back(format, dim, rotated, device):
    """The kernel adds the offset before or after it rotates keys back. Skipped tokens stay zero."""
    case = Case(format=format, dim=dim, heads=2, tokens=24, page=32, dtype="fp32")
    pages, slots, codec = stored(case, device)
    offset = torch.randn(2, dim, generator=torch.Generator().manual_seed(0)).to(OFFSET_DTYPE).to(device)
    got = ops.gather_kv(PackedKV(pages, codec, case.layout, offset), slots, rotated=rotated, backend="triton")
    want, value = ops.gather_kv(PackedKV(pages, codec, case.layout), slots, rotated=rotated, backend="reference")
    want += torch.where(slots >= 0, 1.0, 0.0)[:, None, None] * (codec.rotate_query(offset) if rotated else offset)
    torch.testing.assert_close(got[0], want, rtol=0, atol=3e-6 * float(offset.float().norm()))
    torch.testing.assert_close(got[1], value, rtol=1e-5, atol=1e-5)
    assert (got[0][slots < 0] == 0).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_into_given_tensors(dtype, device):
    case = Case(heads=2, tokens=20)
    pages, slots, codec = stored(case, device)
    wide = torch.empty(20, 4, 80, dtype=DTYPES[dtype], device=device)
    out = wide[:, :2, :64], wide[:, 2:, 16:]
    assert ops.gather_kv(PackedKV(pages, codec, case.layout), slots, out=out, backend="triton")[0] is out[0]
    # Triton's interpreter truncates to bfloat16
    assert_decoded(out, pages, slots, codec, case.layout, False, {"bf16": 2**-7, "fp16": 2**-11, "fp32": 1e-6}[dtype])
    assert wide[:, :2, 64:].isnan().all()
    assert wide[:, 2:, :16].isnan().all()


def test_raw_comes_back_bit_for_bit(device):
    case = Case(format="krawbf16vrawbf16", heads=1, tokens=40)
    key, value, slots, pages, codec = build(case, device)
    ops.store_kv(key, value, PackedKV(pages, codec, case.layout), slots, backend="triton")
    got = ops.gather_kv(PackedKV(pages, codec, case.layout), slots, dtype=torch.bfloat16, backend="triton")
    keep = slots >= 0
    assert torch.equal(got[0][keep].view(torch.int16), key[keep].view(torch.int16))
    assert torch.equal(got[1][keep].view(torch.int16), value[keep].view(torch.int16))


def test_tokens_that_could_not_be_encoded_are_nan(device):
    case = Case(format="k4v8", heads=1, tokens=20, slots="aligned")
    pages, slots, codec = stored(case, device)
    at = case.layout.key.fields_offset + 2 * int(slots[3] % case.page)
    pages[slots[3] // case.page, 0, at : at + 2] = scale16.INVALID & 0xFF
    key, value = ops.gather_kv(PackedKV(pages, codec, case.layout), slots, backend="triton")
    assert key[3].isnan().all()
    assert not key[torch.arange(case.tokens) != 3].isnan().any()
    assert not value.isnan().any()


def test_nothing(device):
    case = Case()
    pages, _, codec = stored(case, device)
    none = torch.zeros(0, dtype=torch.int64, device=device)
    assert ops.gather_kv(PackedKV(pages, codec, case.layout), none, backend="triton")[0].shape == (0, 2, 64)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"slots": torch.zeros(3)}, "slots must be int32 or int64"),
        ({"pages": torch.zeros(2, 2, 100, dtype=torch.uint8)}, "pages must be uint8"),
        ({"out": (torch.zeros(3, 2, 64), torch.zeros(3, 2, 80))}, r"out value must be \[3, 2, 64\]"),
        ({"out": (torch.zeros(3, 2, 64, dtype=torch.int32), torch.zeros(3, 2, 64))}, "out key dtype torch.int32"),
    ],
)
def test_wrong_arguments_are_named(changes, message):
    case = Case()
    pages, _, codec = stored(case, torch.device("cpu"))
    given = {"slots": torch.zeros(3, dtype=torch.int64), **changes}
    kv = PackedKV(given.pop("pages", pages), codec, case.layout)
    with pytest.raises(InputError, match=message):
        ops.gather_kv(kv, **given)


def test_blocks_of_one_token_are_refused(device):
    case = Case(page=1, tokens=4)
    pages, slots, codec = stored(case, device)
    with pytest.raises(UnsupportedError, match="blocks of 1 token"):
        ops.gather_kv(PackedKV(pages, codec, case.layout), slots, backend="triton")
    got = ops.gather_kv(PackedKV(pages, codec, case.layout), slots, backend="reference")
    assert_decoded(got, pages, slots, codec, case.layout, False, 1e-7)
