"""Runs the parts one after another: finished ones are not run again, and failing ones do not stop the rest."""

from __future__ import annotations

import hashlib
import json
import re
import time
import traceback
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import slimkv
from slimkv.errors import InputError
from slimkv.lab.evals.harness import Progress
from slimkv.lab.provenance import device_name, provenance
from slimkv.lab.suite.parts import Part, plan_parts
from slimkv.lab.suite.settings import SuiteSettings, lighter
from slimkv.lab.suite.workbench import Workbench
from slimkv.lab.suite.written import write_all
from slimkv.paths import write_whole

RESULTS_VERSION = 1
DONE, REUSED, FAILED = "done", "reused", "failed"
_KEPT = "parts"
_MARKER = "results.json"
# Code that affects reports, not results.
_REPORTING = ("page", "summary", "written", "compare", "runner")
_NOT_MEASURING = ("cli/", "lab/report/", *(f"lab/suite/{name}.py" for name in _REPORTING))


class Watcher:
    """Receives the progress of a run; this class ignores it."""

    def begin(self, parts: Sequence[Part], notes: Sequence[str]) -> None:
        """Before the first part."""

    def move(self, part: Part, what: str, share: float, seconds_left: float | None) -> None:
        """``share`` of all the work is done."""

    def end(self, part: Part, status: str, seconds: float, error: str | None) -> None:
        """A part is finished, was finished before, or failed."""


@dataclass
class Clock:
    """Estimates the remaining time from the work done in this run, without parts that were finished before."""

    total: float
    skipped: float = 0.0
    done: float = 0.0
    started: float = 0.0

    def left(self, share_of_part: float, weight: float) -> tuple[float, float | None]:
        """(share of the work that is done, seconds left or None if unknown)."""
        done = self.done + share_of_part * weight
        share = (done + self.skipped) / self.total if self.total else 1.0
        elapsed = time.monotonic() - self.started
        if done <= 0 or elapsed < 2:
            return share, None
        return share, elapsed / done * max(self.total - self.skipped - done, 0.0)


@lru_cache(maxsize=1)
def code_digest() -> str:
    """A digest of the sources that affect measurements."""
    root, digest = Path(slimkv.__file__).parent, hashlib.sha256()
    for path in sorted(root.rglob("*")):
        name = path.relative_to(root).as_posix()
        if path.suffix in (".py", ".json", ".h", ".cpp", ".cu", ".cuh") and not name.startswith(_NOT_MEASURING):
            digest.update(name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


def part_key(part: Part, bench: Workbench, calibration: str | None) -> str:
    """Changes with everything that may change the part's result: settings, model, calibration, versions, machine."""
    settings = bench.settings
    known = {
        "part": part.name, "settings": part.settings, "model": bench.model_digest, "engine": settings.engine,
        "device": device_name(settings.device), "dtype": settings.dtype, "calibration": calibration,
        "code": code_digest(), "versions": provenance().versions, "results": RESULTS_VERSION,
    }  # fmt: skip
    text = json.dumps(known, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _kept(path: Path) -> dict[str, Any] | None:
    """The document of a finished part; None if it is missing or incomplete."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) and isinstance(found.get("data"), dict) else None


def _check_folder(folder: Path) -> None:
    if folder.exists() and not folder.is_dir():
        raise InputError(f"{folder} is a file; --output takes a folder for the report")
    strange = (
        folder.is_dir() and any(folder.iterdir()) and not ((folder / _MARKER).is_file() or (folder / _KEPT).is_dir())
    )
    if strange:
        raise InputError(f"{folder} has other files in it; give --output a new folder, or one of an earlier run")


def run_suite(settings: SuiteSettings, folder: Path, watcher: Watcher | None = None) -> dict[str, Any]:
    """Measures everything and writes ``results.json``, ``results.csv``, ``summary.md`` and ``report.html``.

    Finished parts are kept under ``folder/parts`` and reused while their inputs are unchanged. The
    result's ``failed`` names the parts that did not finish.
    """
    watcher = watcher or Watcher()
    _check_folder(folder)
    settings, less = lighter(settings, Workbench(settings, folder).parameters)
    bench = Workbench(settings, folder)
    (folder / _KEPT).mkdir(parents=True, exist_ok=True)
    begin, worked = time.monotonic(), time.process_time()
    parts, notes = plan_parts(bench)
    notes = [*less, *notes]
    if not parts:
        raise InputError(f"nothing to measure: the parts {', '.join(settings.parts)} do not run with {settings.engine}")
    first = [Part("calibration", "calibration", "calibration", {}, 6000, _calibrate)] if bench.wants_calibration else []
    watcher.begin([*first, *parts], notes)
    clock = Clock(sum(p.weight for p in [*first, *parts]), started=time.monotonic())
    records = [_run_part(part, None, bench, clock, watcher) for part in first]
    digest = records[0]["data"]["digest"] if records and records[0]["data"] else None
    if first and digest is None:
        bench.without_calibration()
        parts = [p for p in parts if p.settings.get("format", "raw") in bench.formats]
    for part in parts:
        path = folder / _KEPT / f"{part.name}-{part_key(part, bench, digest)}.json"
        records.append(_run_part(part, path, bench, clock, watcher))
    # The folder of a run does not affect its result.
    command = re.sub(r" (--output|-o)[ =]\S+| --json", "", provenance().command)
    document = {
        "version": RESULTS_VERSION, "suite": settings.name, "model": settings.model, "engine": settings.engine,
        "settings": asdict(settings), "formats": list(bench.formats), "notes": notes,
        "run": asdict(provenance(settings.device, command)), "seconds": round(time.monotonic() - begin, 1),
        "cpu_seconds": round(time.process_time() - worked, 1),
        "failed": [r["name"] for r in records if r["status"] == FAILED], "parts": records,
    }  # fmt: skip
    return write_all(document, folder)


def _calibrate(bench: Workbench, progress: Progress) -> dict[str, Any]:
    """Makes or loads the calibration, whose digest is part of the other parts' keys."""
    path = bench.calibrate(progress)
    assert bench.calibration is not None
    return {"source": bench.calibration.source, "digest": hashlib.sha256(path.read_bytes()).hexdigest()[:16]}


def _run_part(part: Part, path: Path | None, bench: Workbench, clock: Clock, watcher: Watcher) -> dict[str, Any]:
    """The record of a part, which is kept in ``path``."""
    record: dict[str, Any] = {"name": part.name, "kind": part.kind, "title": part.title}
    kept = _kept(path) if path is not None else None
    if kept is not None:
        clock.skipped += part.weight
        watcher.end(part, REUSED, kept["seconds"], None)
        return {**record, "status": REUSED, "seconds": kept["seconds"], "data": kept["data"]}
    begin, error = time.monotonic(), None

    def progress(what: str, done: int, total: int) -> None:
        watcher.move(part, what, *clock.left(done / max(total, 1), part.weight))

    progress(part.title, 0, 1)
    try:
        data = json.loads(json.dumps(part.run(bench, progress), allow_nan=False))
        found: dict[str, Any] = {"seconds": round(time.monotonic() - begin, 1), "data": data}
        if path is not None:
            write_whole(path, f"{json.dumps(found)}\n".encode())
    except Exception as caught:  # any error: the other parts continue
        write_whole(bench.folder / _KEPT / f"{part.name}-failed.txt", traceback.format_exc().encode())
        error = f"{type(caught).__name__}: {caught}"
        found = {"seconds": round(time.monotonic() - begin, 1), "error": error, "data": None}
    clock.done += part.weight
    status = DONE if error is None else FAILED
    watcher.end(part, status, found["seconds"], error)
    return {**record, "status": status, **found}
