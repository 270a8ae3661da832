"""Settings in vLLM: the ``slimkv`` entry of ``--additional-config`` holds the fields of ``KVCacheConfig``.

{"slimkv": {"format": "k4v4", "layers": {"0-1": "fp8", "7": "raw", "-1": "k6v4"}}}
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from slimkv.config import KVCacheConfig
from slimkv.errors import InputError
from slimkv.integrations.serving.model import KEY, parse_settings

BATCH_INVARIANT = "VLLM_BATCH_INVARIANT"  # vLLM's switch for output that does not depend on the batch
EXAMPLE = '--attention-backend CUSTOM --additional-config \'{"slimkv": {"format": "k4v4"}}\''


def wanted(additional_config: object) -> bool:
    """Whether the engine's additional config has settings for slimkv."""
    return isinstance(additional_config, Mapping) and KEY in additional_config


def batch_invariant() -> bool:
    """Whether vLLM's switch is on."""
    return bool(int(os.environ.get(BATCH_INVARIANT, "0")))


def parse(additional_config: object) -> KVCacheConfig:
    """The configuration of the cache, from the engine's whole additional config."""
    if not isinstance(additional_config, Mapping) or KEY not in additional_config:
        raise InputError(
            f"the attention backend CUSTOM is slimkv's, but the additional config has no {KEY!r} entry; use {EXAMPLE}"
        )
    return parse_settings(additional_config[KEY], "vLLM", f"{BATCH_INVARIANT}=1" if batch_invariant() else None)
