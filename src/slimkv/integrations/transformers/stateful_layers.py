"""Packed layers with more state than keys and values: linear-attention states or an indexer's keys."""

from __future__ import annotations

from functools import partialmethod
from typing import Any

from torch import Tensor

from slimkv.integrations.transformers.compat import LinearAttentionLayer
from slimkv.integrations.transformers.layers import LayerSettings, PackedLayer, PackedSlidingLayer


class PackedIndexedLayer(PackedLayer):
    """A packed layer beside the stock one that keeps the rest (the keys of a sparse-attention indexer).

    ``companion`` is that stock layer. Its own keys and values stay empty; attributes that a packed layer lacks are
    delegated to it.
    """

    def __init__(self, format: str, settings: LayerSettings, number: int, companion: Any) -> None:
        self.__dict__["companion"] = companion
        super().__init__(format, settings, number)

    def __getattr__(self, name: str) -> Any:
        companion = self.__dict__.get("companion")
        if companion is None or name.startswith("__"):
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        return getattr(companion, name)

    def __setattr__(self, name: str, value: Any) -> None:
        companion = self.__dict__.get("companion")
        if companion is not None and name in _extras(companion):
            setattr(companion, name, value)
        else:
            super().__setattr__(name, value)

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """See ``PackedLayer``."""
        super().lazy_initialization(key_states, value_states)
        self.companion.device = self.device

    def _both(self, name: str, *args: Any) -> None:
        """A method of the packed layer, then of the companion."""
        getattr(PackedLayer, name)(self, *args)
        if self.is_initialized or name == "reset":
            getattr(self.companion, name)(*args)

    crop = partialmethod(_both, "crop")
    reset = partialmethod(_both, "reset")
    offload = partialmethod(_both, "offload")
    prefetch = partialmethod(_both, "prefetch")
    reorder_cache = partialmethod(_both, "reorder_cache")
    batch_repeat_interleave = partialmethod(_both, "batch_repeat_interleave")
    batch_select_indices = partialmethod(_both, "batch_select_indices")


def _extras(companion: Any) -> set[str]:
    """The state of the stock layer besides keys and values."""
    return vars(companion).keys() - {"keys", "values", "is_initialized", "dtype", "device"}


class PackedHybridLayer(LinearAttentionLayer, PackedLayer):
    """Linear attention with its stock states, and full attention in packed pages, in one layer of a model."""

    is_compileable = False
    supports_early_init = True
    packed: type[PackedLayer] = PackedLayer

    def __init__(self, format: str, settings: LayerSettings, number: int, arguments: dict[str, Any]) -> None:
        self._start(format, settings, number, arguments)
        LinearAttentionLayer.__init__(self, **{k: v for k, v in arguments.items() if k != "sliding_window"})

    def _start(self, format: str, settings: LayerSettings, number: int, arguments: dict[str, Any]) -> None:
        PackedLayer.__init__(self, format, settings, number)

    def __repr__(self) -> str:
        return self.packed.__repr__(self)

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        """Initializes the packed part, given K and V, or the linear states, given keywords."""
        if args:
            self.packed.lazy_initialization(self, *args)
        else:
            LinearAttentionLayer.lazy_initialization(self, **kwargs)

    def get_max_length(self) -> int:
        """See ``PackedLayer``."""
        return self.packed.get_max_length(self)

    def _both(self, name: str, *args: Any) -> None:
        """A method of the linear states, which may refuse it, then of the packed part."""
        getattr(LinearAttentionLayer, name)(self, *args)
        getattr(self.packed, name)(self, *args)

    offload = partialmethod(_both, "offload")
    prefetch = partialmethod(_both, "prefetch")
    reset = partialmethod(_both, "reset")
    crop = partialmethod(_both, "crop")
    reorder_cache = partialmethod(_both, "reorder_cache")

    def batch_repeat_interleave(self, repeats: int) -> None:
        """See ``PackedLayer``."""
        self._map_states(lambda x: x.repeat_interleave(repeats, 0))
        self.packed.batch_repeat_interleave(self, repeats)

    def batch_select_indices(self, indices: Tensor) -> None:
        """See ``PackedLayer``."""
        self._map_states(lambda x: x[indices.to(x.device)])
        self.packed.batch_select_indices(self, indices)

    def _map_states(self, change: Any) -> None:
        for states in (self.conv_states, self.recurrent_states):
            for number, state in states.items():
                if state is not None:
                    states[number] = change(state)


class PackedHybridSlidingLayer(PackedHybridLayer, PackedSlidingLayer):
    """``PackedHybridLayer`` whose attention has a window."""

    packed = PackedSlidingLayer

    def _start(self, format: str, settings: LayerSettings, number: int, arguments: dict[str, Any]) -> None:
        PackedSlidingLayer.__init__(self, format, settings, arguments["sliding_window"], False, number)

    def activate_past_recording(self) -> None:
        """See ``PackedSlidingLayer``."""
        PackedSlidingLayer.activate_past_recording(self)
