"""slimkv: a KV cache of 2-8 bits a number that attention reads directly."""

from slimkv.codec import Codec, Encoded
from slimkv.errors import SlimKVError
from slimkv.spec import CodecSpec, PageLayout, ScalePolicy, TensorFormat

__version__ = "0.1.0"

__all__ = ["Codec", "CodecSpec", "Encoded", "PageLayout", "ScalePolicy", "SlimKVError", "TensorFormat", "__version__"]
