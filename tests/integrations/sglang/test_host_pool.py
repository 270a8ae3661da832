"""SGLang's hierarchical cache with packed pages: codes and scales of evicted pages come back from host memory."""

from __future__ import annotations

import random

import pytest

pytest.importorskip("sglang")

from engines import engine, run_engine, slimkv
from prompts import run

pytestmark = [pytest.mark.sglang, pytest.mark.slow]


def test_evicted_pages_come_back_from_host_memory():
    """Six prompts run through a cache that holds three. The first two come back from host memory with equal answers."""
    source = random.Random(0)
    prompts = [[source.randrange(3, 40_000) for _ in range(290)] for _ in range(6)]
    result = run_engine(
        engine(
            **slimkv("k4v4"), enable_hierarchical_cache=True, hicache_ratio=4.0, hicache_mem_layout="layer_first",
            max_total_tokens=1024,
        ),
        [
            run("first", prompts[:2], 8, one_by_one=True),
            run("others", prompts[2:], 8, one_by_one=True),
            run("again", prompts[:2], 8, one_by_one=True),
        ],
    )  # fmt: skip
    assert result["max_total_num_tokens"] == 1024
    assert result["cached"] == {"first": [0, 0], "others": [0, 0, 0, 0], "again": [288, 288]}
    assert result["tokens"]["again"] == result["tokens"]["first"]
