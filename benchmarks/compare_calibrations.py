"""KL divergence of one format with several calibrations of a model, on the same windows of a text.

    slimkv calibrate smollm2-135m-instruct -o transformers.safetensors
    slimkv calibrate smollm2-135m-instruct --engine vllm --engine-options '{"dtype": "float32"}' -o vllm.safetensors
    python benchmarks/compare_calibrations.py transformers.safetensors vllm.safetensors --text wiki.test.raw --windows 8

After every window, prints the mean of each file and its ratio to the first file's mean. The evaluation mode is strict,
as in ``slimkv eval agreement``.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch

from slimkv.calibration import Calibration
from slimkv.lab import models
from slimkv.lab.evals.agreement import compare_logits
from slimkv.lab.evals.harness import STOCK, STRICT, CacheKind, attending, window_logits
from slimkv.lab.evals.texts import load_text, token_windows


def main() -> None:
    """Command-line entry point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path, help="calibration files; ratios are relative to the first")
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--format", default="k4v4")
    parser.add_argument("--text", default="shipped")
    parser.add_argument("--windows", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--json", type=Path, help="write the divergence of every window here")
    given = parser.parse_args()
    if given.threads:
        torch.set_num_threads(given.threads)
    models.quiet_loading()
    loaded = models.load(given.model)
    loaded.model.to(given.device)
    kinds = [CacheKind(file.stem, given.format, Calibration.load(file)) for file in given.files]
    ids = token_windows(loaded.tokenizer, load_text(given.text), given.windows, given.tokens).to(given.device)
    found: dict[str, list[float]] = {kind.name: [] for kind in kinds}
    for number in range(len(ids)):
        window = ids[number : number + 1]
        raw = window_logits(loaded.model, window, STOCK.new(loaded.model, STRICT))
        for kind in kinds:
            with attending(loaded.model, kind.format):
                logits = window_logits(loaded.model, window, kind.new(loaded.model, STRICT))
            found[kind.name].append(float(compare_logits(raw, logits)[1].mean()))
        means = {name: sum(values) / len(values) for name, values in found.items()}
        base = means[kinds[0].name]
        shown = ", ".join(f"{name} {mean:.5f} ({mean / base:.3f})" for name, mean in means.items())
        print(f"{number + 1} windows: {shown}", flush=True)
    if given.json is not None:
        given.json.write_text(json.dumps({"model": given.model, "format": given.format, "kl": found}, indent=1))


if __name__ == "__main__":
    main()
