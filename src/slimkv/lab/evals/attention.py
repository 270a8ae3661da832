"""The error of the attention output with quantised keys and values."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from typing import TypeVar

import torch
from torch import Tensor

from slimkv.codec import Codec
from slimkv.lab.evals.samples import AttentionSample
from slimkv.spec import CodecSpec, Kind, PageLayout, ScalePolicy


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
    """The output's error with only the keys, or only the values, stored under a policy."""

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
    """K and V after the codec, float32."""
    key, value = sample.key, sample.value
    if codec.spec.key.kind == Kind.RAW:
        key = key.to(getattr(torch, codec.spec.key.raw_dtype))
    if codec.spec.value.kind == Kind.RAW:
        value = value.to(getattr(torch, codec.spec.value.raw_dtype))
    return codec.decode_key(codec.encode_key(key)).float(), codec.decode_value(codec.encode_value(value)).float()


def attention_error(sample: AttentionSample, spec: CodecSpec, name: str | None = None) -> AttentionError:
    """The errors of ``spec`` on ``sample``."""
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
    """Every scale policy at every width, for keys and for values on their own."""
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
    """The same table from several samples -> its mean; names and widths are kept."""
    out = []
    for rows in zip(*tables, strict=True):
        errors = [f.name for f in fields(rows[0]) if f.type == "float"]
        means = {name: sum(getattr(row, name) for row in rows) / len(rows) for name in errors}
        out.append(replace(rows[0], **means))
    return out
