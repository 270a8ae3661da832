"""Host work of a decode step: few torch operations, and nothing is read back from the device."""

from __future__ import annotations

import contextlib
from collections import Counter
from typing import Any

import pytest
import torch
from tiny import tiny, tokens
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import DynamicCache

from slimkv.integrations.transformers import SlimKVCache, attention
from slimkv.integrations.transformers import tables as sequence_tables
from slimkv.ops.attention import reference as attend_reference
from slimkv.ops.store import reference as store_reference

LAYERS, STEPS = 3, 40
VIEWS = ("view", "squeeze", "unsqueeze", "transpose", "slice", "select", "expand", "unbind", "t", "detach", "alias")
EMPTY = ("empty", "new_empty", "fill_")  # the tests poison memory with fill_
READ_BACK = ("_local_scalar_dense", "nonzero", "equal", "is_nonzero")


class Operations(TorchDispatchMode):
    """Counts torch operations by name."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        self.counts[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))

    @property
    def kernels(self) -> int:
        """Number of operations that would launch a kernel on a GPU."""
        return sum(n for name, n in self.counts.items() if name not in (*VIEWS, *EMPTY))

    @property
    def read_back(self) -> int:
        """Number of operations that wait for the device."""
        return sum(self.counts[name] for name in READ_BACK)


@torch.no_grad()
def decode(kind: str, packed: bool) -> Operations:
    """Counts operations in STEPS decode steps of two sequences with a mask, called as by ``generate``."""
    model = tiny(kind, layers=LAYERS)
    cache = SlimKVCache(model.config, "k4v4", backend="reference") if packed else DynamicCache(config=model.config)
    with attention(model) if packed else contextlib.nullcontext():
        seen = 66  # no step starts a new block
        model(tokens(2, seen), attention_mask=torch.ones(2, seen), past_key_values=cache)
        masks = [torch.ones(2, seen + i + 1) for i in range(STEPS + 1)]
        step = tokens(2, 1)
        model(step, attention_mask=masks[0], past_key_values=cache)
        with Operations() as operations:
            for mask in masks[1:]:
                model(step, attention_mask=mask, past_key_values=cache)
    return operations


@pytest.fixture
def without_kernels(monkeypatch):
    """Keeps only the host work of store and attend. Attend then counts as one operation and store as none."""
    monkeypatch.setattr(store_reference, "run", lambda request: None)
    monkeypatch.setattr(store_reference, "fuses_offset", lambda request: True, raising=False)  # as on a GPU
    monkeypatch.setattr(attend_reference, "run", lambda request: request.out.zero_())


def test_a_step_launches_no_more_than_with_the_stock_cache(without_kernels):
    stock, packed = decode("llama", False), decode("llama", True)
    # Per layer and step, stock runs two concatenations and attention. The packed cache runs one operation here, the
    # zeroing in place of attend.
    assert packed.kernels + 2 * LAYERS * STEPS == stock.kernels
    assert packed.read_back == stock.read_back


@pytest.mark.parametrize("kind", ["mistral", "gemma3"])
def test_windows_change_their_tables_once_a_block(kind, without_kernels):
    packed = decode(kind, True)
    assert packed.kernels <= decode(kind, False).kernels


def test_tables_of_a_step_are_made_by_the_first_layer_only(without_kernels, monkeypatch):
    built = Counter()

    def counted(name: str):
        real = getattr(sequence_tables.SequenceTables, name)

        def method(self, *args):
            built[name] += 1
            return real(self, *args)

        monkeypatch.setattr(sequence_tables.SequenceTables, name, method)

    for name in ("_build", "_build_ahead", "_next"):
        counted(name)
    decode("llama", True)
    assert built == {"_build": 1, "_build_ahead": 1, "_next": STEPS + 1}
