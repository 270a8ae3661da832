"""Bad input gives a one-line error and an exit code before a model is loaded or anything is written."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from slimkv.cli.app import app

PLAN = "plan --layers 2 --num-kv-heads 2 --head-dim 64"
# The command, and part of the line that it prints.
ROWS = {
    "wrong": "No such command 'wrong'",
    "eval wrong": "No such command 'wrong'",
    "bench attend --no-such-option": "No such option: --no-such-option",
    "plan": "give --config, or also --layers, --num-kv-heads, --head-dim",
    "plan --config nowhere.json": "there is no file nowhere.json",
    "plan --config binary.txt": "binary.txt",
    "plan --layers 0 --num-kv-heads 2 --head-dim 64": "--layers must be at least 1, not 0",
    "plan --layers 99999999999 --num-kv-heads 2 --head-dim 64": "--layers must be at most 2147483647",
    "plan --layers 2 --num-kv-heads 2 --head-dim 7": "head_dim 7 is not supported",
    "plan --layers two": "'--layers'",
    f"{PLAN} --memory lots": "cannot read the memory size 'lots'",
    f"{PLAN} --memory 0": "--memory must be more than 0 bytes, not 0",
    f"{PLAN} --format int4": "unknown format 'int4'",
    f"{PLAN} --format ' , ,'": "--format takes at least one value",
    f"{PLAN} --format k4v4,k4v4": "--format takes each value once",
    f"{PLAN} --block 5": "5",
    f"{PLAN} --sequences 0": "0",
    "doctor --require gpu": "unknown requirement 'gpu'",
    "doctor --require ,": "--require takes at least one value",
    "doctor --require torch --model M": "run slimkv doctor once with each",
    "doctor --format k9v9": "options for --model only: --format",
    "doctor --format k4v4 --device cpu": "options for --model only: --format and --device",
    "doctor --model M --format k9v9": "unknown format 'k9v9'",
    "doctor --model M --format k4v4+cal": "'k4v4+cal' needs a calibration",
    "doctor --model ''": "no model ''",
    "cache info nowhere.safetensors": "nowhere.safetensors",
    "cache info binary.txt": "binary.txt",
    "cache verify words.txt": "words.txt",
    "calibrate ''": "no model ''",
    "calibrate M --threads 99999999999999999999": "--threads must be at most 1024",
    "calibrate M --tokens 99999999999999999999": "--tokens must be at most 2147483647",
    "calibrate M --seed -1": "--seed must be at least 0, not -1",
    "calibrate M --device cpu:3": "there is no cpu:3",
    "calibrate M --text shipped --ids random": "--text and --ids both choose what the model reads",
    "calibrate M --text empty.txt": "empty.txt has no words in it",
    "calibrate M --text ''": "no text file ''",
    "calibrate M --engine vllm --device cpu --dtype float16": "vLLM does not take --device, --dtype",
    "calibrate M --engine sglang --threads 2": "SGLang does not take --threads",
    "calibrate M --engine vllm --engine-options ''": "is not JSON",
    "calibrate M -o fifo": "fifo is a device, a pipe or a broken link",
    "calibrate M -o /dev/null": "/dev/null is a device, a pipe or a broken link",
    "calibrate M -o loop": "loop is a device, a pipe or a broken link",
    "calibrate": "Missing argument",
    "calibrate ./nowhere": "neither a folder nor a hub name",
    "calibrate folder": "folder without a config.json",
    "calibrate M --profile silly": "unknown profile 'silly'; use one of lossless, balanced, aggressive",
    "calibrate M --budget 99": "more than 2 and less than 9, not 99",
    "calibrate M --budget 1": "more than 2 and less than 9, not 1",
    "calibrate M --budget 4 --profile balanced": "give one of them",
    "calibrate M --ids zipf": "--ids 'zipf' is not one of sampled, random",
    "calibrate M --engine ollama": "--engine 'ollama' is not one of transformers, vllm, sglang",
    "calibrate M --engine vllm": "vllm is not installed here: pip install 'slimkv[vllm]'",
    "calibrate M --engine vllm --engine-options {": "is not JSON",
    "calibrate M --engine vllm --engine-options []": "must be a JSON object",
    "calibrate M --engine-options {}": "--engine-options are for --engine vllm and sglang",
    "calibrate M -o missing/model.safetensors": "the folder missing does not exist",
    "calibrate M -o folder": "folder is a folder; give the name of a file in it",
    "calibrate M --device cuda": "torch sees no CUDA device",
    "calibrate M --device abacus": "unknown device 'abacus'",
    "calibrate M --dtype int3": "--dtype 'int3' is not one of float32, bfloat16, float16",
    "calibrate M --threads -1": "must be at least 1, not -1",
    "calibrate M --windows 0": "must be at least 1, not 0",
    "calibrate M --text binary.txt": "binary.txt is not a UTF-8 text file",
    "calibrate M --text nowhere.txt": "no text file 'nowhere.txt'",
    "eval agreement --device cuda": "torch sees no CUDA device, so --device cuda cannot be used; use --device cpu",
    "eval agreement --device mps": "slimkv does not run on 'mps'",
    "eval agreement --text binary.txt": "binary.txt is not a UTF-8 text file",
    "eval agreement --text folder": "folder is a folder; give a text file",
    "eval agreement --format k4w4": "k4w4",
    "eval agreement --format ,": "--format takes at least one value",
    "eval agreement --format k4v4,k4v4": "--format takes each value once",
    "eval agreement --prefill ''": "--prefill takes at least one value",
    "eval agreement --prefill 8bit,8bit": "--prefill takes each value once",
    "eval agreement --calibration broken.safetensors": "broken.safetensors is not a complete calibration file",
    "eval agreement --calibration empty.txt": "empty.txt is not a complete calibration file",
    "eval agreement --calibration auto --format calibrated": "needs a calibration file with widths, not auto",
    "eval agreement --plot ''": ". is a folder; give the name of a file in it",
    "eval agreement --plot p.svg --output p.svg": "two options name p.svg",
    "eval agreement --output fifo": "fifo is a device, a pipe or a broken link",
    "eval agreement --windows 99999999999": "--windows must be at most 2147483647",
    "eval agreement --format raw": "raw is the stock cache",
    "eval scores --format memory=50%": "only slimkv eval positions takes memory=50%",
    "eval needle --format memory=k4v4": "only slimkv eval positions takes memory=k4v4",
    "doctor --model M --format raw": "raw is the stock cache",
    "eval scores --format c4": "c4 is for latents, and this command measures keys: use slimkv eval agreement",
    "doctor --model M --format c4r8": "c4r8 is for latents",
    "demo --format c4": "c4 is for latents",
    "eval agreement --format c4+cal --calibration auto": "'c4+cal' is not a format that can be calibrated",
    "eval agreement --format c9": "unknown format 'c9'",
    "eval positions --format memory=0": "'memory=0' leaves a cache no memory",
    "eval agreement --format k4v4+cal": "'k4v4+cal' needs a calibration",
    "eval agreement --calibration nowhere.safetensors": "there is no calibration file 'nowhere.safetensors'",
    "eval agreement --prefill 3bit": "3bit",
    "eval agreement --model ./nowhere": "neither a folder nor a hub name",
    "eval agreement --offset -1": "must be at least 0, not -1",
    "eval agreement --threads -2": "must be at least 1, not -2",
    "eval agreement --windows 0": "must be at least 1, not 0",
    "eval agreement --output missing/p.json": "the folder missing does not exist",
    "eval positions --plot missing/p.svg": "the folder missing does not exist",
    "eval agreement --plot p.png": "give --plot a name such as p.svg, not p.png",
    "eval needle --contexts abc": "--contexts takes numbers separated by commas, not 'abc'",
    "eval needle --depths ,": "--depths takes at least one value",
    "eval needle --contexts -5": "--contexts must be at least 64, not -5",
    "eval needle --contexts 512,512": "--contexts takes each value once",
    "eval needle --depths 0.5,1.5": "--depths must be at most 1, not 1.5",
    "eval needle --depths nan": "--depths must be at least 0, not nan",
    "eval generation --text words.txt": "No such option: --text",
    "eval generation --new-tokens 0": "must be at least 1, not 0",
    "bench attend --cells nothing": "no cell is called 'nothing'",
    "bench attend --cells ''": "--cells takes at least one value",
    "bench attend --backend reference,cuda --device cpu": "--backend cuda does not run on cpu",
    "bench attend --backend ,": "--backend takes at least one value",
    "bench attend --device cuda": "torch sees no CUDA device",
    "bench attend --output missing/r.json": "the folder missing does not exist",
    "bench store --backend warp --cells decode-16 --quiet --device cpu": "no backend 'warp'; known are ",
    "bench generate --dtype int8": "unknown dtype 'int8'; known are float32, bfloat16, float16",
    "bench generate --format k9v9": "k9v9",
    "bench generate --model ./nowhere": "neither a folder nor a hub name",
    "bench generate --rounds 0": "must be at least 1, not 0",
    "bench generate --new-tokens 0": "--new-tokens must be at least 1, not 0",
    "bench generate --context 99999999999": "--context must be at most 2147483647",
    "bench generate --format ''": "--format takes at least one value",
    "bench generate --model M --layers 3": "leave out --layers or --model",
    "bench serve": "vllm is not installed here: pip install 'slimkv[vllm]'",
    "bench serve --engine sglang": "sglang is not installed here: pip install 'slimkv[sglang]'",
    "bench serve --engine ollama": "unknown engine 'ollama'; known are vllm, sglang",
    "bench serve --systems int4": "unknown format 'int4'",
    "bench serve --systems bf16,bf16": "--systems takes each value once",
    "bench serve --phases ''": "--phases takes at least one value",
    "bench serve --memory 0": "--memory must be a positive number, not 0",
    "bench serve --memory 1.5": "--memory must be at most 1, not 1.5",
    "bench serve --memory nan": "--memory must be a positive number, not nan",
    "bench serve --offload-gib -1": "--offload-gib must be a positive number, not -1",
    "bench serve --seed -1": "--seed must be at least 0, not -1",
    "bench serve --phases sprint": "unknown phase 'sprint'",
    "bench serve --shape gpt-9": "unknown shape 'gpt-9'",
    "bench serve --plot p.png": "give --plot a name such as p.svg, not p.png",
    "bench serve --new-tokens 1": "must be at least 2, not 1",
    "suite smoke ./nowhere": "neither a folder nor a hub name",
    "suite smoke ''": "no model ''",
    "suite smoke --engine tgi": "unknown engine 'tgi'; known are transformers, vllm",
    "suite smoke --engine vllm": "vllm is not installed here: pip install 'slimkv[vllm]'",
    "suite smoke --parts lunch": "unknown part 'lunch'",
    "suite smoke --parts ''": "--parts takes at least one value",
    "suite smoke --parts tasks,tasks": "--parts takes each value once",
    "suite smoke --tasks ,": "--tasks takes at least one value",
    "suite smoke --tasks hellaswag": 'pip install "slimkv[suite]"',
    "suite smoke --format memory=50%": "'memory=50%' has several formats in one cache",
    "suite smoke --tokens 1": "--tokens must be at least 2, not 1",
    "suite smoke --lengths 512,512": "--lengths takes each value once",
    "suite smoke --memory lots": "cannot read the memory size 'lots'",
    "suite smoke --memory 0": "--memory must be more than 0 bytes, not 0",
    "suite smoke --output loop": "loop is not a folder; give a folder",
    "suite smoke --text empty.txt": "empty.txt has no words in it",
    "suite smoke --calibration broken.safetensors": "broken.safetensors is not a complete calibration file",
    "suite quick --lengths abc": "--lengths takes numbers separated by commas, not 'abc'",
    "suite smoke --output words.txt": "words.txt is a file; give a folder",
    "suite smoke --device cuda": "torch sees no CUDA device",
    "suite smoke --text binary.txt": "binary.txt is not a UTF-8 text file",
    "suite smoke --calibration nowhere.safetensors": "there is no calibration file 'nowhere.safetensors'",
    "suite compare nowhere folder": "nowhere",
    "soak": "vllm is not installed here: pip install 'slimkv[vllm]'",
    "serve M --port 8000": "No such option: --port: options of the engine follow --, as in MODEL -- --port 8000",
    "bench attend --page 5": "--page 5 is not one of 1, 16, 32, 64, 128",
    "bench store --page 5": "--page 5 is not one of 1, 16, 32, 64, 128",
    "soak --format x": "unknown format 'x'",
    "soak --dtype int8": "unknown dtype 'int8'; known are float32, bfloat16, float16",
    "soak --cancelled nan": "--cancelled must be at least 0, not nan",
    "soak --seed -1": "--seed must be at least 0, not -1",
    "soak --cache-tokens 99999999999": "--cache-tokens must be at most 2147483647",
    "soak --output missing/soak.json": "the folder missing does not exist",
    "demo --output words.txt": "words.txt is a file; give a folder",
    "demo --format k9v9": "k9v9",
    "demo --format calibrated": "needs a calibration file with widths, not auto",
    "demo --calibration broken.safetensors": "broken.safetensors is not a complete calibration file",
    "demo --output loop": "loop is not a folder; give a folder",
    "demo --calibration nowhere.safetensors": "there is no calibration file 'nowhere.safetensors'",
    "demo --threads 0": "must be at least 1, not 0",
    "demo --device cuda": "torch sees no CUDA device",
}


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A folder with a few files. The machine appears to have no GPU and no engines, and fetching a model fails."""
    (tmp_path / "folder").mkdir()
    (tmp_path / "words.txt").write_text("Some words.")
    (tmp_path / "binary.txt").write_bytes(bytes(range(256)))
    (tmp_path / "empty.txt").write_text(" ")
    (tmp_path / "broken.safetensors").write_bytes(b"\xff" * 16)
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("slimkv.lab.engine_process.find_spec", lambda name: None)
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    monkeypatch.setattr("slimkv.lab.models.folder", lambda *a, **k: pytest.fail("a model is fetched"))
    return tmp_path


def contents(folder: Path) -> set[Path]:
    return set(folder.rglob("*"))


@pytest.mark.parametrize("command", ROWS)
def test_one_line_and_nothing_written(command, place):
    words = [word if word != "M" else "smollm2-135m-instruct" for word in shlex.split(command)]
    before = contents(place)
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 2, (result.output, result.exception)
    assert isinstance(result.exception, SystemExit)
    lines = result.output.strip().splitlines()
    assert len(lines) == 1, result.output
    assert lines[0].startswith("error: ")
    assert ROWS[command] in lines[0]
    assert contents(place) == before


def test_there_are_enough_of_them():
    assert len(ROWS) >= 50
