"""Error of the attention output with quantised keys and values, by format and scale policy.

    python benchmarks/attention_errors.py
    python benchmarks/attention_errors.py --model smollm2-135m-instruct --text wiki.test.raw

Queries, keys and values come from a model, or are synthetic with the properties that make real ones hard to quantise:

* a few key channels are many times larger than the rest and carry a constant offset (rotary pairs do this);
* every channel has its own spread, and values have heavy tails (Student's t);
* a few tokens have far larger norms, and the first one is an attention sink with a small value;
* queries lie near a few directions, so attention is neither uniform nor concentrated on one token.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from slimkv.codec import Codec
from slimkv.lab import models
from slimkv.lab.evals.texts import SHIPPED, load_text, token_windows
from slimkv.lab.report.page import table_line
from slimkv.spec import CodecSpec, Kind, PageLayout, ScalePolicy

OUTLIER_CHANNELS = 0.04
CHANNEL_GAIN = (4.0, 12.0)
OUTLIER_TOKENS = 0.01
KEY_TOKEN_GAIN = (1.5, 3.0)
VALUE_TOKEN_GAIN = (3.0, 10.0)
TAIL_FREEDOM = 5
QUERY_RANK = 8
SCORE_SPREAD = 1.5
_CAPTURE = "slimkv_capture"


@dataclass(frozen=True)
class AttentionSample:
    """Queries [heads, queries, dim], keys and values [heads, tokens, dim], float32.

    If ``causal``, the queries belong to the last tokens and see none after their own.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    causal: bool = False


def student(shape: tuple[int, ...], freedom: int, generator: torch.Generator) -> Tensor:
    """Samples of Student's t distribution, scaled to variance 1."""
    normal = torch.randn(shape, generator=generator)
    chi = torch.randn((*shape, freedom), generator=generator).square().mean(-1)
    return normal / chi.sqrt() * math.sqrt((freedom - 2) / freedom)


def _uniform(shape: tuple[int, ...], low: float, high: float, generator: torch.Generator) -> Tensor:
    return low + (high - low) * torch.rand(shape, generator=generator)


def _pick(heads: int, size: int, share: float, generator: torch.Generator) -> Tensor:
    """bool [heads, size] with at least one True in each row."""
    count = max(1, round(share * size))
    chosen = torch.rand(heads, size, generator=generator).topk(count, -1).indices
    return torch.zeros(heads, size, dtype=torch.bool).scatter_(-1, chosen, True)


def _channels(heads: int, dim: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """The spread of each channel (float) and whether it is an outlier (bool), both [heads, 1, dim]."""
    spread = (0.5 * torch.randn(heads, 1, dim, generator=generator)).exp()
    return spread, _pick(heads, dim, OUTLIER_CHANNELS, generator)[:, None, :]


def _token_gain(heads: int, tokens: int, span: tuple[float, float], generator: torch.Generator) -> Tensor:
    gain = _uniform((heads, tokens), *span, generator)
    return torch.where(_pick(heads, tokens, OUTLIER_TOKENS, generator), gain, 1.0)[..., None]


def heavy_tailed(
    heads: int = 8, tokens: int = 1024, dim: int = 128, queries: int = 64, seed: int = 0
) -> AttentionSample:
    """One synthetic sample. The same seed gives the same statistics on every machine."""
    generator = torch.Generator().manual_seed(seed)
    spread, outlier = _channels(heads, dim, generator)
    gain = torch.where(outlier, _uniform((heads, 1, dim), *CHANNEL_GAIN, generator), 1.0)
    sign = torch.where(torch.rand(heads, 1, dim, generator=generator) < 0.5, -1.0, 1.0)
    noise = student((heads, tokens, dim), TAIL_FREEDOM, generator)
    key = spread * (torch.where(outlier, 0.25 * noise + sign, noise) * gain)
    key = key * _token_gain(heads, tokens, KEY_TOKEN_GAIN, generator)

    value_spread, _ = _channels(heads, dim, generator)
    value = value_spread * student((heads, tokens, dim), TAIL_FREEDOM, generator)
    value = value * _token_gain(heads, tokens, VALUE_TOKEN_GAIN, generator)
    value[:, 0] *= 0.1

    basis = torch.randn(heads, QUERY_RANK, dim, generator=generator) * spread / gain
    query = torch.randn(heads, queries, QUERY_RANK, generator=generator) @ basis
    query = query + 0.3 * torch.randn(heads, queries, dim, generator=generator) * spread / gain
    scores = query @ key.transpose(-1, -2) / math.sqrt(dim)
    query = query * (SCORE_SPREAD / scores.std(-1, keepdim=True))
    return AttentionSample(query, key, value)


def capture_attention(model: Any, token_ids: Tensor, queries: int = 64) -> list[AttentionSample]:
    """One sample per layer from a forward pass of a transformers model on ``token_ids`` (int64 [1, tokens]).

    Keys and values cover all tokens and are repeated for each query head. Queries cover the last ``queries`` tokens.
    """
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import sdpa_mask

    samples: list[AttentionSample] = []

    def record(module: Any, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
        group = query.shape[1] // key.shape[1]
        all_keys, all_values = (states[0].repeat_interleave(group, 0).float() for states in (key, value))
        samples.append(AttentionSample(query[0, :, -queries:].float(), all_keys, all_values, causal=True))
        return sdpa_attention_forward(module, query, key, value, *args, **kwargs)

    AttentionInterface.register(_CAPTURE, record)
    AttentionMaskInterface.register(_CAPTURE, sdpa_mask)
    before = model.config._attn_implementation
    model.set_attn_implementation(_CAPTURE)
    try:
        with torch.no_grad():
            model(token_ids, use_cache=False)
    finally:
        model.set_attn_implementation(before)
    return samples


@dataclass(frozen=True)
class AttentionError:
    """Errors of one format, each as a relative root mean square."""

    format: str
    bytes_per_token_per_head: float  # allocated, per KV head
    key: float  # |k - k_hat| / |k|
    value: float
    output: float  # |o - o_hat| / |o| with K and V quantised
    output_keys_only: float
    output_values_only: float


@dataclass(frozen=True)
class PolicyError:
    """Error of the output if only the keys, or only the values, are stored with a scale policy."""

    bits: int
    policy: str
    keys: float
    values: float


def attend(query: Tensor, key: Tensor, value: Tensor, causal: bool = False) -> Tensor:
    """softmax(q k / sqrt(dim)) v over [..., tokens, dim]; with ``causal``, the queries belong to the last tokens."""
    scores = query @ key.transpose(-1, -2) / math.sqrt(query.shape[-1])
    if causal:
        future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device)
        scores = scores.masked_fill(future.triu(scores.shape[-1] - scores.shape[-2] + 1), -math.inf)
    return torch.softmax(scores, -1) @ value


def relative_error(estimate: Tensor, truth: Tensor) -> float:
    """Root of the summed squared error over the summed squares."""
    difference = (estimate - truth).double().square().sum()
    return float((difference / truth.double().square().sum()).sqrt())


def round_trip(codec: Codec, sample: AttentionSample) -> tuple[Tensor, Tensor]:
    """K and V after encoding and decoding, float32."""
    key, value = sample.key, sample.value
    if codec.spec.key.kind == Kind.RAW:
        key = key.to(getattr(torch, codec.spec.key.raw_dtype))
    if codec.spec.value.kind == Kind.RAW:
        value = value.to(getattr(torch, codec.spec.value.raw_dtype))
    return codec.decode_key(codec.encode_key(key)).float(), codec.decode_value(codec.encode_value(value)).float()


def attention_error(sample: AttentionSample, spec: CodecSpec, name: str | None = None) -> AttentionError:
    """Errors of ``spec`` on ``sample``."""
    key, value = round_trip(Codec(spec, sample.key.device), sample)

    def output(k: Tensor, v: Tensor) -> Tensor:
        return attend(sample.query, k, v, sample.causal)

    truth = output(sample.key, sample.value)
    return AttentionError(
        format=name or spec.format,
        bytes_per_token_per_head=PageLayout(spec, 16).bytes_per_token,
        key=relative_error(key, sample.key),
        value=relative_error(value, sample.value),
        output=relative_error(output(key, value), truth),
        output_keys_only=relative_error(output(key, sample.value), truth),
        output_values_only=relative_error(output(sample.key, value), truth),
    )


def compare_formats(sample: AttentionSample, formats: Iterable[str]) -> list[AttentionError]:
    """``attention_error`` of each format name."""
    dim, value_dim = sample.key.shape[-1], sample.value.shape[-1]
    return [attention_error(sample, CodecSpec.parse(format, dim, value_dim), format) for format in formats]


def compare_policies(sample: AttentionSample, widths: Sequence[int] = (2, 3, 4)) -> list[PolicyError]:
    """Errors of every scale policy at every width, with only the keys or only the values quantised."""
    out = []
    for bits in widths:
        for policy in ScalePolicy:
            spec = CodecSpec.parse(
                f"k{bits}v{bits}",
                sample.key.shape[-1],
                sample.value.shape[-1],
                key_policy=policy,
                value_policy=policy,
            )
            error = attention_error(sample, spec)
            out.append(PolicyError(bits, policy.value, error.output_keys_only, error.output_values_only))
    return out


Row = TypeVar("Row", AttentionError, PolicyError)


def average(tables: Sequence[Sequence[Row]]) -> list[Row]:
    """Averages tables of the same shape over samples. Names and widths are kept."""
    out = []
    for rows in zip(*tables, strict=True):
        errors = [f.name for f in fields(rows[0]) if f.type == "float"]
        means = {name: sum(getattr(row, name) for row in rows) / len(rows) for name in errors}
        out.append(replace(rows[0], **means))
    return out


def main() -> None:
    """Prints the tables of docs/design/codec.md."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a model instead of synthetic samples: a packaged one, a folder or a hub name")
    parser.add_argument("--text", default=SHIPPED, help="text that the model reads")
    parser.add_argument("--tokens", type=int, default=1024, help="tokens of the text")
    parser.add_argument("--head-dim", type=int, default=128, help="head size of the synthetic samples")
    parser.add_argument("--seeds", type=int, default=4, help="synthetic samples to average over")
    parser.add_argument("--format", default="ku4vu4,kur4vur4,k4v4,turboquant_4bit_nc,fp8", help="formats to compare")
    given = parser.parse_args()
    if given.model is None:
        samples = [heavy_tailed(heads=4, dim=given.head_dim, seed=seed) for seed in range(given.seeds)]
    else:
        model, tokenizer, _ = models.load(given.model)
        samples = capture_attention(model, token_windows(tokenizer, load_text(given.text), 1, given.tokens))
    what = "synthetic samples" if given.model is None else f"layers of {given.model}"
    print(f"relative error, head size {samples[0].key.shape[-1]}, mean of {len(samples)} {what}")
    print(table_line(["format", "bytes/token/head", "keys", "values", "output", "output, K only", "output, V only"]))
    for row in average([compare_formats(sample, given.format.split(",")) for sample in samples]):
        errors = row.key, row.value, row.output, row.output_keys_only, row.output_values_only
        print(table_line([row.format, f"{row.bytes_per_token_per_head:g}", *(f"{error:.4f}" for error in errors)]))
    print("error of the output with only keys, or only values, quantised")
    print(table_line(["bits", "policy", "keys", "values"]))
    for policy in average([compare_policies(sample) for sample in samples]):
        print(table_line([str(policy.bits), policy.policy, f"{policy.keys:.4f}", f"{policy.values:.4f}"]))


if __name__ == "__main__":
    main()
