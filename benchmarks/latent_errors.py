"""Error of latent attention (MLA) with quantised latents and rope parts, on synthetic data.

There are three kinds of latents: random directions, latents with heavy tails and outliers, and the latter plus a vector
that all tokens share. Rope parts are pairs of dimensions that rotate with the position. Except with random directions,
the pairs differ widely in magnitude, which makes rope parts of real models hard to quantise.

    python benchmarks/latent_errors.py
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields

import torch
from attention_errors import relative_error, student
from torch import Tensor

from slimkv.codec import Codec
from slimkv.lab.report.page import table_line
from slimkv.spec import Kind, LatentSpec, PageLayout

SCORE_SPREAD = 1.5  # standard deviation of the scores from the latents, and of those from the rope parts
ROPE_BASE = 10000.0
SHARED_PART = 2.0  # "shared" latents: norm of the vector that all tokens have in common, over the norm of the rest
KINDS = ("random", "heavy", "shared")


@dataclass(frozen=True)
class LatentSample:
    """Latents [tokens, latent_dim], rope parts [tokens, rope_dim] and queries [queries, dim], float32.

    ``query`` and ``query_rope`` already include the softmax scale.
    """

    latent: Tensor
    rope: Tensor
    query: Tensor
    query_rope: Tensor


@dataclass(frozen=True)
class LatentError:
    """Errors of one format, each as a relative root mean square."""

    kind: str
    format: str
    bytes_per_token: float
    latent: float
    rope: float
    output: float  # error of the attention output with both quantised
    output_latent_only: float
    output_rope_only: float
    output_centred: float  # both quantised; the mean latent is subtracted before encoding and added back afterwards


def _rope_parts(tokens: int, dim: int, heavy: bool, generator: torch.Generator) -> Tensor:
    """Pairs with a constant part, rotated by position as by rotary embeddings: [tokens, dim]."""
    pairs = dim // 2
    size = torch.ones(pairs)
    if heavy:  # sizes vary, and two pairs are another 40 times larger
        size = (1.2 * torch.randn(pairs, generator=generator)).exp()
        size[torch.randperm(pairs, generator=generator)[:2]] *= 40
    angle = torch.arange(tokens)[:, None] * ROPE_BASE ** (-torch.arange(pairs) / pairs)
    noise = student((tokens, pairs, 2), 5, generator)
    base = torch.randn(pairs, 2, generator=generator) + 0.5 * noise
    x, y = (size[:, None] * base).unbind(-1)
    return torch.stack([x * angle.cos() - y * angle.sin(), x * angle.sin() + y * angle.cos()], -1).flatten(-2)


def sample_latents(
    kind: str, tokens: int = 2048, latent_dim: int = 512, rope_dim: int = 64, queries: int = 64, seed: int = 0
) -> LatentSample:
    """One sample of ``kind``, which is one of ``KINDS``. The same seed gives the same sample."""
    generator, heavy = torch.Generator().manual_seed(seed), kind != "random"
    latent = torch.randn(tokens, latent_dim, generator=generator)
    if heavy:
        spread = (0.7 * torch.randn(latent_dim, generator=generator)).exp()
        spread[torch.randperm(latent_dim, generator=generator)[:8]] *= 12
        latent = spread * student((tokens, latent_dim), 4, generator)
    if kind == "shared":
        common = torch.randn(latent_dim, generator=generator)
        latent = latent + common * (SHARED_PART * latent.square().mean().sqrt() / common.square().mean().sqrt())
    latent = latent / latent.square().mean(-1, keepdim=True).sqrt()  # models cache the latent after an RMS norm
    rope = _rope_parts(tokens, rope_dim, heavy, generator)
    basis = torch.randn(8, latent_dim, generator=generator)
    query = torch.randn(queries, 8, generator=generator) @ basis + torch.randn(queries, latent_dim, generator=generator)
    query_rope = torch.randn(queries, rope_dim, generator=generator) / (rope.std(0) if heavy else 1)
    for q, k in ((query, latent), (query_rope, rope)):
        q *= SCORE_SPREAD / (q @ k.T).std(-1, keepdim=True)
    return LatentSample(latent, rope, query, query_rope)


def _attend(sample: LatentSample, latent: Tensor, rope: Tensor) -> Tensor:
    scores = sample.query.double() @ latent.double().T + sample.query_rope.double() @ rope.double().T
    return scores.softmax(-1) @ latent.double()


def latent_error(sample: LatentSample, kind: str, format: str) -> LatentError:
    """Errors of one format on ``sample``."""
    spec = LatentSpec.parse(format, sample.latent.shape[-1], sample.rope.shape[-1])
    codec = Codec(spec)

    def as_stored(x: Tensor, raw: bool, dtype: str) -> Tensor:
        return x.to(getattr(torch, dtype)) if raw else x

    def stored_latent(x: Tensor) -> Tensor:
        return codec.decode_key(codec.encode_key(as_stored(x, spec.key.kind == Kind.RAW, spec.key.raw_dtype))).float()

    latent, mean = stored_latent(sample.latent), sample.latent.mean(0)
    rope = codec.decode_value(
        codec.encode_value(as_stored(sample.rope, spec.value.kind == Kind.RAW, spec.value.raw_dtype))
    ).float()
    truth = _attend(sample, sample.latent, sample.rope)
    return LatentError(
        kind=kind,
        format=format,
        bytes_per_token=PageLayout(spec, 64).bytes_per_token,
        latent=relative_error(latent, sample.latent),
        rope=relative_error(rope, sample.rope),
        output=relative_error(_attend(sample, latent, rope), truth),
        output_latent_only=relative_error(_attend(sample, latent, sample.rope), truth),
        output_rope_only=relative_error(_attend(sample, sample.latent, rope), truth),
        output_centred=relative_error(_attend(sample, stored_latent(sample.latent - mean) + mean, rope), truth),
    )


def compare_latent_formats(
    formats: Iterable[str], latent_dim: int = 512, rope_dim: int = 64, seeds: int = 4, kinds: Sequence[str] = KINDS
) -> list[LatentError]:
    """Errors of every format on every kind of sample, as root mean squares over ``seeds`` samples."""
    rows, names = [], list(formats)
    numbers = [f.name for f in fields(LatentError) if f.type == "float"]
    for kind in kinds:
        samples = [sample_latents(kind, 2048, latent_dim, rope_dim, seed=seed) for seed in range(seeds)]
        for format in names:
            found = [latent_error(sample, kind, format) for sample in samples]
            means = {n: math.sqrt(sum(getattr(f, n) ** 2 for f in found) / len(found)) for n in numbers}
            rows.append(LatentError(kind, format, **means))
    return rows


def main() -> None:
    """Prints the table of docs/design/latents.md."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--formats", default="crawr8,crawrfp8,crawr6,crawr4,c4,c4r8,c4rfp8,c4r6,c4r4,c6,c6r8,c8r8")
    parser.add_argument("--latent-dim", type=int, default=512)
    parser.add_argument("--rope-dim", type=int, default=64)
    parser.add_argument("--seeds", type=int, default=4)
    given = parser.parse_args()
    print(table_line(["samples", "format", "bytes/token", "latent", "rope", "latent only", "rope only", "both"]))
    for row in compare_latent_formats(given.formats.split(","), given.latent_dim, given.rope_dim, given.seeds):
        errors = row.latent, row.rope, row.output_latent_only, row.output_rope_only, row.output
        print(table_line([row.kind, row.format, f"{row.bytes_per_token:g}", *(f"{x:.4f}" for x in errors)]))


if __name__ == "__main__":
    main()
