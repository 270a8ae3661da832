"""What configurations of the CUDA kernels depend on of a device."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch


@dataclass(frozen=True)
class Device:
    """Multiprocessors, shared memory in bytes, and what sm_90 has and others lack."""

    multiprocessors: int
    shared_of_multiprocessor: int
    shared_of_block: int
    copy_engine: bool = False  # bulk copies that report to a barrier
    warpgroups: bool = False  # products of four warps


@lru_cache(maxsize=64)
def device_of(device: torch.device) -> Device:
    """Numbers of a CUDA device."""
    about: Any = torch.cuda.get_device_properties(device)
    return Device(
        about.multi_processor_count,
        about.shared_memory_per_multiprocessor,
        about.shared_memory_per_block_optin,
        copy_engine=about.major >= 9,
        warpgroups=(about.major, about.minor) == (9, 0),
    )
