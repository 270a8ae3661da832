"""The progress of a run: what watches it, and how long it will take."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from slimkv.lab.suite.parts import Part


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
