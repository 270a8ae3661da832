"""Every snippet of the documents that needs a GPU, on a small model."""

from __future__ import annotations

import importlib.util
import shlex
import subprocess
import sys

import pytest

from documents import commands

pytestmark = [pytest.mark.gpu, pytest.mark.slow]

COMMANDS = [command for need, command in commands() if need == "gpu"]
SERVING = ["--shape", "tiny", "--context", "512", "--requests", "2", "--arrivals", "2", "--memory", "0.2", "--eager"]
SMALLER = {
    "serve": [*SERVING, "--output", "4", "--most-requests", "2", "--rounds", "1", "--offload-gib", "1"],
    "generate": ["--context", "256", "--new-tokens", "4", "--rounds", "1", "--layers", "2"],
}


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_run(command):
    words = shlex.split(command)
    if words[0] == "bash":
        pytest.skip("a script of measurements, not a snippet to try")
    words = ["bench", *words[3:]] if words[:3] == ["python", "-m", "slimkv.bench"] else words[1:]
    engine = "sglang" if "sglang" in words else "vllm"
    if words[1] == "serve" and importlib.util.find_spec(engine) is None:
        pytest.skip(f"needs {engine}")
    done = subprocess.run(
        [sys.executable, "-m", "slimkv", *words, *SMALLER[words[1]]], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{command}\n{done.stdout[-1000:]}{done.stderr[-3000:]}"
