"""AttentionBatch: tables from host-side lists."""

from __future__ import annotations

import pytest
import torch

from slimkv.errors import InputError
from slimkv.ops import AttentionBatch


def test_tables():
    batch = AttentionBatch.build([[5, 2], [7], []], [20, 3, 0], [2, 3, 0], 16, "cpu")
    assert batch.block_table.tolist() == [[5, 2], [7, 0], [0, 0]]
    assert batch.seq_lens.tolist() == [20, 3, 0]
    assert batch.cu_seqlens_q.tolist() == [0, 2, 5, 5]
    assert batch.slot_mapping.tolist() == [2 * 16 + 2, 2 * 16 + 3, 7 * 16, 7 * 16 + 1, 7 * 16 + 2]
    assert (batch.max_query_len, batch.max_seq_len) == (3, 20)
    assert batch.block_table.dtype == batch.seq_lens.dtype == batch.cu_seqlens_q.dtype == torch.int32
    assert batch.slot_mapping.dtype == torch.int64


def test_no_sequences():
    batch = AttentionBatch.build([], [], [], 16, "cpu")
    assert batch.block_table.shape == (0, 0)
    assert batch.cu_seqlens_q.tolist() == [0]
    assert (batch.max_query_len, batch.min_query_len, batch.max_seq_len) == (0, 0, 0)


@pytest.mark.parametrize(
    ("blocks", "lens", "new", "message"),
    [
        ([[0]], [17], [1], "sequence 0: 1 new tokens of 17 do not fit 1 blocks of 16"),
        ([[0]], [3], [4], "sequence 0: 4 new tokens of 3"),
        ([[0], [1]], [3], [1], "2 block lists, 1 lengths and 1 query lengths do not match"),
    ],
)
def test_what_does_not_fit_is_named(blocks, lens, new, message):
    with pytest.raises(InputError, match=message):
        AttentionBatch.build(blocks, lens, new, 16, "cpu")
