"""The fidelity guard: what it measures, when it raises, and that it checks each layer once."""

import logging

import pytest
import torch

from slimkv.calibration.guard import MAX_SCORE_ERROR, MIN_TOKENS, Guard, score_errors
from slimkv.errors import FidelityError

TOKENS, HEADS, KV_HEADS, DIM = 300, 4, 2, 32


def vectors(heads: int, seed: int) -> torch.Tensor:
    return torch.randn(TOKENS, heads, DIM, generator=torch.Generator().manual_seed(seed))


def test_the_figure_is_the_standard_deviation_of_score_differences():
    query, key = vectors(HEADS, 0), vectors(KV_HEADS, 1)
    stored = key + 0.1 * vectors(KV_HEADS, 2)
    figures = score_errors(query, key, stored, DIM**-0.5)
    for head in range(KV_HEADS):
        grouped = query[:, 2 * head : 2 * head + 2].double()
        scores = torch.einsum("qgd,kd->gqk", grouped, (stored - key)[:, head].double()) * DIM**-0.5
        torch.testing.assert_close(figures[head].double(), scores.var(-1, correction=0).mean().sqrt())


def test_a_constant_difference_does_not_count():
    query, key = vectors(HEADS, 0), vectors(KV_HEADS, 1)
    figures = score_errors(query, key, key + 100 * torch.ones(DIM), DIM**-0.5)
    assert float(figures.max()) < 1e-2


def test_it_stops_with_layer_figure_and_cures():
    guard = Guard(MAX_SCORE_ERROR, ("0", "1"))
    query, key = vectors(HEADS, 0), vectors(KV_HEADS, 1)
    noise = 30 * vectors(KV_HEADS, 2)
    with pytest.raises(FidelityError, match=r"layer 1: .* nats .*slimkv calibrate.*'raw'.*max_score_error=0"):
        guard.compare("1", query, key, lambda rows: (key + noise)[rows], DIM**-0.5)
    assert guard.wants("1", MIN_TOKENS), "the next prompt is stopped too"


def test_healthy_layers_are_logged_once_in_one_line(caplog):
    guard = Guard(MAX_SCORE_ERROR, ("0", "1"))
    query, key = vectors(HEADS, 0), vectors(KV_HEADS, 1)
    with caplog.at_level(logging.INFO, "slimkv"):
        for layer in ("0", "1"):
            assert guard.wants(layer, MIN_TOKENS)
            guard.compare(layer, query, key, lambda rows: (key + 0.01)[rows], DIM**-0.5)
            assert not guard.wants(layer, MIN_TOKENS)
    assert len(caplog.records) == 1
    assert "layer 0" in caplog.text
    assert "layer 1" in caplog.text


def test_short_prompts_and_a_limit_of_zero_are_left_alone():
    assert not Guard(MAX_SCORE_ERROR, ("0",)).wants("0", MIN_TOKENS - 1)
    assert not Guard(0, ("0",)).wants("0", MIN_TOKENS)


def test_nan_stops_too():
    guard = Guard(MAX_SCORE_ERROR, ("0",))
    key = vectors(KV_HEADS, 1)
    with pytest.raises(FidelityError):
        guard.compare("0", vectors(HEADS, 0), key, lambda rows: key[rows] * torch.nan, DIM**-0.5)
