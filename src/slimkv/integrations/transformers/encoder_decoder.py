"""The packed cache of an encoder-decoder model: packed self-attention, stock cross-attention."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from slimkv.integrations.transformers.cache import SlimKVCache
from slimkv.integrations.transformers.compat import Cache, DynamicCache, EncoderDecoderCache


class EncoderDecoderSlimKVCache(SlimKVCache, EncoderDecoderCache):
    """The class of ``SlimKVCache(config)`` for an encoder-decoder model: the packed cache of the decoder's
    self-attention. It holds the stock cache of the cross-attention, which is written once and has the length of the
    encoder's input.
    """

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        self.cross_attention_cache = DynamicCache()
        self.is_updated: dict[int, bool] = {}

    @property
    def self_attention_cache(self) -> SlimKVCache:
        """The cache itself: models access it as ``EncoderDecoderCache.self_attention_cache``."""
        return self

    def __iter__(self) -> Iterator[tuple[Tensor | None, ...]]:
        """Self-attention's keys, values and window, then those of cross-attention, by layer; decoded."""
        cross = iter(self.cross_attention_cache)
        for own in SlimKVCache.__iter__(self):
            yield own + next(cross, (None, None, None))

    def reset(self) -> None:
        """Empties both caches."""
        SlimKVCache.reset(self)
        self.cross_attention_cache = DynamicCache()
        self.is_updated = {}

    def _select(self, method: str, given: Any) -> None:
        super()._select(method, given)
        getattr(self.cross_attention_cache, method)(given)


# The stock class delegates to its self-attention cache, which is this object, so these methods are the plain cache's.
for _name in vars(EncoderDecoderCache).keys() & vars(Cache).keys():
    if _name not in vars(EncoderDecoderSlimKVCache) and _name not in vars(SlimKVCache):
        setattr(EncoderDecoderSlimKVCache, _name, vars(Cache)[_name])

SlimKVCache.encoder_decoder_class = EncoderDecoderSlimKVCache
