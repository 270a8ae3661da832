"""Lossless pages give the stock tokens with sliding windows and with speculation."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm")

from engines import NGRAM, engine, run_engine, slimkv
from prompts import long, ragged, repeating, run

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

WINDOWED = {
    "hf_overrides": {
        "sliding_window": 48,
        "layer_types": ["sliding_attention", "full_attention"] * 4,
    }
}
SCHEDULE = [[1, 2, 3], [3, 4, 1], [5, 32, 2]]  # requests from and to, drafts for each
DYNAMIC = {"speculative_config": {**NGRAM["speculative_config"], "num_speculative_tokens_per_batch_size": SCHEDULE}}


@pytest.mark.parametrize("variant", [WINDOWED, NGRAM, DYNAMIC], ids=["sliding-window", "n-gram", "by-batch-size"])
def test_variants_give_the_stock_tokens(variant):
    runs = [run("ragged", ragged(), 8), run("long", long()[:1] + repeating(), 20)]
    ours, theirs = (run_engine(engine(**variant, **how), runs) for how in (slimkv("raw"), {}))
    assert ours["tokens"] == theirs["tokens"]
    if variant is not WINDOWED:
        assert ours["counters"]["long"]["vllm:spec_decode_num_accepted_tokens"] > 0
        assert ours["counters"] == theirs["counters"]
