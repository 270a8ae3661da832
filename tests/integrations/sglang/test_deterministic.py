"""``--enable-deterministic-inference`` in the real engine: an answer depends on its own prompt only.

SGLang's batch-invariant GEMMs need a GPU, so a plugin runs linear layers row by row here.
"""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("sglang")

from engines import model_drafts, ngram_drafts, plugin_path, run_engine, slimkv
from prompts import run
from row_exact import PROMPTS, assert_same, tiny_model

from slimkv.integrations.sglang import ngram

pytestmark = [pytest.mark.sglang, pytest.mark.slow]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def ask(model, tmp_path_factory):
    """A function that runs an engine with the switch."""
    home, plugins = tmp_path_factory.mktemp("cache"), tmp_path_factory.mktemp("plugins")
    path = plugin_path(plugins, "exact", "exact_rows:with_drafts")

    def ask(runs: list[dict], **arguments: object) -> dict:
        engine = {
            "model_path": model, "enable_deterministic_inference": True, **slimkv("k4v4"), "chunked_prefill_size": 768,
            **arguments,
        }  # fmt: skip
        return run_engine(engine, runs, PYTHONPATH=path, XDG_CACHE_HOME=str(home))

    return ask


def asked(name: str, **how: bool) -> dict:
    return run(name, PROMPTS, 10, logprobs=3, **how)


@pytest.fixture(scope="module")
def plain(ask):
    return ask([asked("together"), asked("cached"), asked("alone", one_by_one=True, reset=True)])


def test_neighbours_and_the_radix_cache_change_nothing(plain):
    assert_same(plain, "together", plain, "cached")
    assert_same(plain, "together", plain, "alone")
    assert sum(plain["cached"]["cached"]) > 1000, "the radix cache is on"


def test_chunks_change_nothing(ask, plain):
    assert_same(plain, "together", ask([asked("together")], chunked_prefill_size=64), "together")


def test_ngram_drafts_change_nothing(ask, plain):
    found = ask([asked("together")], **ngram_drafts())
    assert_same(plain, "together", found, "together")
    assert 0 < found["verified"]["together"] < 10 * len(PROMPTS), "some were accepted"


def test_a_draft_model_changes_nothing(ask, plain, model):
    found = ask([asked("together")], **model_drafts(model))
    assert_same(plain, "together", found, "together")
    assert 0 < found["verified"]["together"] < 8 * len(PROMPTS), "most were accepted"


def test_trees_become_their_longest_path():
    """The first request has two branches and a padding node, the second a chain that fills its tree."""
    parents = np.array([[-1, 0, 0, 2, 0], [-1, 0, 1, 2, 3]])
    mask = np.zeros((2, 5, 5), dtype=np.uint8)
    for request in range(2):
        for node in range(5):
            at = node
            while at >= 0:
                mask[request, node, at] = 1
                at = parents[request, at]
    tokens = np.array([[7, 11, 12, 13, 0], [7, 21, 22, 23, 24]], dtype=np.int64).reshape(-1)
    chains, causal = ngram.chains(tokens, mask.reshape(-1), 5)
    assert chains.reshape(2, 5).tolist() == [[7, 12, 13, 0, 0], [7, 21, 22, 23, 24]]
    assert (causal.reshape(2, 5, 5) == np.tri(5)).all()
    assert (chains.dtype, causal.dtype) == (tokens.dtype, mask.dtype)
