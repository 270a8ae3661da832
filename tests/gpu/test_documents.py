"""Every snippet of the documents that needs a GPU, on a small model."""

from __future__ import annotations

import importlib.util
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "integrations" / "vllm"))
sys.path.insert(0, str(Path(__file__).parent.parent / "integrations" / "shared"))

from documents import ROOT, commands

pytestmark = [pytest.mark.gpu, pytest.mark.slow]

COMMANDS = [command for need, command in commands() if need == "gpu"]
SERVING = ["--shape", "tiny", "--context", "512", "--requests", "2", "--arrivals", "2", "--memory", "0.2", "--eager"]
SMALLER = {
    "serve": [
        *SERVING,
        "--new-tokens",
        "4",
        "--most-requests",
        "2",
        "--rounds",
        "1",
        "--offload-gib",
        "1",
        "--short-context",
        "256",
    ],
    "positions": ["--tokens", "512"],
    "generate": ["--context", "256", "--new-tokens", "4", "--rounds", "1", "--layers", "2"],
}


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_run(command, tmp_path):
    words = shlex.split(command)
    if words[:2] == ["vllm", "serve"]:
        pytest.importorskip("vllm")
        _serve(words, tmp_path)
        return
    if words[0] == "bash":
        pytest.skip("a script of measurements, not a snippet to try")
    if words[0] == "python":
        _run_script(words, tmp_path)
        return
    words = [str(tmp_path / word) if word.endswith((".svg", ".png")) else word for word in words[1:]]
    engine = "sglang" if "sglang" in words else "vllm"
    if words[1] == "serve" and importlib.util.find_spec(engine) is None:
        pytest.skip(f"needs {engine}")
    done = subprocess.run(
        [sys.executable, "-m", "slimkv", *words, *SMALLER[words[1]]], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{command}\n{done.stdout[-1000:]}{done.stderr[-3000:]}"


def _run_script(words: list[str], folder: Path) -> None:
    """A script of ``benchmarks/`` on one short window of the shipped text."""
    words[words.index("--text") + 1] = "shipped"
    words[words.index("--json") + 1] = str(folder / "out.json")
    small = ["--model", "smollm2-135m-instruct", "--windows", "1", "--tokens", "64"]
    done = subprocess.run([sys.executable, *words[1:], *small], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-3000:]
    assert (folder / "out.json").is_file()


def _serve(words: list[str], folder: Path) -> None:
    import openai
    from servers import serving

    if "--kv-offloading-size" in words:
        words[words.index("--kv-offloading-size") + 1] = "1"
    small = [word.replace("/var/cache/kv", str(folder)).replace("42949672960", str(1 << 30)) for word in words[3:]]
    with serving(folder, *small, packed="--attention-backend" in words) as (address, _):
        client = openai.OpenAI(base_url=address, api_key="none", timeout=300)
        asked = {"model": "smollm2", "prompt": "The capital of France is", "max_tokens": 4, "temperature": 0}
        assert "Paris" in client.completions.create(**asked).choices[0].text
