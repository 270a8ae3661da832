"""Block tables and lengths of SGLang's batches, without an engine. Tables for graphs must equal the eager ones."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("sglang")

from plans import PAGE, make_batch

from slimkv.errors import UnsupportedError
from slimkv.integrations.sglang.metadata import BlockTables, GraphTables, eager_step

pytestmark = pytest.mark.sglang

REQUESTS, POSITIONS = 6, 200
BLOCKS = -(-POSITIONS // PAGE)


class WindowPool:
    """Stands in for SGLang's pool of sliding-window layers: it maps slots to slots, with an extra entry for padding."""

    def __init__(self, slots: int) -> None:
        order = torch.randperm(slots // PAGE)
        self.full_to_swa_index_mapping = torch.cat(
            [(order[:, None] * PAGE + torch.arange(PAGE)).flatten(), torch.tensor([-1])]
        )

    def translate_loc_from_full_to_swa(self, slots):
        return self.full_to_swa_index_mapping[slots]


@pytest.fixture
def tables():
    """Every request owns some pages, in random order. Table entries beyond its length hold stale slots."""
    torch.manual_seed(0)
    pages = torch.randperm(REQUESTS * BLOCKS).view(REQUESTS, BLOCKS)
    slots = (pages[..., None] * PAGE + torch.arange(PAGE)).flatten(1)[:, :POSITIONS].int()
    return BlockTables(slots.contiguous(), PAGE, WindowPool(REQUESTS * BLOCKS * PAGE))


def slot_of(table: torch.Tensor, row: int, position: int) -> int:
    return int(table[row, position // PAGE]) * PAGE + position % PAGE


def assert_tables(tables, step, requests, lengths):
    for row, (request, length) in enumerate(zip(requests, lengths, strict=True)):
        assert int(step.seq_lens[row]) == length
        for position in range(length):
            slot = int(tables.req_to_token[request, position])
            assert slot_of(step.block_table, row, position) == slot
            assert slot_of(step.window_table, row, position) == int(tables.window_pool.full_to_swa_index_mapping[slot])


def test_prefill_and_decode_of_a_mixed_batch_are_two_parts(tables):
    new = [30, 7, 1, 1]
    rows = zip([4, 0, 3, 1], [90, 7, 55, 1], new, strict=True)
    slots = torch.cat([tables.req_to_token[r, n - k : n] for r, n, k in rows]).long()
    batch = make_batch("MIXED", [4, 0, 3, 1], [90, 7, 55, 1], new, slots)
    step = eager_step(batch, tables)
    assert_tables(tables, step, [4, 0, 3, 1], [90, 7, 55, 1])
    prefill, decode = step.parts
    assert (prefill.rows, decode.rows) == (slice(0, 37), slice(37, 39))
    for part, requests, most, least, starts in (
        (prefill, slice(0, 2), 30, 7, [0, 30, 37]),
        (decode, slice(2, 4), 1, 1, [0, 1, 2]),
    ):
        assert torch.equal(part.batch.block_table, step.block_table[requests])
        assert torch.equal(part.window_batch.block_table, step.window_table[requests])
        assert torch.equal(part.batch.seq_lens, step.seq_lens[requests])
        assert (part.batch.max_query_len, part.batch.min_query_len) == (most, least)
        assert part.batch.cu_seqlens_q.tolist() == part.window_batch.cu_seqlens_q.tolist() == starts
    assert step.num_queries == 39
    assert torch.equal(step.window_slots, tables.window_pool.full_to_swa_index_mapping[slots])


@pytest.mark.parametrize(("new", "parts"), [([5, 9], 1), ([1, 1], 1), ([1, 4], 1), ([4, 1], 2)])
def test_batches_of_one_kind_are_one_part(tables, new, parts):
    step = eager_step(make_batch("EXTEND", [1, 2], [40, 60], new, torch.zeros(sum(new), dtype=torch.int64)), tables)
    assert len(step.parts) == parts
    assert step.parts[0].batch.max_seq_len == 60


def test_verified_tokens_are_counted(tables):
    """SGLang's sequence lengths do not include the drafted tokens."""
    batch = make_batch("TARGET_VERIFY", [2, 5], [33, 80], [4, 4], torch.zeros(8, dtype=torch.int64))
    step = eager_step(batch, tables)
    assert_tables(tables, step, [2, 5], [37, 84])
    assert step.parts[0].batch.cu_seqlens_q.tolist() == [0, 4, 8]
    assert step.parts[0].batch.max_query_len == 4


@pytest.mark.parametrize(("mode", "queries"), [("DECODE", 1), ("TARGET_VERIFY", 3)])
def test_a_graphs_tables_are_the_eager_ones(tables, mode, queries):
    """Graph tables are created once and updated in place."""
    graph = GraphTables(4, 4 * queries, tables, torch.device("cpu"))
    step = graph.step(3, queries)
    addresses = [t.data_ptr() for t in (step.block_table, step.window_table, step.seq_lens, step.window_slots)]
    for requests, lengths in (([0, 1, 2], [10, 20, 30]), ([5, 3, 4], [100, 99, 1])):
        slots = torch.randint(0, 500, (3 * queries,))
        batch = make_batch(mode, requests, lengths, [queries] * 3, slots)
        more = 0 if mode == "DECODE" else queries
        graph.fill(batch, graph.step(3, queries), more)
        assert graph.step(3, queries) is step
        want = eager_step(batch, tables)
        assert_tables(tables, step, requests, [n + more for n in lengths])
        assert torch.equal(step.seq_lens, want.seq_lens)
        assert torch.equal(step.window_slots, want.window_slots)
        assert torch.equal(step.parts[0].batch.cu_seqlens_q, want.parts[0].batch.cu_seqlens_q)
    assert addresses == [t.data_ptr() for t in (step.block_table, step.window_table, step.seq_lens, step.window_slots)]
    assert step.parts[0].batch.max_seq_len >= POSITIONS


def test_graphs_of_other_sizes_share_the_tables(tables):
    graph = GraphTables(4, 12, tables, torch.device("cpu"))
    assert graph.step(2, 1).block_table.data_ptr() == graph.step(4, 3).block_table.data_ptr()


def test_ragged_verification_is_refused(tables):
    batch = make_batch("TARGET_VERIFY", [0, 1], [5, 6], [2, 2], torch.zeros(4, dtype=torch.int64))
    batch.spec_info = type("Spec", (), {"ragged_verify_layout": object()})()
    with pytest.raises(UnsupportedError, match="SGLANG_RAGGED_VERIFY_MODE"):
        eager_step(batch, tables)


def test_without_host_lengths_the_table_is_as_wide_as_it_can_be(tables):
    batch = make_batch("DECODE", [0, 1], [5, 6], [1, 1], torch.zeros(2, dtype=torch.int64))
    batch.seq_lens_cpu = None
    step = eager_step(batch, tables)
    assert step.block_table.shape == (2, BLOCKS)
    assert_tables(tables, step, [0, 1], [5, 6])
