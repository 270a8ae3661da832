"""Runs work in forks of a process that has already imported an engine, since importing takes longer than the work."""

from __future__ import annotations

import atexit
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from prompts import EngineError


class Forked:
    """Client of ``serve``: starts ``script`` in a separate process, sends it requests, and stops it at exit."""

    def __init__(self, script: Path, limit_seconds: float) -> None:
        self.script, self.limit_seconds = script, limit_seconds
        self._server: subprocess.Popen[str] | None = None

    def run(self, request: dict[str, Any], environment: dict[str, str]) -> Any:
        """Result of ``request`` in a fork with this environment. On failure, raises ``EngineError`` with its output."""
        if self._server is None or self._server.poll() is not None:
            command = [sys.executable, str(self.script)]
            self._server = subprocess.Popen(
                command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
            atexit.register(self._server.communicate)  # closes its stdin, and waits
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        with tempfile.TemporaryDirectory() as folder:
            order = {
                "request": request, "environment": environment, "seconds": self.limit_seconds, "folder": folder,
            }  # fmt: skip
            print(json.dumps(order), file=self._server.stdin, flush=True)
            status = self._server.stdout.readline().strip()
            log, result = Path(folder, "log"), Path(folder, "result")
            if status != "0" or not result.is_file():
                raise EngineError(f"exit status {status or 'unknown'}\n{log.read_text() if log.is_file() else ''}")
            return json.loads(result.read_text())


def serve(run: Callable[[dict[str, Any]], Any], preload: Sequence[str]) -> None:
    """For each order on stdin, forks a child that writes the result of ``run``; answers with its exit status."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # output of libraries must not mix with the answers
    for name in preload:
        importlib.import_module(name)
    for line in sys.stdin:
        order = json.loads(line)
        child = os.fork()
        if not child:
            sys.exit(_run(run, order))
        ended, status, deadline = 0, 0, time.monotonic() + order["seconds"]
        while not ended and time.monotonic() < deadline:
            time.sleep(0.05)
            ended, status = os.waitpid(child, os.WNOHANG)
        with suppress(ProcessLookupError):  # kills a child that exceeded its time, and processes that it left running
            os.killpg(child, signal.SIGKILL)
        if not ended:
            _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), file=answers, flush=True)


def _run(run: Callable[[dict[str, Any]], Any], order: dict[str, Any]) -> int:
    """Runs in the child, which gets its own session, output, environment and import path."""
    os.setsid()
    folder = Path(order["folder"])
    log = os.open(folder / "log", os.O_WRONLY | os.O_CREAT)
    for stream, target in ((0, os.open(os.devnull, os.O_RDONLY)), (1, log), (2, log)):
        os.dup2(target, stream)
    os.environ.clear()
    os.environ.update(order["environment"])
    sys.path[:0] = [p for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if p and p not in sys.path]
    importlib.invalidate_caches()
    try:
        (folder / "result").write_text(json.dumps(run(order["request"])))
    except BaseException:
        traceback.print_exc()
        return 1
    return 0
