"""The encode and decode round trip of ``benchmarks/cold_tier.py``."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("transformers")
import cold_tier


@pytest.mark.parametrize(("format", "most"), [("k8v8", 0.01), ("k4v4", 0.11), ("k2v2", 0.4)])
def test_a_prefix_comes_back(format, most):
    source = torch.Generator().manual_seed(0)
    key, value = (torch.randn(1, 2, 48, 64, generator=source) for _ in "kv")
    got = cold_tier.round_trip(key + 5, value, 0, format, None)
    for one, right in zip(got, (key + 5, value), strict=True):
        assert one.shape == right.shape
        error = (one - right).norm() / (right - right.mean(2, keepdim=True)).norm()
        assert most / 4 < error < most
