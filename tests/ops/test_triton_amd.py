"""Triton kernels compile for AMD GPUs, without such a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton.backends.amd", reason="this build of Triton compiles for other devices only")
SCRIPT = Path(__file__).with_name("compile_triton.py")


@pytest.mark.slow
@pytest.mark.parametrize(("architecture", "lanes"), [("gfx942", 64), ("gfx1100", 32)])
def test_kernels_compile_for(architecture, lanes, tmp_path):
    """Runs in its own process, because the interpreter replaces the compiler in this one."""
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, SCRIPT, "hip", architecture, str(lanes)], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
    kernels = done.stdout.split()
    assert {"attend_kernel", "attend_latent_kernel", "prefill_kernel", "unpack_kernel"} <= set(kernels)
    assert len(kernels) >= 7, kernels
