"""What the measured times include."""

from __future__ import annotations

import torch

from slimkv.lab.bench.timing import Timer

MS = {"call": 0.25, "before": 1.0, "flush": 8.0}


class Fake(Timer):
    """Simulates a GPU on which operations take the times in MS. A graph is the list of operations it runs."""

    def _flush(self) -> None:
        ran.append("flush")

    def _capture(self, calls):
        ran.clear()
        for call in calls:
            call()
        return list(ran)

    def _replay(self, graph, count):
        return sum(MS[name] for name in graph)


ran: list[str] = []


def timer() -> Fake:
    return Fake(torch.device("cuda"))


def call() -> None:
    ran.append("call")


def test_what_runs_before_each_call_is_taken_off():
    for options in ({}, {"cold": False}, {"before": lambda: ran.append("before")}):
        assert timer()(call, **options) == MS["call"]


def test_what_runs_before_is_what_was_asked_for():
    found = timer()
    found(call, before=lambda: ran.append("before"))
    assert "flush" not in ran
    found(call)
    assert set(ran) == {"flush"}  # flushes alone are captured last, so that their time can be subtracted
    found(call, cold=False)
    assert set(ran) == {"call"}
