"""A custom engine on ``PagedPool``: pages of one layer, a changing set of sequences, ``store`` and ``attend``.

    python examples/own_engine.py

Two prompts of different lengths share a prefix block. They are prefilled together and decode a few steps. The output
is compared with torch's attention on the unquantised keys and values.
"""

import argparse

import torch
from torch.nn.functional import scaled_dot_product_attention

from slimkv import AttentionBatch, PagedPool

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--format", default="k4v4", help="how keys and values are stored")
parser.add_argument("--device", default="cpu")
parser.add_argument("--steps", type=int, default=4, help="decoding steps")
arguments = parser.parse_args()

HEADS, KV_HEADS, DIM, BLOCK = 8, 2, 128, 16
generator = torch.Generator().manual_seed(0)


def states(tokens: int, heads: int) -> torch.Tensor:
    """Random stand-ins for a model's projections: [tokens, heads, DIM]."""
    return torch.randn(tokens, heads, DIM, generator=generator).to(arguments.device)


class Sequence:
    """The blocks of one sequence, with its unquantised keys and values for the comparison."""

    def __init__(self, blocks: list[int], key: torch.Tensor, value: torch.Tensor) -> None:
        self.blocks, self.key, self.value = blocks, key, value


def step(pool: PagedPool, sequences: list[Sequence], new: list[tuple[torch.Tensor, torch.Tensor]]) -> float:
    """Stores the new tokens of every sequence and attends to them; returns the relative error of the output."""
    for sequence, (key, value) in zip(sequences, new, strict=True):
        sequence.key, sequence.value = torch.cat([sequence.key, key]), torch.cat([sequence.value, value])
        missing = -(-len(sequence.key) // BLOCK) - len(sequence.blocks)
        pool.make_writable(sequence.blocks, len(sequence.key) - len(key))  # copies a shared block before writing
        sequence.blocks += pool.allocator.allocate(max(missing, 0))
    lengths, counts = [len(s.key) for s in sequences], [len(key) for key, _ in new]
    batch = AttentionBatch.build([s.blocks for s in sequences], lengths, counts, BLOCK, arguments.device)
    pool.store(torch.cat([key for key, _ in new]), torch.cat([value for _, value in new]), batch.slot_mapping)
    query = states(sum(counts), HEADS)
    out = pool.attend(query, batch)

    errors, start = [], 0
    for sequence, count in zip(sequences, counts, strict=True):
        q = query[start : start + count].transpose(0, 1)
        k, v = (x.repeat_interleave(HEADS // KV_HEADS, 1).transpose(0, 1) for x in (sequence.key, sequence.value))
        visible = torch.ones(count, len(sequence.key), dtype=torch.bool).tril(len(sequence.key) - count)
        exact = scaled_dot_product_attention(q, k, v, attn_mask=visible.to(q.device)).transpose(0, 1)
        errors.append((out[start : start + count] - exact).norm() / exact.norm())
        start += count
    return float(torch.stack(errors).mean())


pool = PagedPool(arguments.format, 64, KV_HEADS, BLOCK, arguments.device, head_dim=DIM)
system = (states(BLOCK, KV_HEADS), states(BLOCK, KV_HEADS))  # a system prompt of one block, shared by both sequences
first = Sequence([], torch.empty(0, KV_HEADS, DIM), torch.empty(0, KV_HEADS, DIM))
print(f"system prompt: error {step(pool, [first], [system]):.3f}")
pool.allocator.share(first.blocks)
second = Sequence(list(first.blocks), *system)

prompts = [(states(n, KV_HEADS), states(n, KV_HEADS)) for n in (37, 5)]
print(f"prefill of 37 and 5 tokens: error {step(pool, [first, second], prompts):.3f}")
for _ in range(arguments.steps):
    error = step(pool, [first, second], [(states(1, KV_HEADS), states(1, KV_HEADS)) for _ in range(2)])
print(f"{arguments.steps} decoding steps: error {error:.3f} in the last")

tokens = len(first.key) + len(second.key)
used = pool.allocator.count - pool.allocator.free_blocks
print(f"{tokens} tokens in {used} blocks, one of them shared: {used * pool.layout.page_bytes * KV_HEADS:,} bytes")
for sequence in (first, second):
    pool.allocator.free(sequence.blocks)
print(f"{pool.allocator.free_blocks} of {pool.allocator.count} blocks free again")
