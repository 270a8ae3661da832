"""Attention on pages equals stock attention on the decoded keys and values."""

from __future__ import annotations

from fused_vs_decoded import compare_paths
from tiny import tiny, tokens


def test_both_paths_choose_the_same_tokens():
    model = tiny()
    paths = compare_paths(model, tokens(1, 40), "k4v4", steps=12)
    assert paths.first_different_token is None
    assert 0 < paths.largest_difference < 1e-3
    assert (paths.fused_calls, paths.decoded_calls) == (12 * model.config.num_hidden_layers, 0)
