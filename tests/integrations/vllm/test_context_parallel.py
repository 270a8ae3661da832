"""Decode context parallelism: ranks (here threads) that share the tokens give the result of a single cache."""

from __future__ import annotations

from dataclasses import replace
from threading import Barrier, Thread

import pytest
import torch

from slimkv import Codec, CodecSpec, PageLayout, ops
from slimkv.integrations.vllm.context_parallel import DCPConfig, attend_shards, shard_tables
from slimkv.ops import AttentionBatch, PackedKV

DIM, KV_HEADS, HEADS, BLOCK = 64, 1, 8, 16  # HEADS: query heads of all ranks, which share one KV head


class Threads:
    """Exchanges tensors between ranks at a barrier."""

    def __init__(self, ranks: int) -> None:
        self.barrier = Barrier(ranks, timeout=60)
        self.given: list[torch.Tensor] = [torch.empty(0)] * ranks

    def exchange(self, rank: int, tensor: torch.Tensor) -> list[torch.Tensor]:
        self.given[rank] = tensor
        self.barrier.wait()
        everyone = list(self.given)
        self.barrier.wait()
        return everyone


class Rank:
    """Stands in for vLLM's process group, as seen by one rank."""

    def __init__(self, threads: Threads, ranks: int, rank: int) -> None:
        self.threads, self.world_size, self.rank_in_group = threads, ranks, rank

    def all_gather(self, input_: torch.Tensor, dim: int) -> torch.Tensor:
        return torch.cat(self.threads.exchange(self.rank_in_group, input_), dim)

    def reduce_scatter(self, input_: torch.Tensor, dim: int) -> torch.Tensor:
        total = torch.stack(self.threads.exchange(self.rank_in_group, input_)).sum(0)
        return total.chunk(self.world_size, dim)[self.rank_in_group]


@pytest.mark.parametrize(("length", "ranks", "interleave"), [(0, 2, 1), (7, 2, 1), (13, 3, 4), (64, 4, 16), (65, 2, 8)])
def test_every_token_is_held_once(length, ranks, interleave):
    lengths = torch.tensor([length], dtype=torch.int32)
    held = [int(DCPConfig(ranks, r, interleave).held(lengths)) for r in range(ranks)]
    owner = torch.arange(length) // interleave % ranks
    assert held == [int((owner == r).sum()) for r in range(ranks)]
    assert max(held, default=0) <= DCPConfig(ranks, 0, interleave).most_held(length)


def fill(codec, layout, key, value, tokens):
    """Pages and block table [blocks] with the given tokens of one sequence, in order."""
    blocks = max(layout.blocks_for(len(tokens)), 1)
    pages = torch.zeros(blocks, KV_HEADS, layout.page_bytes, dtype=torch.uint8)
    ops.store_kv(key[tokens], value[tokens], PackedKV(pages, codec, layout), torch.arange(len(tokens)))
    return pages, torch.arange(blocks, dtype=torch.int32)


@pytest.mark.parametrize("norm", [0.0, 1000.0], ids=["plain", "centred"])
@pytest.mark.parametrize("raw", [False, True])
@pytest.mark.parametrize(("ranks", "interleave"), [(2, 1), (4, 8)])
@pytest.mark.parametrize("queries", [(1, 1, 1), (1, 70, 3)], ids=["decode", "mixed"])
def test_all_ranks_together_give_what_one_cache_gives(ranks, interleave, queries, raw, norm):
    torch.manual_seed(0)
    spec = CodecSpec.parse("k4v4", DIM)
    codec, layout = Codec(spec), PageLayout(spec, BLOCK)
    lens = (90, 70, 40)  # in the mixed case, the second request starts in this step
    options = ops.AttendOptions(softmax_scale=0.2, softcap=3.0)
    keys, values = ([torch.randn(n, KV_HEADS, DIM) for n in lens] for _ in range(2))
    constant = torch.nn.functional.normalize(torch.randn(KV_HEADS, DIM), dim=-1) * norm
    offset = constant.bfloat16() if norm else None
    constant = constant.bfloat16().float()
    starts = torch.tensor([0, *torch.tensor(queries).cumsum(0)], dtype=torch.int32)
    query = torch.randn(int(starts[-1]), HEADS, DIM)
    new = [torch.cat([x[n - q :] for x, n, q in zip(side, lens, queries, strict=True)]) for side in (keys, values)]

    def pool(rank=None):
        """A pool with all sequences, or a rank's part of them: pages, table [requests, blocks]."""
        pages, tables, count = [], [], 0
        for key, value, n in zip(keys, values, lens, strict=True):
            every = torch.arange(n)
            tokens = every if rank is None else every[every // interleave % ranks == rank]
            own, table = fill(codec, layout, key, value, tokens)  # keys without their constant part
            tables.append(torch.nn.functional.pad(table + count, (0, 8 - len(table))))
            pages.append(own)
            count += len(own)
        return torch.cat(pages), torch.stack(tables)

    pages, table = pool()
    seq_lens = torch.tensor(lens, dtype=torch.int32)
    batch = AttentionBatch(table, seq_lens, starts, max(queries), max(lens))
    kv, fresh = PackedKV(pages, codec, layout, offset), (new[0] + constant, new[1])
    want = ops.attend(query, kv, batch, options, fresh=fresh if raw else None)
    threads, results = Threads(ranks), {}

    def work(rank: int) -> None:
        sharing = DCPConfig(ranks, rank, interleave)
        tables = shard_tables(sharing, batch, len(query))
        mine = query.chunk(ranks, 1)[rank]
        out = torch.full_like(mine, torch.nan)
        held, held_table = pool(rank)
        attend_shards(
            mine, fresh, replace(kv, pages=held), replace(batch, block_table=held_table), tables,
            Rank(threads, ranks, rank), options=options, rounding=None, raw=raw, out=out, backend=None,
        )  # fmt: skip
        results[rank] = out

    workers = [Thread(target=work, args=(rank,)) for rank in range(ranks)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert len(results) == ranks, "a rank failed"
    got = torch.cat([results[rank] for rank in range(ranks)], 1)
    assert torch.allclose(got, want, rtol=1e-4, atol=1e-5)
