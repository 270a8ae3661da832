"""The loop over cells that ``bench attend`` and ``bench store`` share: options, compilation in advance, timing."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch

from slimkv.errors import InputError, SlimKVError, UnsupportedError
from slimkv.lab.bench.baselines import time_baseline
from slimkv.lab.bench.results import Baseline, Report, Row, run_facts
from slimkv.lab.bench.timing import Timer, copy_bandwidth
from slimkv.lab.settings import check_limits, setting
from slimkv.ops.cuda import cuda_unavailable_reason
from slimkv.ops.registry import AVAILABLE
from slimkv.spec import BLOCK_SIZES

_COMPILE_PROCESSES = 8
Step = Callable[[str], object]


@dataclass(frozen=True)
class Options:
    """What to run."""

    cells: tuple[str, ...] = setting((), "Cells by name or pattern, such as decode-*,prefill-*, or all.")
    backends: tuple[str, ...] = setting(
        (), "Backends to time, such as cuda,triton; default: the device's own.", option="backend"
    )
    device: str | None = None  # by default CUDA if available
    page: int | None = setting(None, "Tokens per page; default: the cell's own.", least=1)
    no_baselines: bool = setting(False, "Time slimkv alone.")
    small: bool = setting(False, "Use the small cells of a CPU, even on a GPU.")
    as_device: str | None = setting(
        None, "Limit the GPU to the features and shared memory of a100, b300, rtx4090 or rtx5090."
    )

    def __post_init__(self) -> None:
        check_limits(self)
        if self.page not in (None, *BLOCK_SIZES):
            raise InputError(f"--page {self.page} is not one of {', '.join(map(str, BLOCK_SIZES))}")

    def torch_device(self) -> torch.device:
        """The device, with an index."""
        return torch.zeros(0, device=self.device or ("cuda" if torch.cuda.is_available() else "cpu")).device

    def chosen_backends(self, device: torch.device) -> list[str]:
        """The implementations to time."""
        if self.backends or device.type != "cuda":
            return list(self.backends) or ["cpu"]
        return ["triton" if cuda_unavailable_reason(device) else "cuda"]


# (cell, backend, device, whether only to compile) -> ``attention.Case`` or ``store.Case``
Create = Callable[[Any, str, torch.device, bool], Any]


def _compile(job: tuple[Create, Any, str, str]) -> None:
    """Compiles the kernels of a cell, in a separate process."""
    create, cell, backend, device = job
    case = create(cell, backend, torch.device(device), True)
    case.error()
    case.run()
    torch.cuda.synchronize()


def _compile_ahead(jobs: Iterable[tuple[Create, Any, str, str]], step: Step) -> None:
    """Compiles in other processes to fill the compiler's disk cache; errors are raised again when a cell runs."""
    todo = list(jobs)
    if len(todo) < 3:
        return
    workers = min(_COMPILE_PROCESSES, len(todo), max(1, (os.cpu_count() or 2) // 2))
    step(f"compiling {len(todo)} kernels in {workers} processes")
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        for future in [pool.submit(_compile, job) for job in todo]:
            future.exception()


def run_cells(
    operation: str, cells: list[Any], backends: Callable[[Any], list[str]], create: Create, options: Options, step: Step
) -> Report:
    """Times every cell with each of its backends, and the baselines once per shape."""
    device = options.torch_device()
    for name in options.backends:
        if name not in AVAILABLE:
            raise InputError(f"no backend {name!r}; known are {', '.join(AVAILABLE)}")
        if reason := AVAILABLE[name](device):
            raise UnsupportedError(f"--backend {name} does not run on {device}: {reason}")
    work = [(cell, backend) for cell in cells for backend in backends(cell)]
    if device.type == "cuda":
        _compile_ahead([(create, cell, backend, str(device)) for cell, backend in work], step)
    step("copy bandwidth")
    copy, timer, rows = copy_bandwidth(device), Timer(device), list[Row]()
    shared: dict[object, list[Baseline]] = {}  # by shape
    for cell, backend in work:
        step(f"{cell.name}: {backend}")
        torch.manual_seed(0)
        case = create(cell, backend, device, False)
        error, moved, shape, timing = case.error(), case.moved_bytes, case.shape, case.timing
        if error is not None and not error < 1:
            raise SlimKVError(
                f"{cell.name} with {backend}: the output differs from float64 by {error:.2g}; its time is invalid"
            )
        ms = timer(case.run, **timing)
        if not options.no_baselines and shape not in shared:
            shared[shape] = []
            for name, (size, candidates) in case.baselines().items():
                step(f"{cell.name}: {name}")
                shared[shape].append(time_baseline(name, candidates, timer, size, copy, **timing))
        rows.append(
            Row(
                cell=cell.name, format=cell.format, shape=cell.sizes, backend=backend, ms=ms, moved_bytes=moved,
                fraction_of_copy=moved / (1e-3 * ms) / copy, error=error,
                tflops=cell.flops / (1e9 * ms) if getattr(cell, "compute_bound", False) else None,
                baselines=[baseline.against(ms) for baseline in shared.get(shape, [])],
            )
        )  # fmt: skip
        del case
        if device.type == "cuda":
            torch.cuda.empty_cache()
    return Report(operation, rows, copy_bytes_per_second=copy, **run_facts(device))
