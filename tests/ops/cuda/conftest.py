"""Makes the emulated GPU importable, and defines fixtures for real GPUs."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from slimkv.ops.cuda.device import device_of

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture
def hopper(device) -> torch.device:
    """A GPU with the instructions of compute capability 9.0."""
    if not device_of(device).warpgroups:
        pytest.skip("these instructions are those of compute capability 9.0")
    return device
