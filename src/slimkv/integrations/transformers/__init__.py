"""transformers: a packed cache, and attention that reads it."""

from slimkv.integrations.transformers.cache import SlimKVCache
from slimkv.integrations.transformers.enabling import Status, disable, enable, status
from slimkv.integrations.transformers.encoder_decoder import EncoderDecoderSlimKVCache
from slimkv.integrations.transformers.plugin import register, slimkv_attention
from slimkv.integrations.transformers.size import CacheSize
from slimkv.integrations.transformers.switching import Counts, attention

__all__ = [
    "CacheSize",
    "Counts",
    "EncoderDecoderSlimKVCache",
    "SlimKVCache",
    "Status",
    "attention",
    "disable",
    "enable",
    "register",
    "slimkv_attention",
    "status",
]

register()
