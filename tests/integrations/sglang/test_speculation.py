"""Speculation in the real engine: chains of drafted tokens are verified on packed pages in one launch."""

from __future__ import annotations

import pytest

pytest.importorskip("sglang")

from engines import engine, plugin_path, prefixed, run_engine, slimkv
from prompts import long, model_folder, ragged, run

pytestmark = [pytest.mark.sglang, pytest.mark.slow]

STEPS = 3


def test_a_draft_model_changes_no_token(tmp_path):
    """SmolLM2 drafting for itself: ragged and chunked prompts, and prompts whose pages the radix cache has."""
    drafts = {
        "speculative_algorithm": "STANDALONE", "speculative_draft_model_path": model_folder(),
        "speculative_num_steps": STEPS, "speculative_eagle_topk": 1, "speculative_num_draft_tokens": STEPS + 1,
        "speculative_draft_attention_backend": "torch_native",
    }  # fmt: skip
    runs = [run("mixed", [*ragged(), *long()], 24), run("miss", prefixed(), 12), run("hit", prefixed(), 12)]
    path = plugin_path(tmp_path, "drafts", "torch_native_drafts:register")  # lets ``torch_native`` draft
    alone = run_engine(engine(**slimkv("k4v4")), runs)
    drafted = run_engine(engine(**drafts, **slimkv("k4v4")), runs, PYTHONPATH=path)
    assert drafted["tokens"] == alone["tokens"]
    assert drafted["tokens"]["hit"] == drafted["tokens"]["miss"]
    assert min(drafted["cached"]["hit"]) >= 6 * drafted["page_size"]
    # The draft attends numbers, the target codes: it guesses most tokens, and a step that verifies takes several.
    assert 0 < drafted["verified"]["mixed"] < 0.6 * sum(len(tokens) for tokens in drafted["tokens"]["mixed"])
