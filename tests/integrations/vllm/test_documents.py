"""Runs every snippet in the documentation that needs vLLM, with a model and sizes for its CPU engine."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import urllib.request

import pytest

pytest.importorskip("vllm")
pytest.importorskip("openai")

import openai
import torch
from engines import ENVIRONMENT, LIMIT_SECONDS, environment
from observed import check_a_calibration_is_made
from prompts import model_folder
from servers import serving

from documents import PAGES, commands, inline_commands, misspelt, served, snippets
from server_process import running
from slimkv.lab.soak.server import environment as server_environment
from slimkv.lab.soak.server import free_port

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

COMMANDS = [command for need, command in commands() if need == "vllm"]
SERVED = [c for c in COMMANDS if c.startswith("vllm serve ")]
CALIBRATED = [c for c in COMMANDS if c.startswith("slimkv calibrate ")]
MEASURED = [c for c in COMMANDS if c.startswith("slimkv suite ")]
SOAKED = [c for c in COMMANDS if c.startswith("slimkv soak ")]
SLIMKV = [c for c in COMMANDS if c.startswith(("slimkv doctor ", "slimkv serve ", "slimkv --version"))]
PYTHON = [
    (path.name, text)
    for path in PAGES
    for need, language, text in snippets(path)
    if need == "vllm" and language == "python"
]


def test_every_command_has_a_test():
    others = set(COMMANDS) - set(SERVED) - set(CALIBRATED) - set(MEASURED) - set(SOAKED) - set(SLIMKV)
    assert all(c.startswith(("pip install ", "python -m sglang.")) for c in others), others


@pytest.fixture(scope="module")
def parser():
    """The parser of the command ``vllm``, with ``serve`` only."""
    from vllm.entrypoints.cli.serve import cmd_init
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    whole = FlexibleArgumentParser()
    for command in cmd_init():
        command.subparser_init(whole.add_subparsers(required=True, dest="subparser"))
    return whole


@pytest.mark.parametrize("words", served("vllm serve"), ids=" ".join)
def test_vllm_accepts_the_options(words, parser):
    """Those of every page, with vLLM's own parser; servers that need a GPU run in tests/gpu."""
    from vllm import AsyncEngineArgs

    arguments = AsyncEngineArgs.from_cli_args(parser.parse_args(words[1:]))
    given = {word.lstrip("-").replace("-", "_") for word in words if word.startswith("--")}
    assert all(getattr(arguments, name) not in (None, "auto") for name in given), given
    for wrong in misspelt(words):
        with pytest.raises(SystemExit):
            parser.parse_args(wrong[1:])


def test_vllm_knows_the_options_of_calibrations():
    from dataclasses import fields

    from vllm import EngineArgs

    from slimkv.cli.serve import PASSED_ON

    every = [shlex.split(c) for c in (*COMMANDS, *inline_commands()) if c.startswith("slimkv calibrate ")]
    given = [words[words.index("--engine-options") + 1] for words in every if "vllm" in words]
    names = {name for options in given for name in json.loads(options)}
    assert names | PASSED_ON["vllm"] <= {one.name for one in fields(EngineArgs)}
    assert "tensor_parallel_size" in names


@pytest.mark.parametrize("command", SLIMKV)
def test_slimkv_commands_run(command, parser):
    """``serve`` only prints its command here; ``test_slimkv_serve_answers`` starts it."""
    from slimkv.lab import models

    words = shlex.split(command.replace("MODEL", str(models.folder(models.DEFAULT))))
    if words[1] == "serve":
        words[2:2] = ["--dry-run"]
    done = subprocess.run(
        [sys.executable, "-m", *words], capture_output=True, text=True, timeout=LIMIT_SECONDS, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    if words[1] == "serve":
        assert "--attention-backend CUSTOM" in done.stdout
        parser.parse_args(shlex.split(done.stdout.splitlines()[-1])[1:])


@pytest.fixture(scope="module")
def calibration(tmp_path_factory):
    from slimkv import calibrate_model
    from slimkv.lab import models

    file = tmp_path_factory.mktemp("calibration") / "model.safetensors"
    windows = torch.arange(64).reshape(1, 64)
    calibrate_model(models.load(models.DEFAULT).model, file, windows=windows)
    return str(file)


@pytest.mark.extended
@pytest.mark.parametrize("command", SERVED)
def test_servers_answer(command, calibration, tmp_path):
    command = command.replace("/var/cache/prompts", str(tmp_path / "prompts"))
    words = shlex.split(command.replace("model.safetensors", calibration))
    assert words[2] == "MODEL"
    with serving(tmp_path, *words[3:]) as (address, _):
        client = openai.OpenAI(base_url=address, api_key="none", timeout=LIMIT_SECONDS)
        answer = client.completions.create(
            model="smollm2", prompt="The capital of France is", max_tokens=4, temperature=0
        )
        assert "Paris" in answer.choices[0].text


@pytest.mark.extended
def test_slimkv_serve_answers(tmp_path):
    """The model is calibrated in the engine, then served, and the metrics describe its cache."""
    port, log = free_port(), tmp_path / "log"
    own = ["--max-model-len", "1024", "--enforce-eager", "--dtype", "float32"]
    command = [
        sys.executable, "-m", "slimkv", "serve", model_folder(), "--engine", "vllm", "--format", "k4v4", "--", *own,
        "--host", "127.0.0.1", "--port", str(port), "--served-model-name", "smollm2",
    ]  # fmt: skip
    path = server_environment(tmp_path).get("PYTHONPATH")
    extra = {"XDG_CACHE_HOME": str(tmp_path), **({"PYTHONPATH": path} if path else {})}
    with running(command, environment(**extra), port, log, signal.SIGINT) as address:
        client = openai.OpenAI(base_url=address, api_key="none", timeout=LIMIT_SECONDS)
        asked = {"model": "smollm2", "prompt": "The capital of France is", "max_tokens": 4, "temperature": 0}
        assert "Paris" in client.completions.create(**asked).choices[0].text
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as page:
            metrics = page.read().decode()
    assert 'slimkv:kv_cache_bytes_per_token{engine="0"} 6120.0' in metrics
    assert 'slimkv:kv_cache_capacity_bytes{engine="0"}' in metrics
    printed = log.read_text()
    assert "slimkv calibrate" in printed
    assert len(list((tmp_path / "slimkv" / "calibrations").glob("*.safetensors"))) == 1


@pytest.mark.extended
@pytest.mark.parametrize("command", CALIBRATED)
def test_calibrations_are_made(command, tmp_path):
    on_cpu = {"dtype": "float32", "block_size": 32}
    check_a_calibration_is_made(command, on_cpu, tmp_path / "made.safetensors", environment(), LIMIT_SECONDS)


@pytest.mark.extended
@pytest.mark.parametrize("command", MEASURED)
def test_the_suite_runs(command, tmp_path):
    words = shlex.split(command)
    words[words.index("MODEL")] = model_folder()
    small = ["--parts", "memory,tasks", "--format", "k4v4", "--lengths", "192", "--contexts", "1", "--questions", "2"]
    done = subprocess.run(
        [sys.executable, "-m", "slimkv", *words[1:], *small, "--device", "cpu", "--output", str(tmp_path / "out")],
        env=environment(), capture_output=True, text=True, timeout=LIMIT_SECONDS, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    assert (tmp_path / "out" / "report.html").is_file()


@pytest.mark.extended
@pytest.mark.parametrize("command", SOAKED)
def test_soaks_pass(command, tmp_path):
    small = "--seconds 30 --concurrency 6 --max-model-len 192 --cache-tokens 384 --answers 2 --growth-mib 500"
    words = [*shlex.split(command)[1:], *small.split(), "--request-seconds", "600"]
    done = subprocess.run(
        [sys.executable, "-m", "slimkv", *words], env=environment(), cwd=tmp_path, capture_output=True, text=True,
        timeout=LIMIT_SECONDS, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert json.loads(done.stdout)["passed"]


@pytest.mark.parametrize(("page", "snippet"), PYTHON)
def test_python_runs(page, snippet, tmp_path):
    model = re.compile(r'LLM\(\s*"MODEL",')
    assert model.search(snippet), page
    sizes = 'max_model_len=256, block_size=32, enforce_eager=True, dtype="float32",'
    snippet = model.sub(lambda _: f"LLM({model_folder()!r}, {sizes}", snippet)
    body = "".join(f"    {line}\n" for line in snippet.splitlines())
    script = tmp_path / "snippet.py"
    script.write_text(f"if __name__ == '__main__':\n{body}    print(llm.generate('Hello')[0].outputs[0].text)\n")
    done = subprocess.run(
        [sys.executable, str(script)], env={**os.environ, **ENVIRONMENT}, capture_output=True, text=True,
        timeout=LIMIT_SECONDS, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
