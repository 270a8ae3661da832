"""Encoding and decoding: the same bytes everywhere and for every format, even for extreme vectors."""

from fractions import Fraction

import numpy as np
import pytest
import torch

from slimkv import Codec, CodecSpec, Encoded
from slimkv.codec import quantize, scale16
from slimkv.errors import InputError
from slimkv.spec import Kind, ScalePolicy

LOSSY = [
    "k1v1",
    "k2v2",
    "k3v3",
    "k4v4",
    "k5v5",
    "k6v6",
    "k7v7",
    "k8v8",
    "ku2vu2",
    "ku4vu4",
    "ku8vu8",
    "kur4vur4",
    "fp8",
]
POLICIES = list(ScalePolicy)


def vectors(count, dim, seed=0):
    """Heavy-tailed vectors with norms over six orders of magnitude."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, dim, generator=generator) * torch.randn(1, dim, generator=generator).exp()
    return x * torch.exp(3 * torch.randn(count, 1, generator=generator))


def same(a: Encoded, b: Encoded) -> bool:
    return torch.equal(a.codes, b.codes) and torch.equal(a.fields, b.fields)


@pytest.mark.parametrize("format", LOSSY)
@pytest.mark.parametrize("policy", POLICIES)
def test_batch_shape_and_splits_do_not_matter(format, policy):
    codec = Codec(CodecSpec.parse(format, 96, key_policy=policy))
    x = vectors(60, 96)
    whole = codec.encode_key(x)
    one_by_one = [codec.encode_key(row) for row in x]
    assert torch.equal(torch.stack([e.codes for e in one_by_one]), whole.codes)
    assert torch.equal(torch.stack([e.fields for e in one_by_one]), whole.fields)
    shaped = codec.encode_key(x.reshape(3, 4, 5, 96).transpose(0, 1))
    assert torch.equal(shaped.codes.transpose(0, 1).reshape(60, 96), whole.codes)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("bits", [1, 4, 8])
def test_summation_order_does_not_matter(bits, policy):
    """Permuting the dimensions of vector and rotation alike reorders every sum; codes and scale stay the same."""
    codec = Codec(CodecSpec.parse(f"k{bits}v{bits}", 128, key_policy=policy))
    x = vectors(200, 128, seed=1)
    order = torch.randperm(128, generator=torch.Generator().manual_seed(2))
    tables = codec.key_tables
    shuffled = quantize.SideTables(**{**vars(tables), "hadamard": tables.hadamard[order]})
    expected = codec.encode_key(x)
    assert same(quantize.encode_lloyd(x[:, order].contiguous(), codec.spec.key, shuffled), expected)
    turned = quantize.SideTables(**{**vars(tables), "hadamard": tables.hadamard[:, order]})
    by_column = quantize.encode_lloyd(x, codec.spec.key, turned)
    assert torch.equal(by_column.codes, expected.codes[:, order])
    assert torch.equal(by_column.fields, expected.fields)


@pytest.mark.parametrize("format", LOSSY)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_inputs_encode_like_their_float32_values(format, dtype):
    """Up to 4 bits, 16-bit floats are encoded as short integers; with more bits, exactly as in float32."""
    codec = Codec.from_format(format, 64)
    x = vectors(50, 64).clamp(-6e4, 6e4).to(dtype)
    sides = (
        (codec.encode_key, codec.spec.key, codec.key_tables),
        (codec.encode_value, codec.spec.value, codec.value_tables),
    )
    for encode, fmt, tables in sides:
        if fmt.kind == Kind.LLOYD and fmt.bits <= 4:
            assert same(encode(x), quantize.encode_lloyd(x.float(), fmt, tables, short=True))
            assert not same(encode(x), encode(x.float()))
        else:
            assert same(encode(x), encode(x.float()))


@pytest.mark.parametrize("format", ["k1v1", "k2v2", "k3v3", "k4v4"])
def test_both_halves_encode_alike(format):
    codec = Codec.from_format(format, 64)
    x = torch.randn(50, 64, generator=torch.Generator().manual_seed(1)).bfloat16()
    x = torch.where(x.abs() > 1e-3, x, 0)  # exactly representable in fp16, too
    assert same(codec.encode_key(x), codec.encode_key(x.half()))


def test_short_integers_are_for_16_bit_floats_and_few_bits():
    fmt = Codec.from_format("k4v5", 64).spec
    assert quantize.becomes_short(fmt.key, torch.bfloat16, 256)
    for other in ((fmt.key, torch.float32, 64), (fmt.value, torch.bfloat16, 64), (fmt.key, torch.float16, 272)):
        assert not quantize.becomes_short(*other)


def test_products_of_short_integers_are_compared_as_they_are():
    """Tests a product above and one below a boundary, both closer to it than float32 can represent."""
    codec = Codec.from_format("k4v4", 64)
    tables, g = codec.key_tables, torch.Generator().manual_seed(3)
    seen = set()
    while len(seen) < 2:
        x = torch.randn(20_000, 64, generator=g).bfloat16()
        fixed, _, _ = quantize._fixed_point(x.float(), quantize.SHORT_FIXED_POINT_BITS)
        rotated = quantize.rotate_fixed(fixed, tables)
        factor = torch.tensor(tables.unit) / quantize.squared_norm_in_steps(fixed).sqrt()
        rounded = rotated * factor
        for row, column in ((rounded != 0) & torch.isin(rounded, tables.boundaries)).nonzero().tolist():
            product = Fraction(float(rotated[row, column])) * Fraction(float(factor[row, 0]))
            boundary = Fraction(float(rounded[row, column]))
            if product == boundary:
                continue
            index = sum(product > Fraction(float(b)) for b in tables.boundaries)
            code = codec.encode_key(x[row]).codes[column]
            assert code == (index if index >= 8 else 7 - index)
            seen.add(product > boundary)


@pytest.mark.parametrize("format", [w for w in LOSSY if "u" not in w])
def test_scaling_by_a_power_of_two_scales_the_field_only(format):
    codec = Codec.from_format(format, 80)
    x = vectors(40, 80) / 1e3
    base, scaled = codec.encode_key(x), codec.encode_key(x * 2**7)
    assert torch.equal(base.codes, scaled.codes)
    ratio = scale16.decode_unsigned(scaled.fields) / scale16.decode_unsigned(base.fields)
    assert (ratio == 2**7).all()


@pytest.mark.parametrize("format", [*LOSSY, "raw", "k4vu4"])
@pytest.mark.parametrize("dim", [64, 80, 128])
def test_zero_vectors_decode_to_zero(format, dim):
    codec = Codec.from_format(format, dim)
    dtype = torch.bfloat16 if format == "raw" else torch.float32
    x = torch.zeros(3, dim, dtype=dtype)
    x[1] = 1.0
    for compress, decompress in ((codec.pack_key, codec.unpack_key), (codec.pack_value, codec.unpack_value)):
        out = decompress(compress(x))
        assert (out[[0, 2]] == 0).all()
        assert (out[1] != 0).any()
    tiny = torch.full((1, dim), 1e-30, dtype=dtype)
    assert codec.unpack_key(codec.pack_key(tiny)).abs().max() <= 1e-30


@pytest.mark.parametrize("bits", range(1, 9))
@pytest.mark.parametrize("policy", POLICIES)
def test_norms_from_1e_minus_6_to_beyond_fp16(bits, policy):
    """The relative error does not depend on the norm, even far below and far above the range of an fp16 scale."""
    codec = Codec(CodecSpec.parse(f"k{bits}v{bits}", 128, key_policy=policy))
    direction = torch.randn(64, 128, generator=torch.Generator().manual_seed(3))
    direction = direction / direction.norm(dim=-1, keepdim=True)
    errors = []
    for norm in (1e-6, 1e-3, 1.0, 65504.0, 1e8):
        x = direction * norm
        out = codec.decode_key(codec.encode_key(x))
        errors.append(((out - x).norm(dim=-1) / x.norm(dim=-1)).mean())
    assert max(errors) / min(errors) < 1.02
    limit = {1: 0.8, 2: 0.4, 3: 0.2}.get(bits, 0.1)
    assert max(errors) < limit


@pytest.mark.parametrize("format", LOSSY)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_nan_and_inf_are_errors_that_name_the_vector(format, bad):
    codec = Codec.from_format(format, 64)
    x = torch.ones(2, 3, 64)
    x[1, 2, 5] = bad
    with pytest.raises(InputError, match=r"1 key vector\(s\).*index \(1, 2\).*NaN or Inf"):
        codec.encode_key(x)
    with pytest.raises(InputError, match=r"1 value vector"):
        codec.pack_value(x)


@pytest.mark.parametrize("format", LOSSY)
def test_a_norm_no_scale_can_hold_is_an_error(format):
    codec = Codec.from_format(format, 64)
    x = torch.ones(2, 64)
    x[1] *= torch.arange(1, 65) * 1e30
    with pytest.raises(InputError, match=r"index \(1,\), has a norm beyond"):
        codec.encode_key(x)


@pytest.mark.parametrize("format", LOSSY)
def test_invalid_vectors_are_marked_and_do_not_touch_their_neighbours(format):
    codec = Codec.from_format(format, 64)
    clean = vectors(5, 64)
    dirty = clean.clone()
    dirty[1, 3], dirty[3, 0] = float("nan"), float("-inf")
    expected, marked = codec.encode_key(clean), codec.encode_key(dirty, mark_invalid=True)
    for good in (0, 2, 4):
        assert torch.equal(marked.codes[good], expected.codes[good])
        assert torch.equal(marked.fields[good], expected.fields[good])
    for invalid in (1, 3):
        assert (marked.codes[invalid] == 0).all()
        assert (marked.fields[invalid] == scale16.INVALID).all()
    decoded = codec.decode_key(marked)
    assert decoded[[1, 3]].isnan().all()
    assert decoded[[0, 2, 4]].isfinite().all()
    assert same(codec.encode_key(clean, mark_invalid=True), expected)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_raw_keeps_every_bit(dtype):
    codec = Codec(CodecSpec.parse("raw", 64).with_raw_dtype(dtype))
    integer = torch.int32 if dtype == "float32" else torch.int16
    info = torch.iinfo(integer)
    bits = torch.randint(info.min, info.max + 1, (20, 64), generator=torch.Generator().manual_seed(0)).to(integer)
    x = bits.view(getattr(torch, dtype))  # NaN and Inf patterns among them
    for compress, decompress in ((codec.pack_key, codec.unpack_key), (codec.pack_value, codec.unpack_value)):
        assert torch.equal(decompress(compress(x)).view(integer), bits)
    with pytest.raises(InputError, match="bit for bit"):
        codec.encode_key(torch.zeros(64, dtype=torch.float16 if dtype != "float16" else torch.float32))


@pytest.mark.parametrize("bits", range(2, 9))
@pytest.mark.parametrize("rotated", [False, True])
def test_uniform_errors_stay_within_half_a_step(bits, rotated):
    format = f"k{'ur' if rotated else 'u'}{bits}vu{bits}"
    codec = Codec.from_format(format, 64)
    x = vectors(100, 64)
    seen = codec.rotate_query(x)
    out = codec.decode_key(codec.encode_key(x), rotated=True)
    span = seen.amax(-1, keepdim=True) - seen.amin(-1, keepdim=True)
    largest = seen.abs().amax(-1, keepdim=True)
    # Half a step, plus the largest errors of rounding the step to 11 bits and the zero point to 10 bits.
    allowed = span / (2**bits - 1) / 2 * 1.001 + span * 2**-11 + largest * 2**-10 + 1e-6 * largest
    assert ((out - seen).abs() <= allowed).all()


def test_constant_vectors_in_uniform():
    codec = Codec.from_format("ku4vu4", 64)
    x = torch.tensor([[0.75], [-3.0], [1e-9]]).expand(3, 64)
    torch.testing.assert_close(codec.decode_key(codec.encode_key(x)), x.contiguous(), rtol=2**-9, atol=0)


def test_fp8_is_e4m3_under_a_power_of_two():
    codec = Codec.from_format("fp8", 64)
    x = vectors(100, 64)
    encoded = codec.encode_key(x)
    scale = scale16.decode_unsigned(encoded.fields)
    assert (scale.log2() == scale.log2().round()).all()
    largest = (x.abs().amax(-1, keepdim=True) / scale).flatten()
    assert (largest > 224).all()
    assert (largest <= 448).all()
    expected = (x / scale).to(torch.float8_e4m3fn).float() * scale
    assert torch.equal(codec.decode_key(encoded), expected)


def test_norm_policy_keeps_norms_and_unbiased_keeps_projections():
    x = vectors(200, 128)
    norm = x.norm(dim=-1)
    for bits in (1, 2, 4, 8):
        restored = {}
        for policy in POLICIES:
            codec = Codec(CodecSpec.parse(f"k{bits}v{bits}", 128, key_policy=policy))
            restored[policy] = codec.decode_key(codec.encode_key(x))
        torch.testing.assert_close(restored[ScalePolicy.NORM].norm(dim=-1), norm, rtol=6e-4, atol=0)
        projected = (restored[ScalePolicy.UNBIASED] * x).sum(-1)
        torch.testing.assert_close(projected, norm.square(), rtol=6e-4, atol=0)
        assert (restored[ScalePolicy.PLAIN].norm(dim=-1) / norm).std() > 1e-4


@pytest.mark.parametrize("policy", POLICIES)
def test_every_sum_is_exact(policy):
    """Repeats the encoder's arithmetic in numpy integers, for enough values to expose intermediate rounding."""
    count, dim, bits = 8192, 128, 8
    codec = Codec(CodecSpec.parse(f"k{bits}v{bits}", dim, key_policy=policy))
    x = vectors(count, dim, seed=4)
    tables, f32 = codec.key_tables, np.float32
    largest = x.abs().amax(-1, keepdim=True).double().numpy()
    unit = 2.0 ** (20 - np.floor(np.log2(largest)))
    fixed = np.rint(x.double().numpy() * unit).astype(np.int64)
    rotated = (fixed @ tables.hadamard.numpy().astype(np.int64)).astype(f32)
    squared = (fixed * fixed).sum(-1, keepdims=True).astype(f32)
    norm = np.sqrt(squared)
    standard = rotated * (f32(tables.unit) / norm)
    index = np.searchsorted(tables.boundaries.numpy(), standard, side="left")
    codes = np.where(index >= 128, index, 127 - index)
    levels = (tables.levels.numpy()[codes] * 128).astype(np.int64)
    if policy == ScalePolicy.PLAIN:
        scale = norm * f32(tables.plain_scale)
    elif policy == ScalePolicy.NORM:
        scale = norm / np.sqrt((levels * levels).sum(-1, keepdims=True).astype(f32)) * f32(128)
    else:
        dot = (rotated.astype(np.int64) * levels).sum(-1, keepdims=True).astype(f32)
        scale = squared * f32(tables.root_dim) / dot * f32(128)
    scale = scale * (1 / unit).astype(f32)
    encoded = codec.encode_key(x)
    assert np.array_equal(encoded.codes.numpy(), codes)
    assert torch.equal(encoded.fields, scale16.encode_unsigned(torch.from_numpy(scale)))


@pytest.mark.parametrize("bits", [2, 3, 4])
@pytest.mark.parametrize("largest", [1.0, 30.0])
def test_short_integers_do_not_show(bits, largest):
    """The error is nearly that of 21-bit integers and an exact norm, with and without an outlier."""
    codec, x = Codec(CodecSpec.parse(f"k{bits}v{bits}", 128)), vectors(2048, 128, seed=5).bfloat16()
    x[:, 3] *= largest

    def error(values: torch.Tensor) -> float:
        squared = (codec.decode_key(codec.encode_key(values)) - x.float()).square().sum(-1)
        return float((squared / x.float().square().sum(-1)).mean())

    short, exact = error(x), error(x.float())
    assert short != exact
    assert short < 1.001 * exact


def test_sums_are_integers_rounded_once():
    """Compares with Python integers. float32 sums of the same numbers differ, so the test would detect them."""
    codec = Codec(CodecSpec.parse("k4v4", 128))
    fixed, _, _ = quantize._fixed_point(vectors(64, 128, seed=4), quantize.FIXED_POINT_BITS)
    matrix = codec.key_tables.hadamard
    rotated, squared = quantize.rotate_fixed(fixed, codec.key_tables), quantize.squared_norm(fixed)
    signs, rows = matrix.T.long().tolist(), fixed.long().tolist()
    exact_rotated = [[float(sum(a * b for a, b in zip(row, column, strict=True))) for column in signs] for row in rows]
    exact_squared = [[float(sum(a * a for a in row))] for row in rows]
    assert torch.equal(rotated, torch.tensor(exact_rotated, dtype=torch.float64).float())
    assert torch.equal(squared, torch.tensor(exact_squared, dtype=torch.float64).float())
    assert not torch.equal(fixed @ matrix.float(), rotated)
    assert not torch.equal(fixed.square().sum(-1, keepdim=True), squared)
