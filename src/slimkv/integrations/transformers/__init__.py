"""transformers: a packed cache, and attention that reads it."""

from slimkv.integrations.transformers.cache import CacheSize, SlimKVCache
from slimkv.integrations.transformers.plugin import Counts, attention, register, slimkv_attention

__all__ = ["CacheSize", "Counts", "SlimKVCache", "attention", "register", "slimkv_attention"]
