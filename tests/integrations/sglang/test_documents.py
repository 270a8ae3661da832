"""Runs every snippet in the documentation that needs SGLang. ``test_server.py`` starts the server."""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys

import pytest

pytest.importorskip("sglang")

from engines import LIMIT_SECONDS, environment
from observed import check_a_calibration_is_made
from prompts import model_folder
from sglang.srt.plugins import load_plugins
from sglang.srt.server_args import ServerArgs

from documents import PAGES, commands, misspelt, served, snippets
from slimkv.cli.serve import PASSED_ON
from slimkv.config import KVCacheConfig

pytestmark = [pytest.mark.sglang, pytest.mark.slow]

PYTHON = [
    (path.name, text)
    for path in PAGES
    for need, language, text in snippets(path)
    if need == "sglang" and language == "python"
]
COMMANDS = {command for need, command in commands() if need == "sglang" or "sglang." in command}
CALIBRATED = sorted(command for command in COMMANDS if command.startswith("slimkv calibrate "))
SLIMKV = sorted(c for c in COMMANDS if c.startswith(("slimkv doctor ", "slimkv serve ")))
SERVED = "python -m sglang.launch_server --model-path MODEL --attention-backend slimkv --page-size 64"


def test_every_command_has_a_test():
    assert SERVED in COMMANDS
    others = COMMANDS - {SERVED, *CALIBRATED, *SLIMKV}
    for command in (c for c in others if not c.startswith("pip install ")):  # latents: test_mla.py starts such engines
        words = shlex.split(command)
        assert words[:3] == ["python", "-m", "sglang.launch_server"], command
        settings = json.loads(words[words.index("--json-model-override-args") + 1])["slimkv"]
        if "cold" in settings:  # under a stock backend: test_cold.py starts such an engine
            assert "--enable-hierarchical-cache" in words, command
            assert "--attention-backend" not in words, command
            settings = settings["cold"]
        else:
            assert words[words.index("--attention-backend") + 1] == "slimkv", command
        KVCacheConfig.parse(settings)


@pytest.fixture(scope="module")
def parser():
    """The parser of ``python -m sglang.launch_server``."""
    load_plugins()
    whole = argparse.ArgumentParser()
    ServerArgs.add_cli_args(whole)
    return whole


@pytest.mark.parametrize("words", served("python -m sglang.launch_server"), ids=" ".join)
def test_sglang_accepts_the_options(words, parser):
    """Those of every page, with SGLang's own parser; servers that need a GPU run in tests/gpu."""
    arguments = ServerArgs.from_cli_args(parser.parse_args(words[3:]))
    given = {word.lstrip("-").replace("-", "_") for word in words if word.startswith("--")}
    assert all(getattr(arguments, name) is not None for name in given), given
    for wrong in misspelt(words):
        with pytest.raises(SystemExit):
            parser.parse_args(wrong[3:])


def test_sglang_knows_the_options_of_calibrations():
    every = [shlex.split(command) for command in CALIBRATED]
    names = {name for words in every for name in json.loads(words[words.index("--engine-options") + 1])}
    assert "tp_size" in names
    ServerArgs(model_path="MODEL", **dict.fromkeys(names | PASSED_ON["sglang"]))
    with pytest.raises(TypeError, match="tp_sizes"):
        ServerArgs(model_path="MODEL", tp_sizes=4)


@pytest.mark.parametrize("command", SLIMKV)
def test_slimkv_commands_run(command, parser):
    """``serve`` only prints its command here; ``test_server.py`` starts that server."""
    words = shlex.split(command.replace("MODEL", model_folder()))
    if words[1] == "serve":
        words[2:2] = ["--dry-run"]
    done = subprocess.run(
        [sys.executable, "-m", *words], env=environment(), capture_output=True, text=True, timeout=LIMIT_SECONDS,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    if words[1] == "serve":
        assert "--attention-backend slimkv" in done.stdout
        parser.parse_args(shlex.split(done.stdout.splitlines()[-1])[3:])


@pytest.mark.extended
@pytest.mark.parametrize("command", CALIBRATED)
def test_calibrations_are_made(command, tmp_path):
    on_cpu = {"device": "cpu", "dtype": "float32", "attention_backend": "torch_native", "max_total_tokens": 1024}
    check_a_calibration_is_made(command, on_cpu, tmp_path / "made.safetensors", environment(), LIMIT_SECONDS)


@pytest.mark.parametrize(("page", "snippet"), PYTHON)
def test_python_runs(page, snippet, tmp_path):
    assert 'model_path="MODEL"' in snippet, page
    sizes = 'device="cpu", dtype="float32", context_length=256, max_total_tokens=1024, disable_cuda_graph=True'
    snippet = snippet.replace('model_path="MODEL"', f"model_path={model_folder()!r}, {sizes}")
    asked = "print(engine.generate('The capital of France is', {'temperature': 0, 'max_new_tokens': 4})['text'])"
    body = "".join(f"    {line}\n" for line in [*snippet.splitlines(), asked, "engine.shutdown()"])
    script = tmp_path / "snippet.py"
    script.write_text(f"if __name__ == '__main__':\n{body}")
    done = subprocess.run(
        [sys.executable, str(script)], env=environment(), capture_output=True, text=True, timeout=LIMIT_SECONDS,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert "Paris" in done.stdout
