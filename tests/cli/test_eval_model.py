"""The commands that run a model: on a folder with a tiny one, so that they take seconds."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from slimkv.cli.app import app


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
def test_eval_commands_give_json_and_a_plot(command, tiny_folder, tmp_path):
    plot = tmp_path / "plot.png"
    result = run("eval", command, "--model", str(tiny_folder), "--plot", str(plot), "--json", *COMMANDS[command])
    report = json.loads(result.stdout)
    assert report["model"] == str(tiny_folder)
    assert report["run"]["versions"]["transformers"]
    assert report.get("mode") == {
        "perplexity": "strict", "agreement": "serving", "needle": "serving", "generation": "serving", "layers": None,
    }[command]  # fmt: skip
    assert plot.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("command", ["perplexity", "layers"])
def test_eval_commands_show_a_table(command, tiny_folder):
    assert "k4v4" in run("eval", command, "--model", str(tiny_folder), *COMMANDS[command]).stdout


def test_paths_and_bench(tiny_folder):
    report = json.loads(
        run("eval", "paths", "--model", str(tiny_folder), "--tokens", "32", "--steps", "4", "--json").stdout
    )
    assert (report["steps"], report["decoded_calls"]) == (4, 0)
    arguments = ["--device", "cpu", "--dtype", "float32", "--context", "40", "--new-tokens", "3", "--rounds", "1"]
    rows = json.loads(run("bench", "generate", "--model", str(tiny_folder), *arguments, "--json").stdout)["rows"]
    assert [row["cache"] for row in rows] == ["DynamicCache", "k4v4"]
    assert rows[1]["cache_bytes"] < rows[0]["cache_bytes"]
    assert all(row["tokens_per_second"] > 0 for row in rows)


def test_demo_writes_the_report(tiny_folder, tmp_path):
    shown = run("demo", "--model", str(tiny_folder), "--out", str(tmp_path)).stdout
    assert "DynamicCache" in shown
    assert (tmp_path / "report.html").stat().st_size > 5000
    assert json.loads((tmp_path / "report.json").read_text())["model"] == str(tiny_folder)


def test_a_missing_model_is_one_line():
    result = CliRunner().invoke(app, ["eval", "perplexity", "--model", "./nowhere"])
    assert result.exit_code == 2
    assert "neither a folder nor a hub name" in result.output
    assert "Traceback" not in result.output
