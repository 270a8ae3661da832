"""Perplexity of text after a prefix whose K and V were encoded and decoded by the cold tier's codec.

    python benchmarks/cold_tier.py MODEL --text wiki.test.raw --device cuda --dtype bfloat16

Keys are centred and, with ``+cal``, rounded with a calibration, as in vLLM's cold tier.
"""

from __future__ import annotations

import argparse
import math
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from slimkv import fake_quantize
from slimkv.calibration import Calibration
from slimkv.integrations.transformers.calibration.cached import auto_calibration
from slimkv.lab import models
from slimkv.lab.evals.texts import load_text, token_windows


def round_trip(
    key: Tensor, value: Tensor, layer: int, format: str, calibration: Calibration | None
) -> tuple[Tensor, Tensor]:
    """key, value [1, heads, tokens, dim] -> the same, decoded from pages of ``format``."""
    known = calibration if format.endswith("+cal") else None
    return fake_quantize(key, value, format.removesuffix("+cal"), known, layer=layer, num_layers=layer + 1)


@torch.inference_mode()
def losses(model: Any, window: Tensor, prefix: int, formats: list[str], calibration: Calibration) -> dict[str, float]:
    """Summed cross-entropy (nats) of the tokens after ``prefix``, by format. The first entry is an unchanged cache."""
    ids = window[None].to(model.device)
    read = DynamicCache(config=model.config)
    model(ids[:, :prefix], past_key_values=read, logits_to_keep=1)
    kept, found = [(layer.keys.clone(), layer.values.clone()) for layer in read.layers], {}
    for format in ("unchanged", *formats):
        cache = DynamicCache(config=model.config)
        for number, (key, value) in enumerate(kept):
            if format != "unchanged":
                key, value = round_trip(key, value, number, format, calibration)
            cache.update(key, value, number)
        logits = model(ids[:, prefix:], past_key_values=cache).logits[0, :-1].float()
        found[format] = float(torch.nn.functional.cross_entropy(logits, ids[0, prefix + 1 :], reduction="sum"))
    return found


def main() -> None:
    """Prints one line per format."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--text", required=True)
    parser.add_argument("--formats", default="k6v6+cal,k4v4,k4v4+cal,k2v2+cal")
    parser.add_argument("--windows", type=int, default=24)
    parser.add_argument("--prefix", type=int, default=3072)
    parser.add_argument("--rest", type=int, default=1024)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    asked = parser.parse_args()
    loaded = models.load(asked.model, models.parse_dtype(asked.dtype), asked.device)
    windows = token_windows(loaded.tokenizer, load_text(asked.text), asked.windows, asked.prefix + asked.rest)
    calibration, formats = auto_calibration(loaded.model), asked.formats.split(",")
    each = [losses(loaded.model, window, asked.prefix, formats, calibration) for window in windows]
    count = len(each) * (asked.rest - 1)
    base = sum(x["unchanged"] for x in each) / count
    for format in each[0]:
        mean = sum(x[format] for x in each) / count
        print(f"{format:10} perplexity {math.exp(mean):.4f} ({math.expm1(mean - base):+.3%})", flush=True)


if __name__ == "__main__":
    main()
