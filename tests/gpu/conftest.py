"""Makes the kernels' cases importable. These tests need a GPU: what they check only exists there."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent.parent / "ops"))


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda", 0)
