"""A packed cache layer of sliding-window or chunked attention."""

from __future__ import annotations

from torch import Tensor

from slimkv.integrations.transformers.layer_settings import LayerSettings
from slimkv.integrations.transformers.layers import PackedLayer


class PackedSlidingLayer(PackedLayer):
    """A layer that attends to the last ``sliding_window`` tokens (or a chunk of that size) and stores no more."""

    is_sliding = True

    def __init__(
        self, format: str, settings: LayerSettings, sliding_window: int, chunked: bool = False, number: int = 0
    ) -> None:
        super().__init__(format, settings, number)
        self.window = self.sliding_window = sliding_window
        self.chunked = chunked
        self.record_past = False

    @property
    def cumulative_length(self) -> int:
        """Positions seen so far, under the stock layer's name."""
        return self.tokens

    def activate_past_recording(self) -> None:
        """From now on, keeps tokens that leave the window until ``crop``, so that it can remove tokens."""
        self.record_past = True
        if self.is_initialized:
            self.tables.record_past = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """See ``PackedLayer``."""
        super().lazy_initialization(key_states, value_states)
        self.tables.record_past |= self.record_past

    def _visible(self, new: int) -> int:
        past = self.tokens - new
        return min(past, self.sliding_window - 1) + new

    def get_max_length(self) -> int:
        """The window."""
        return self.sliding_window

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """See ``PackedLayer``."""
        kept = min(self.tokens, self.sliding_window - 1)
        return kept + query_length, self.tokens - kept

    def check_crop(self, tokens: int) -> None:
        """See ``PackedLayer``."""
        if not tokens or not self.is_initialized or self.tokens < self.sliding_window:
            return
        needed = max(self.tokens - tokens - self.sliding_window + 1, 0)
        if not self.record_past or needed < self.tables.kept_from:
            raise RuntimeError(
                f"a sliding layer of {self.sliding_window} tokens that has seen {self.tokens} cannot remove {tokens}: "
                "the tokens before its window are gone; call cache.activate_past_recording() before the forward passes"
            )
