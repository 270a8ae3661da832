"""The ``sglang.srt.plugins`` entry point, which SGLang runs once in each process.

It registers a backend and hooks a few methods. The hooks do nothing unless slimkv is the attention backend or a cold
tier.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from importlib import import_module
from typing import Any

from slimkv.errors import SlimKVError
from slimkv.integrations.sglang.names import BACKEND, HOST_POOL, LISTENING, cold_settings, has_settings, is_chosen

DEFAULT_PAGE_SIZE = 64

_CONFIGURATORS = "sglang.srt.model_executor.pool_configurator"
_DEFAULT = f"{_CONFIGURATORS}.DefaultPoolConfigurator"
_WINDOWED = f"{_CONFIGURATORS}.HybridSWAPoolConfigurator"
_POOL_CLASS = "sglang.srt.mem_cache.kv_cache_configurator.KVCacheConfigurator._resolve_kv_pool_class"
# SGLang's functions, and slimkv's wrappers by module and name.
_AROUND = {
    f"{_DEFAULT}.__init__": "sizing.default_init",
    f"{_DEFAULT}._compute_cell_size": "sizing.cell_size",
    f"{_WINDOWED}.__init__": "sizing.windowed_init",
    f"{_WINDOWED}._full_cell_bytes": "sizing.full_cell_bytes",
    f"{_WINDOWED}._swa_cell_bytes": "sizing.window_cell_bytes",
    f"{_WINDOWED}._recompute_cell_size": "sizing.recompute_cell_size",
    _POOL_CLASS: "plugin.pool_class",
    HOST_POOL: "cold.build_host_pool",
}
TARGETS = tuple(target for target in _AROUND if target != HOST_POOL)  # without these, the cache has the wrong size
_RPC = "sglang.srt.managers.scheduler.Scheduler.handle_rpc_request"


def register() -> None:
    """Registers ``--attention-backend slimkv`` and the hooks that size and build its cache."""
    from slimkv.integrations.sglang.versions import installed_version

    installed_version()
    from sglang.srt.arg_groups.choices import (
        add_attention_backend_choices,
        add_chunked_prefix_cache_attention_backend,
        add_deterministic_attention_backend_choices,
        add_radix_supported_deterministic_attention_backend_choices,
    )
    from sglang.srt.arg_groups.resolution_hooks import register_resolution_hook
    from sglang.srt.layers.attention.attention_registry import HYBRID_GDN_SM100_BACKENDS, register_attention_backend
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    add_attention_backend_choices([BACKEND])
    add_deterministic_attention_backend_choices([BACKEND])
    add_radix_supported_deterministic_attention_backend_choices([BACKEND])  # a hit gives the same output as a miss
    add_chunked_prefix_cache_attention_backend(BACKEND)
    HYBRID_GDN_SM100_BACKENDS.add(BACKEND)
    register_attention_backend(BACKEND)(_create_backend)
    register_resolution_hook("handle_attention_backend_compatibility")(_defaults)
    register_resolution_hook("handle_other_validations")(_check_options)
    listening = {_RPC: "observe.answer"} if os.environ.get(LISTENING) else {}
    for target, name in {**_AROUND, **listening}.items():
        HookRegistry.register(target, _lazy(name), HookType.AROUND)


def _defaults(server_args: Any, previous: Callable[[Any], None]) -> None:
    """Hook of SGLang's argument resolution: sets the default page size, and disables prefill graphs of latents."""
    from sglang.srt.arg_groups.overrides import declare_resolution, model_config_of, resolved_view
    from sglang.srt.configs.model_config import AttentionArch

    previous(server_args)
    if not is_chosen(server_args) and cold_settings(server_args) is None:
        return
    if resolved_view(server_args).page_size is None:
        declare_resolution(server_args, BACKEND, page_size=DEFAULT_PAGE_SIZE)
    if is_chosen(server_args) and model_config_of(server_args).attention_arch == AttentionArch.MLA:
        _prefill_without_graphs(server_args)


def _prefill_without_graphs(server_args: Any) -> None:
    """Disables prefill graphs unless the user requested them: the number of latents that prefill expands varies."""
    from sglang.srt.arg_groups.overrides import declare_resolution, resolving_view
    from sglang.srt.model_executor.cuda_graph_config import Backend, Phase, with_phase

    graphs = resolving_view(server_args).cuda_graph_config
    asked_for = (Phase.PREFILL, "backend") in getattr(server_args, "_cuda_graph_config_locked", ())
    if graphs.prefill.backend != Backend.DISABLED and not asked_for:
        eager = with_phase(graphs, Phase.PREFILL, backend=Backend.DISABLED)
        declare_resolution(server_args, f"{BACKEND}_prefill", cuda_graph_config=eager)


def _check_options(server_args: Any, previous: Callable[[Any], None]) -> None:
    """Hook of SGLang's argument resolution, before any process starts: raises for unsupported options."""
    previous(server_args)
    if is_chosen(server_args):
        from slimkv.integrations.sglang import refusals, settings

        config = settings.parse(server_args)
        refusals.check_options(server_args)
        refusals.check_deterministic(server_args, config)
    elif cold_settings(server_args) is not None:
        from slimkv.integrations.sglang import refusals

        refusals.check_cold_options(server_args)
    elif has_settings(server_args):
        from slimkv.integrations.sglang import settings

        settings.refuse_unused(server_args)


def _lazy(name: str) -> Callable[..., Any]:
    """The function ``name`` ("module.function") of ``slimkv.integrations.sglang``, imported at the first call."""
    module, _, function = name.partition(".")

    def around(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        found = getattr(import_module(f"slimkv.integrations.sglang.{module}"), function)
        return found(original, *args, **kwargs)

    around.__name__ = function
    return around


def pool_class(original: Callable[..., type], kvc: Any, *, kind: str, default: type) -> type:
    """Wraps ``KVCacheConfigurator._resolve_kv_pool_class``: the class of slimkv's pool for models that it packs."""
    from slimkv.integrations.sglang.compat import MHATokenToKVPool, MLATokenToKVPool, check_hooks
    from slimkv.integrations.sglang.mla.pool import SlimKVLatentPool
    from slimkv.integrations.sglang.pool import PackedPool, SlimKVPool, bind
    from slimkv.integrations.sglang.sizing import packs, sized_plan

    expected: type
    ours: type[PackedPool]
    built, expected, ours = "mha", MHATokenToKVPool, SlimKVPool
    if kvc.use_mla_backend:
        built, expected, ours = "mla", MLATokenToKVPool, SlimKVLatentPool
    if not packs(kvc) or kind != built:
        if kind == "mha" and not packs(kvc) and cold_settings(kvc.server_args) is not None:
            from slimkv.integrations.sglang import refusals

            check_hooks((HOST_POOL,))
            refusals.check_cold_model(kvc)
        return original(kvc, kind=kind, default=default)
    check_hooks(TARGETS)
    if default is not expected:
        raise SlimKVError(f"slimkv's pages replace SGLang's plain pool, not {default.__name__}")
    return bind(sized_plan(kvc), TARGETS, ours)


def _create_backend(runner: Any) -> Any:
    """The backend of a model runner, for K and V or for latents."""
    if runner.use_mla_backend:
        from slimkv.integrations.sglang.mla.backend import SlimKVLatentBackend

        return SlimKVLatentBackend(runner)
    from slimkv.integrations.sglang.backend import SlimKVAttnBackend

    return SlimKVAttnBackend(runner)
