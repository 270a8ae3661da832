"""Step metadata, shared by all layers: block tables from SGLang's slot table, lengths, and bounds on the host.

Building it takes no device-to-host copy and no loop over requests. SGLang orders decode requests after prefill
requests. Attention on such a batch takes two calls, because split-KV needs the decode requests in one call.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from slimkv.calibration.positions import matrix_index
from slimkv.errors import UnsupportedError
from slimkv.ops import AttentionBatch


@dataclass(frozen=True)
class Part:
    """Consecutive requests that share one attention call."""

    rows: slice  # within the step's queries
    batch: AttentionBatch
    window_batch: AttentionBatch | None  # the same, with blocks of the pool of sliding-window layers
    prompt: bool | None = None  # see ``AttendOptions``; None unless deterministic


@dataclass
class Step:
    """One forward pass."""

    block_table: Tensor  # int32 [requests, blocks]
    window_table: Tensor | None  # the same, in the pool of sliding-window layers
    seq_lens: Tensor  # int32 [requests], the new tokens included
    parts: tuple[Part, ...]
    window_slots: Tensor | None = None  # int64 [tokens], where sliding-window layers store
    matrix_index: Tensor | None = None  # int32 [tokens], the position range of each token, if a calibration has ranges

    @property
    def num_queries(self) -> int:
        """The number of query rows that belong to a request."""
        return self.parts[-1].rows.stop if self.parts else 0


@dataclass
class BlockTables:
    """Derives block tables from SGLang's slots.

    ``req_to_token``: int32 [requests, positions], the slot of each token; tokens of a page have consecutive slots.
    """

    req_to_token: Tensor
    page_size: int
    window_pool: Any = None  # SGLang's pool with sliding-window layers, or None
    position_edges: tuple[int, ...] | None = None  # ends of a calibration's ranges
    deterministic: bool = False

    @property
    def width(self) -> int:
        """Blocks of the longest possible sequence."""
        return -(-self.req_to_token.shape[1] // self.page_size)

    def fill(self, requests: Tensor, table: Tensor, window_table: Tensor | None) -> None:
        """Writes the blocks of ``requests`` to the tables [requests, blocks]; graphs may capture it. Entries beyond the
        end of a sequence are stale or zero: valid blocks that are never read.
        """
        first_slots = self.req_to_token[:, : table.shape[1] * self.page_size : self.page_size]
        slots = first_slots.index_select(0, requests).clamp_(min=0)
        if window_table is not None:
            mapping = self.window_pool.full_to_swa_index_mapping
            window_slots = mapping[slots.clamp(max=mapping.numel() - 1).long()].clamp_(min=0)
            window_table.copy_(window_slots // self.page_size)
        table.copy_(slots // self.page_size)

    def write_slots(self, out_cache_loc: Tensor) -> Tensor | None:
        """The slots of ``out_cache_loc``'s tokens in the sliding-window pool; None without one."""
        return None if self.window_pool is None else self.window_pool.translate_loc_from_full_to_swa(out_cache_loc)

    def matrix_index(self, positions: Tensor | None) -> Tensor | None:
        """The position range of each of ``positions``, int64 [tokens] -> int32 [tokens]; None without a calibration."""
        if self.position_edges is None or positions is None:
            return None
        return matrix_index(positions, self.position_edges)


def eager_step(batch: Any, tables: BlockTables) -> Step:
    """The step of a batch outside a graph."""
    count, device = batch.batch_size, batch.seq_lens.device
    seq_lens, prompt = batch.seq_lens[:count].to(torch.int32), False
    if batch.forward_mode.is_decode_or_idle():
        lengths, longest = [1] * count, _longest(batch, tables)
    elif batch.forward_mode.is_target_verify():
        each = verified_tokens(batch)
        seq_lens, lengths, longest = seq_lens + each, [each] * count, _longest(batch, tables, each)
    else:
        lengths, longest, prompt = list(batch.extend_seq_lens_cpu), _longest(batch, tables), True
    blocks = min(-(-longest // tables.page_size), tables.width)
    table = torch.zeros(count, blocks, dtype=torch.int32, device=device)
    window_table = torch.zeros_like(table) if tables.window_pool is not None else None
    tables.fill(batch.req_pool_indices[:count], table, window_table)
    slots = tables.write_slots(batch.out_cache_loc) if batch.out_cache_loc is not None else None
    bound, kind = min(longest, blocks * tables.page_size), prompt if tables.deterministic else None
    parts = _parts(lengths, table, window_table, seq_lens, bound, kind)
    return Step(table, window_table, seq_lens, parts, slots, tables.matrix_index(batch.positions))


def verified_tokens(batch: Any) -> int:
    """Queries per request in a batch that verifies drafts."""
    spec = batch.spec_info
    if getattr(spec, "ragged_verify_layout", None) is not None:
        raise UnsupportedError("slimkv verifies the same number of tokens per request: unset SGLANG_RAGGED_VERIFY_MODE")
    tokens = batch.positions.numel() if batch.input_ids is None else batch.input_ids.shape[0]
    return tokens // batch.batch_size


def _longest(batch: Any, tables: BlockTables, more: int = 0) -> int:
    """A host-side upper bound on the sequence lengths."""
    if batch.seq_lens_cpu is None or batch.seq_lens_cpu.numel() == 0:
        return tables.width * tables.page_size
    return int(batch.seq_lens_cpu.max()) + more


def _parts(
    lengths: list[int], table: Tensor, window_table: Tensor | None, seq_lens: Tensor, longest: int, prompt: bool | None
) -> tuple[Part, ...]:
    """One part, or two if single-query requests follow longer ones and ``prompt`` is None."""
    count = len(lengths)
    prefills = count
    while prefills and lengths[prefills - 1] == 1 and prompt is None:
        prefills -= 1
    parts, first = [], 0
    for requests in (slice(0, prefills), slice(prefills, count)):
        own = lengths[requests]
        if not own:
            continue
        rows = slice(first, first + sum(own))
        batch = AttentionBatch(
            table[requests], seq_lens[requests], starts_of(own, table.device), max(own), longest, min(own)
        )
        parts.append(_part(rows, batch, None if window_table is None else window_table[requests], prompt))
        first = rows.stop
    return tuple(parts)


def starts_of(lengths: list[int], device: torch.device) -> Tensor:
    """Where the tokens of each request begin, and where the last ones end: int32 [requests + 1]."""
    counted = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    return counted.to(device, non_blocking=True)


def _part(rows: slice, batch: AttentionBatch, window_table: Tensor | None, prompt: bool | None) -> Part:
    return Part(rows, batch, None if window_table is None else replace(batch, block_table=window_table), prompt)


class GraphTables:
    """Tables at fixed addresses for steps that are captured in a CUDA graph and replayed."""

    def __init__(self, max_requests: int, max_tokens: int, tables: BlockTables, device: torch.device) -> None:
        self._tables = tables
        self._block_table = torch.zeros(max_requests, tables.width, dtype=torch.int32, device=device)
        self._window_table = torch.zeros_like(self._block_table) if tables.window_pool is not None else None
        self._seq_lens = torch.ones(max_requests, dtype=torch.int32, device=device)
        self._window_slots = self._matrix_index = None
        if tables.window_pool is not None:
            self._window_slots = torch.zeros(max_tokens, dtype=torch.int64, device=device)
        if tables.position_edges is not None:
            self._matrix_index = torch.zeros(max_tokens, dtype=torch.int32, device=device)
        self._steps: dict[tuple[int, int], Step] = {}

    def step(self, requests: int, queries: int) -> Step:
        """The step of ``requests`` requests with ``queries`` queries each; the same object at capture and replay."""
        key = (requests, queries)
        if key not in self._steps:
            device, tokens = self._seq_lens.device, requests * queries
            starts = torch.arange(0, tokens + 1, queries, dtype=torch.int32, device=device)
            table, window_table = self._block_table[:requests], _first(self._window_table, requests)
            longest, kind = self._tables.width * self._tables.page_size, False if self._tables.deterministic else None
            batch = AttentionBatch(table, self._seq_lens[:requests], starts, queries, longest)
            self._steps[key] = Step(
                table, window_table, batch.seq_lens, (_part(slice(0, tokens), batch, window_table, kind),),
                _first(self._window_slots, tokens), _first(self._matrix_index, tokens),
            )  # fmt: skip
        return self._steps[key]

    def fill(self, batch: Any, step: Step, more: int) -> None:
        """Updates ``step`` from the batch's device tensors; recorded in the graph.

        ``more``: tokens that the batch's lengths do not count yet.
        """
        count = step.seq_lens.shape[0]
        step.seq_lens.copy_(batch.seq_lens[:count])
        if more:
            step.seq_lens.add_(more)
        self._tables.fill(batch.req_pool_indices[:count], step.block_table, step.window_table)
        if step.window_slots is not None and batch.out_cache_loc is not None:
            slots = self._tables.write_slots(batch.out_cache_loc[: step.window_slots.shape[0]])
            assert slots is not None
            step.window_slots[: slots.shape[0]].copy_(slots)
        if step.matrix_index is not None:
            ranges = self._tables.matrix_index(batch.positions[: step.matrix_index.shape[0]])
            assert ranges is not None
            step.matrix_index[: ranges.shape[0]].copy_(ranges)


def _first(buffer: Tensor | None, count: int) -> Tensor | None:
    return None if buffer is None else buffer[:count]
