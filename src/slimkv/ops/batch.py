"""Arguments of operations: packed tokens, the sequences of a step, and the rounding of keys."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from slimkv.arguments import typed, typed_fields
from slimkv.codec import Codec
from slimkv.errors import InputError
from slimkv.spec import PageLayout


@typed_fields()
@dataclass(frozen=True, eq=False)
class PackedKV:
    """Packed keys and values of one layer.

    Attributes:
        pages: uint8 [blocks, num_kv_heads, page_bytes], last axis contiguous.
        codec: encodes and decodes the vectors; its spec equals that of the layout.
        layout: the place of each byte in a page.
        key_offset: bfloat16 [num_kv_heads, key_dim], contiguous: subtracted from keys before they are encoded (see
            ``slimkv.codec.key_offset``). Every reader of the pages must pass the same offset.
    """

    pages: Tensor
    codec: Codec
    layout: PageLayout
    key_offset: Tensor | None = None


@typed_fields()
@dataclass(frozen=True, eq=False)
class Rounding:
    """Query-aware rounding of Lloyd-Max keys: it moves errors into directions that queries ignore.

    Attributes:
        matrices: int8 [num_kv_heads, key_dim, key_dim] or [matrices, num_kv_heads, key_dim, key_dim], contiguous, from
            ``slimkv.codec.query_aware.query_aware_matrix``.
        index: int32 [tokens]: the matrix of each token; required if there are several. Values are clamped to the valid
            range.
    """

    matrices: Tensor
    index: Tensor | None = None


@typed_fields()
@dataclass(frozen=True, eq=False)
class AttentionBatch:
    """The tables of one step: device tensors for the kernels, and host-side bounds, so that nothing is read back.

    Attributes:
        block_table: int32 [sequences, max_blocks].
        seq_lens: int32 [sequences], including the new tokens; 0 gives zero output.
        cu_seqlens_q: int32 [sequences + 1], ascending from 0 to the number of queries (rows beyond are not written).
        max_query_len: an upper bound on the number of queries of a sequence.
        max_seq_len: an upper bound on ``seq_lens``.
        min_query_len: a lower bound on the number of queries (0: unknown). If it exceeds ``MAX_DECODE_QUERIES``, the
            decode kernel is skipped, and sequences with fewer queries get no output.
        slot_mapping: int64 [new tokens]: the slots of the new tokens; attention does not use it.
    """

    block_table: Tensor
    seq_lens: Tensor
    cu_seqlens_q: Tensor
    max_query_len: int
    max_seq_len: int
    min_query_len: int = 0
    slot_mapping: Tensor | None = None

    @classmethod
    @typed
    def build(
        cls,
        blocks: Sequence[Sequence[int]],
        seq_lens: Sequence[int],
        query_lens: Sequence[int],
        block_size: int,
        device: torch.device | str,
    ) -> AttentionBatch:
        """Builds the tables from host-side lists: the blocks, length and number of new tokens of each sequence."""
        if not len(blocks) == len(seq_lens) == len(query_lens):
            raise InputError(
                f"{len(blocks)} block lists, {len(seq_lens)} lengths and {len(query_lens)} query lengths do not match: "
                "blocks, seq_lens and query_lens have one entry per sequence"
            )
        for i, (owned, length, new) in enumerate(zip(blocks, seq_lens, query_lens, strict=True)):
            if not 0 <= new <= length or length > len(owned) * block_size:
                raise InputError(
                    f"sequence {i}: {new} new tokens of {length} do not fit {len(owned)} blocks of {block_size}"
                )
        width = max((len(b) for b in blocks), default=0)
        table = torch.tensor([list(b) + [0] * (width - len(b)) for b in blocks], dtype=torch.int32).reshape(
            len(blocks), width
        )
        slots = [
            blocks[i][p // block_size] * block_size + p % block_size
            for i in range(len(blocks))
            for p in range(seq_lens[i] - query_lens[i], seq_lens[i])
        ]
        starts = torch.tensor([0, *query_lens]).cumsum(0).to(torch.int32)
        return cls(
            block_table=table.to(device),
            seq_lens=torch.tensor(list(seq_lens), dtype=torch.int32).to(device),
            cu_seqlens_q=starts.to(device),
            slot_mapping=torch.tensor(slots, dtype=torch.int64).to(device),
            max_query_len=max(query_lens, default=0),
            max_seq_len=max(seq_lens, default=0),
            min_query_len=min(query_lens, default=0),
        )
