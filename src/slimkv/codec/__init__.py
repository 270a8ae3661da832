"""The codec: plain torch on any device. Every kernel is tested against it."""

from slimkv.codec.codec import Codec
from slimkv.codec.quantize import Encoded

__all__ = ["Codec", "Encoded"]
