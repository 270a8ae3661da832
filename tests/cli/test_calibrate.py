"""``slimkv calibrate`` and the commands that read its file, on a tiny model."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from slimkv.calibration import Calibration
from slimkv.cli.app import app

ARGUMENTS = ["--windows", "1", "--tokens", "48"]


def run(*arguments: str, code: int = 0):
    result = CliRunner().invoke(app, list(arguments))
    assert result.exit_code == code, result.output
    return result


@pytest.fixture(scope="module")
def file(tiny_folder, tmp_path_factory):
    out = tmp_path_factory.mktemp("calibration") / "tiny.safetensors"
    run("calibrate", str(tiny_folder), "-o", str(out), "--profile", "aggressive", *ARGUMENTS)
    return out


def test_it_writes_a_file_and_says_what_is_in_it(tiny_folder, tmp_path):
    out = tmp_path / "c.safetensors"
    report = json.loads(
        run("calibrate", str(tiny_folder), "-o", str(out), "--budget", "4.5", "--json", *ARGUMENTS).stdout
    )
    assert report["source"] == "48 token ids sampled from the model, seed 0"
    assert report["file_bytes"] == out.stat().st_size
    assert len(report["logit_error_reduction"]) == report["layers"] == 2
    assert report["widths"]["bits_per_number"] <= 4.5
    made = Calibration.load(out)
    assert made.formats == {int(c["layer"]): c["format"] for c in report["widths"]["choices"]}


def test_by_default_it_is_kept_for_this_models_files(tiny_folder, tmp_path, monkeypatch):
    """Every engine finds it there with calibration='auto'. Different weights count as a different model."""
    import shutil

    from slimkv.calibration.cache import cached_calibration, cached_path
    from slimkv.errors import InputError

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with pytest.raises(InputError, match=f"make one with slimkv calibrate {tiny_folder}"):
        cached_calibration(str(tiny_folder))
    report = json.loads(run("calibrate", str(tiny_folder), "--max-positions", "300", "--json", *ARGUMENTS).stdout)
    assert report["max_positions"] == 300
    assert report["widths"] is None
    assert cached_calibration(str(tiny_folder)).max_positions == 300
    other = shutil.copytree(tiny_folder, tmp_path / "other")
    assert cached_path(str(other)) == cached_path(str(tiny_folder))
    weights = next(other.glob("*.safetensors"))
    weights.write_bytes(weights.read_bytes()[:-1] + b"x")
    assert cached_path(str(other)) != cached_path(str(tiny_folder))


def test_engines_are_named(tiny_folder):
    refused = run("calibrate", str(tiny_folder), "--engine", "ollama", *ARGUMENTS, code=2).output
    assert "not one of transformers, vllm" in refused
    refused = run("calibrate", str(tiny_folder), "--engine", "vllm", "--budget", "4", *ARGUMENTS, code=2).output
    assert "need --engine" in refused
    refused = run("calibrate", str(tiny_folder), "--engine-options", "{}", *ARGUMENTS, code=2).output
    assert "--engine-options are for --engine vllm" in refused


def test_random_ids_on_demand(tiny_folder, tmp_path):
    out = tmp_path / "c.safetensors"
    run("calibrate", str(tiny_folder), "-o", str(out), "--ids", "random", "--seed", "3", *ARGUMENTS)
    assert Calibration.load(out).source == "48 random token ids, seed 3"
    refused = run("calibrate", str(tiny_folder), "-o", str(out), "--ids", "zipf", *ARGUMENTS, code=2).output
    assert "not one of sampled, random" in refused


def test_text_and_tables(tiny_folder, tmp_path):
    shown = run(
        "calibrate",
        str(tiny_folder),
        "-o",
        str(tmp_path / "c"),
        "--text",
        "shipped",
        "--profile",
        "balanced",
        *ARGUMENTS,
    ).stdout
    assert "48 tokens of shipped" in shown
    assert "widths per layer" in shown
    assert Calibration.load(tmp_path / "c").formats is not None


def test_evals_take_the_file(file, tiny_folder, tmp_path):
    model = ["--model", str(tiny_folder), "--windows", "1", "--tokens", "48", "--json"]
    arguments = ["--calibration", str(file), "--format", "k4v4,calibrated", *model]
    report = json.loads(run("eval", "agreement", *arguments).stdout)
    assert report["mode"] == "strict"
    assert report["calibration"] == "48 token ids sampled from the model, seed 0"
    assert [r["format"] for r in report["rows"]][-1] == "calibrated"
    plot = tmp_path / "positions.svg"
    arguments = ["--calibration", str(file), "--format", "k4v4,k4v4+cal", "--plot", str(plot), *model]
    report = json.loads(run("eval", "positions", *arguments).stdout)
    assert [r["format"] for r in report["rows"]] == ["k4v4", "k4v4+cal"]
    assert plot.read_text().count("<polyline") == 4  # KL and bytes of both formats


def test_mistakes_are_one_line(file, tiny_folder, tmp_path):
    out = ["-o", str(tmp_path / "x")]
    assert (
        "both choose the widths"
        in run("calibrate", str(tiny_folder), *out, "--budget", "4", "--profile", "balanced", code=2).output
    )
    assert "unknown profile" in run("calibrate", str(tiny_folder), *out, "--profile", "best", *ARGUMENTS, code=2).output
    assert not (tmp_path / "x").exists()
    file_of_nothing = ["eval", "agreement", "--calibration", str(tmp_path / "x"), "--model", str(tiny_folder)]
    assert "there is no calibration file" in run(*file_of_nothing, code=2).output
