"""``slimkv serve``: vLLM's or SGLang's own server with a packed cache; the model is calibrated the first time."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
from importlib import util
from pathlib import Path
from typing import Annotated, Any

import typer

from slimkv.calibration import Calibration
from slimkv.calibration.cache import cached_path
from slimkv.cli.options import ModelArgument
from slimkv.cli.parsing import option
from slimkv.config import CALIBRATED, KVCacheConfig
from slimkv.errors import InputError, MissingDependencyError
from slimkv.formats import Kind, is_latent_format
from slimkv.lab import models
from slimkv.spec import parse_spec

AUTO, NONE = "auto", "none"
ENGINES = {"vllm": "vLLM", "sglang": "SGLang"}
# Options that select the model and the devices: a calibration inside the engine needs them too.
PASSED_ON = {
    "vllm": {
        "tensor_parallel_size", "pipeline_parallel_size", "enable_expert_parallel", "dtype", "quantization", "revision",
        "trust_remote_code", "load_format", "download_dir", "tokenizer", "max_model_len", "max_num_seqs",
        "gpu_memory_utilization", "cpu_offload_gb", "hf_overrides",
    },
    "sglang": {
        "tp_size", "ep_size", "dtype", "quantization", "revision", "trust_remote_code", "load_format", "download_dir",
        "tokenizer_path", "context_length", "mem_fraction_static", "device",
    },
}  # fmt: skip
SHORT = {
    "vllm": {"tp": "tensor_parallel_size", "pp": "pipeline_parallel_size", "q": "quantization"},
    "sglang": {"tp": "tp_size", "tensor_parallel_size": "tp_size", "ep": "ep_size", "expert_parallel_size": "ep_size"},
}
SET_HERE = {
    "vllm": {"attention_backend", "additional_config"},
    "sglang": {"attention_backend", "json_model_override_args", "model_path"},
}


def serve(
    model: ModelArgument,
    options: Annotated[list[str] | None, typer.Argument(help="The engine's own options, after --.")] = None,
    engine: Annotated[str | None, option("vllm or sglang; default: the one that is installed.")] = None,
    format: Annotated[str, option("How keys and values are stored: k4v4, k5v4, ...")] = AUTO,
    calibration: Annotated[str, option("auto (made once and kept), none, or a file from slimkv calibrate.")] = AUTO,
    dry_run: Annotated[bool, option("Print the commands and run nothing.", "--dry-run")] = False,
) -> None:
    """Serve a model with a packed cache: slimkv serve MODEL -- --port 8000."""
    given = options or []
    _check(format, calibration)
    chosen = _engine(engine)
    _check_options(chosen, given)
    source = models.source(model)
    file, make = _calibration(chosen, source, format, calibration, given)
    if make is not None:
        typer.echo(shlex.join(make))
        if not dry_run:
            file = _made(make, source)
    command = _command(chosen, source, format, file, given)
    typer.echo(shlex.join(command))
    if not dry_run:
        sys.stdout.flush()
        os.execvp(command[0], command)


def _check(format: str, calibration: str) -> None:
    """Raises if the format does not exist or the calibration file cannot be read."""
    if calibration in (AUTO, NONE):
        if format == CALIBRATED:
            raise InputError(
                f"--format {CALIBRATED} takes the widths from --calibration FILE: make the file with slimkv calibrate "
                "--budget or --profile"
            )
        KVCacheConfig.parse({"format": format})
        return
    KVCacheConfig.parse({"format": format, "calibration": calibration})
    Calibration.load(calibration)


def _engine(asked: str | None) -> str:
    """The engine to run; raises if it is not installed."""
    if asked is not None and asked not in ENGINES:
        raise InputError(f"--engine {asked!r} is not one of {', '.join(ENGINES)}")
    found = [name for name in ENGINES if _launcher(name) is not None]
    if asked is None and not found:
        raise MissingDependencyError(
            'neither vLLM nor SGLang is installed: pip install "slimkv[vllm]" or pip install "slimkv[sglang]"'
        )
    if asked is not None and asked not in found:
        raise MissingDependencyError(f'{ENGINES[asked]} is not installed: pip install "slimkv[{asked}]"')
    return asked or found[0]


def _launcher(engine: str) -> list[str] | None:
    """The command that starts the engine's server; None if it is not installed."""
    if engine == "sglang":
        return [sys.executable, "-m", "sglang.launch_server"] if util.find_spec("sglang") is not None else None
    beside = str(Path(sys.executable).parent)  # slimkv's own environment, activated or not
    program = shutil.which("vllm", path=os.pathsep.join([beside, os.environ.get("PATH", "")]))
    return [program, "serve"] if program is not None else None


def _named(engine: str, options: list[str]) -> dict[str, Any]:
    """The engine's options by name, with underscores; a flag is True. Values are parsed as JSON if possible."""
    out: dict[str, Any] = {}
    for number, word in enumerate(options):
        if not word.startswith("-") or _is_number(word):
            continue
        name, equals, value = word.lstrip("-").partition("=")
        name = name.replace("-", "_")
        following = options[number + 1] if number + 1 < len(options) else "-"
        if not equals:
            value = "true" if following.startswith("-") and not _is_number(following) else following
        name = SHORT[engine].get(name, name)
        try:
            out[name] = json.loads(value)
        except json.JSONDecodeError:
            out[name] = value
    return out


def _is_number(word: str) -> bool:
    return word.lstrip("-").replace(".", "", 1).isdigit()


def _check_options(engine: str, options: list[str]) -> None:
    """Raises if an option is given that this command sets itself."""
    clash = sorted(SET_HERE[engine] & _named(engine, options).keys())
    if clash:
        words = ", ".join("--" + name.replace("_", "-") for name in clash)
        raise InputError(
            f"slimkv serve sets {words} itself: leave it out, or take the command that --dry-run prints and edit it"
        )


def _calibration(
    engine: str, source: str, format: str, asked: str, options: list[str]
) -> tuple[Path | None, list[str] | None]:
    """The calibration file, if any, and the command that makes it if it is missing."""
    if asked not in (AUTO, NONE):
        return Path(asked).resolve(), None
    if asked == NONE or not _takes_calibration(source, format):
        return None, None
    try:
        file: Path | None = cached_path(source)
    except InputError:
        file = None  # the model is not downloaded yet; the engine does that
    if file is not None and file.is_file():
        return file, None
    passed = {name: value for name, value in _named(engine, options).items() if name in PASSED_ON[engine]}
    make = [sys.executable, "-m", "slimkv", "calibrate", source, "--engine", engine]
    return file, [*make, "--engine-options", json.dumps(passed)] if passed else make


def _takes_calibration(source: str, format: str) -> bool:
    """Whether a calibration applies to ``format``: it does to Lloyd-Max keys, not to latents."""
    if format == AUTO:
        return not _caches_latents(source)
    return not is_latent_format(format) and parse_spec(format, 128).key.kind == Kind.LLOYD


def _caches_latents(source: str) -> bool:
    """Whether the model caches latents; False if its configuration cannot be read, which the engine will report."""
    path = Path(source) / "config.json"
    try:
        if not path.is_file():
            from huggingface_hub import hf_hub_download

            path = Path(hf_hub_download(source, "config.json"))
        config = json.loads(path.read_text(encoding="utf-8"))
    except Exception:  # the hub's client raises many kinds of errors
        return False
    return (config.get("text_config") or config).get("kv_lora_rank") is not None


def _made(make: list[str], source: str) -> Path:
    """Runs the calibration in a separate process, which frees its memory, and returns the file."""
    done = subprocess.run(make, check=False)
    if done.returncode != 0:
        raise InputError(
            f"the calibration failed with exit code {done.returncode} (its messages are above); to serve without one, "
            "add --calibration none"
        )
    return cached_path(source)


def _command(engine: str, source: str, format: str, file: Path | None, options: list[str]) -> list[str]:
    """The engine's command line."""
    settings = {"slimkv": {"format": format, **({"calibration": str(file)} if file is not None else {})}}
    launcher = _launcher(engine)
    assert launcher is not None
    if engine == "vllm":
        own = [source, "--attention-backend", "CUSTOM", "--additional-config", json.dumps(settings)]
    else:
        own = ["--model-path", source, "--attention-backend", "slimkv", "--json-model-override-args"]
        own.append(json.dumps(settings))
        own += [] if "page_size" in _named(engine, options) else ["--page-size", "64"]
    return [*launcher, *own, *options]
