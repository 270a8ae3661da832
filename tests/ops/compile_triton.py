"""Compiles Triton kernels for a GPU that this machine does not have, by calling their launchers without a device.

python tests/ops/compile_triton.py hip gfx942 64     # backend, architecture, lanes of a warp
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

compiled: list[str] = []


class NoDevice:
    """A driver that reports a target to compile for, and launches nothing."""

    def __init__(self, target: GPUTarget) -> None:
        self.target = target

    def get_current_target(self) -> GPUTarget:
        """The target to compile for."""
        return self.target

    def get_current_device(self) -> int:
        """The only device."""
        return 0

    def get_current_stream(self, device: int) -> int:
        """Any stream, since nothing is launched."""
        return 0


def _compile(function: JITFunction, grid, *args, **options) -> None:
    kernel = function.warmup(*args, grid=grid, **options)
    assert kernel.asm, f"{function.__name__} has no machine code"
    compiled.append(function.__name__)


def main() -> None:
    """Compiles attention, store and gather for three formats, and latent attention; prints the kernels' names."""
    backend, architecture, lanes = sys.argv[1:]
    driver.set_active(
        NoDevice(GPUTarget(backend, int(architecture) if architecture.isdigit() else architecture, int(lanes)))
    )
    JITFunction.__getitem__ = lambda self, grid: partial(_compile, self, grid)  # type: ignore[method-assign]
    sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]
    import latent_cases
    from attention_cases import Case, build
    from test_attention import poisoned_out, request_of

    from slimkv.ops.attention.triton import launch as attention
    from slimkv.ops.gather import triton as gather
    from slimkv.ops.gather.api import GatherRequest
    from slimkv.ops.latent.triton import launch as latent
    from slimkv.ops.store.api import StoreRequest
    from slimkv.ops.store.triton import launch as store

    for change in (
        {},
        {"format": "k3v2", "dim": 96},
        {"format": "k5vfp8", "dim": 128, "window": 20, "softcap": 3.0, "sinks": True},
    ):
        case = Case(lens=(60, 90), queries=(1, 40), **change)
        built = build(case, torch.device("cpu"))
        attention.run(request_of(built, *poisoned_out(case, built)))
        slots = built.positions(0)
        key, value = (torch.zeros(len(slots), built.pages.shape[1], case.dim) for _ in range(2))
        store.run(StoreRequest(key, value, built.pages, slots, built.codec, built.layout))
        gather.run(GatherRequest(built.pages, slots, key, value, built.codec, built.layout, False))
    for format in ("c4", "craw", "cu4rfp8"):
        latents = latent_cases.build(latent_cases.Case(format=format), torch.device("cpu"))
        latent.run(latents.request(torch.zeros_like(latents.query_latent)))
    print(*sorted(set(compiled)))


if __name__ == "__main__":
    main()
