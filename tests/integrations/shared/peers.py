"""Engines in separate processes that answer one request at a time. Requests are lines of JSON, answers are lines that
begin with ``>``.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any


class Peer:
    """Runs ``script`` with the engine's arguments as JSON."""

    def __init__(self, script: Path, engine: dict[str, Any], environment: dict[str, str], log: Path) -> None:
        self.log, self.said = log, ""  # file for stderr, and the other lines on stdout
        self.process = subprocess.Popen(
            [sys.executable, str(script), json.dumps(engine)], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=log.open("w"), text=True, env=environment, start_new_session=True,
        )  # fmt: skip

    def send(self, **request: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()

    def answer(self) -> str:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith(">"):
                return line[1:].strip()
            self.said += line
        raise AssertionError(f"the engine ended:\n{self.log.read_text()[-5000:]}")

    def ask(self, **request: Any) -> dict[str, Any]:
        self.send(**request)
        return json.loads(self.answer())

    def stop(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


@contextmanager
def all_ready(peers: dict[str, Peer]):
    """Waits until every peer is ready, and stops them on exit."""
    try:
        for peer in peers.values():
            assert peer.answer() == "ready"
        yield peers
    finally:
        for peer in peers.values():
            peer.stop()
