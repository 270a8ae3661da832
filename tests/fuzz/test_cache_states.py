"""Any sequence of operations gives the same results with a packed cache and with transformers' own.

Pages are lossless here (``krawfp32vrawfp32``), so that results are equal bit for bit. Copies and unpickled caches take
part as well: an operation on one cache must not affect another.
"""

from __future__ import annotations

import copy
import io
import pickle

import pytest

pytest.importorskip("hypothesis")
pytest.importorskip("transformers")

import torch
from budget import fuzz
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test
from tiny import LOSSLESS, tiny
from transformers import DynamicCache

import slimkv

HEADS, DIM = 2, 32
MOST_TOKENS, MOST_SEQUENCES, MOST_CACHES = 150, 6, 3


def through_torch_save(x):
    buffer = io.BytesIO()
    torch.save(x, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


COPIES = [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x)), through_torch_save]


class Pair:
    """A packed cache and its stock twin."""

    def __init__(self, kind: str, block_size: int, recording: bool) -> None:
        config = tiny(kind).config
        self.cache = slimkv.SlimKVCache(config, LOSSLESS, block_size=block_size, fresh="codes")
        self.stock = DynamicCache(config=config)
        self.batch, self.tokens, self.since_crop = 0, 0, 0
        if recording:
            for one in (self.cache, self.stock):
                one.activate_past_recording()

    def twin(self, way) -> Pair:
        other = object.__new__(Pair)
        other.cache, other.stock = way(self.cache), copy.deepcopy(self.stock)
        other.batch, other.tokens, other.since_crop = self.batch, self.tokens, self.since_crop
        return other

    def each(self, change) -> None:
        change(self.cache)
        change(self.stock)

    def check(self) -> None:
        assert self.cache.get_seq_length() == self.stock.get_seq_length() == self.tokens
        for layer in range(len(self.cache.layers)):
            assert self.cache.get_mask_sizes(3, layer) == self.stock.get_mask_sizes(3, layer)


class Caches(RuleBasedStateMachine):
    """Up to three caches, copies of one another, each beside its stock twin."""

    @initialize(
        kind=st.sampled_from(["llama", "mistral", "gemma3", "llama4"]), block_size=st.sampled_from([16, 32]),
        recording=st.booleans(),
    )  # fmt: skip
    def start(self, kind, block_size, recording):
        self.kind, self.sliding = kind, kind != "llama"
        self.recording = recording and kind != "llama4"  # the stock cache cannot crop chunked layers
        self.pairs = [Pair(kind, block_size, self.recording)]
        self.numbers = torch.Generator().manual_seed(0)

    def pick(self, which) -> Pair:
        return self.pairs[which % len(self.pairs)]

    @rule(which=st.integers(0, 2), count=st.sampled_from([1, 1, 1, 2, 5, 16, 23, 24, 25, 40]), batch=st.integers(1, 3))
    def update(self, which, count, batch):
        pair = self.pick(which)
        if pair.tokens + count > MOST_TOKENS:
            return
        pair.batch = pair.batch or batch
        for index in range(len(pair.cache.layers)):
            key, value = (torch.randn(pair.batch, HEADS, count, DIM, generator=self.numbers) for _ in range(2))
            ours, theirs = (one.update(key, value, index) for one in (pair.cache, pair.stock))
            for a, b in zip(ours, theirs, strict=True):
                assert a.shape == b.shape
                assert torch.equal(a + 0, b)  # any operation decodes a lazy tensor
        pair.tokens += count
        pair.since_crop += count
        pair.check()

    @rule(which=st.integers(0, 2), share=st.floats(0, 1))
    def crop(self, which, share):
        pair = self.pick(which)
        if not pair.tokens or (self.sliding and not self.recording):
            return
        remove = int(share * (pair.since_crop if self.sliding else pair.tokens))
        pair.each(lambda one: one.crop(-remove))
        pair.tokens -= remove
        pair.since_crop = 0
        pair.check()

    @precondition(lambda self: any(pair.batch for pair in self.pairs))
    @rule(which=st.integers(0, 2), data=st.data())
    def reorder(self, which, data):
        pair = self.pick(which)
        if pair.batch:
            index = data.draw(st.lists(st.integers(0, pair.batch - 1), min_size=pair.batch, max_size=pair.batch))
            pair.each(lambda one: one.reorder_cache(torch.tensor(index)))
            pair.check()

    @rule(which=st.integers(0, 2), repeats=st.integers(1, 3))
    def repeat(self, which, repeats):
        pair = self.pick(which)
        if pair.tokens and pair.batch * repeats <= MOST_SEQUENCES:  # an empty stock cache ignores it
            pair.each(lambda one: one.batch_repeat_interleave(repeats))
            pair.batch *= repeats
            pair.check()

    @rule(which=st.integers(0, 2), data=st.data())
    def select(self, which, data):
        pair = self.pick(which)
        if pair.tokens:  # an empty stock cache ignores it
            index = data.draw(st.lists(st.integers(0, pair.batch - 1), min_size=1, max_size=MOST_SEQUENCES))
            pair.each(lambda one: one.batch_select_indices(torch.tensor(index)))
            pair.batch = len(index)
            pair.check()

    @rule(which=st.integers(0, 2), often=st.integers(0, 3))
    def reset(self, which, often):
        pair = self.pick(which)
        if often:
            return  # caches that are reset more often expose fewer errors
        pair.cache.reset()
        pair.stock = DynamicCache(config=tiny(self.kind).config)
        if self.recording:
            pair.stock.activate_past_recording()
        pair.batch = pair.tokens = pair.since_crop = 0
        pair.check()

    @rule(which=st.integers(0, 2), way=st.sampled_from(COPIES))
    def take_copy(self, which, way):
        pair = self.pick(which).twin(way)
        if len(self.pairs) == MOST_CACHES:
            self.pairs.pop(0)
        self.pairs.append(pair)
        pair.check()

    @rule(which=st.integers(0, 2))
    def offload(self, which):
        for layer in self.pick(which).cache.layers:
            layer.offload()
            layer.prefetch()

    @rule(which=st.integers(0, 2))
    def look(self, which):
        pair = self.pick(which)
        for ours, theirs in zip(pair.cache, pair.stock, strict=True):
            for a, b in zip(ours[:2], theirs[:2], strict=True):
                if b is None or not b.numel():
                    assert a is None or not a.numel()
                else:  # while recording, the stock layer returns more than its window
                    assert torch.equal(a, b[:, :, b.shape[2] - a.shape[2] :] if self.recording else b)


def machine(examples: int, steps: int) -> None:
    run_state_machine_as_test(Caches, settings=fuzz(examples, stateful_step_count=steps))


def test_states():
    machine(12, 30)


@pytest.mark.slow
def test_states_at_length():
    machine(2000, 50)
