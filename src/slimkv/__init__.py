"""slimkv: a KV cache of 2-8 bits per value, with attention directly on the packed codes."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from slimkv.codec import Codec, Encoded
from slimkv.errors import (
    CorruptDataError,
    FidelityError,
    InputError,
    MissingDependencyError,
    OutOfPagesError,
    SlimKVError,
    SpecError,
    UnsupportedError,
)
from slimkv.spec import CodecSpec, LatentSpec, PageLayout, ScalePolicy, TensorFormat

if TYPE_CHECKING:
    from slimkv import ops
    from slimkv.cache import PagedPool
    from slimkv.calibration import Calibration
    from slimkv.config import KVCacheConfig
    from slimkv.integrations.transformers import SlimKVCache, attention, disable, enable, status
    from slimkv.integrations.transformers.calibration.calibrate import calibrate_model
    from slimkv.training import fake_quantize

__version__ = "0.1.0"

__all__ = [
    "AttentionBatch", "Calibration", "Codec", "CodecSpec", "CorruptDataError", "Encoded", "FidelityError", "InputError",
    "KVCacheConfig", "LatentSpec", "MissingDependencyError", "OutOfPagesError", "PageLayout", "PagedPool",
    "ScalePolicy", "SlimKVCache", "SlimKVError", "SpecError", "TensorFormat", "UnsupportedError", "__version__",
    "attention", "calibrate_model", "disable", "enable", "fake_quantize", "ops", "status",
]  # fmt: skip

# Imported on first use, because they need optional packages (an engine, kernels).
_HOME = {
    "AttentionBatch": "slimkv.ops",
    "Calibration": "slimkv.calibration",
    "KVCacheConfig": "slimkv.config",
    "PagedPool": "slimkv.cache",
    "SlimKVCache": "slimkv.integrations.transformers",
    "attention": "slimkv.integrations.transformers",
    "calibrate_model": "slimkv.integrations.transformers.calibration.calibrate",
    "disable": "slimkv.integrations.transformers",
    "enable": "slimkv.integrations.transformers",
    "fake_quantize": "slimkv.training",
    "status": "slimkv.integrations.transformers",
}


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(_HOME[name]), name)
    if name == "ops":
        return import_module("slimkv.ops")
    raise AttributeError(f"module 'slimkv' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
