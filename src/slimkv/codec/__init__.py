"""The codec: plain torch, any device. What every kernel is tested against."""

from slimkv.codec.codec import Codec
from slimkv.codec.quantize import Encoded

__all__ = ["Codec", "Encoded"]
