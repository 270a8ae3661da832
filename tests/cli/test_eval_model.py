"""Commands that run a model, on a tiny one so that they take seconds."""

from __future__ import annotations

import json
from xml.etree import ElementTree

import pytest
import torch
from typer.testing import CliRunner

from slimkv import enable
from slimkv.cli.app import app
from slimkv.errors import InputError
from slimkv.lab import models


def run(*arguments: str):
    result = CliRunner().invoke(app, list(arguments))
    assert result.exit_code == 0, result.output
    return result


COMMANDS = {
    "agreement": ["--windows", "1", "--tokens", "64", "--format", "k4v4,k6v6", "--serving"],
    "needle": ["--contexts", "96", "--depths", "0.5", "--format", "k4v4"],
    "generation": ["--new-tokens", "4", "--format", "k4v4"],
    "positions": ["--windows", "1", "--tokens", "64", "--format", "k4v4"],
}


@pytest.mark.parametrize("command", COMMANDS)
def test_eval_commands_give_json(command, tiny_folder, tmp_path):
    plot = tmp_path / "plot.svg"
    drawn = ["--plot", str(plot)] if command in ("agreement", "positions") else []
    result = run("eval", command, "--model", str(tiny_folder), "--json", *drawn, *COMMANDS[command])
    report = json.loads(result.stdout)
    assert report["model"] == str(tiny_folder)
    assert report["run"]["versions"]["transformers"]
    assert report.get("mode") == (None if command == "positions" else "serving")
    assert not drawn or ElementTree.parse(plot).getroot().tag.endswith("svg")


@pytest.fixture(scope="module")
def latent_folder(tiny_folder, tmp_path_factory):
    """A model that caches latents, with random weights and the tokenizer of ``tiny_folder``."""
    import transformers

    folder = tmp_path_factory.mktemp("latents")
    torch.manual_seed(0)
    config = transformers.DeepseekV3Config(
        hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2,
        kv_lora_rank=32, q_lora_rank=16, qk_rope_head_dim=16, qk_nope_head_dim=16, v_head_dim=16, vocab_size=49152,
        first_k_dense_replace=2, eos_token_id=None, pad_token_id=0, max_position_embeddings=1024,
    )  # fmt: skip
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((tiny_folder / name).read_bytes())
    return str(folder)


@pytest.mark.parametrize("command", COMMANDS)
def test_formats_of_latents(command, latent_folder):
    small = [word.replace("k4v4,k6v6", "k4v4").replace("k4v4", "c4,craw") for word in COMMANDS[command]]
    report = json.loads(run("eval", command, "--model", latent_folder, "--json", *small).stdout)
    assert {"c4", "craw"} <= {row["format"] for row in report.get("rows") or report["cells"]}


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize(("format", "said"), [("c4", "c4' is for latents"), ("k4v4", "k4v4' is for K and V")])
def test_formats_of_the_other_kind_fail_before_anything_runs(
    command, format, said, tiny_folder, latent_folder, monkeypatch
):
    monkeypatch.setattr(torch.nn.Module, "__call__", lambda *given, **more: pytest.fail("the model runs"))
    folder = str(tiny_folder) if format == "c4" else latent_folder
    result = CliRunner().invoke(app, ["eval", command, "--model", folder, "--format", format])
    assert result.exit_code == 2, result.output
    assert f"error: format '{said}, but this model caches" in result.output


def test_latents_are_not_calibrated(latent_folder, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.nn.Module, "__call__", lambda *given, **more: pytest.fail("the model runs"))
    file = tmp_path / "latents.safetensors"
    demo = ["demo", "--model", latent_folder, "--output", str(tmp_path)]
    for command in (["calibrate", latent_folder, "-o", str(file)], demo):
        result = CliRunner().invoke(app, command)
        assert result.exit_code == 2, result.output
        assert "error: slimkv does not calibrate latent attention" in result.output
        assert not list(tmp_path.iterdir())
    with pytest.raises(InputError, match="does not calibrate latent attention"):
        enable(models.load(latent_folder).model, calibration="auto")


def test_no_memory_is_one_line(monkeypatch):
    def allocate(names):
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 137438953408 bytes.")

    monkeypatch.setattr("slimkv.cli.doctor.diagnose", allocate)
    result = CliRunner().invoke(app, ["doctor"])
    assert result.exit_code == 1, result.output
    assert result.output.startswith("error: DefaultCPUAllocator: can't allocate memory")


@pytest.mark.parametrize("command", ["agreement", "generation"])
def test_eval_commands_show_a_table(command, tiny_folder):
    assert "k4v4" in run("eval", command, "--model", str(tiny_folder), *COMMANDS[command]).stdout


def test_bench_generate(tiny_folder):
    arguments = ["--device", "cpu", "--dtype", "float32", "--context", "40", "--new-tokens", "3", "--rounds", "1"]
    rows = json.loads(run("bench", "generate", "--model", str(tiny_folder), *arguments, "--json").stdout)["rows"]
    assert [row["cache"] for row in rows] == ["DynamicCache", "k4v4"]
    assert rows[1]["cache_bytes"] < rows[0]["cache_bytes"]
    assert all(row["tokens_per_second"] > 0 for row in rows)


def test_calibrated_beside_plain_everywhere(tiny_folder, tmp_path):
    file, model = tmp_path / "tiny.safetensors", ["--model", str(tiny_folder)]
    run("calibrate", str(tiny_folder), "-o", str(file), "--windows", "1", "--tokens", "64", "--ids", "random")
    both = ["--format", "k4v4,k4v4+cal", "--calibration", str(file), "--json"]
    for command in ("agreement", "needle"):
        report = json.loads(run("eval", command, *model, *COMMANDS[command], "--offset", "9", *both).stdout)
        rows = report.get("rows") or report["cells"]
        assert {"k4v4", "k4v4+cal"} <= {row["format"] for row in rows}
    asked = ["--prompt", "Two and two are", "--prompt", "One and one are", "--new-tokens", "3"]
    report = json.loads(run("eval", "generation", *model, *asked, *both).stdout)
    assert len(report["raw_texts"]) == 2
    assert {row["prompt"] for row in report["rows"]} == {"Two and two are", "One and one are"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["agreement", "--format", "calibrated"], "'calibrated' needs a calibration"),
        (["needle", "--format", "k4v4+cal"], "'k4v4+cal' needs a calibration"),
        (["agreement", "--format", "k4w4"], "k4w4"),
        (["positions", "--dtype", "bf16"], "'bf16'"),
    ],
)
def test_what_cannot_work_fails_before_a_model_is_loaded(arguments, message, monkeypatch):
    monkeypatch.setattr("slimkv.lab.models.load", lambda *a, **k: pytest.fail("loaded a model"))
    result = CliRunner().invoke(app, ["eval", *arguments])
    assert result.exit_code == 2
    assert message in result.output


@pytest.mark.parametrize(
    "arguments",
    [
        ["eval", "agreement", "--windows", "1", "--tokens", "64", "--format", "k4v4", "--model"],
        pytest.param(["eval", "positions", "--tokens", "64", "--format", "k4v4", "--model"], marks=pytest.mark.tail),
        ["calibrate", "--windows", "1", "--tokens", "48", "--ids", "random"],
    ],
)
def test_a_model_is_loaded_in_the_dtype_asked_for(arguments, tiny_folder, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    load, found = models.load, []

    def noted(*given):
        loaded = load(*given)
        found.append(loaded.model.dtype)
        return loaded

    monkeypatch.setattr(models, "load", noted)
    run(*arguments, str(tiny_folder), "--dtype", "bfloat16", "--json")
    assert found == [torch.bfloat16]


def test_demo_writes_the_report(tiny_folder, tmp_path):
    shown = run("demo", "--model", str(tiny_folder), "--output", str(tmp_path)).stdout
    assert "DynamicCache" in shown
    assert "k4v4+cal" in shown
    assert (tmp_path / "report.html").stat().st_size > 5000
    assert json.loads((tmp_path / "report.json").read_text())["model"] == str(tiny_folder)


def test_a_missing_model_is_one_line():
    result = CliRunner().invoke(app, ["eval", "agreement", "--model", "./nowhere"])
    assert result.exit_code == 2
    assert "neither a folder nor a hub name" in result.output
    assert "Traceback" not in result.output
