"""Sliding windows in the real SGLang engine, with a separate pool for windowed layers."""

from __future__ import annotations

import pytest

pytest.importorskip("sglang")

from engines import PAGE, run_engine, slimkv, write_windowed_model
from prompts import long, piece, ragged, run

pytestmark = [pytest.mark.sglang, pytest.mark.slow]

OWN_POOL = {"is_hybrid_swa": True, "hybrid_layer_pattern": [1, 0, 1, 0]}


def test_lossless_pages_give_the_stock_tokens(tmp_path):
    """SGLang reuses pages that no window contains any more, so the kernels must not read them."""
    model = {"model_path": write_windowed_model(tmp_path / "model"), "load_format": "dummy"}
    runs = [run("ragged", ragged(), 6), run("long", long(), 24), run("hit", [long()[0] + piece(900, 20)], 6)]
    stock = run_engine(model, runs)
    ours = run_engine(model | slimkv("raw", more=OWN_POOL) | {"swa_full_tokens_ratio": 0.25}, runs)
    assert ours["tokens"] == stock["tokens"]
    assert ours["cached"]["hit"][0] >= PAGE
