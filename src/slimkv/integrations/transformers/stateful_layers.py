"""Packed layers with more state than keys and values: linear-attention states or an indexer's keys."""

from __future__ import annotations

from collections.abc import Callable
from functools import partialmethod
from typing import Any

from torch import Tensor

from slimkv.integrations.transformers.compat import LinearAttentionCacheLayerMixin
from slimkv.integrations.transformers.layers import PackedLayer
from slimkv.integrations.transformers.sliding import PackedSlidingLayer


class _Companion:
    """Mixin: a stock layer, ``companion``, keeps the rest of the state; its own keys and values stay empty.

    Attributes that a packed layer lacks are delegated to it.
    """

    companion: Any
    is_croppable: Any = property(lambda self: self.companion.is_croppable)

    def __init__(self, companion: Any, *packed: Any) -> None:
        self.__dict__["companion"] = companion
        super().__init__(*packed)

    def __getattr__(self, name: str) -> Any:
        if name == "companion" or name.startswith("__"):
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        return getattr(self.companion, name)

    def __setattr__(self, name: str, value: Any) -> None:
        """Delegates the companion's attributes: models also assign to the state of an indexer."""
        if name in vars(self.companion).keys() - {"keys", "values", "is_initialized", "dtype", "device"}:
            setattr(self.companion, name, value)
        else:
            super().__setattr__(name, value)

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """See ``PackedLayer``."""
        super().lazy_initialization(key_states, value_states)  # type: ignore[misc]
        self.companion.device = key_states.device

    def _both(self, name: str, *args: Any) -> None:
        """Calls a method of the companion, which may raise, then that of the packed layer."""
        getattr(self.companion, name)(*args)
        getattr(super(), name)(*args)

    crop = partialmethod(_both, "crop")
    reset = partialmethod(_both, "reset")
    offload = partialmethod(_both, "offload")
    prefetch = partialmethod(_both, "prefetch")
    reorder_cache = partialmethod(_both, "reorder_cache")
    batch_repeat_interleave = partialmethod(_both, "batch_repeat_interleave")
    batch_select_indices = partialmethod(_both, "batch_select_indices")


class PackedIndexedLayer(_Companion, PackedLayer):
    """Full attention to tokens that an indexer selects; the companion has the indexer's keys."""


class _Linear(_Companion):
    """Mixin: linear attention beside packed attention; the companion has the linear-attention states."""

    def batch_repeat_interleave(self, repeats: int) -> None:
        """See ``PackedLayer``."""
        self._map_states(lambda x: x.repeat_interleave(repeats, 0))

    def batch_select_indices(self, indices: Tensor) -> None:
        """See ``PackedLayer``."""
        self._map_states(lambda x: x[indices.to(x.device)])

    def _map_states(self, change: Callable[[Tensor], Tensor]) -> None:
        """Changes the states of all sequences: the stock layer has no method for it. The tables move the pages."""
        for states in (self.companion.conv_states, self.companion.recurrent_states):
            for number, state in states.items():
                if state is not None:
                    states[number] = change(state)


LinearAttentionCacheLayerMixin.register(_Linear)


class PackedHybridLayer(_Linear, PackedLayer):
    """Linear and full attention in one layer of a model."""


class PackedHybridSlidingLayer(_Linear, PackedSlidingLayer):
    """Linear and sliding-window attention in one layer of a model."""

    activate_past_recording = partialmethod(_Companion._both, "activate_past_recording")
