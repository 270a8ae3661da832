"""Test cases of ``attend_latent``: stored latents, queries, and the exact result in float64 on the same codes."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import cached_property

import torch
from torch import Tensor

from slimkv import Codec, PageLayout, ops
from slimkv.ops.latent.api import LatentRequest, checked_request
from slimkv.spec import LatentSpec

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
PRECISION = 5e-3  # relative, against float64


@dataclass(frozen=True)
class Case:
    """Sequences of ``lens`` tokens with ``queries`` queries each, in blocks scattered among random bytes."""

    format: str = "c4r8"
    latent_dim: int = 128
    rope_dim: int = 32
    heads: int = 4
    lens: tuple[int, ...] = (70, 5)
    queries: tuple[int, ...] = (1, 1)
    page: int = 16
    dtype: str = "bf16"
    out_dtype: str = "fp32"
    scale: float = 0.1
    padding: int = 0  # rows beyond the last query
    peaked: bool = False  # one token gets nearly all attention
    heavy: bool = False  # heavy-tailed latents
    rows: bool = False  # token rows, and a table of slots that skips every fifth and the first ten tokens

    def __str__(self) -> str:
        changed = [(f.name, getattr(self, f.name)) for f in fields(self) if getattr(self, f.name) != f.default]
        return "-".join(f"{name}={value}" for name, value in changed).replace(" ", "") or "plain"

    @property
    def layout(self) -> PageLayout:
        """The layout of the pages."""
        spec = LatentSpec.parse(self.format, self.latent_dim, self.rope_dim)
        return PageLayout(spec.with_raw_dtype(str(DTYPES[self.dtype]).removeprefix("torch.")), self.page, self.rows)

    @property
    def skipped(self) -> Tensor:
        """bool [longest sequence]: the positions that a table of slots skips."""
        position = torch.arange(max(self.lens))
        return (position % 5 == 3) | (position < 10) if self.rows else torch.zeros(len(position), dtype=torch.bool)


@dataclass(frozen=True)
class Built:
    """The tensors of a case."""

    case: Case
    codec: Codec
    layout: PageLayout
    latent: Tensor
    rope: Tensor
    pages: Tensor  # [blocks, page_bytes], random bytes where no token is stored
    table: Tensor  # out of range beyond the blocks of a sequence
    seq_lens: Tensor
    starts: Tensor
    query_latent: Tensor
    query_rope: Tensor

    blocks: Tensor  # the block table; the same as ``table``, unless that lists slots

    def slots(self, sequence: int) -> Tensor:
        """The slots of the tokens of a sequence."""
        position = torch.arange(self.case.lens[sequence], device=self.pages.device)
        return self.blocks[sequence, position // self.case.page].long() * self.case.page + position % self.case.page

    @property
    def kv(self) -> ops.PackedKV:
        """The stored latents."""
        return ops.PackedKV(self.pages, self.codec, self.layout)

    @property
    def batch(self) -> ops.AttentionBatch:
        """The batch of all sequences."""
        bounds = max(self.case.queries), self.max_seq_len
        return ops.AttentionBatch(self.table, self.seq_lens, self.starts, *bounds)

    @property
    def max_seq_len(self) -> int:
        """The number of tokens that the table has room for."""
        return self.table.shape[1] * (1 if self.case.rows else self.case.page)

    def request(self, out: Tensor, lse: Tensor | None = None) -> LatentRequest:
        """The request that a backend gets, with queries and output in the stored space."""
        return checked_request(
            self.query_latent, self.query_rope, self.kv, self.batch, self.case.scale, out=out, lse=lse
        )

    def attend(self, **options) -> Tensor | tuple[Tensor, Tensor]:
        """The result of ``ops.attend_latent``."""
        return ops.attend_latent(
            self.query_latent, self.query_rope, self.kv, self.batch, softmax_scale=self.case.scale, **options
        )

    @cached_property
    def exact(self) -> tuple[Tensor, Tensor]:
        """Output and log-sum-exp in float64, with queries and output in the original space; NaN in padding rows."""
        rows = self.query_latent.shape[0]
        out = torch.full((rows, self.case.heads, self.case.latent_dim), torch.nan, dtype=torch.float64)
        lse = torch.full((rows, self.case.heads), torch.nan, dtype=torch.float64)
        for sequence, (length, count) in enumerate(zip(self.case.lens, self.case.queries, strict=True)):
            own = slice(int(self.starts[sequence]), int(self.starts[sequence]) + count)
            latent, rope = ops.gather_latent(self.kv, self.slots(sequence), backend="reference")
            scores = torch.einsum("qhd,kd->qhk", self.query_latent[own].double(), latent.double())
            scores += torch.einsum("qhd,kd->qhk", self.query_rope[own].double(), rope.double())
            seen = torch.arange(length)[None] <= torch.arange(length - count, length)[:, None]
            seen &= ~self.case.skipped[:length]
            scores = (scores * self.case.scale).cpu().masked_fill(~seen[:, None], -torch.inf)
            lse[own] = scores.logsumexp(-1)
            weights = torch.exp(scores - lse[own].masked_fill(lse[own] == -torch.inf, 0)[..., None])
            out[own] = torch.einsum("qhk,kd->qhd", weights, latent.double().cpu())
        return out, lse


def build(case: Case, device: torch.device, seed: int = 0) -> Built:
    """Stores random latents and makes random queries."""
    generator = torch.Generator().manual_seed(seed)
    layout, dtype = case.layout, DTYPES[case.dtype]
    codec = Codec(layout.spec, device)
    per_sequence = [layout.blocks_for(length) for length in case.lens]
    blocks, width = sum(per_sequence) + 3, max(per_sequence) + 1
    order = torch.randperm(blocks, generator=generator).to(torch.int32)
    table = torch.full((len(case.lens), width), 2**30, dtype=torch.int32)  # out of range: must not be read
    for sequence, count in enumerate(per_sequence):
        table[sequence, :count], order = order[:count], order[count:]
    pages = torch.randint(0, 256, (blocks, layout.page_bytes), dtype=torch.uint8, generator=generator).to(device)
    tokens, rows = sum(case.lens), sum(case.queries) + case.padding
    latent = torch.randn(tokens, case.latent_dim, generator=generator)
    if case.heavy:
        latent = latent * torch.randn(tokens, case.latent_dim, generator=generator).abs() ** 3
    latent = latent / latent.square().mean(-1, keepdim=True).sqrt()  # RMS-normalized, as in models
    rope = 3 * torch.randn(tokens, case.rope_dim, generator=generator)
    query_latent = torch.randn(rows, case.heads, case.latent_dim, generator=generator)
    query_rope = torch.randn(rows, case.heads, case.rope_dim, generator=generator)
    if case.peaked:
        query_latent[0, 0] = 20 * latent[3]
    starts = torch.tensor([0, *case.queries]).cumsum(0).to(torch.int32)
    built = Built(
        case, codec, layout, *(x.to(device, dtype) for x in (latent, rope)), pages, table.to(device),
        torch.tensor(case.lens, dtype=torch.int32, device=device), starts.to(device),
        *(x.to(device, dtype) for x in (query_latent, query_rope)), table.to(device),
    )  # fmt: skip
    slots = torch.cat([built.slots(i) for i in range(len(case.lens))])
    if case.rows:
        of_tokens = torch.full((len(case.lens), max(case.lens) + 3), 2**30, dtype=torch.int32, device=device)
        for sequence, length in enumerate(case.lens):
            skipped = case.skipped[:length].to(device)
            of_tokens[sequence, :length] = built.slots(sequence).int().masked_fill(skipped, -1)
        built = replace(built, table=of_tokens)
    backend = "reference" if device.type == "cpu" else "cuda" if case.rows else "triton"
    ops.store_latent(built.latent, built.rope, built.kv, slots, backend=backend)
    return built


def check(built: Built, out: Tensor, lse: Tensor | None = None, precision: float = PRECISION) -> None:
    """Compares with the exact result. Padding rows must still be NaN."""
    exact, exact_lse = built.exact
    count = sum(built.case.queries)
    assert out[count:].isnan().all()
    got, want = out[:count].double().cpu(), exact[:count]
    error = (got - want).norm(dim=-1) / want.norm(dim=-1).clamp(min=1e-3)
    assert error.max() <= precision, f"{error.max():.1e}"
    if lse is not None:
        assert lse[count:].isnan().all()
        torch.testing.assert_close(lse[:count].double().cpu(), exact_lse[:count], atol=precision, rtol=5e-4)
