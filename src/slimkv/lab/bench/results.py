"""Results of a benchmark: rows, and where and when they were measured."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from slimkv.lab.provenance import provenance


@dataclass(frozen=True)
class Baseline:
    """Another implementation on the same cell, in the same run; ``ms`` is None if it cannot run, with the reason."""

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
    tflops: float | None  # of compute-bound cells
    error: float | None  # relative, of the output against float64 on the same codes
    over_k4v4_by_bytes: float | None  # time per byte over that of the k4v4 cell of this shape
    baselines: list[Baseline]

    def baseline(self, name: str) -> Baseline | None:
        """The baseline called ``name``."""
        return next((b for b in self.baselines if b.name == name), None)


@dataclass(frozen=True)
class Rotation:
    """The same codes stored and read with and without the rotation."""

    backend: str
    without_ms: float
    with_ms: float

    @property
    def cost(self) -> float:
        """Relative: 0.02 is 2% slower."""
        return self.with_ms / self.without_ms - 1


@dataclass(frozen=True)
class Report:
    """Rows of one run."""

    operation: str
    rows: list[Row]
    rotation: list[Rotation]
    device: str
    copy_bytes_per_second: float
    versions: dict[str, str]
    date: str
    command: str


def load(path: Path) -> Report:
    """Reads a report that ``slimkv bench --output`` wrote."""
    data = json.loads(path.read_text(encoding="utf-8"))
    data["rows"] = [Row(**{**row, "baselines": [Baseline(**b) for b in row["baselines"]]}) for row in data["rows"]]
    data["rotation"] = [Rotation(**r) for r in data["rotation"]]
    return Report(**data)


def make_report(operation: str, rows: list[Row], device: torch.device, copy: float) -> Report:
    """Adds the provenance of the run."""
    return Report(operation, rows, _rotation(rows), copy_bytes_per_second=copy, **run_facts(device))


def run_facts(device: torch.device) -> dict[str, Any]:
    """Where and when: the fields device, versions, date and command of a report."""
    run = asdict(provenance(device))
    del run["cpu_threads"]
    return run


def _rotation(rows: list[Row]) -> list[Rotation]:
    """Pairs cells called rotation-off-X and rotation-on-X."""
    times = {(row.cell, row.backend): row.ms for row in rows}
    pairs = [(row, (row.cell.replace("rotation-off-", "rotation-on-"), row.backend)) for row in rows]
    return [Rotation(r.backend, r.ms, times[on]) for r, on in pairs if on[0] != r.cell and on in times]
