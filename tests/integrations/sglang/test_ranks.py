"""Two tensor-parallel ranks of the real engine, each with the pages of its own KV head."""

from __future__ import annotations

import pytest

pytest.importorskip("sglang")

from engines import run_engine, slimkv
from observed import write_llama
from prompts import run

pytestmark = [pytest.mark.sglang, pytest.mark.slow]


def test_two_ranks_give_what_one_gives(tmp_path):
    folder = write_llama(tmp_path)
    prompts = [[3 + (7 * i + 5 * j) % 500 for j in range(20 + 60 * i)] for i in range(4)]
    runs = [run("miss", prompts, 12), run("hit", prompts, 12)]
    # Not the key offsets that an engine with one rank learned from other prompts in another test.
    environment = {"SGLANG_CPU_OMP_THREADS_BIND": "0|1", "XDG_CACHE_HOME": str(tmp_path / "cache")}
    one, two = (
        run_engine({"model_path": folder, "tp_size": ranks, **slimkv("k4v4")}, runs, **environment) for ranks in (1, 2)
    )
    assert two["tokens"] == one["tokens"]
    assert two["tokens"]["hit"] == two["tokens"]["miss"]
    assert max(two["cached"]["hit"]) >= 2 * two["page_size"]
