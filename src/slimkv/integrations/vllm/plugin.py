"""The ``vllm.general_plugins`` entry point, which vLLM runs once in each process.

``register`` only names attributes of this module, so an installed but unused slimkv costs nothing. vLLM looks them up
when it creates a layer, within the engine's config context. ``CUSTOM`` is slimkv's backend for K and V, or for latents
in MLA models. On a CPU, vLLM's own names resolve to slimkv's backends if the user chose CUSTOM.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

_switched_on: list[Any] = []  # configs of the models that slimkv serves in this process
# On a CPU, vLLM always chooses a CPU backend, but looks up its class by one of these names.
_ON_CPU = ("CPU_ATTN", "CPU_MLA", "AMX_MLA")


def register() -> None:
    """Makes ``--attention-backend CUSTOM`` mean slimkv."""
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    for name in ("CUSTOM", *(_ON_CPU if current_platform.is_cpu() else ())):
        register_backend(AttentionBackendEnum[name], f"{__name__}.{name}")


def __getattr__(name: str) -> Any:
    if name != "CUSTOM" and name not in _ON_CPU:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from vllm.config import get_current_vllm_config
    from vllm.utils.import_utils import resolve_obj_by_qualname
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    from slimkv.errors import InputError
    from slimkv.integrations.vllm.settings import EXAMPLE, wanted

    config = get_current_vllm_config()
    if name == "CUSTOM":
        return _backend(config.model_config is not None and config.model_config.use_mla, config)
    if getattr(config.attention_config.backend, "name", None) == "CUSTOM":
        _switched_on.append(config.model_config)
        return _backend(name != "CPU_ATTN", config)
    if wanted(config.additional_config) and not _drafts(config):
        raise InputError(f"the additional config has settings for slimkv, which is not switched on; use {EXAMPLE}")
    return resolve_obj_by_qualname(AttentionBackendEnum[name].value)


def _drafts(config: Any) -> bool:
    """Whether this is the config of a drafter for a model that slimkv serves: a copy of the engine's config with the
    drafter's backend, and with its own model if it has one.
    """
    speculative = config.speculative_config
    if speculative is None:
        return False
    targets = (config.model_config, speculative.target_model_config)
    return any(served is target for served in _switched_on for target in targets)


def _backend(latent: bool, config: Any) -> Any:
    """slimkv's backend for K and V, or for latents with dense or sparse attention."""
    sparse = latent and hasattr(config.model_config.hf_text_config, "index_topk")
    module, name = "backend", "SlimKVBackend"
    if latent:
        module, name = ("mla.sparse", "SlimKVSparseMLABackend") if sparse else ("mla.backend", "SlimKVMLABackend")
    return getattr(import_module(f"slimkv.integrations.vllm.{module}"), name)
