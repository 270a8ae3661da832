"""Engines in separate processes: their environment and log, and ending them with all their children."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from slimkv.errors import MissingDependencyError, SlimKVError


class EngineError(SlimKVError, RuntimeError):
    """An engine that did not start or stopped; the text includes the end of its log."""


def require_engine(engine: str) -> None:
    """Raises if vLLM or SGLang is not installed."""
    if find_spec(engine) is None:
        raise MissingDependencyError(f"{engine} is not installed here: pip install 'slimkv[{engine}]'")


def import_package(name: str, use: str, install: str) -> Any:
    """Imports a package; if that fails, the error names the command that installs it."""
    try:
        return import_module(name)
    except ImportError as error:
        raise MissingDependencyError(f"{use} needs {name} ({error}): pip install {install}") from error


def environment(**own: str) -> dict[str, str]:
    """Environment variables of an engine; those that the user has set take precedence."""
    return {"PYTHONUNBUFFERED": "1", "VLLM_NO_USAGE_STATS": "1", **own, **os.environ}


def log_tail(log: Path, characters: int = 3000) -> str:
    """The end of a log."""
    return log.read_text(encoding="utf-8", errors="replace")[-characters:]


@contextmanager
def running(command: list[str], log: Path, env: dict[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    """Runs a command in its own session and finally kills the session, because the next engine needs its memory."""
    with (
        _ends_when_asked(),
        log.open("wb") as out,
        subprocess.Popen(command, stdout=out, stderr=out, start_new_session=True, env=env) as process,
    ):
        try:
            yield process
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


@contextmanager
def _ends_when_asked() -> Iterator[None]:
    """On SIGTERM (for example from a time limit), also ends the engine, which runs in its own session."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def run_plan(
    module: str, plan: dict[str, Any], stem: Path, env: dict[str, str], tell: Callable[[str], object],
    limit_seconds: float | None = None,
) -> tuple[dict[str, Any], str | None]:  # fmt: skip
    """Runs ``python -m module PLAN RESULT``; returns the result as far as it was written, and the error or None.

    The files are ``stem`` with the endings ``.plan.json``, ``.json`` and ``.log``. ``tell`` gets each line of the log.
    """
    target, request, log = (stem.with_name(stem.name + end) for end in (".json", ".plan.json", ".log"))
    target.unlink(missing_ok=True)
    request.write_text(json.dumps(plan))  # prompts of a suite are millions of tokens
    error, shown, begin = None, 0, time.monotonic()
    with running([sys.executable, "-u", "-m", module, str(request), str(target)], log, env) as process:
        while process.poll() is None and error is None:
            time.sleep(0.2)
            shown = _tell_lines(log, shown, tell)
            if limit_seconds is not None and time.monotonic() - begin > limit_seconds:
                error = f"stopped after {limit_seconds} s"
        if error is None and process.returncode:
            error = f"exit code {process.returncode}"
    _tell_lines(log, shown, tell)
    return json.loads(target.read_text()) if target.is_file() else {}, error


def _tell_lines(log: Path, shown: int, tell: Callable[[str], object]) -> int:
    """Passes the complete lines after byte ``shown`` to ``tell``; returns the offset behind them."""
    with log.open("rb") as file:
        file.seek(shown)
        for line in file.read().splitlines(keepends=True):
            if line.endswith(b"\n"):
                shown += len(line)
                tell(line.decode(errors="replace").rstrip())
    return shown
