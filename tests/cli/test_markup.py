"""Text of users is printed literally: names of files and models, prompts and answers may look like markup of rich."""

from __future__ import annotations

import json

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from slimkv import SlimKVCache, attention
from slimkv.cli import demo, loading
from slimkv.cli.app import app
from slimkv.cli.output import console, emit, make_table
from slimkv.lab import models

NAME = "[red]a[/red][0] [/] :warning:"  # tags, one without an opening tag, and the name of an emoji


@pytest.fixture(autouse=True)
def wide(monkeypatch):
    monkeypatch.setenv("COLUMNS", "250")  # lines are not wrapped


def run(*arguments: str, code: int = 0) -> str:
    result = CliRunner().invoke(app, list(arguments))
    assert result.exit_code == code, result.output
    return result.output


def test_tables_and_lines(capsys):
    emit(None, False, make_table(f"title {NAME}", f"column {NAME}", rows=[[f"cell {NAME}"]]), f"line {NAME}")
    shown = capsys.readouterr().out
    for place in ("title", "column", "cell", "line"):
        assert f"{place} {NAME}" in shown


def test_names_of_files_and_models(tmp_path):
    folder = tmp_path / NAME.replace("/", "|")
    folder.mkdir()
    config = {"num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 128, "model_type": NAME}
    (folder / "config.json").write_text(json.dumps(config))
    assert f"{NAME}: 16.00 GiB" in run("plan", "--config", str(folder))
    missing = str(folder / "[none].json")
    assert f"there is no file {missing}" in run("plan", "--config", missing, code=2)
    assert f"unknown format '{NAME}'" in run("plan", "--config", str(folder), "--format", NAME, code=2)


def test_prompt_files(tiny_folder, tmp_path):
    model, file = models.load(str(tiny_folder)).model, tmp_path / "[bold]p[0].safetensors"
    cache, ids = SlimKVCache(model, "k4v4"), torch.arange(20).reshape(1, 20)
    with attention(model), torch.no_grad():
        model(ids, past_key_values=cache)
    cache.save(file, model, ids)
    assert file.name in "".join(run("cache", "info", str(file)).split())  # a title is wrapped to its table
    assert str(file) in run("cache", "verify", str(file))


def test_prompts(tiny_folder):
    shown = run("eval", "generation", "--model", str(tiny_folder), "--prompt", NAME, "--new-tokens", "2")
    assert shown.count(NAME) == 2


def test_progress_and_answers(monkeypatch, capsys):
    wide = Console(stderr=True, markup=False, emoji=False, force_terminal=True, width=200)
    monkeypatch.setattr(loading, "console", lambda stderr: wide)
    with loading.progress_bar() as progress:
        progress(f"loading {NAME}", 1, 2)
    assert f"loading {NAME}" in capsys.readouterr().err
    console().print(demo._panels(f"asked {NAME}", {f"cache {NAME}": f"answered {NAME}"}))
    shown = capsys.readouterr().out
    for place in ("asked", "cache", "answered"):
        assert f"{place} {NAME}" in shown


@pytest.mark.parametrize("name", ["[bold]x[/bold]", "[/]"])
def test_doctor_names_what_it_was_asked_for(name):
    assert f"unknown requirement '{name}'" in run("doctor", "--require", name, code=2)
