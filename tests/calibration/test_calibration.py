"""Rounding matrices from a calibration: for any codec, any heads."""

from __future__ import annotations

import pytest
import torch

from slimkv import Codec, CodecSpec
from slimkv.codec.query_aware import query_aware_matrix
from slimkv.errors import InputError


@pytest.mark.parametrize("seed", [1, 0x51])
def test_matrices_are_those_of_the_codecs_rotation(calibration, seed):
    codec = Codec(CodecSpec.parse("k4v4", 32, seed=seed))
    got = calibration.query_aware_matrices(1, codec)
    assert torch.equal(got, query_aware_matrix(calibration.layers[1].query_moment, codec.key_rotation))
    assert (got.dtype, got.shape) == (torch.int8, (2, 32, 32))
    assert calibration.query_aware_matrices(1, codec) is got  # made once


def test_a_rank_takes_its_heads(calibration):
    codec = Codec.from_format("k4v4", 32)
    both = calibration.query_aware_matrices(0, codec)
    second = calibration.query_aware_matrices(0, codec, heads=slice(1, 2))
    assert torch.equal(second, both[1:])
    assert second.is_contiguous()
    for heads in (slice(1, 3), slice(2, 2)):
        with pytest.raises(InputError, match="not among the 2 KV heads of layer 0"):
            calibration.query_aware_matrices(0, codec, heads=heads)


def test_formats_without_such_rounding_get_none(calibration):
    assert calibration.query_aware_matrices(0, Codec.from_format("turboquant_k8v4", 32)) is None
    assert calibration.query_aware_matrices(0, Codec.from_format("raw", 32)) is None


def test_what_does_not_fit_is_refused(calibration):
    with pytest.raises(InputError, match="has no layer 3; it has 3 attention layers"):
        calibration.query_aware_matrices(3, Codec.from_format("k4v4", 32))
    with pytest.raises(InputError, match="keys of 32 dimensions in layer 0; these have 64"):
        calibration.query_aware_matrices(0, Codec.from_format("k4v4", 64))
