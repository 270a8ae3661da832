"""The Python example for vLLM, on its CPU engine."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("vllm")

from engines import LIMIT_SECONDS, environment

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.extended]

ROOT = Path(__file__).parents[3]


def test_offline():
    script = ROOT / "examples" / "vllm_offline.py"
    done = subprocess.run(
        [sys.executable, str(script), "--cpu"], env=environment(), capture_output=True, text=True,
        timeout=LIMIT_SECONDS, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert "Paris" in done.stdout
