"""Weights in a running engine, and checkpoints that declare an fp8 cache."""

from __future__ import annotations

import json
import shutil
from types import SimpleNamespace

import pytest

pytest.importorskip("sglang")

import torch
import transformers
from engines import run_engine, slimkv
from observed import write_llama
from prompts import run
from safetensors.torch import load_file, save_file
from sglang.srt.model_executor.model_runner_components.weight_updater import _unsupported_derived_weight_cache_error

import slimkv as package
from slimkv.integrations.sglang.refusals import forbid_new_weights

pytestmark = pytest.mark.sglang

PROMPTS = [[(7 * i + 3 * j * j) % 500 + 3 for j in range(30 + 67 * i)] for i in range(4)]
SCHEME = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "tensor", "dynamic": False}


@pytest.mark.parametrize(("calibration", "transfers"), [(None, False), ("auto", False), (None, True)])
def test_sglang_sees_why_weights_cannot_be_updated(calibration, transfers):
    model = torch.nn.Sequential(torch.nn.Linear(2, 2))
    plan = SimpleNamespace(config=SimpleNamespace(calibration=calibration), transfers=transfers)
    forbid_new_weights(model, plan)
    said = _unsupported_derived_weight_cache_error(model)
    if calibration is None and not transfers:
        assert said is None
    else:
        assert "belongs to the weights that this engine started with" in said


@pytest.mark.slow
def test_an_engine_loads_other_weights_unless_it_has_a_calibration(tmp_path):
    folder, other = write_llama(tmp_path / "model"), tmp_path / "other"
    shutil.copytree(folder, other)
    weights = load_file(other / "model.safetensors")
    save_file({name: 1.5 * x for name, x in weights.items()}, other / "model.safetensors", metadata={"format": "pt"})
    runs = [run("before", PROMPTS, 8), run("after", PROMPTS, 8, weights=str(other))]
    want = run_engine({"model_path": str(other), **slimkv("raw")}, [run("after", PROMPTS, 8)])
    plain = run_engine({"model_path": folder, **slimkv("raw")}, runs)
    assert plain["updated"]["after"][0]
    assert plain["tokens"]["before"] != plain["tokens"]["after"] == want["tokens"]["after"]
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    package.calibrate_model(model, samples=(2, 64)).save(tmp_path / "made.safetensors")
    how = slimkv("k4v4", calibration=str(tmp_path / "made.safetensors"))
    bound = run_engine({"model_path": folder, **how}, [*runs[:1], {**runs[1], "reset": True}])
    success, message = bound["updated"]["after"]
    assert not success
    assert "belongs to the weights that this engine started with" in message
    assert bound["tokens"]["after"] == bound["tokens"]["before"], "still the old weights"


@pytest.mark.slow
def test_scales_of_a_checkpoint_change_nothing(tmp_path):
    """On a CPU, SGLang itself refuses an fp8 cache, so the dtype is always given here."""
    folder = write_llama(tmp_path / "model")
    weights = load_file(tmp_path / "model" / "model.safetensors")
    sides = {f"model.layers.{i}.self_attn.{x}_scale": torch.tensor(0.02) for i in range(2) for x in "kv"}
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    found = []
    for name, scheme in (("plain", None), ("scaled", SCHEME)):
        path = tmp_path / name
        shutil.copytree(folder, path)
        save_file({**weights, **(sides if scheme else {})}, path / "model.safetensors", metadata={"format": "pt"})
        config["quantization_config"] = {
            "quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": {},
            "ignore": ["lm_head"], "kv_cache_scheme": scheme, "quantization_status": "compressed",
        }  # fmt: skip
        (path / "config.json").write_text(json.dumps(config))
        how = {"dtype": "bfloat16", "kv_cache_dtype": "bf16", **slimkv("k4v4")}
        found.append(run_engine({"model_path": str(path), **how}, [run("a", PROMPTS, 8, one_by_one=True)]))
    assert found[0]["tokens"] == found[1]["tokens"]
