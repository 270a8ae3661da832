"""The compiled CPU kernels under sanitizers, in a separate process that preloads the sanitizer's runtime."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from slimkv.ops.cpu import isa
from slimkv.ops.cpu.compiler import find_compiler

pytestmark = [pytest.mark.slow, pytest.mark.skipif(find_compiler() is None, reason="needs a C++ compiler")]

# No torch here: its libraries are not instrumented, and their threads would be reported. Calls are replayed from files.
REPLAY = """
import ctypes, sys
library = ctypes.CDLL(sys.argv[1])
for name in sys.argv[2:]:
    exec(compile(open(name).read(), name, "exec"), {"library": library})
"""
RUNTIMES = {"address": "libasan.so", "thread": "libtsan.so", "undefined": "libubsan.so"}
CASES = [
    {"format": "k4v4", "lens": (700, 40, 0), "queries": (1, 40, 0)},
    {"format": "k3v5", "dim": 80, "value_dim": 48, "lens": (130, 3), "queries": (3, 1), "window": 20, "sinks": True},
    {"format": "ku4vfp8", "dim": 112, "page": 1, "lens": (70, 9), "queries": (8, 1), "softcap": 9.0},
    {"format": "k2vrawfp32", "dim": 48, "page": 128, "lens": (150,), "queries": (50,), "fresh": True},
]


def runtime(name: str) -> str:
    """The shared library of a sanitizer, which must be loaded before everything else."""
    compiler = find_compiler()
    assert compiler is not None
    found = subprocess.run([compiler, f"-print-file-name={RUNTIMES[name]}"], capture_output=True, text=True, check=True)
    path = found.stdout.strip()
    if not Path(path).is_absolute():
        pytest.skip(f"the compiler has no {RUNTIMES[name]}")
    return path


@pytest.mark.parametrize("sanitizer", list(RUNTIMES))
@pytest.mark.parametrize("name", [isa.find().name, "generic"])
def test_kernels_are_clean(sanitizer, name, tmp_path):
    from cpu_replay import build_sanitized, record

    library = build_sanitized(isa.find(name), sanitizer, tmp_path)
    scripts = [record(case, tmp_path / f"case{i}", threads=4) for i, case in enumerate(CASES)]
    replay = tmp_path / "replay.py"
    replay.write_text(REPLAY)
    environment = {
        **os.environ,
        "LD_PRELOAD": runtime(sanitizer),
        "ASAN_OPTIONS": "detect_leaks=0",
        "TSAN_OPTIONS": "exitcode=66",
        "UBSAN_OPTIONS": "halt_on_error=1",
    }
    done = subprocess.run(
        [sys.executable, "-S", str(replay), str(library), *map(str, scripts)],
        env=environment, capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.count("ok") == len(CASES)
