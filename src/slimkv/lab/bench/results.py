"""Results of a benchmark: rows, and where and when they were measured."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from slimkv.lab.provenance import provenance


@dataclass(frozen=True)
class Baseline:
    """Another implementation on the same cell, in the same run; ``ms`` is None if it cannot run."""

    name: str
    ms: float | None
    ratio: float | None  # its time over slimkv's: above 1 slimkv is faster
    fraction_of_copy: float | None
    detail: str  # the fastest configuration, or why it is absent

    def against(self, ours_ms: float) -> Baseline:
        """The same baseline compared with another time of slimkv."""
        return self if self.ms is None else replace(self, ratio=self.ms / ours_ms)


@dataclass(frozen=True)
class Row:
    """One cell with one backend."""

    cell: str
    format: str
    shape: dict[str, int]
    backend: str
    ms: float
    moved_bytes: int
    fraction_of_copy: float
    tflops: float | None  # None for memory-bound cells
    error: float | None  # relative, of the output against float64 on the same codes
    baselines: list[Baseline]

    def baseline(self, name: str) -> Baseline | None:
        """The baseline called ``name``."""
        return next((b for b in self.baselines if b.name == name), None)


@dataclass(frozen=True)
class Report:
    """Rows of one run."""

    operation: str
    rows: list[Row]
    device: str
    copy_bytes_per_second: float
    versions: dict[str, str]
    date: str
    command: str


def run_facts(device: torch.device) -> dict[str, Any]:
    """Where and when: the fields device, versions, date and command of a report."""
    run = asdict(provenance(device))
    del run["cpu_threads"]
    return run
