"""Test cases of ``store_kv``: vectors that are hard to encode, their slots, and the expected bytes."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from slimkv import Codec, CodecSpec, PageLayout, ScalePolicy
from slimkv.codec import quantize
from slimkv.codec.pack import pack_rows, page_tables
from slimkv.codec.quantize import SideTables
from slimkv.codec.query_aware import query_aware_matrix
from slimkv.spec import Kind

POISON_BYTE = 0xA5
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@dataclass(frozen=True)
class Case:
    """``slots``: "aligned" runs of whole pages, an "unaligned" run, or "scattered" slots, some of them negative."""

    format: str = "k4v4"
    dim: int = 64
    value_dim: int | None = None
    heads: int = 2
    page: int = 16
    tokens: int = 48
    slots: str = "scattered"
    slot_dtype: str = "int64"
    dtype: str = "bf16"
    policy: str = "norm"
    strided: bool = False

    def __str__(self) -> str:
        changed = [f"{k}={v}" for k, v in self.__dict__.items() if v != getattr(Case, k, False)]
        return ",".join(changed) or "default"

    @property
    def layout(self) -> PageLayout:
        policy = ScalePolicy(self.policy)
        return PageLayout(
            CodecSpec.parse(self.format, self.dim, self.value_dim, key_policy=policy, value_policy=policy), self.page
        )

    def slot_mapping(self, generator: torch.Generator) -> tuple[Tensor, int]:
        """Slots int [tokens] and how many blocks they need."""
        blocks = -(-self.tokens // self.page) + 3
        if self.slots == "aligned":
            order = torch.randperm(blocks, generator=generator)
            slots = (order[:, None] * self.page + torch.arange(self.page)).flatten()[: self.tokens]
        elif self.slots == "unaligned":
            slots = torch.arange(self.tokens) + self.page + 5
        else:
            slots = torch.randperm(blocks * self.page, generator=generator)[: self.tokens]
            slots[3::7] = -1
        return slots.to(getattr(torch, self.slot_dtype)), blocks


def random_rows(count: int, dim: int, generator: torch.Generator) -> Tensor:
    """float32 [count, dim]: norms from 1e-6 to 1e8, zeros, constants, one-hots, sparse and tiny rows among them."""
    x = torch.randn(count, dim, generator=generator)
    x *= torch.logspace(-6, 8, count)[torch.randperm(count, generator=generator)][:, None] / dim**0.5
    special = [
        torch.zeros(dim),
        torch.full((dim,), -0.0),
        torch.ones(dim),
        torch.nn.functional.one_hot(torch.tensor(dim // 2), dim).float() * -3,
        *(_between_levels(dim, bits) for bits in (2, 3, 4, 8)),
        (torch.arange(dim) % 2).float(),
        torch.full((dim,), 1e-42),
        _between_fp8(dim),
    ]
    for i, row in enumerate(special[:count]):
        x[i * (count // len(special)) if count >= len(special) else i] = row
    return x


def _between_levels(dim: int, bits: int) -> Tensor:
    """Halfway between the evenly spaced levels of ``bits`` bits, which run from 0 in steps of 1."""
    top = (1 << bits) - 1
    row = torch.arange(dim).float() % top + 0.5
    row[0], row[1] = 0, top
    return row


def _between_fp8(dim: int) -> Tensor:
    """Halfway between e4m3 numbers of several exponents."""
    number = torch.arange(dim)
    return (1 + (2 * (number % 8) + 1) / 16.0) * 2.0 ** (number % 6 - 3)


def build(case: Case, device: torch.device, seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor, Codec]:
    """K, V, slots, poisoned pages and the codec."""
    g = torch.Generator().manual_seed(seed)
    layout = case.layout

    def side(dim: int, raw: str | None) -> Tensor:
        dtype = getattr(torch, raw) if raw else DTYPES[case.dtype]
        x = random_rows(case.tokens * case.heads, dim, g).view(case.tokens, case.heads, dim)
        if dtype == torch.float16:
            x = x.clamp(-65504, 65504)
        x = x.to(dtype).to(device)
        if case.strided:
            wide = torch.full((case.tokens, case.heads + 1, dim + 16), torch.nan, dtype=dtype, device=device)
            wide[:, 1:, 8:-8] = x
            x = wide[:, 1:, 8:-8]
        return x

    spec = layout.spec
    key = side(spec.key_dim, spec.key.raw_dtype if spec.key.kind == Kind.RAW else None)
    value = side(spec.value_dim, spec.value.raw_dtype if spec.value.kind == Kind.RAW else None)
    slots, blocks = case.slot_mapping(g)
    key[slots < 0] = torch.nan  # engines do not clear the rows that a store skips
    value[slots < 0] = torch.nan
    pages = torch.full((blocks, case.heads, layout.page_bytes), POISON_BYTE, dtype=torch.uint8, device=device)
    return key, value, slots.to(device), pages, Codec(spec, device)


def random_query_aware(heads: int, codec: Codec, seed: int = 0) -> Tensor:
    """int8 [heads, dim, dim] for queries concentrated in a few directions, different ones for every head."""
    g = torch.Generator().manual_seed(seed)
    dim = codec.spec.key_dim
    queries = torch.randn(heads, 4 * dim, dim, generator=g) * torch.logspace(0, -2, dim)
    turned = queries @ torch.linalg.qr(torch.randn(heads, dim, dim, generator=g))[0]
    return query_aware_matrix(turned.mT @ turned, codec.to("cpu").key_rotation).to(codec.device)


def expected(
    key: Tensor,
    value: Tensor,
    slots: Tensor,
    pages: Tensor,
    codec: Codec,
    layout: PageLayout,
    query_aware: Tensor | None = None,
) -> Tensor:
    """The pages after the store, computed with the codec alone; vectors that cannot be encoded are marked."""
    keep = (slots >= 0).nonzero().flatten()
    rows = pack_rows(
        layout,
        codec.encode_key(key[keep], query_aware=query_aware, mark_invalid=True),
        codec.encode_value(value[keep], mark_invalid=True),
    )
    out, where = pages.clone(), slots[keep].long()
    offsets = page_tables(layout, pages.device).byte_offsets[where % layout.block_size]
    for head in range(pages.shape[1]):
        out[(where // layout.block_size)[:, None], head, offsets] = rows[:, head]
    return out


def standard(x: Tensor, tables: SideTables) -> Tensor:
    """float32 [rows, dim]: what the encoder compares with boundaries, for integers with a maximum in [2^20, 2^21)."""
    rotated = (x.double() @ tables.hadamard).float()
    norm = x.to(torch.int64).square().sum(-1, keepdim=True).float().sqrt()
    return rotated * (torch.tensor(tables.unit, dtype=torch.float32) / norm)


def rows_on_boundaries(codec: Codec, per_boundary: int = 2) -> tuple[Tensor, int]:
    """float32 [rows, dim] with a rotated coordinate on a boundary or just beside it, and the number of those on it.

    Perturbs integer coordinates of random vectors until float32 arithmetic gives exactly the boundary.
    """
    g = torch.Generator().manual_seed(1)
    tables, dim = codec.to("cpu").key_tables, codec.spec.key_dim
    rows, exact = [], 0
    for boundary in tables.boundaries[:: max(1, len(tables.boundaries) // 15)]:
        found = 0
        for _ in range(20):
            x = torch.randn(dim, generator=g, dtype=torch.float64)
            x = (x / x.abs().max() * 1.7 * 2**20).round()
            at = int((standard(x[None].float(), tables)[0] - boundary).abs().argmin())
            for _ in range(4):
                rotated = x @ tables.hadamard[:, at]
                norm = x.norm()
                x = (x + (float(boundary) * norm / tables.unit - rotated) / dim * tables.hadamard[:, at]).round()
            shaken = x + torch.randint(-2, 3, (2048, dim), generator=g)
            shaken = shaken[(shaken.abs().amax(1) >= 2**20) & (shaken.abs().amax(1) < 2**21)].float()
            distance = standard(shaken, tables)[:, at] - boundary
            on, beside = shaken[distance == 0], shaken[(distance != 0) & (distance.abs() < 1e-5)]
            rows += [on[:per_boundary], beside[:per_boundary]]
            found += len(on[:per_boundary])
            if found >= per_boundary:
                break
        exact += found
    return torch.cat(rows), exact


@lru_cache  # such rows are rare: the search takes seconds
def short_rows_beside_boundaries(spec: CodecSpec, dtype: torch.dtype, count: int = 4) -> Tensor:
    """16-bit floats [count, dim]: a rotated coordinate times its factor is a boundary after rounding to float32.

    Before rounding, half of the products lie above the boundary and half below.
    """
    g = torch.Generator().manual_seed(2)
    tables, dim = Codec(spec).key_tables, spec.key_dim
    boundaries = tables.boundaries[tables.boundaries != 0]
    above, below = torch.empty(0, dim, dtype=dtype), torch.empty(0, dim, dtype=dtype)
    while min(len(above), len(below)) < count // 2:
        x = torch.randn(20_000, dim, generator=g).to(dtype)
        fixed, _, _ = quantize._fixed_point(x.float(), quantize.SHORT_FIXED_POINT_BITS)
        rotated = quantize.rotate_fixed(fixed, tables)
        factor = torch.tensor(tables.unit) / quantize.squared_norm_in_steps(fixed).sqrt()
        rounded = rotated * factor
        rest = rotated.double() * factor.double() - rounded.double()
        on = torch.isin(rounded, boundaries)
        above = torch.cat([above, x[(on & (rest > 0)).any(-1)]])
        below = torch.cat([below, x[(on & (rest < 0)).any(-1)]])
    return torch.cat([above[: count // 2], below[: count // 2]])


def build_beside_boundaries(dtype: str, device: torch.device) -> tuple[Case, Tensor, Tensor, Tensor, Codec, Tensor]:
    """Rows beside boundaries as K and V: case, rows, slots, pages, codec, and the expected pages."""
    case = Case(heads=1, dtype=dtype)
    codec = Codec(case.layout.spec, device)
    rows = short_rows_beside_boundaries(case.layout.spec, DTYPES[dtype])[:, None, :].to(device)
    slots = torch.arange(len(rows), device=device)
    pages = torch.zeros(1, 1, case.layout.page_bytes, dtype=torch.uint8, device=device)
    return case, rows, slots, pages, codec, expected(rows, rows, slots, pages, codec, case.layout)
