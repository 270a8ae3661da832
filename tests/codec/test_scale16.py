from fractions import Fraction

import numpy as np
import pytest
import torch

from slimkv.codec import scale16

ALL = torch.arange(1 << 16, dtype=torch.int32)


def unsigned_value(code: int) -> Fraction:
    exponent, mantissa = code >> 10, code & 0x3FF
    return Fraction(1024 + mantissa, 1024) * Fraction(2) ** (exponent - 40)


def signed_value(code: int) -> Fraction:
    exponent, mantissa = (code >> 9) & 0x3F, code & 0x1FF
    magnitude = Fraction(512 + mantissa, 512) * Fraction(2) ** (exponent - 40)
    return -magnitude if code & 0x8000 else magnitude


def test_every_unsigned_code_round_trips():
    codes = torch.cat([torch.zeros(1, dtype=torch.int32), ALL[1 << 10 :]])  # encoders write no codes in between
    values = scale16.decode_unsigned(codes)
    assert torch.equal(scale16.encode_unsigned(values), codes)
    assert values[0] == 0
    assert values[-1].isnan()
    assert (values[1:-1].diff() > 0).all()
    for code, value in zip(codes[1:-1:97].tolist(), values[1:-1:97].tolist(), strict=True):
        assert Fraction(value) == unsigned_value(code)


def test_every_signed_code_round_trips():
    positive = ALL[1 << 9 : 0x7FFF]
    codes = torch.cat([torch.zeros(1, dtype=torch.int32), positive, positive | 0x8000])
    values = scale16.decode_signed(codes)
    assert torch.equal(scale16.encode_signed(values), codes)
    assert torch.equal(values[1 : 1 + len(positive)], -values[1 + len(positive) :])
    for code, value in zip(codes[1::97].tolist(), values[1::97].tolist(), strict=True):
        assert Fraction(value) == signed_value(code)
    assert scale16.decode_signed(torch.tensor([scale16.INVALID], dtype=torch.int32)).isnan().all()


def nearest_even(x: Fraction, value, codes) -> int:
    """The code whose value is nearest to x; the even one in a tie."""
    return min(codes, key=lambda code: (abs(value(code) - x), code & 1))


@pytest.mark.parametrize("exponent", [-39, -30, -1, 0, 5, 22])
def test_unsigned_rounding_is_nearest_ties_to_even(exponent):
    base = (exponent + 40) << 10
    # Thirteen bits are dropped: ties, one step to either side of them, and numbers in between.
    dropped = [0, 1, 0xFFF, 0x1000, 0x1001, 0x1FFF, 0x123]
    for mantissa in (0, 1, 2, 511, 1022, 1023):
        for low in dropped:
            x = np.ldexp(np.float32(1) + np.float32((mantissa << 13 | low) / 2**23), exponent).astype(np.float32)
            code = base + mantissa
            expected = nearest_even(Fraction(float(x)), unsigned_value, (code, code + 1))
            assert scale16.encode_unsigned(torch.tensor([x])).item() == expected


@pytest.mark.parametrize("sign", [1, -1])
def test_signed_rounding_is_nearest_ties_to_even(sign):
    base = 40 << 9
    for mantissa in (0, 1, 2, 255, 510, 511):
        for low in (0, 1, 0x1FFF, 0x2000, 0x2001, 0x3FFF):
            x = np.float32(sign) * (np.float32(1) + np.float32((mantissa << 14 | low) / 2**23))
            code = base + mantissa
            expected = nearest_even(Fraction(float(abs(x))), signed_value, (code, code + 1))
            expected |= 0x8000 if sign < 0 else 0
            assert scale16.encode_signed(torch.tensor([x])).item() == expected


def test_the_ends_of_the_range():
    largest, smallest = 2.0 ** (63 - scale16.BIAS) * (2 - 2**-9), scale16.SMALLEST_NORMAL
    encode = lambda *x: scale16.encode_unsigned(torch.tensor(x, dtype=torch.float32)).tolist()  # noqa: E731
    assert encode(largest, smallest, 0.0) == [0xFFFE, 1 << 10, 0]
    assert encode(largest * 1.001, 1e30, float("inf"), float("nan")) == [scale16.INVALID] * 4
    assert encode(smallest * 0.9, 1e-40) == [0, 0]
    signed = scale16.encode_signed(torch.tensor([1e9, -1e9, float("nan"), -float("inf"), -0.0, -1e-20]))
    assert signed.tolist() == [scale16.INVALID] * 4 + [0, 0]


def test_relative_precision_is_that_of_fp16():
    x = torch.logspace(-11.5, 7, 10_000, base=10.0)
    decoded = scale16.decode_unsigned(scale16.encode_unsigned(x))
    assert ((decoded - x).abs() / x).max() <= 2**-11
