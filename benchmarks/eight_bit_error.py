"""The error that 8-bit prefill adds to attention on codes, on the queries, keys and values of a real model's layers.

    python benchmarks/eight_bit_error.py [--model NAME] [--text FILE] [--tokens 1024] [--layers 20] [--json FILE]

The rounding steps of 8-bit prefill are added one after another. For plain and calibrated codes, prints how much each
combination raises the squared error over that of the codes alone, relative to unquantised attention and summed over
layers.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from attention_errors import AttentionSample, capture_attention
from integer_weights import integer_operands
from torch import Tensor

from slimkv import ops
from slimkv.calibration.positions import matrix_index
from slimkv.codec import Codec
from slimkv.integrations.transformers.calibration.cached import auto_calibration
from slimkv.lab import models
from slimkv.lab.evals.texts import load_text, token_windows
from slimkv.ops import PackedKV, Rounding
from slimkv.ops.attention.eight_bit import LOG2E, TOP, attend_sequence, operands, rounded_queries
from slimkv.ops.gather.reference import decode_slots
from slimkv.spec import CodecSpec, PageLayout

# Flags: queries rounded to int8, values rounded to e4m3, probabilities rounded to e4m3, and whether the denominator
# sums the rounded probabilities.
STEPS = {
    "codes": (False, False, False, True),
    "int8 queries": (True, False, False, True),
    "and e4m3 values": (True, True, False, True),
    "and e4m3 weights": (True, True, True, True),
    "all, unrounded denominator": (True, True, True, False),
}
INTEGERS = "integers alone"  # the arithmetic of GPUs without warpgroup MMA


def layer_errors(
    sample: AttentionSample, group: int, scale: float, window: int | None, stored: Any
) -> dict[str, float]:
    """Squared relative error of the attention output for each of ``STEPS`` and for ``INTEGERS``.

    ``stored(key, value, codec, layout)`` returns the pages.
    """
    key, value = (x[::group].transpose(0, 1).contiguous() for x in (sample.key, sample.value))
    query, count = sample.query.transpose(0, 1), sample.key.shape[1]
    spec = CodecSpec.parse("k4v4", key.shape[-1], value.shape[-1])
    layout, codec = PageLayout(spec, 16), Codec(spec)
    pages, slots = stored(key, value, codec, layout), torch.arange(count)
    position = torch.arange(count)
    hidden = position[None, :] > position[:, None]
    if window is not None:
        hidden |= position[None, :] <= position[:, None] - window

    def scores(q: Tensor, k: Tensor) -> Tensor:
        x = torch.einsum("qhgd,khd->hgqk", q.unflatten(1, (k.shape[1], group)), k) * (scale * LOG2E)
        return x.masked_fill(hidden, -torch.inf)

    exact = torch.einsum("hgqk,khd->hgqd", torch.softmax(scores(query, key) / LOG2E, -1), value)
    kv, (codes_key, codes_value) = (
        operands(codec, layout, pages, slots),
        decode_slots(pages, slots, codec, layout, True),
    )
    rotated = codec.rotate_query(query)
    rows, row_scale = rounded_queries(rotated)
    value_scale = kv.value_scale.T[:, None, None, :]
    found = {}
    for name, (int8_queries, e4m3_values, e4m3_weights, rounded_sum) in STEPS.items():
        x = scores(rows * row_scale[..., None] if int8_queries else rotated, codes_key) + value_scale.log2()
        plain = torch.exp2(x - torch.ceil(x.amax(-1, keepdim=True)) + TOP)
        weights = plain.to(torch.float8_e4m3fn).float() if e4m3_weights else plain
        total = ((weights if rounded_sum else plain) / value_scale).sum(-1, keepdim=True)
        values = kv.value * kv.value_scale[..., None] if e4m3_values else codes_value
        out = codec.unrotate_output(torch.einsum("hgqk,khd->hgqd", weights / value_scale, values) / total)
        found[name] = float((out - exact).square().sum() / exact.square().sum())
    in_integers = integer_operands(codec, layout, pages, slots)
    rows_out, _ = attend_sequence(rotated, in_integers, ~hidden, scale, 0.0, None)
    out = codec.unrotate_output(rows_out).transpose(0, 1).reshape(exact.shape)
    return found | {INTEGERS: float((out - exact).square().sum() / exact.square().sum())}


def main() -> None:
    """Command-line entry point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--text", default="shipped")
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=1 << 20)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    models.quiet_loading()
    loaded = models.load(options.model)
    calibration = auto_calibration(loaded.model, progress=lambda *_: None)
    ids = token_windows(loaded.tokenizer, load_text(options.text), 1, options.tokens, offset=0)
    samples = capture_attention(loaded.model, ids, queries=options.tokens)[: options.layers]
    edges = calibration.position_edges(options.tokens)
    rows: dict[str, list[dict[str, float]]] = {"plain": [], "calibrated": []}
    for number, sample in enumerate(samples):
        attention = loaded.model.model.layers[number].self_attn
        for kind, errors in rows.items():

            def stored(
                key: Tensor, value: Tensor, codec: Codec, layout: PageLayout, kind=kind, number=number
            ) -> Tensor:
                slots = torch.arange(key.shape[0], dtype=torch.int32)
                matrices = calibration.query_aware_matrices(number, codec, positions=options.tokens)
                matrices = matrices if kind == "calibrated" else None
                several = matrices is not None and matrices.ndim == 4
                index = matrix_index(slots.long(), edges).to(torch.int32) if several else None
                pages = torch.zeros(layout.blocks_for(len(slots)), key.shape[1], layout.page_bytes, dtype=torch.uint8)
                rounding = None if matrices is None else Rounding(matrices, index)
                ops.store_kv(key, value, PackedKV(pages, codec, layout), slots, rounding)
                return pages

            group = loaded.model.config.num_attention_heads // loaded.model.config.num_key_value_heads
            errors.append(
                layer_errors(sample, group, attention.scaling, getattr(attention, "sliding_window", None), stored)
            )
    report = {
        kind: {name: sum(e[name] for e in errors) / sum(e["codes"] for e in errors) - 1 for name in (*STEPS, INTEGERS)}
        for kind, errors in rows.items()
    }
    print(f"squared error over that of the codes, {options.model}, {len(samples)} layers, {options.tokens} tokens")
    for name in [*STEPS, INTEGERS][1:]:
        print(f"{name:28}", *(f"{kind} {report[kind][name]:+.2%}" for kind in rows), sep="  ")
    if options.json:
        written = {"model": options.model, "tokens": options.tokens, "over_codes": report, "squared_errors": rows}
        options.json.write_text(json.dumps(written, indent=2) + "\n")


if __name__ == "__main__":
    main()
