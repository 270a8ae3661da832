"""CUDA C++ kernels: sources, compilation on first use, and launch."""

from __future__ import annotations

from functools import lru_cache

import torch

LEAST_CAPABILITY = (8, 0)


@lru_cache
def cuda_unavailable_reason(device: torch.device) -> str | None:
    """None if the kernels can be compiled and run, otherwise the reason."""
    if device.type != "cuda":
        return f"it is CUDA C++ and does not run on {device.type}"
    if torch.version.hip is not None:
        return "it is CUDA C++ and this is a ROCm build of torch"
    capability = torch.cuda.get_device_capability(device)
    if capability < LEAST_CAPABILITY:
        return f"it needs compute capability 8.0 or newer; {torch.cuda.get_device_name(device)} has {capability}"
    try:
        from cuda.bindings import driver, nvrtc  # noqa: F401
    except ImportError:
        return 'cuda-bindings is not installed; install it with: pip install "slimkv[cuda]"'
    return None
