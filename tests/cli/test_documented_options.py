"""Documented commands that need a GPU or an engine: here their arguments are read, and no work starts.

The tests of the engines do the same for ``vllm serve`` and ``sglang.launch_server``, with the engines' own parsers.
"""

from __future__ import annotations

import argparse
import json
import re
import runpy
import shlex
import sys

import pytest
from typer.testing import CliRunner

from documents import ROOT, commands, inline_commands, misspelt, quoted_commands
from slimkv.cli.app import app

STARTS = (  # what the commands call once they have read and checked their arguments
    "slimkv.cli.bench.bench_attend", "slimkv.cli.bench.bench_serve", "slimkv.cli.bench.bench_store",
    "slimkv.cli.bench.time_generation", "slimkv.cli.calibrate.load_quietly", "slimkv.cli.calibrate.require_engine",
    "slimkv.cli.demo.load_quietly", "slimkv.cli.doctor.diagnose", "slimkv.cli.doctor.load_quietly",
    "slimkv.cli.eval.load_quietly", "slimkv.cli.soak.soak_server", "slimkv.cli.suite.run_suite",
)  # fmt: skip
CHECKS = (  # what only asks whether a package is installed
    "slimkv.cli.bench.require_engine", "slimkv.cli.soak.require_engine", "slimkv.cli.suite.require_engine",
    "slimkv.cli.suite.import_lm_eval",
)  # fmt: skip
ELSEWHERE = [*(command for need, command in commands() if need is not None), *quoted_commands()]
SLIMKV = [c for c in ELSEWHERE if c.startswith("slimkv ") and not c.startswith("slimkv suite compare ")]
SCRIPTS = [c for c in ELSEWHERE if c.startswith("python ") and not c.startswith("python -m ")]


class WorkStartedError(Exception):
    """The command has accepted its arguments."""


def start(*arguments, **options):
    raise WorkStartedError


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A folder with a model's configuration and a text, where no command does its work."""
    llama = {"num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 128}
    for file in (tmp_path / "MODEL" / "config.json", tmp_path / "DIR" / "config.json", tmp_path / "config.json"):
        file.parent.mkdir(exist_ok=True)
        file.write_text(json.dumps(llama))
    for name in ("wiki.test.raw", "FILE"):
        (tmp_path / name).write_text("Some words.")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("slimkv.cli.serve._launcher", lambda engine: [engine])
    for name in STARTS:
        monkeypatch.setattr(name, start)
    for name in CHECKS:
        monkeypatch.setattr(name, lambda *given: None)


def read(words: list[str]) -> None:
    """Reads a command's arguments as ``slimkv`` does; raises if it would end with an error."""
    words = ["./MODEL" if word == "MODEL" else word for word in words[1:]]
    if words[0] == "serve":  # the only command that can show its work
        words.insert(1, "--dry-run")
    done = CliRunner().invoke(app, words)
    if done.exit_code != 0 and not isinstance(done.exception, WorkStartedError):
        raise ValueError(done.output or repr(done.exception))


@pytest.mark.parametrize("command", SLIMKV)
def test_slimkv_accepts_the_options(command, place):
    words = shlex.split(command)
    read(words)
    for wrong in [[*words[:2], "--no-such-option", *words[2:]], *misspelt(words)]:
        with pytest.raises(ValueError, match="No such option"):
            read(wrong)


@pytest.mark.parametrize("command", inline_commands())
def test_commands_in_the_text_exist(command, place):
    """They may leave out arguments, and a group or a last option may be all there is to name."""
    refused = ""
    try:
        read(shlex.split(command))
    except ValueError as error:
        refused = str(error)
    assert re.search(r"^$|Missing argument|requires an argument|\bgive --config, or|^\s*Usage: ", refused), refused


@pytest.mark.parametrize("command", SCRIPTS)
def test_scripts_accept_the_options(command, place, monkeypatch):
    script, *words = shlex.split(command)[1:]
    parse = argparse.ArgumentParser.parse_args
    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", lambda self: start(parse(self)))
    for given, ends in ((words, WorkStartedError), *((wrong, SystemExit) for wrong in misspelt(words))):
        monkeypatch.setattr(sys, "argv", [script, *given])
        with pytest.raises(ends):
            runpy.run_path(str(ROOT / script), run_name="__main__")


def test_a_wrong_value_or_phase_is_found(place):
    with pytest.raises(ValueError, match="unknown phase 'decoding'"):
        read(shlex.split("slimkv bench serve --phases decoding"))
    with pytest.raises(ValueError, match="draws the phase sessions"):
        read(shlex.split("slimkv bench serve --plot sessions.svg"))


def test_every_kind_of_command_is_read():
    assert {c.split()[1] for c in SLIMKV} == {"serve", "calibrate", "doctor", "bench", "soak", "suite", "eval"}
    assert len(SLIMKV) >= 20
    assert len(SCRIPTS) >= 2
