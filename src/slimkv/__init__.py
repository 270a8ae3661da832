"""slimkv: a KV cache of 2-8 bits per value, with attention directly on the packed codes."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

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

if TYPE_CHECKING:
    from slimkv import ops
    from slimkv.cache import PagedPool
    from slimkv.calibration import Calibration
    from slimkv.codec import Codec, Encoded
    from slimkv.config import KVCacheConfig
    from slimkv.integrations.transformers import SlimKVCache, attention, disable, enable, status
    from slimkv.integrations.transformers.calibration.calibrate import calibrate_model
    from slimkv.ops import AttentionBatch
    from slimkv.spec import CodecSpec, LatentSpec, PageLayout, ScalePolicy, TensorFormat
    from slimkv.training import fake_quantize

__version__ = "0.1.0"

__all__ = [
    "AttentionBatch", "Calibration", "Codec", "CodecSpec", "CorruptDataError", "Encoded", "FidelityError", "InputError",
    "KVCacheConfig", "LatentSpec", "MissingDependencyError", "OutOfPagesError", "PageLayout", "PagedPool",
    "ScalePolicy", "SlimKVCache", "SlimKVError", "SpecError", "TensorFormat", "UnsupportedError", "__version__",
    "attention", "calibrate_model", "disable", "enable", "fake_quantize", "ops", "status",
]  # fmt: skip

# Imported on first use: torch takes seconds, and some need optional packages (an engine, kernels).
_NAMES = {
    "cache": ("PagedPool",),
    "calibration": ("Calibration",),
    "codec": ("Codec", "Encoded"),
    "config": ("KVCacheConfig",),
    "integrations.transformers": ("SlimKVCache", "attention", "disable", "enable", "status"),
    "integrations.transformers.calibration.calibrate": ("calibrate_model",),
    "ops": ("AttentionBatch",),
    "spec": ("CodecSpec", "LatentSpec", "PageLayout", "ScalePolicy", "TensorFormat"),
    "training": ("fake_quantize",),
}
_HOME = {name: f"slimkv.{module}" for module, names in _NAMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(_HOME[name]), name)
    if name in ("codec", "formats", "ops", "spec"):
        return import_module(f"slimkv.{name}")
    raise AttributeError(f"module 'slimkv' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
