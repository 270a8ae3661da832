"""The table of decode configurations: the choice for a request and a device."""

from __future__ import annotations

from dataclasses import replace

import pytest
from test_decode_cuda import B300, H200, HOPPER_GPU, OLD_GPU, SMALL_GPU

from slimkv.ops.attention.api import MAX_DECODE_QUERIES
from slimkv.ops.attention.cuda.decode_config import (
    FEW_BYTES,
    SHORT_BYTES,
    UNBOUNDED,
    DecodeConfig,
    bound_of,
    config_for,
    reachable,
    shared_bytes,
)
from slimkv.ops.attention.cuda.decode_config import VERIFY as PAIRS
from slimkv.ops.attention.cuda.decode_config import VERIFY_WARPS as TEAMS
from slimkv.spec import CodecSpec, PageLayout


@pytest.mark.parametrize(("dim", "tokens", "stages"), [(80, 128, 3), (96, 64, 4), (112, 64, 4), (128, 64, 4)])
def test_blocks_that_fit_only_twice_are_shorter(dim, tokens, stages):
    config = config_for(H200, PageLayout(CodecSpec.parse("k8v8", dim), 64), 4, 8)
    assert config is not None
    assert (config.source, config.block_tokens, config.stages) == (PAIRS, tokens, stages)


# The configurations that serve most models, on an H200: by format, head size and query rows.
@pytest.mark.parametrize(
    ("format", "dim", "group", "queries", "config"),
    [
        ("k4v4", 128, 4, 1, DecodeConfig(4, 64, 8, 2, bulk=True)),
        ("k4v4", 128, 8, 1, DecodeConfig(8, 64, 8, 2, bulk=True)),
        ("k4v4", 128, 4, 4, DecodeConfig(16, 64, 8, 2, bulk=True)),
        ("k4v4", 128, 4, 5, DecodeConfig(24, 128, 16, 4, source=PAIRS, bulk=True)),
        ("k4v4", 128, 4, 8, DecodeConfig(32, 128, 16, 4, source=PAIRS, bulk=True)),
        ("k4v4", 128, 4, 16, DecodeConfig(64, 128, 16, 3, source=PAIRS, bulk=True)),
        ("k5v5", 128, 4, 16, DecodeConfig(64, 64, 16, 4, source=PAIRS, bulk=True)),
        ("k4v4", 96, 4, 1, DecodeConfig(4, 64, 12, 2, bulk=True)),
        ("k3v3", 112, 4, 1, DecodeConfig(4, 64, 12, 2, bulk=True)),
        ("k4v4", 64, 4, 1, DecodeConfig(4, 128, 12, 2, bulk=True)),
        ("k2v2", 128, 4, 1, DecodeConfig(4, 128, 12, 2, bulk=True)),
        ("k4v4", 256, 4, 1, DecodeConfig(4, 32, 12, 2)),
        ("k4v4", 256, 4, 2, DecodeConfig(8, 32, 8, 2)),
        ("k4v4", 256, 4, 4, DecodeConfig(16, 128, 16, 3, source=PAIRS, bulk=True)),
        ("k4v4", 256, 6, 8, DecodeConfig(48, 64, 16, 3, source=PAIRS, bulk=True)),
        ("k4v4", 256, 6, 10, DecodeConfig(32, 128, 16, 2, source=PAIRS, bulk=True)),  # two work tiles
        ("k8v8", 256, 6, 4, DecodeConfig(24, 64, 16, 2, source=PAIRS, bulk=True)),
        ("k5v5", 128, 4, 1, DecodeConfig(4, 64, 12, 1, bulk=True)),
        ("k8v8", 128, 4, 1, DecodeConfig(4, 32, 8, 2)),
        ("fp8", 128, 4, 1, DecodeConfig(4, 32, 12, 2)),
    ],
)
def test_the_table(format, dim, group, queries, config):
    assert config_for(H200, PageLayout(CodecSpec.parse(format, dim), 64), group, queries) == config


# The same with 99 KB of shared memory and no instructions of sm_90.
@pytest.mark.parametrize(
    ("format", "dim", "group", "queries", "config"),
    [
        ("k4v4", 128, 4, 1, DecodeConfig(4, 64, 8, 1)),
        ("k4v4", 128, 8, 1, DecodeConfig(8, 32, 8, 1)),
        ("k4v4", 128, 4, 8, DecodeConfig(32, 128, 8, 1, 2, source=TEAMS)),
        ("k4v4", 256, 6, 1, DecodeConfig(8, 32, 8, 1)),
        ("k4v4", 256, 6, 4, DecodeConfig(24, 128, 8, 1, source=TEAMS)),
        ("k4v4", 256, 6, 8, DecodeConfig(48, 128, 8, 1, source=TEAMS)),
        ("k5v5", 128, 4, 1, DecodeConfig(4, 32, 12, 1)),
    ],
)
def test_the_table_of_a_smaller_gpu(format, dim, group, queries, config):
    assert config_for(OLD_GPU, PageLayout(CodecSpec.parse(format, dim), 64), group, queries) == config


@pytest.mark.parametrize(
    ("dim", "group", "bound", "config"),
    [
        (128, 4, SHORT_BYTES, DecodeConfig(4, 64, 4, 2, 3, bulk=True)),
        (128, 4, FEW_BYTES, DecodeConfig(4, 64, 4, 2, 3, bulk=True)),
        (64, 8, FEW_BYTES, DecodeConfig(8, 32, 4, 1, 4)),
        (128, 8, FEW_BYTES, DecodeConfig(8, 32, 4, 2, 2)),
        (64, 8, SHORT_BYTES, DecodeConfig(8, 64, 12, 2, bulk=True)),
        (256, 4, FEW_BYTES, DecodeConfig(4, 32, 8, 2)),
    ],
)
def test_the_table_for_short_sequences(dim, group, bound, config):
    layout = PageLayout(CodecSpec.parse("k4v4", dim), 64)
    assert config_for(H200, layout, group, 1, bound) == config
    assert config in reachable(H200, layout, group, 1, 128)


def test_only_many_short_sequences_have_a_bound():
    layout = PageLayout(CodecSpec.parse("k4v4", 128), 64)
    assert bound_of(layout, 11_000) == SHORT_BYTES
    assert bound_of(layout, 400) == FEW_BYTES
    assert bound_of(layout, 20_000) == bound_of(layout, None) == bound_of(layout, 400, few_tiles=True) == UNBOUNDED


@pytest.mark.parametrize("group", [1, 4])
@pytest.mark.parametrize(("format", "rows"), [("k4v4", 8), ("k6v4", 8), ("ku8vu8", 8), ("k5v5", 4), ("fp8", 4)])
def test_slow_int8_products_are_not_used(format, rows, group):
    for dim in (64, 128, 256):
        layout = PageLayout(CodecSpec.parse(format, dim), 64)
        for bound in (FEW_BYTES, UNBOUNDED):
            config, fast = (config_for(x, layout, group, 1, bound) for x in (B300, replace(B300, int8_rate=2.0)))
            assert config is not None
            assert config.rows == rows
            assert fast is not None
            assert fast.rows == 4


def test_shared_memory_of_every_configuration_fits_its_device():
    for format in ("k4v4", "k2v2", "k8v8", "fp8"):
        for dim in (64, 128, 256):
            layout = PageLayout(CodecSpec.parse(format, dim), 64)
            for device in (SMALL_GPU, OLD_GPU, HOPPER_GPU):
                configs = reachable(device, layout, 4, MAX_DECODE_QUERIES)
                if not configs:  # the kernel is not used
                    assert format == "k8v8" or dim == 256
                    assert device is OLD_GPU
                for config in configs:
                    assert shared_bytes(layout, config) * config.blocks_per_sm <= device.shared_of_multiprocessor
                    assert shared_bytes(layout, config) <= device.shared_of_block
