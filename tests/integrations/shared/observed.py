"""Calibration in engines: a model, comparison with transformers' calibration, and the documented commands."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from prompts import model_folder

from slimkv.calibration import Calibration


def write_llama(folder: Path) -> str:
    """A Llama with random weights."""
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=512, hidden_size=128, intermediate_size=192, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=64, max_position_embeddings=2048, initializer_range=0.1, bos_token_id=1,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return str(folder)


def check_it_is_what_transformers_finds(folder: str, made: Calibration) -> None:
    import transformers

    from slimkv.integrations.transformers.calibration.collect import gather_calibration

    model = transformers.LlamaForCausalLM.from_pretrained(folder).eval()
    other = gather_calibration(model, costs=False, samples=(16, 128))
    assert made.identity == other.identity
    assert made.max_positions == other.max_positions == 2048
    assert sorted(made.layers) == sorted(other.layers)
    for number, layer in made.layers.items():
        want = other.layers[number]
        assert layer.rotary.planes.tolist() == want.rotary.planes.tolist()
        assert torch.allclose(layer.rotary.frequencies, want.rotary.frequencies, atol=1e-5)
        # The engine and transformers sampled different texts: moments are close, and far from those of the other head.
        apart = (layer.query_moment - want.query_moment).norm(dim=(1, 2)) / want.query_moment.norm(dim=(1, 2))
        swapped = (layer.query_moment - want.query_moment.flip(0)).norm() / want.query_moment.norm()
        assert apart.max() < 0.5 * swapped


def check_a_calibration_is_made(
    command: str, options: dict[str, Any], target: Path, environment: dict[str, str], seconds: float
) -> None:
    """Runs a documented ``slimkv calibrate`` command on SmolLM2, with engine options for a CPU and a short text."""
    words = shlex.split(command)
    words[words.index("MODEL")] = model_folder()
    words[words.index("--engine-options") + 1] = json.dumps(options)
    small = ["--windows", "1", "--tokens", "64", "-o", str(target)]
    done = subprocess.run(
        [sys.executable, "-m", "slimkv", *words[1:], *small], env=environment, capture_output=True, text=True,
        timeout=seconds, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    assert target.is_file()
