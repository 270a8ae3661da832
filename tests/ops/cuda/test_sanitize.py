"""The program that a memory checker runs on a GPU finds its imports without pytest."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def test_it_starts_as_a_program():
    program = Path(__file__).parents[2] / "gpu" / "sanitize.py"
    done = subprocess.run([sys.executable, program, "unknown"], capture_output=True, text=True, cwd="/")
    assert done.returncode == 2, done.stderr
    assert "parts are store, attend, prefill, latent" in done.stderr
