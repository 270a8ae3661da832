"""slimkv: a KV cache of 2-8 bits a number that attention reads directly."""

from typing import Any

from slimkv.codec import Codec, Encoded
from slimkv.errors import SlimKVError
from slimkv.spec import CodecSpec, PageLayout, ScalePolicy, TensorFormat

__version__ = "0.1.0"

__all__ = ["Codec", "CodecSpec", "Encoded", "PageLayout", "ScalePolicy", "SlimKVError", "TensorFormat", "__version__"]

_FROM_TRANSFORMERS = ("SlimKVCache", "attention", "disable", "enable")


def __getattr__(name: str) -> Any:
    """The names of the transformers integration, which is imported when they are first used."""
    if name in _FROM_TRANSFORMERS:
        import slimkv.integrations.transformers as integration

        return getattr(integration, name)
    if name == "models":
        import importlib

        return importlib.import_module("slimkv.models")
    raise AttributeError(f"module 'slimkv' has no attribute {name!r}")
