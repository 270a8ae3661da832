"""``AttentionBatch``: which queries belong to which sequences, and where their tokens live."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from slimkv.arguments import typed
from slimkv.errors import InputError


@dataclass(frozen=True)
class AttentionBatch:
    """The tables of one step. Device tensors for the kernels, and host-side bounds so that nothing is read back."""

    block_table: Tensor  # int32 [sequences, max_blocks]
    seq_lens: Tensor  # int32 [sequences], the new tokens included
    cu_seqlens_q: Tensor  # int32 [sequences + 1]
    slot_mapping: Tensor  # int64 [new tokens]
    max_query_len: int
    max_seq_len: int
    min_query_len: int = 0  # 0: not known; like the two above it goes with cu_seqlens_q

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
        """From host-side lists: each sequence's blocks, its length with the new tokens, and how many tokens are new."""
        if not len(blocks) == len(seq_lens) == len(query_lens):
            raise InputError(
                f"{len(blocks)} block lists, {len(seq_lens)} lengths and {len(query_lens)} query lengths do not match: "
                "blocks, seq_lens and query_lens have one entry for each sequence"
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
