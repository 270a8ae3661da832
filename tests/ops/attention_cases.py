"""Test cases of ``attend``: their tensors, and the exact result in float64."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from slimkv import Codec, CodecSpec, PageLayout, ops
from slimkv.codec.key_offset import subtract_offset
from slimkv.codec.pack import page_tables, take_tokens
from slimkv.codec.quantize import SideTables
from slimkv.codec.rotation import block_size
from slimkv.ops import AttentionBatch, PackedKV
from slimkv.ops.attention.api import MAX_DECODE_QUERIES
from slimkv.spec import Kind

POISON_BYTE = 0xA5
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def add_offset(key: Tensor, offset: Tensor) -> Tensor:
    """The inverse of ``subtract_offset``, up to its rounding."""
    return (key.float() + offset).to(key.dtype)


@dataclass(frozen=True)
class Case:
    """The input of one ``attend`` call: sequences of ``lens`` tokens, whose last ``queries`` tokens have queries."""

    format: str = "k4v4"
    dim: int = 64
    value_dim: int | None = None
    num_kv_heads: int = 2
    group: int = 4
    page: int = 16
    lens: tuple[int, ...] = (53, 16, 7)
    queries: tuple[int, ...] = (1, 1, 1)
    window: int | None = None
    softcap: float = 0.0
    sinks: bool = False
    scale: float | None = None
    causal: bool = True
    fresh: bool = False
    num_splits: int | None = 1
    dtype: str = "bf16"
    out_dtype: str = "fp32"
    padding: int = 0  # rows of query and out that belong to no sequence
    given_workspace: bool = False
    key_norm: float = 1.0
    value_norm: float = 1.0
    query_norm: float = 1.0
    slack: bool = False  # host-side bounds beyond what the batch needs, as in a padded CUDA graph
    peaked: bool = False  # queries equal to one of the keys, whose score is far above all others
    rising: float = 0.0  # by which scores rise along a sequence, so that running maxima change all the time
    strided: bool = False  # query and out are slices of wider tensors
    offset_norm: float = 0.0  # of a vector that all keys of a KV head contain, subtracted before they are stored

    def __str__(self) -> str:
        changed = [f"{k}={v}" for k, v in self.__dict__.items() if v != getattr(Case, k)]
        return ",".join(changed).replace(" ", "") or "default"

    @property
    def spec(self) -> CodecSpec:
        return CodecSpec.parse(self.format, self.dim, self.value_dim)

    @property
    def bound(self) -> float:
        """Largest relative error of an output row.

        Probabilities and queries are rounded to fp16, or to bf16 next to raw bf16 keys and values. A bf16 result is
        rounded once more. Triton's interpreter truncates to bf16 instead of rounding, which doubles the error.

        Prefill also rounds unpacked and scaled keys to fp16. This changes scores as much as rounding the queries does,
        and more for larger vectors: of 9,440 rows of 128 dimensions, the worst has an error of 2.5e-3 (2.5e-3 if only
        the keys are rounded, 1.2e-3 for only the queries, 3e-4 for only the probabilities or only the values), and the
        median row one of 4e-4.
        """
        if self.spec.format == "krawfp32vrawfp32" and self.dtype == self.out_dtype == "fp32":
            return 1e-4
        if "rawbf16" in self.spec.format or self.fresh:
            return 5e-3 if torch.cuda.is_available() else 1e-2
        if self.out_dtype == "bf16":
            return 5e-3
        if max(self.queries) > MAX_DECODE_QUERIES:
            return 3e-3
        # A softmax scale above 1 / sqrt(dim), or larger scores, amplify the score errors of rounded queries.
        return 2e-3 * max(1.0, (self.scale or 0.0) * math.sqrt(self.dim), self.rising / 2)

    @property
    def lse_bound(self) -> float:
        """Largest error of the log-sum-exp relative to 1 + its magnitude, caused by rounded queries."""
        return 5e-3 if "krawbf16" in self.spec.format else 2e-3


@dataclass(frozen=True)
class Built:
    """The tensors of a case."""

    case: Case
    codec: Codec
    layout: PageLayout
    batch: AttentionBatch
    pages: Tensor
    query: Tensor
    fresh: tuple[Tensor, Tensor] | None
    sinks: Tensor | None
    key_offset: Tensor | None = None

    @property
    def options(self) -> ops.AttendOptions:
        c = self.case
        return ops.AttendOptions(
            softmax_scale=c.scale, causal=c.causal, sliding_window=c.window, softcap=c.softcap, sinks=self.sinks
        )

    @property
    def kv(self) -> ops.PackedKV:
        return ops.PackedKV(self.pages, self.codec, self.layout, self.key_offset)

    def arguments(self, **changes) -> dict:
        """Arguments of ``ops.attend``, except out, lse, workspace, num_splits and backend.

        ``changes`` may name arguments, and fields of ``kv`` and ``batch``.
        """
        own = {"query": self.query, "kv": self.kv, "batch": self.batch, "options": self.options, "fresh": self.fresh}
        for name in ("kv", "batch"):
            fields = vars(own[name])
            own[name] = replace(own[name], **{field: changes.pop(field) for field in list(changes) if field in fields})
        return {**own, **changes}

    def attend_lse(self, backend: str, **changes) -> tuple[Tensor, Tensor]:
        """The output and its log-sum-exp."""
        arguments = self.arguments(**changes)
        lse = torch.empty(arguments["query"].shape[:2], dtype=torch.float32, device=self.pages.device)
        return ops.attend(**arguments, lse=lse, backend=backend), lse

    def positions(self, sequence: int) -> Tensor:
        """Slots of a sequence's tokens: int64 [length]."""
        position = torch.arange(self.case.lens[sequence], device=self.pages.device)
        tokens = self.layout.block_size
        return self.batch.block_table[sequence, position // tokens].long() * tokens + position % tokens

    def poison(self, slots: Tensor, byte: int) -> None:
        """Writes ``byte`` to every byte of the tokens at ``slots`` (int64 [tokens]), in all heads."""
        size = self.layout.block_size
        offsets = page_tables(self.layout, self.pages.device).byte_offsets[slots % size]
        self.pages.transpose(0, 1)[:, (slots // size)[:, None], offsets] = byte


def build(case: Case, device: torch.device, seed: int = 0) -> Built:
    """Builds a case. The reference stores every token, to blocks in random order; all other bytes are poisoned."""
    g = torch.Generator().manual_seed(seed)
    spec, dtype = case.spec, DTYPES[case.dtype]
    layout, codec = PageLayout(spec, case.page), Codec(spec, device)
    need = [layout.blocks_for(n) for n in case.lens]
    order = torch.randperm(sum(need) + 3, generator=g).tolist()
    blocks = [[order.pop() for _ in range(n)] for n in need]
    whole = AttentionBatch.build(blocks, case.lens, case.lens, case.page, device)
    starts = torch.tensor([0, *case.queries]).cumsum(0).to(torch.int32)
    batch = replace(
        whole, cu_seqlens_q=starts.to(device), max_query_len=max(case.queries), min_query_len=min(case.queries)
    )
    if case.slack:
        wider = torch.nn.functional.pad(batch.block_table, (0, 3))
        largest = wider.shape[1] * case.page
        most = sum(case.queries) + case.padding
        batch = replace(batch, block_table=wider, max_query_len=most, max_seq_len=largest, min_query_len=0)
    pages = torch.full(
        (sum(need) + 3, case.num_kv_heads, layout.page_bytes), POISON_BYTE, dtype=torch.uint8, device=device
    )
    total = sum(case.lens)
    raw = {name: fmt.raw_dtype for name, fmt in (("key", spec.key), ("value", spec.value)) if fmt.kind == Kind.RAW}

    def random(rows: int, heads: int, dim: int, norm: float, side: str | None = None) -> Tensor:
        x = torch.randn(rows, heads, dim, generator=g) * norm
        x = x * torch.exp(0.3 * torch.randn(rows, heads, 1, generator=g))  # so that scales differ between tokens
        return x.to(device).to(getattr(torch, raw[side]) if side in raw else dtype)

    key = random(total, case.num_kv_heads, spec.key_dim, case.key_norm, "key")
    value = random(total, case.num_kv_heads, spec.value_dim, case.value_norm, "value")

    def directions(norm: float, seed: int) -> Tensor:
        x = torch.randn(case.num_kv_heads, spec.key_dim, generator=torch.Generator().manual_seed(seed))
        return (x * norm / x.norm(dim=-1, keepdim=True)).to(device)

    rise = directions(1.0, seed + 2)
    if case.rising:
        ramp = torch.cat([torch.linspace(0, case.rising, n) for n in case.lens]).to(device)
        key = (key + ramp[:, None, None] * rise).to(key.dtype)
    offset = None
    if case.offset_norm:
        offset = directions(case.offset_norm, seed + 1).to(torch.bfloat16)
        key = subtract_offset(add_offset(key, offset), offset)
    if total:
        ops.store_kv(key, value, PackedKV(pages, codec, layout), whole.slot_mapping, backend="reference")
    rows, heads = sum(case.queries) + case.padding, case.num_kv_heads * case.group
    query = random(rows, heads, spec.key_dim, case.query_norm)
    if case.peaked:
        first = base = 0
        for length, count in zip(case.lens, case.queries, strict=True):
            towering = key[base + length - count].repeat_interleave(case.group, 0)  # a key that every query sees
            query[first : first + count] = (towering.float() * case.query_norm).to(dtype)
            first, base = first + count, base + length
    if case.rising:
        query = (query + math.sqrt(spec.key_dim) * rise.repeat_interleave(case.group, 0)).to(query.dtype)
    query[rows - case.padding :] = torch.nan  # engines do not clear padding rows
    if case.strided:
        wide = torch.empty(rows, heads + 2, spec.key_dim + 16, dtype=dtype, device=device)
        wide[:, 1:-1, : spec.key_dim] = query
        query = wide[:, 1:-1, : spec.key_dim]
    fresh = None
    if case.fresh:
        fresh = (
            random(rows, case.num_kv_heads, spec.key_dim, case.key_norm),
            random(rows, case.num_kv_heads, spec.value_dim, case.value_norm),
        )
        if offset is not None:
            fresh = add_offset(fresh[0], offset), fresh[1]
        for x in fresh:
            x[rows - case.padding :] = torch.nan
    sinks = torch.randn(heads, generator=g).to(device) if case.sinks else None
    return Built(case, codec, layout, batch, pages, query, fresh, sinks, offset)


def _rotation(tables: SideTables, dim: int, rotated: bool, device: torch.device) -> Tensor:
    """The rotation from the original space to the stored one, float64 [dim, dim]."""
    if rotated:
        return tables.hadamard / math.sqrt(block_size(dim))
    return torch.eye(dim, dtype=torch.float64, device=device)


def exact(built: Built) -> tuple[Tensor, Tensor]:
    """Exact attention: output float64 [rows, heads, value_dim], log-sum-exp [rows, heads]; NaN in padding rows."""
    case, codec, device = built.case, built.codec, built.pages.device
    spec, heads = case.spec, case.num_kv_heads * case.group
    rotations = (
        _rotation(codec.key_tables, spec.key_dim, spec.key.rotated, device),
        _rotation(codec.value_tables, spec.value_dim, spec.value.rotated, device),
    )
    rows = built.query.shape[0]
    out = torch.full((rows, heads, spec.value_dim), torch.nan, dtype=torch.float64, device=device)
    lse = torch.full((rows, heads), torch.nan, dtype=torch.float64, device=device)
    scale = case.scale if case.scale is not None else 1 / math.sqrt(spec.key_dim)
    first = 0
    for sequence, (length, count) in enumerate(zip(case.lens, case.queries, strict=True)):
        encoded = take_tokens(built.layout, built.pages, built.positions(sequence))
        key = codec.decode_key(encoded[0], rotated=True).double() @ rotations[0].T
        value = codec.decode_value(encoded[1], rotated=True).double() @ rotations[1].T
        if built.key_offset is not None:
            key = key + built.key_offset.double()
        if built.fresh is not None and count:
            key[length - count :] = built.fresh[0][first : first + count].double()
            value[length - count :] = built.fresh[1][first : first + count].double()
        position = torch.arange(length, device=device)
        for i in range(count):
            row, at = first + i, length - count + i
            if length == 0:
                out[row] = 0
                lse[row] = -torch.inf if built.sinks is None else built.sinks.double()
                continue
            query = built.query[row].double().unflatten(0, (case.num_kv_heads, case.group))
            score = torch.einsum("hgd,khd->hgk", query, key).flatten(0, 1) * scale  # [heads, keys]
            if case.softcap:
                score = case.softcap * torch.tanh(score / case.softcap)
            hidden = torch.zeros(length, dtype=torch.bool, device=device)
            if case.causal:
                hidden |= position > at
            if case.window is not None:
                hidden |= position <= at - case.window
            score = score.masked_fill(hidden, -torch.inf)
            logits = score if built.sinks is None else torch.cat([score, built.sinks.double()[:, None]], 1)
            lse[row] = logits.logsumexp(-1)
            weight = torch.exp(score - lse[row, :, None]).unflatten(0, (case.num_kv_heads, case.group))
            out[row] = torch.einsum("hgk,khd->hgd", weight, value).flatten(0, 1)
        first += count
    return out, lse


def variants(base: Case, **axes: list) -> list[Case]:
    """``base`` with one field changed at a time, over all values of that field."""
    return [replace(base, **{name: value}) for name, values in axes.items() for value in values]
