"""Makes the kernels' test cases importable. These tests check behaviour that only GPUs have."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent.parent / "ops"))


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda", 0)
