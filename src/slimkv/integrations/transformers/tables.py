"""Slots, block tables and lengths of a batch. One ``SequenceTables`` serves all layers that store the same tokens.

Block ``j`` of sequence ``b`` is block ``(j mod rows) * batch + b`` of the pool: there is no allocator, growing appends
rows, and reordering the batch is one ``index_select``. Layers with a window reuse their rows as a ring.

Left padding takes no slot: a sequence's first real token has position 0. The padding is known only when attention runs,
after the first layer has stored its tokens; these tokens are then moved, byte for byte.

The tables of a step are computed on the device from host-side numbers, without copies in either direction. The tables
of single-token steps are built for many steps at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from slimkv.errors import InputError
from slimkv.ops import AttentionBatch

if TYPE_CHECKING:
    from slimkv.integrations.transformers.layers import PackedLayer

AHEAD = 64  # single-token steps per batch of tables


@dataclass(frozen=True)
class Step:
    """The tables of one forward pass of ``new`` tokens."""

    batch: AttentionBatch
    tokens: int  # positions after the step, padding included
    new: int
    query_rows: Tensor | None  # int64: rows of [batch * new] that are real tokens; None: all


def lasting() -> Any:
    """A context for creating tensors that are written in later calls and so must not be inference tensors."""
    return torch.inference_mode(False)


class TableSet:
    """The tables of a cache: one object for all layers that store the same tokens."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.ladder: Any = None  # the ``ladder.Ladder`` of layers in tiers
        self._tables: dict[tuple[torch.device, int | None, int | None], SequenceTables] = {}

    def get(self, batch: int, device: torch.device, window: int | None, tier: int | None = None) -> SequenceTables:
        """The tables for layers with ``window``, or for one tier of layers that have several."""
        key = (device, window, tier)
        if key not in self._tables:
            self._tables[key] = SequenceTables(batch, self.block_size, device, window, exact=tier is not None)
        found = self._tables[key]
        if found.batch != batch:
            raise InputError(f"layers of one cache were given batches of {found.batch} and {batch} sequences")
        return found

    def __iter__(self) -> Iterator[SequenceTables]:
        return iter(self._tables.values())

    def clear(self) -> None:
        """Clears the tables."""
        self._tables.clear()
        if self.ladder is not None:
            self.ladder.clear()


class SequenceTables:
    """Slots, block table and lengths of ``batch`` sequences; a window keeps only the last tokens.

    ``exact``: allocates no spare blocks, and members resize their pages themselves.
    """

    def __init__(
        self, batch: int, block_size: int, device: torch.device, window: int | None = None, exact: bool = False
    ) -> None:
        self.batch = batch
        self.block_size = block_size
        self.device = device
        self.window = window
        self.exact = exact
        self.record_past = False
        self.tokens = 0
        self.rows = 0
        self.kept_from = 0  # earlier positions may be overwritten
        self.pads = [0] * batch
        self._pad = torch.zeros(batch, dtype=torch.int64, device=device)
        self._members: list[PackedLayer] = []
        self._step: Step | None = None
        # ((rows, first position of each sequence) for which the steps are valid, position of the first step, steps)
        self._ahead: tuple[tuple[int, tuple[int, ...]], int, list[Step]] | None = None
        self._starts: tuple[int, Tensor] | None = None  # ``cu_seqlens_q`` of the last number of queries
        self._prefix: tuple[tuple[int, int, int], Step] | None = None  # (tokens, tokens of the prefix, rows), step

    @property
    def blocks(self) -> int:
        """The number of blocks in each member's pool."""
        return self.rows * self.batch

    def join(self, member: PackedLayer) -> None:
        """Registers a layer whose pool has ``blocks`` blocks."""
        self._members.append(member)

    def advance(self, seen: int, new: int, needs_past: bool) -> Step:
        """The tables for ``new`` tokens of a layer that has ``seen``; the first layer to call advances the tables.
        Without ``needs_past``, attention reads the new tokens directly, and a window need not hold all of them.
        """
        if seen + new == self.tokens and self._step is not None and self._step.new == new:
            return self._step
        if seen != self.tokens or any(0 < x.tokens < seen for x in self._members):
            raise InputError(
                f"a layer with {seen} tokens received {new} more, but not all layers hold {self.tokens}; every layer "
                "of a cache must take part in every forward pass, so a cache cannot serve two models in turn"
            )
        if self.window is not None and not self.record_past:
            upto = self.tokens if needs_past else self.tokens + new
            self.kept_from = max(self.kept_from, upto - self.window + 1)
        self._reserve(self.tokens + new)
        self.tokens += new
        single = new == 1 and max(self.pads) < self.tokens
        self._step = self._next() if single else self._build(new)
        return self._step

    def _reserve(self, tokens: int) -> None:
        """Allocates blocks for positions ``kept_from .. tokens``."""
        size = self.block_size
        if self.window is None:
            needed = -(-max(tokens - min(self.pads), 0) // size)
            if self.exact:
                self.rows = needed
            elif needed > self.rows:
                self.rows = max(needed, self.rows + self.rows // 32)  # few copies, and at most 3% unused
                for member in self._members:
                    member.grow(self.blocks)
            return
        needed = -(-(tokens - self.kept_from + size - 1) // size)
        if needed > self.rows or self.rows > needed + max(2, needed // 8):
            source, target = [], []
            for b, pad in enumerate(self.pads):
                first, end = self._base(pad) // size, -(-max(self.tokens - pad, 0) // size)
                source += [j % self.rows * self.batch + b for j in range(first, end)]
                target += [j % needed * self.batch + b for j in range(first, end)]
            self.rows = needed
            ids = torch.tensor([source, target], dtype=torch.int64, device=self.device)
            for member in self._members:
                member.relocate(ids[0], ids[1], self.blocks)

    def _base(self, pad: int) -> int:
        return max(self.kept_from - pad, 0) // self.block_size * self.block_size

    def _slots(self, positions: Tensor, pad: Tensor) -> Tensor:
        """Positions [n] (padding included) -> slots int64 [batch, n]; -1 where there is padding or nothing is kept."""
        real = positions[None, :] - pad[:, None]
        row = (real // self.block_size) % max(self.rows, 1)
        block = row * self.batch + torch.arange(self.batch, device=self.device)[:, None]
        slots = block * self.block_size + real % self.block_size
        return torch.where((real >= 0) & (positions >= self.kept_from)[None, :], slots, -1)

    def slots(self, first: int, count: int) -> Tensor:
        """Slots of positions ``first .. first + count``: int64 [batch, count], -1 for padding."""
        return self._slots(torch.arange(first, first + count, device=self.device), self._pad)

    def _block_table(self, base: Tensor) -> Tensor:
        """int32 [batch, rows] from block ``base`` [batch] on."""
        table = torch.arange(self.rows, device=self.device)[None, :] + base[:, None]
        table = table % max(self.rows, 1) * self.batch + torch.arange(self.batch, device=self.device)[:, None]
        return table.to(torch.int32)

    def _first_blocks(self) -> Tensor:
        """int64 [batch]: the block where each sequence begins."""
        return (self.kept_from - self._pad).clamp(min=0) // self.block_size

    def cu_seqlens_q(self, new: int) -> Tensor:
        """int32 [batch + 1] for ``new`` queries of every sequence."""
        if self._starts is None or self._starts[0] != new:
            self._starts = new, torch.arange(self.batch + 1, dtype=torch.int32, device=self.device) * new
        return self._starts[1]

    def _longest(self) -> int:
        return max(max(self.tokens - pad, 0) - self._base(pad) for pad in set(self.pads))

    def _next(self) -> Step:
        """The same as ``_build(1)`` if every sequence gets a real token, from tables built ahead."""
        past = self.tokens - 1
        valid = self.rows, tuple(self._base(pad) for pad in self.pads) if self.kept_from else ()
        if self._ahead is None or self._ahead[0] != valid or not 0 <= past - self._ahead[1] < AHEAD:
            self._ahead = valid, past, self._build_ahead(past)
        return self._ahead[2][past - self._ahead[1]]

    def _build_ahead(self, past: int) -> list[Step]:
        """AHEAD steps of one token each; the first adds position ``past``."""
        base = self._first_blocks()
        now = torch.arange(past + 1, past + 1 + AHEAD, device=self.device)
        lengths = (now[:, None] - (self._pad + base * self.block_size)[None, :]).to(torch.int32)
        slots = self.slots(past, AHEAD).t().contiguous()
        table, starts, longest = self._block_table(base), self.cu_seqlens_q(1), self._longest()
        return [
            Step(AttentionBatch(table, seq_lens, starts, 1, longest + i, slot_mapping=mapping), past + 1 + i, 1, None)
            for i, (seq_lens, mapping) in enumerate(zip(lengths.unbind(), slots.unbind(), strict=True))
        ]

    def _build(self, new: int) -> Step:
        size, past = self.block_size, self.tokens - new
        base = self._first_blocks()
        lengths = (self.tokens - self._pad).clamp(min=0) - base * size
        counts = [min(new, max(self.tokens - pad, 0)) for pad in self.pads] if max(self.pads) > past else None
        rows = None
        if counts is None:
            starts = self.cu_seqlens_q(new)
        else:
            starts = torch.tensor([0, *counts]).cumsum(0).to(torch.int32).to(self.device)
            real = [b * new + i for b, n in enumerate(counts) for i in range(new - n, new)]
            rows = torch.tensor(real, dtype=torch.int64, device=self.device)
        batch = AttentionBatch(
            block_table=self._block_table(base),
            seq_lens=lengths.to(torch.int32),
            cu_seqlens_q=starts,
            slot_mapping=self.slots(past, new).reshape(-1),
            max_query_len=new if counts is None else max(counts),
            max_seq_len=self._longest(),
            min_query_len=new if counts is None else min(counts),
        )
        return Step(batch, self.tokens, new, rows)

    def current(self) -> Step:
        """The current tables, for reading."""
        return self._build(0)

    def prefix(self, tokens: int) -> Step:
        """The tables as if only the first ``tokens`` positions existed (no window, no padding)."""
        key = (self.tokens, tokens, self.rows)
        if self._prefix is None or self._prefix[0] != key:
            held, self.tokens = self.tokens, tokens
            self._prefix = key, replace(self._build(0), tokens=held)
            self.tokens = held
        return self._prefix[1]

    def set_padding(self, pads: list[int]) -> Step:
        """The step with ``pads[b]`` leading positions of sequence b known to be padding."""
        assert self._step is not None
        if pads == self.pads:
            return self._step
        if len(pads) != self.batch:
            raise InputError(f"the attention mask has {len(pads)} rows, the cache {self.batch} sequences")
        for b, (old, new) in enumerate(zip(self.pads, pads, strict=True)):
            if new < old:
                raise InputError(
                    f"sequence {b} had {old} tokens of left padding, which were dropped, and now has {new}: "
                    "the attention mask must keep hiding the same positions"
                )
        pad = torch.tensor(pads, dtype=torch.int64, device=self.device)
        held = torch.arange(self.kept_from, self.tokens, device=self.device)
        source, target = self._slots(held, self._pad), self._slots(held, pad)
        kept = (target >= 0) & (source >= 0) & (source != target)
        for member in self._members:
            member.pool.move_tokens(source[kept], target[kept])
        self.pads, self._pad = list(pads), pad
        self._ahead = self._prefix = None
        self._step = self._build(self._step.new)
        return self._step

    def crop(self, tokens: int) -> None:
        """Removes the last ``tokens`` positions."""
        self.tokens = max(self.tokens - tokens, 0)
        if self.window is not None:
            self.kept_from = min(max(self.kept_from, self.tokens - self.window + 1), self.tokens)
        self._step = None

    def drop(self, tokens: int) -> None:
        """Forgets the first ``tokens`` positions: whole blocks, or all there are (no window, no padding)."""
        self.tokens -= tokens
        self._reserve(self.tokens)
        self._step = self._ahead = self._prefix = None

    def select(self, index: Tensor) -> None:
        """Sequence ``index[i]`` becomes sequence i; the batch becomes ``len(index)``."""
        index = index.to(self.device)
        chosen = (torch.arange(self.rows, device=self.device)[:, None] * self.batch + index).flatten()
        for member in self._members:
            member.relocate(chosen, torch.arange(len(chosen), device=self.device), len(chosen))
        self.pads = [self.pads[i] for i in index.tolist()] if any(self.pads) else [0] * len(index)
        self._pad = self._pad[index]
        self.batch = len(index)
        self._step = self._ahead = self._prefix = self._starts = None
