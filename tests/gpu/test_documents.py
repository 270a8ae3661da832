"""Runs every command of the documentation that needs a GPU, with a small model.

vLLM's engines get caches of a fixed size, so that several tests can share a GPU. Stock vLLM measures the free memory
otherwise, and fails if another engine frees some meanwhile.
"""

from __future__ import annotations

import importlib.util
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent.parent / "integrations" / "vllm"))
sys.path.insert(0, str(Path(__file__).parent.parent / "integrations" / "shared"))

from mla_models import deepseek_v2, saved
from prompts import model_folder

from documents import ROOT, commands
from slimkv import calibrate_model
from slimkv.lab import models

pytestmark = [pytest.mark.gpu, pytest.mark.slow]

COMMANDS = [command for need, command in commands() if need == "gpu"]
# With 8 sequences of such a small model, FlashAttention-3 in stock vLLM 0.32 accesses invalid memory.
SERVING = "--context 512 --requests 2 --arrivals 2 --memory 0.03 --eager --new-tokens 4 --rounds 1 --max-num-seqs 16"
SMALLER = {
    "serve": f"{SERVING} --most-requests 2 --offload-gib 1 --short-context 256 --users 2 --turns 2 --think 0.1",
    "positions": "--tokens 512",
    "generate": "--context 256 --new-tokens 4 --rounds 1 --layers 2",
}
ANSWER_SECONDS = 300
MEMORY = ("--gpu-memory-utilization", "0.03", "--kv-cache-memory-bytes", str(1 << 30))  # fits beside other engines


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_run(command, tmp_path):
    words = shlex.split(command)
    if words[0] == "bash":
        pytest.skip("a script of measurements, not a snippet to try")
    if words[:2] == ["vllm", "serve"] or words[:3] == ["python", "-m", "sglang.launch_server"]:
        _serve(words, tmp_path)
    elif words[0] == "python":
        _run_script(words, tmp_path)
    else:
        _run_slimkv(words[1:], tmp_path)


def _run_slimkv(words: list[str], folder: Path) -> None:
    """Runs a command of slimkv with a small model and small sizes."""
    if words[1] == "serve":
        _need("sglang" if "sglang" in words else "vllm")
    small = SMALLER[words[1]].split()
    if words[1] == "serve":
        small += ["--shape", "tiny-mla" if "deepseek-v2-lite" in words else "smollm2-135m"]
        small += [] if {"sglang", "sessions"} & set(words) else ["--cache-gib", "1"]
    words = [str(folder / word) if word.endswith(".svg") else word for word in words]
    done = subprocess.run([sys.executable, "-m", "slimkv", *words, *small], capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{words}\n{done.stdout[-1000:]}{done.stderr[-3000:]}"


def _run_script(words: list[str], folder: Path) -> None:
    """Runs a script of ``benchmarks/`` on one short window of the shipped text."""
    words[words.index("--text") + 1] = "shipped"
    words[words.index("--json") + 1] = str(folder / "out.json")
    small = ["--model", "smollm2-135m-instruct", "--windows", "1", "--tokens", "64"]
    done = subprocess.run([sys.executable, *words[1:], *small], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-3000:]
    assert (folder / "out.json").is_file()


def _serve(words: list[str], folder: Path) -> None:
    """Queries a server of SmolLM2, or of a small random model with latents, whose answers are nonsense."""
    import openai

    latents = any("deepseek" in word for word in words)
    model = _latent_model(folder / "model") if latents else model_folder()
    with (_vllm if words[0] == "vllm" else _sglang)(words, model, folder) as address:
        client = openai.OpenAI(base_url=address, api_key="none", timeout=ANSWER_SECONDS)
        asked = {"model": "smollm2", "prompt": "The capital of France is", "max_tokens": 4, "temperature": 0}
        asked |= {"prompt": [5, 6, 7, 8]} if latents else {}
        answer = client.completions.create(**asked)
    assert answer.usage.completion_tokens == 4 if latents else "Paris" in answer.choices[0].text


def _latent_model(folder: Path) -> str:
    model = saved(partial(deepseek_v2, qk_nope_head_dim=128, v_head_dim=128), folder)  # sizes for stock prefill
    models.load(models.DEFAULT).tokenizer.save_pretrained(folder)
    return model


@contextmanager
def _vllm(words: list[str], model: str, folder: Path) -> Iterator[str]:
    _need("vllm")
    if any("NixlConnector" in word for word in words):
        _need("nixl")
    from servers import serving

    if "--kv-offloading-size" in words:
        words[words.index("--kv-offloading-size") + 1] = "1"
    options = [word.replace("/var/cache/kv", str(folder)).replace("42949672960", str(1 << 30)) for word in words[3:]]
    if any("model.safetensors" in word for word in options):
        file = folder / "model.safetensors"
        calibrate_model(models.load(models.DEFAULT).model, file, windows=torch.arange(64).reshape(1, 64))
        options = [word.replace("model.safetensors", str(file)) for word in options]
    if model != model_folder():
        options += ["--dtype", "bfloat16"]  # on GPUs, stock prefill of latents does not support float32
    with serving(folder, *options, *MEMORY, model=model, packed=False) as (address, _):
        yield address


@contextmanager
def _sglang(words: list[str], model: str, folder: Path) -> Iterator[str]:
    _need("sglang")
    from server_process import running
    from slimkv.lab.engine_process import environment
    from slimkv.lab.soak.server import free_port

    words[words.index("--model-path") + 1] = model
    if "--hicache-size" in words:
        words[words.index("--hicache-size") + 1] = "1"
    port = free_port()
    small = f"--port {port} --host 127.0.0.1 --served-model-name smollm2 --context-length 1024 --disable-cuda-graph"
    command = [sys.executable, *words[1:], *small.split(), "--max-total-tokens", "4096"]
    if model != model_folder():
        command.append("--skip-server-warmup")  # its sentence has tokens outside the small vocabulary
    with running(command, environment(), port, folder / "log", signal.SIGTERM) as address:
        yield address


def _need(package: str) -> None:
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"needs {package}")
