"""How many cases a test draws."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, Phase, settings

SCALE = float(os.environ.get("SLIMKV_FUZZ", "1"))


def count(cases: int) -> int:
    """``cases``, scaled by ``SLIMKV_FUZZ``."""
    return max(int(cases * SCALE), 1)


def fuzz(cases: int, **more) -> settings:
    """Settings of a hypothesis test with this many cases. Failures are not shrunk, because that takes minutes."""
    return settings(
        max_examples=count(cases), deadline=None, derandomize=SCALE == 1, database=None,
        suppress_health_check=list(HealthCheck), phases=(Phase.explicit, Phase.generate), report_multiple_bugs=False,
        **more,
    )  # fmt: skip
