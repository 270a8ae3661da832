"""Makes the helper modules of these tests importable, and defines the device that kernels run on."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="session")
def device() -> torch.device:
    """A GPU where there is one; else the CPU, on which Triton's interpreter runs the kernels."""
    return torch.zeros(0, device="cuda" if torch.cuda.is_available() else "cpu").device
