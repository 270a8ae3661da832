"""Sliding windows in the real SGLang engine, with the tokens of windowed layers in a pool of their own."""

from __future__ import annotations

import pytest

pytest.importorskip("sglang")

from engines import PAGE, long, piece, ragged, run, run_engine, slimkv, write_windowed_model

pytestmark = [pytest.mark.sglang, pytest.mark.slow]

OWN_POOL = {"is_hybrid_swa": True, "hybrid_layer_pattern": [1, 0, 1, 0]}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return {"model_path": write_windowed_model(tmp_path_factory.mktemp("windowed")), "load_format": "dummy"}


def runs() -> list[dict]:
    return [run("ragged", ragged(), 6), run("long", long(), 24), run("hit", [long()[0] + piece(900, 20)], 6)]


@pytest.fixture(scope="module")
def stock(model):
    return run_engine(model, runs())


def test_lossless_pages_give_the_stock_tokens(model, stock):
    """One pool for all layers."""
    ours = run_engine(model | slimkv("raw"), runs())
    assert ours["tokens"] == stock["tokens"]


def test_a_pool_of_their_own(model, stock):
    """Pages that left every window are handed out again; the kernels must not have needed them."""
    ours = run_engine(model | slimkv("raw", more=OWN_POOL) | {"swa_full_tokens_ratio": 0.25}, runs())
    assert ours["tokens"] == stock["tokens"]
    assert ours["cached"]["hit"][0] >= PAGE
