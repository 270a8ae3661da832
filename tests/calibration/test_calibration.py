"""Matrices of query-aware rounding from a calibration, for any codec and any heads."""

from __future__ import annotations

import pytest
import torch

from slimkv import Codec, CodecSpec
from slimkv.codec.key_offset import offset_of_keys
from slimkv.codec.query_aware import query_aware_matrix
from slimkv.errors import InputError


@pytest.mark.parametrize("seed", [1, 0x51])
def test_matrices_are_those_of_the_codecs_rotation(calibration, seed):
    codec = Codec(CodecSpec.parse("k4v4", 32, seed=seed))
    got = calibration.query_aware_matrices(1, codec)
    assert torch.equal(got, query_aware_matrix(calibration.layers[1].query_moment, codec.key_rotation))
    assert (got.dtype, got.shape) == (torch.int8, (2, 32, 32))
    assert calibration.query_aware_matrices(1, codec) is got  # cached


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
    with pytest.raises(InputError, match="keys of 32 dimensions in layer 0; the codec has 64"):
        calibration.query_aware_matrices(0, Codec.from_format("k4v4", 64))


def test_a_matrix_for_each_range_of_positions(calibration):
    from dataclasses import replace

    from slimkv.calibration.rotary import Rotary

    rotary = Rotary(torch.stack(torch.arange(32).chunk(2), 1), 10000.0 ** (-torch.arange(0, 32, 2).double() / 32))
    turning = replace(calibration, layers={0: replace(calibration.layers[0], rotary=rotary)}, _matrices={})
    codec = Codec.from_format("k4v4", 32)
    edges = turning.position_edges()
    got = turning.query_aware_matrices(0, codec)
    assert edges[-1] == 4096
    assert got.shape == (len(edges), 2, 32, 32)
    for number, (start, stop) in enumerate(zip((0, *edges[:-1]), edges, strict=True)):
        moment = rotary.mean_moments(calibration.layers[0].query_moment, [(start, stop)])[0]
        assert torch.equal(got[number], query_aware_matrix(moment, codec.key_rotation))
    short = turning.query_aware_matrices(0, codec, positions=300)
    assert torch.equal(short, got[:3])
    # Queries, and so their matrices, differ between the two ends of the range.
    assert not torch.equal(got[0], got[-1])


def test_matrices_made_under_inference_mode_count_their_versions(calibration):
    """Matrices are cached, and backends cache what they derive from them until their version changes."""
    with torch.inference_mode():
        codec = Codec(CodecSpec.parse("k4v4", calibration.statistics(0).key_dim))
        assert not calibration.query_aware_matrices(0, codec).is_inference()


@pytest.mark.parametrize("format", ["k3v3", "k4v4", "k6v6", "fp8"])
@pytest.mark.parametrize("dim", [64, 96, 128])
def test_the_offset_lets_the_first_key_be_stored_exactly(format, dim):
    """With and without query-aware rounding. Other keys are stored nearly as well as with the plain mean."""
    generator = torch.Generator().manual_seed(dim)
    mean, first = torch.randn(2, 3, dim, generator=generator) * torch.tensor([5.0, 8.0])[:, None, None]
    others = mean + 5 * torch.randn(200, 3, dim, generator=generator)
    codec = Codec.from_format(format, dim)
    queries = torch.randn(3, 4 * dim, dim, generator=generator) * torch.logspace(0, -2, dim)
    matrices = query_aware_matrix(queries.mT @ queries, codec.key_rotation)

    def error(key, offset, matrix=None):
        centred = key - offset.float()
        return (codec.decode_key(codec.encode_key(centred, query_aware=matrix)) - centred).norm() / key.norm()

    plain, offset = mean.bfloat16(), offset_of_keys(mean, first, codec)
    rounded = [None] if format == "fp8" else [None, matrices]
    assert error(first, offset) < 2**-8  # the offset's rounding to bfloat16
    for matrix in rounded:
        assert error(first, offset, matrix) < error(first, plain, matrix) / 4
        assert error(others, offset, matrix) < 1.2 * error(others, plain, matrix)
