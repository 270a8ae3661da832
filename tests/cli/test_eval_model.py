"""The commands that run a model: on a folder with a tiny one, so that they take seconds."""

from __future__ import annotations

import json

import pytest
import torch
from typer.testing import CliRunner

from slimkv import models
from slimkv.cli.app import app


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A Llama of random weights with SmolLM2's tokenizer."""
    transformers = pytest.importorskip("transformers")
    target = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
        vocab_size=49152, head_dim=32, max_position_embeddings=1024, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(target)
    source = models.folder(models.DEFAULT)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        if (source / name).is_file():
            (target / name).write_bytes((source / name).read_bytes())
    return target


def run(*arguments: str):
    result = CliRunner().invoke(app, list(arguments))
    assert result.exit_code == 0, result.output
    return result


COMMANDS = {
    "perplexity": ["--windows", "1", "--tokens", "64", "--format", "k4v4"],
    "agreement": ["--windows", "1", "--tokens", "64", "--format", "k4v4,k6v6", "--serving"],
    "needle": ["--contexts", "96", "--depths", "0.5", "--format", "k4v4"],
    "generation": ["--new-tokens", "4", "--format", "k4v4"],
    "layers": ["--tokens", "64", "--format", "k4v4,k6v6"],
}


@pytest.mark.parametrize("command", COMMANDS)
def test_eval_commands_give_json_and_a_plot(command, folder, tmp_path):
    plot = tmp_path / "plot.png"
    result = run("eval", command, "--model", str(folder), "--plot", str(plot), "--json", *COMMANDS[command])
    report = json.loads(result.stdout)
    assert report["model"] == str(folder)
    assert report["run"]["versions"]["transformers"]
    assert report.get("mode") == {
        "perplexity": "strict", "agreement": "serving", "needle": "serving", "generation": "serving", "layers": None,
    }[command]  # fmt: skip
    assert plot.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("command", ["perplexity", "layers"])
def test_eval_commands_show_a_table(command, folder):
    assert "k4v4" in run("eval", command, "--model", str(folder), *COMMANDS[command]).stdout


def test_paths_and_bench(folder):
    report = json.loads(run("eval", "paths", "--model", str(folder), "--tokens", "32", "--steps", "4", "--json").stdout)
    assert (report["steps"], report["decoded_calls"]) == (4, 0)
    arguments = ["--device", "cpu", "--dtype", "float32", "--context", "40", "--new-tokens", "3", "--rounds", "1"]
    rows = json.loads(run("bench", "generate", "--model", str(folder), *arguments, "--json").stdout)["rows"]
    assert [row["cache"] for row in rows] == ["DynamicCache", "k4v4"]
    assert rows[1]["cache_bytes"] < rows[0]["cache_bytes"]
    assert all(row["tokens_per_second"] > 0 for row in rows)


def test_demo_writes_the_report(folder, tmp_path):
    shown = run("demo", "--model", str(folder), "--out", str(tmp_path)).stdout
    assert "DynamicCache" in shown
    assert (tmp_path / "report.html").stat().st_size > 5000
    assert json.loads((tmp_path / "report.json").read_text())["model"] == str(folder)


def test_a_missing_model_is_one_line():
    result = CliRunner().invoke(app, ["eval", "perplexity", "--model", "./nowhere"])
    assert result.exit_code == 2
    assert "neither a folder nor a hub name" in result.output
    assert "Traceback" not in result.output
