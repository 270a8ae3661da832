"""Runs the parts one after another: finished ones are not run again, and failing ones do not stop the rest."""

from __future__ import annotations

import hashlib
import json
import re
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict
from datetime import timedelta
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import slimkv
from slimkv.errors import InputError
from slimkv.integrations.serving.listener import Progress, silent
from slimkv.lab.evals.harness import RAW, WITH_CALIBRATION
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
_STEPS = 1000  # resolution of a run's progress
# Code that affects reports, not results.
_REPORTING = ("page", "summary", "written", "compare", "runner")
_NOT_MEASURING = ("cli/", "lab/report/", *(f"lab/suite/{name}.py" for name in _REPORTING))


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
    ours = (folder / _MARKER).is_file() or (folder / _KEPT).is_dir()
    if folder.is_dir() and any(folder.iterdir()) and not ours:
        raise InputError(f"{folder} has other files in it; give --output a new folder, or one of an earlier run")


def run_suite(
    settings: SuiteSettings,
    folder: Path,
    progress: Progress = silent,
    tell: Callable[[str], object] = lambda line: None,
) -> dict[str, Any]:
    """Measures everything and writes ``results.json``, ``results.csv``, ``summary.md`` and ``report.html``.

    Finished parts are kept under ``folder/parts`` and reused while their inputs are unchanged. The
    result's ``failed`` names the parts that did not finish. ``tell`` gets a line for each note and finished part.
    """
    _check_folder(folder)
    settings, less = lighter(settings, Workbench(settings, folder).parameters)
    bench = Workbench(settings, folder)
    begin, worked = time.monotonic(), time.process_time()
    parts, notes = plan_parts(bench)
    notes = [*less, *notes]
    if not parts:
        raise InputError(
            f"nothing to measure: the parts {', '.join(settings.parts)} do not run with {settings.engine}, or lm-eval "
            "has no --tasks"
        )
    (folder / _KEPT).mkdir(parents=True, exist_ok=True)
    if any(format.endswith(WITH_CALIBRATION) for format in settings.formats):
        parts.insert(0, Part("calibration", "calibration", "calibration", {}, 6000, partial(_calibrate, bench)))
    for note in notes:
        tell(note)
    records: list[dict[str, Any]] = []
    total, done, digest = sum(part.weight for part in parts), 0.0, None
    for number, part in enumerate(parts, 1):
        if part.settings.get("format", RAW) in bench.formats:
            first, last = (round(_STEPS * x / total) for x in (done, done + part.weight))
            record = _run_part(part, digest, bench, _between(progress, first, last))
            seconds, error = record["seconds"], record.get("error")
            told = "finished before, in" if record["status"] == REUSED else f"{record['status']},"
            reason = f": {error.splitlines()[0]}" if error else ""
            tell(f"[{number}/{len(parts)}] {part.title}: {told} {timedelta(seconds=round(seconds))}{reason}")
            records.append(record)
            if part.kind == "calibration" and record["status"] == FAILED:
                bench.formats = tuple(f for f in bench.formats if not f.endswith(WITH_CALIBRATION))
            elif part.kind == "calibration":
                digest = record["data"]["digest"]
        done += part.weight
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


def _between(progress: Progress, first: int, last: int) -> Progress:
    """Reports the progress of one part as steps ``first`` to ``last`` of the run."""
    return lambda what, done, total: progress(what, first + (last - first) * done // max(total, 1), _STEPS)


def _run_part(part: Part, calibration: str | None, bench: Workbench, progress: Progress) -> dict[str, Any]:
    """The record of a part, read from its file, or measured and written to it. A calibration has a cache of its own."""
    record: dict[str, Any] = {"name": part.name, "kind": part.kind, "title": part.title}
    path = None
    if part.kind != "calibration":
        path = bench.folder / _KEPT / f"{part.name}-{part_key(part, bench, calibration)}.json"
    kept = _kept(path) if path is not None else None
    if kept is not None:
        return {**record, "status": REUSED, **kept}
    begin = time.monotonic()
    progress(part.title, 0, 1)
    try:
        data = json.loads(json.dumps(part.run(progress=progress), allow_nan=False))
    except Exception as error:  # any error: the other parts continue
        write_whole(bench.folder / _KEPT / f"{part.name}-failed.txt", traceback.format_exc().encode())
        told = f"{type(error).__name__}: {error}"
        return {**record, "status": FAILED, "seconds": round(time.monotonic() - begin, 1), "error": told, "data": None}
    found = {"seconds": round(time.monotonic() - begin, 1), "data": data}
    if path is not None:
        write_whole(path, f"{json.dumps(found)}\n".encode())
    return {**record, "status": DONE, **found}
