"""Shared by the benchmarks of all operations: options, device, progress, compilation in advance."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import torch

from slimkv.ops.cuda import cuda_unavailable_reason

_COMPILE_PROCESSES = 8


@dataclass(frozen=True)
class Options:
    """What to run.

    Attributes:
        cells: names or shell patterns of cells; none means all.
        backends: implementations to time; none means the one for the device.
        device: ``cuda`` or ``cpu``; by default CUDA if available.
        page: tokens per page, for all cells.
        baselines: whether to time the baselines too.
        small: the small cells even on a GPU.
        as_device: the record that the GPU is held to (``slimkv.ops.cuda.device``).
    """

    cells: list[str] = field(default_factory=list)
    backends: list[str] = field(default_factory=list)
    device: str | None = None
    page: int | None = None
    baselines: bool = True
    small: bool = False
    as_device: str | None = None

    def command(self, operation: str) -> str:
        """The command line that runs this again."""
        words = ["slimkv bench", operation]
        words += [f"--cells {','.join(self.cells)}"] if self.cells else []
        words += [f"--backend {','.join(self.backends)}"] if self.backends else []
        words += [f"--device {self.device}"] if self.device else []
        words += [f"--page {self.page}"] if self.page else []
        words += [] if self.baselines else ["--no-baselines"]
        words += ["--small"] if self.small else []
        words += [f"--as-device {self.as_device}"] if self.as_device else []
        return " ".join(words)

    def torch_device(self) -> torch.device:
        """The device, with an index."""
        return torch.zeros(0, device=self.device or ("cuda" if torch.cuda.is_available() else "cpu")).device

    def chosen_backends(self, device: torch.device) -> list[str]:
        """The implementations to time."""
        if self.backends or device.type != "cuda":
            return self.backends or ["cpu"]
        return ["triton" if cuda_unavailable_reason(device) else "cuda"]


Step = Callable[[str], object]


def silent(message: str) -> None:
    """Ignores progress."""


def compile_ahead(prepare: Callable[[Any], object], jobs: Iterable[Any], device: torch.device, step: Step) -> None:
    """Runs ``prepare(job)`` in other processes to fill the compiler's disk cache; errors are reported later."""
    todo = list(jobs)
    if device.type != "cuda" or len(todo) < 3:
        return
    workers = min(_COMPILE_PROCESSES, len(todo), max(1, (os.cpu_count() or 2) // 2))
    step(f"compiling {len(todo)} kernels in {workers} processes")
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        for future in [pool.submit(prepare, job) for job in todo]:
            future.exception()
