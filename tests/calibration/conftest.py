"""Calibration statistics of a made-up model."""

from __future__ import annotations

import pytest
import torch

from slimkv.calibration import Calibration, LayerStatistics, ModelIdentity

CONFIG = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 97,
    "transformers_version": "5.0",
}


def moments(heads: int, dim: int, seed: int) -> torch.Tensor:
    """Second moments, float64 [heads, dim, dim], of queries concentrated in a few directions."""
    generator = torch.Generator().manual_seed(seed)
    queries = torch.randn(heads, 4 * dim, dim, generator=generator, dtype=torch.float64)
    queries = queries * torch.logspace(0, -1.5, dim, dtype=torch.float64)
    turned = queries @ torch.linalg.qr(torch.randn(heads, dim, dim, generator=generator, dtype=torch.float64))[0]
    return turned.mT @ turned / (4 * dim)


@pytest.fixture
def config() -> dict:
    return dict(CONFIG)


@pytest.fixture
def calibration() -> Calibration:
    """Three layers, each ten times as sensitive as the one before."""
    layers = {
        number: LayerStatistics(
            moments(2, 32, number), 32, *(torch.full((2,), 10.0**number, dtype=torch.float64) for _ in range(2))
        )
        for number in range(3)
    }
    return Calibration(ModelIdentity.of(CONFIG), layers, "nothing", 4096)
