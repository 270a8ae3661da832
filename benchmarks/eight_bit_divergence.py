"""KL divergence from the stock cache with 16-bit prefill, 8-bit prefill, and 8-bit prefill on the 16-bit pass's codes.

    python benchmarks/eight_bit_divergence.py [--model NAME] [--format k4v4+cal] [--text FILE] [--windows 16] [--json F]
        [--device cuda]

Any change in one layer flips some codes of later layers, and most of their quantization error is then drawn anew. The
cost of 8-bit arithmetic alone is therefore visible only if later layers read the codes of the 16-bit pass. Evaluation
is strict and uses the reference backend; windows are those of ``slimkv eval agreement``.
"""

from __future__ import annotations

import argparse
import json
import math
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from slimkv.calibration import Calibration
from slimkv.integrations.transformers.calibration.cached import auto_calibration
from slimkv.lab import models
from slimkv.lab.evals.agreement import compare_logits, growth_over
from slimkv.lab.evals.harness import STOCK, STRICT, WITH_CALIBRATION, CacheKind, attending, window_logits
from slimkv.lab.evals.texts import load_text, token_windows
from slimkv.ops.attention import reference
from slimkv.ops.attention.api import REGISTRY

EIGHT, SIXTEEN, SAME = "8bit", "16bit", "8bit, same codes"


@contextmanager
def reading(name: str, pages: list[Tensor]):
    """Context in which long passes use the reference backend with the arithmetic ``name``.

    With ``SIXTEEN``, appends the pages of each pass to ``pages``; with ``SAME``, restores them before each pass.
    """
    in_eight_bits, in_sixteen, left = reference._in_eight_bits, reference._one_sequence, list(pages)
    select = REGISTRY.select  # the registry of attention: store keeps its own backend, which writes the same bytes

    def attend(request: Any, *rest: Any) -> None:
        if name == SIXTEEN:
            pages.append(request.pages.clone())
        elif name == SAME:
            request.pages.copy_(left.pop(0))
        (in_sixteen if name == SIXTEEN else in_eight_bits)(request, *rest)

    with (
        patch.object(reference, "_in_eight_bits", attend),
        patch.object(REGISTRY, "select", lambda device, request, _: select(device, request, "reference")),
    ):
        yield


def divergences(model: Any, format: str, calibration: Calibration | None, ids: Tensor) -> dict[str, float]:
    """Mean KL divergence from the stock cache on one window (ids int64 [1, tokens]), by arithmetic."""
    packed = CacheKind(format, format, calibration, EIGHT)

    def logits(kind: CacheKind) -> Tensor:
        with attending(model, kind.format), torch.no_grad():
            return window_logits(model, ids, kind.new(model, STRICT), None)

    raw, pages, found = logits(STOCK), [], {}
    for name in (SIXTEEN, SAME, EIGHT):
        with reading(name, pages):
            found[name] = float(compare_logits(raw, logits(packed))[1].double().mean())
    return found


def main() -> None:
    """Command-line entry point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--format", default="k4v4+cal", help="+cal uses --calibration, or calibrates the model")
    parser.add_argument("--calibration", type=Path, help="a file from slimkv calibrate")
    parser.add_argument("--text", default="shipped")
    parser.add_argument("--windows", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--offset", type=int, default=0, help="tokens to skip at the start of the text")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    models.quiet_loading()
    loaded, calibration = models.load(options.model, device=options.device), None
    if options.format.endswith(WITH_CALIBRATION):
        file = options.calibration
        calibration = Calibration.load(file) if file else auto_calibration(loaded.model, progress=lambda *_: None)
    format = options.format.removesuffix(WITH_CALIBRATION)
    text = load_text(options.text)
    windows = token_windows(loaded.tokenizer, text, options.windows, options.tokens, offset=options.offset)
    rows: list[dict[str, float]] = []
    for ids in windows:
        rows.append(divergences(loaded.model, format, calibration, ids[None].to(options.device)))
        base = [row[SIXTEEN] for row in rows]
        found = {name: growth_over(base, [row[name] for row in rows]) for name in (SAME, EIGHT)}
        print(f"window {len(rows)}  16 bits {rows[-1][SIXTEEN]:.4f}", end="  ")
        of_both = [(name, over, math.nan if error is None else error) for name, (over, error) in found.items()]
        print(*(f"{name} {over:+.2%} ± {error:.2%}" for name, over, error in of_both), flush=True)
        if options.json:
            report = {name: {"growth": over, "error": error} for name, (over, error) in found.items()}
            written = {"model": options.model, "format": options.format, "tokens": options.tokens}
            written |= {"device": options.device, "over_16bit": report}
            options.json.write_text(json.dumps(written | {"windows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
