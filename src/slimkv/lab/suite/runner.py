"""Runs the parts one after another: finished ones are not run again, and failing ones do not stop the rest."""

from __future__ import annotations

import hashlib
import json
import time
import traceback
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from importlib import metadata
from pathlib import Path
from typing import Any, Protocol

import slimkv
from slimkv.errors import InputError
from slimkv.lab.provenance import device_name, provenance
from slimkv.lab.suite.parts import Part, plan_parts
from slimkv.lab.suite.settings import SuiteSettings, lighter
from slimkv.lab.suite.workbench import Workbench
from slimkv.paths import write_whole

RESULTS_VERSION = 1
DONE, REUSED, FAILED = "done", "reused", "failed"
_KEPT = "parts"
_MARKER = "results.json"
# Code that affects reports, not results.
_REPORTING = ("page", "summary", "written", "words", "compare", "runner")
_NOT_MEASURING = ("cli/", "lab/report/", *(f"lab/suite/{name}.py" for name in _REPORTING))


class Watcher(Protocol):
    """Receives the progress of a run."""

    def begin(self, parts: Sequence[Part], notes: Sequence[str]) -> None:
        """Before the first part."""

    def move(self, part: Part, what: str, share: float, seconds_left: float | None) -> None:
        """``share`` of all the work is done."""

    def end(self, part: Part, status: str, seconds: float, error: str | None) -> None:
        """A part is finished, was finished before, or failed."""


class Nobody:
    """Ignores progress."""

    def begin(self, parts: Sequence[Part], notes: Sequence[str]) -> None:
        """See ``Watcher``."""

    def move(self, part: Part, what: str, share: float, seconds_left: float | None) -> None:
        """See ``Watcher``."""

    def end(self, part: Part, status: str, seconds: float, error: str | None) -> None:
        """See ``Watcher``."""


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
        if path.suffix in (".py", ".h", ".cpp", ".cu", ".cuh") and not name.startswith(_NOT_MEASURING):
            digest.update(name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


def _versions() -> dict[str, str]:
    found = dict(provenance().versions)
    for name in ("lm_eval", "datasets"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def part_key(part: Part, bench: Workbench, calibration: str | None) -> str:
    """Changes with everything that may change the part's result: settings, model, calibration, versions, machine."""
    settings = bench.settings
    known = {
        "part": part.name, "settings": part.settings, "model": bench.model_digest, "engine": settings.engine,
        "device": device_name(settings.device), "dtype": settings.dtype, "calibration": calibration,
        "code": code_digest(), "versions": _versions(), "results": RESULTS_VERSION,
    }  # fmt: skip
    text = json.dumps(known, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _write(path: Path, text: str) -> None:
    """Writes atomically, so that an interrupted run leaves no partial file."""
    write_whole(path, text.encode())


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
    from slimkv.lab.suite.written import write_all

    watcher = watcher if watcher is not None else Nobody()
    _check_folder(folder)
    bench = Workbench(settings, folder)
    bench.check()
    settings, less = lighter(settings, bench.parameters)
    bench = Workbench(settings, folder)
    (folder / _KEPT).mkdir(parents=True, exist_ok=True)
    begin, worked = time.monotonic(), time.process_time()
    parts, notes = plan_parts(bench)
    notes = [*less, *notes]
    if not parts:
        raise InputError(f"nothing to measure: the parts {', '.join(settings.parts)} do not run with {settings.engine}")
    calibrating = Part("calibration", "calibration", "calibration", {}, 6000 if bench.wants_calibration else 0, _unused)
    watcher.begin([calibrating, *parts] if bench.wants_calibration else parts, notes)
    clock = Clock(sum(p.weight for p in [calibrating, *parts]), started=time.monotonic())
    records: list[dict[str, Any]] = []
    digest = None
    if bench.wants_calibration:
        record, digest = _calibrate(bench, calibrating, clock, watcher)
        records.append(record)
        if digest is None:
            bench.without_calibration()
            parts = [p for p in parts if p.settings.get("format", "raw") in bench.formats]
    for part in parts:
        path = folder / _KEPT / f"{part.name}-{part_key(part, bench, digest)}.json"
        records.append(_run_part(part, path, bench, clock, watcher))
    document = {
        "version": RESULTS_VERSION, "suite": settings.name, "model": settings.model, "engine": settings.engine,
        "settings": asdict(settings), "formats": list(bench.formats), "notes": notes,
        "run": asdict(provenance(settings.device, _command())), "seconds": round(time.monotonic() - begin, 1),
        "cpu_seconds": round(time.process_time() - worked, 1),
        "failed": [r["name"] for r in records if r["status"] == FAILED], "parts": records,
    }  # fmt: skip
    return write_all(document, folder)


def _command() -> str:
    """The command of the run without its folder, which does not affect the result."""
    words, out = provenance().command.split(" "), []
    while words:
        word = words.pop(0)
        if word == "--out" and words:
            words.pop(0)
        elif word != "--json" and not word.startswith("--out="):
            out.append(word)
    return " ".join(out)


def _unused(bench: Workbench, progress: Any) -> dict[str, Any]:
    raise AssertionError("the calibration is made before the parts are keyed")


def _calibrate(bench: Workbench, part: Part, clock: Clock, watcher: Watcher) -> tuple[dict[str, Any], str | None]:
    """The record of the calibration and its digest; None if it failed."""
    begin = time.monotonic()

    def progress(what: str, done: int, total: int) -> None:
        watcher.move(part, what, *clock.left(done / max(total, 1), part.weight))

    try:
        path = bench.calibrate(progress)
    except Exception as error:
        return _failed(part, error, time.monotonic() - begin, bench, watcher), None
    seconds = round(time.monotonic() - begin, 1)
    clock.done += part.weight
    watcher.end(part, DONE, seconds, None)
    data = {"source": bench.calibration.source if bench.calibration is not None else None}
    record = {"name": part.name, "kind": part.kind, "title": part.title, "status": DONE, "seconds": seconds}
    return {**record, "data": data}, hashlib.sha256(path.read_bytes()).hexdigest()[:16]


def _run_part(part: Part, path: Path, bench: Workbench, clock: Clock, watcher: Watcher) -> dict[str, Any]:
    record = {"name": part.name, "kind": part.kind, "title": part.title}
    kept = _kept(path)
    if kept is not None:
        clock.skipped += part.weight
        watcher.end(part, REUSED, kept["seconds"], None)
        return {**record, "status": REUSED, "seconds": kept["seconds"], "data": kept["data"]}
    begin = time.monotonic()

    def progress(what: str, done: int, total: int) -> None:
        watcher.move(part, what, *clock.left(done / max(total, 1), part.weight))

    progress(part.title, 0, 1)
    try:
        data = part.run(bench, progress)
        text = json.dumps({"seconds": round(time.monotonic() - begin, 1), "data": data}, allow_nan=False)
    except Exception as error:  # any error: the other parts continue
        clock.done += part.weight
        return _failed(part, error, time.monotonic() - begin, bench, watcher)
    _write(path, text + "\n")
    clock.done += part.weight
    found = json.loads(text)
    watcher.end(part, DONE, found["seconds"], None)
    return {**record, "status": DONE, **found}


def _failed(part: Part, error: Exception, seconds: float, bench: Workbench, watcher: Watcher) -> dict[str, Any]:
    _write(bench.folder / _KEPT / f"{part.name}-failed.txt", traceback.format_exc())
    told = f"{type(error).__name__}: {error}"
    watcher.end(part, FAILED, seconds, told)
    return {
        "name": part.name, "kind": part.kind, "title": part.title, "status": FAILED, "seconds": round(seconds, 1),
        "error": told, "data": None,
    }  # fmt: skip
