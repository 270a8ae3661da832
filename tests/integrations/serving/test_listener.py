"""Gathering of calibration statistics in a serving engine, tested without one: probes, sums, and ranks that hold some
of the heads."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from slimkv.calibration import LayerStatistics
from slimkv.calibration.gather import PROBE_TOKENS
from slimkv.calibration.rotary import Rotary
from slimkv.integrations.serving.listener import ListeningPlan, ObservedLayer, QueryListener, merge_ranks

DIM, HEADS, GROUP = 16, 4, 2
HALVES = torch.arange(DIM).view(2, -1).T.contiguous()
ROTARY = Rotary(HALVES, 100.0 ** -(torch.arange(DIM // 2, dtype=torch.float64) / (DIM // 2)))
FIELDS = {
    "model_type": "llama", "hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": HEADS * GROUP,
    "num_key_value_heads": HEADS, "head_dim": DIM, "vocab_size": 97, "bos_token_id": 1,
    "max_position_embeddings": 2048,
}  # fmt: skip
CONFIG = SimpleNamespace(**FIELDS, to_dict=lambda: FIELDS)
PLAN = ListeningPlan.of(CONFIG, 512, (2, 256), 0)


def queries(tokens: int, seed: int) -> torch.Tensor:
    """Queries of all heads before RoPE, larger in some directions than in others."""
    made = torch.randn(tokens, HEADS * GROUP, DIM, generator=torch.Generator().manual_seed(seed))
    return made * torch.logspace(0, -1, DIM)


def keys(tokens: int, seed: int) -> torch.Tensor:
    """Keys of all KV heads before RoPE, with a constant part."""
    return torch.randn(tokens, HEADS, DIM, generator=torch.Generator().manual_seed(100 + seed)) + torch.arange(DIM)


def listen(held: slice, rank: int, ranks: int) -> bytes:
    """Runs the whole plan on one rank, which holds some of the KV heads, and returns the rank's statistics."""
    listener = QueryListener()
    own = slice(held.start * GROUP, held.stop * GROUP)
    listener.layers[0] = ObservedLayer(held.stop - held.start, DIM, DIM, None)
    listener.shifted(torch.arange(5))
    listener.take(0, queries(5, 9)[:, own], keys(5, 9)[:, held], 5)  # ignored: no probe or measurement was requested
    for shift in PLAN.shifts:
        listener.probe(shift)
        positions = listener.shifted(torch.arange(PROBE_TOKENS))
        assert positions[0] == shift
        given = (
            ROTARY.turned(x, positions) for x in (queries(PROBE_TOKENS, 0)[:, own], keys(PROBE_TOKENS, 0)[:, held])
        )
        listener.take(0, *given, PROBE_TOKENS)
    listener.measure()
    for chunk in range(3):
        positions = listener.shifted(torch.arange(200) + 200 * chunk)
        assert positions[0] == 200 * chunk
        given = (ROTARY.turned(x, positions) for x in (queries(200, 1 + chunk)[:, own], keys(200, 1 + chunk)[:, held]))
        listener.take(0, *given, 200)
    return listener.collect(rank, ranks)


def expected() -> torch.Tensor:
    read = torch.cat([queries(200, 1 + chunk) for chunk in range(3)])
    grouped = read.transpose(0, 1).reshape(HEADS, -1, DIM).double()
    return grouped.mT @ grouped / grouped.shape[1]


def check_keys(layer: LayerStatistics) -> None:
    """The mean key and the key at position 0 are those before RoPE."""
    read = torch.cat([keys(200, 1 + chunk) for chunk in range(3)]).double()
    assert layer.key_mean is not None
    assert layer.first_key is not None
    assert torch.allclose(layer.key_mean, read.mean(0), rtol=1e-3, atol=1e-3)
    assert torch.allclose(layer.first_key, read[0], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_ranks_sum_their_own_heads(ranks):
    each = HEADS // ranks
    parts = [listen(slice(rank * each, rank * each + each), rank, ranks) for rank in range(ranks)]
    layers, measured = merge_ranks(parts, HEADS)
    assert torch.allclose(layers[0].query_moment, expected(), rtol=1e-3, atol=1e-4)
    assert torch.allclose(measured[0].rotary.frequencies.sort().values, ROTARY.frequencies.sort().values, atol=1e-5)
    assert measured[0].max_positions == 2048
    check_keys(layers[0])


def test_fewer_heads_than_ranks():
    """Every head is held by two ranks, with the same data."""
    parts = [listen(slice(rank // 2, rank // 2 + 1), rank, 2 * HEADS) for rank in range(2 * HEADS)]
    layers, _ = merge_ranks(parts, HEADS)
    assert torch.allclose(layers[0].query_moment, expected(), rtol=1e-3, atol=1e-4)
    check_keys(layers[0])


def test_what_an_engine_is_asked_for():
    assert PLAN.shifts[0] == 0
    assert PLAN.shifts[-1] == 2048 - PROBE_TOKENS
    assert PLAN.fragment == 128
    assert PLAN.first == [1] * 4  # the model's BOS token
    assert len(set(PLAN.seeds)) == 4
    assert ListeningPlan.of(CONFIG, 100, (2, 256), 0).fragment == 100
    without = SimpleNamespace(**{**vars(CONFIG), "bos_token_id": None})
    assert all(0 <= token < 97 for token in ListeningPlan.of(without, 512, (2, 256), 0).first)


def test_the_calibration_says_where_it_is_from():
    asked, stages = [], []
    made = PLAN.calibrate(
        "an engine", HEADS, None, lambda what, done, total: stages.append(done),
        ask=lambda name, **_: asked.append(name), read=lambda: asked.append("read"), say=lambda: asked.append("say"),
        collect=lambda: [listen(slice(0, HEADS), 0, 1)],
    )  # fmt: skip
    assert asked == [*["probe", "read"] * len(PLAN.shifts), "measure", "say"]
    assert stages == [1, 2, 3, 4]
    assert made.source == "512 token ids sampled from the model in an engine, seed 0"
    assert made.max_positions == 2048
