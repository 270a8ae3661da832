"""Speculation in the real engine: chains of drafted tokens are verified on packed pages in one launch."""

from __future__ import annotations

import pytest

pytest.importorskip("sglang")

from engines import engine, model_drafts, plugin_path, prefixed, run_engine, slimkv
from prompts import long, partings, ragged, run, short_model_folder

pytestmark = [pytest.mark.sglang, pytest.mark.slow]

STEPS = 3
NEAR_TIE = 0.1  # gap in nats between the two most likely tokens


def test_a_draft_model_changes_no_more_than_another_batch_does(tmp_path):
    """The model drafts for itself: ragged and chunked prompts, and prompts with pages in the radix cache.

    On some CPUs, GEMM rounding depends on the shapes. Values near the boundary of a code then change their code, and
    near ties between tokens are decided differently. With drafts, tokens may therefore differ, but only at gaps as
    small as those where batched and one-by-one runs without drafts differ. Attention to wrong pages would show as gaps
    of nats.
    """
    drafts = model_drafts(short_model_folder(), steps=STEPS)
    prompts = [*ragged(), *long()]
    runs = [run("mixed", prompts, 24), run("miss", prefixed(), 12), run("hit", prefixed(), 12)]
    singly = run("singly", prompts, 24, one_by_one=True, reset=True)
    path = plugin_path(tmp_path, "drafts", "torch_native_drafts:register")  # lets ``torch_native`` draft
    alone = run_engine(engine(**slimkv("k4v4")), [*({**one, "logprobs": 5} for one in runs), singly])
    drafted = run_engine(engine(**drafts, **slimkv("k4v4")), runs, PYTHONPATH=path)
    one_by_one = {"tokens": {"mixed": alone["tokens"]["singly"]}}
    by_batch = partings(alone, one_by_one, "mixed")
    allowed = max([NEAR_TIE, *(gap for _, gap in by_batch.values())])
    assert allowed < 1, by_batch
    for name in drafted["tokens"]:
        found = partings(alone, drafted, name)
        assert all(gap <= allowed for _, gap in found.values()), (name, found, by_batch)
        assert len(found) <= len(by_batch) + 1, (name, found, by_batch)
    assert drafted["tokens"]["hit"] == drafted["tokens"]["miss"]
    assert min(drafted["cached"]["hit"]) >= 6 * drafted["page_size"]
    # The draft model reads an unpacked cache, the target reads codes. Still, most drafts are accepted.
    assert 0 < drafted["verified"]["mixed"] < 0.6 * sum(len(tokens) for tokens in drafted["tokens"]["mixed"])
