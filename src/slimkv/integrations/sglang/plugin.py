"""How SGLang finds slimkv: the ``sglang.srt.plugins`` entry point, run once in each of its processes.

It names a backend and hooks a few methods, which do what they did while slimkv is not the attention backend.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from slimkv.errors import SlimKVError
from slimkv.integrations.sglang.names import BACKEND, HOST_POOL, LISTENING

DEFAULT_PAGE_SIZE = 64

_CONFIGURATORS = "sglang.srt.model_executor.pool_configurator"
_DEFAULT = f"{_CONFIGURATORS}.DefaultPoolConfigurator"
_WINDOWED = f"{_CONFIGURATORS}.HybridSWAPoolConfigurator"
_POOL_CLASS = "sglang.srt.mem_cache.kv_cache_configurator.KVCacheConfigurator._resolve_kv_pool_class"
# SGLang's methods, and the functions of slimkv's sizing around them.
HOOKS = {
    f"{_DEFAULT}.__init__": "default_init",
    f"{_DEFAULT}._compute_cell_size": "cell_size",
    f"{_WINDOWED}.__init__": "windowed_init",
    f"{_WINDOWED}._full_cell_bytes": "full_cell_bytes",
    f"{_WINDOWED}._swa_cell_bytes": "window_cell_bytes",
    f"{_WINDOWED}._recompute_cell_size": "recompute_cell_size",
}
TARGETS = (*HOOKS, _POOL_CLASS)
_RPC = "sglang.srt.managers.scheduler.Scheduler.handle_rpc_request"


def register() -> None:
    """Makes ``--attention-backend slimkv`` known, and sizes and builds its cache when it is chosen."""
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
    add_radix_supported_deterministic_attention_backend_choices([BACKEND])  # a hit answers as the miss did
    add_chunked_prefix_cache_attention_backend(BACKEND)
    HYBRID_GDN_SM100_BACKENDS.add(BACKEND)
    register_attention_backend(BACKEND)(_create_backend)
    register_resolution_hook("handle_attention_backend_compatibility")(_defaults)
    register_resolution_hook("handle_other_validations")(_check_options)
    for target, name in HOOKS.items():
        HookRegistry.register(target, _lazy(name), HookType.AROUND)
    HookRegistry.register(_POOL_CLASS, _pool_class, HookType.AROUND)
    HookRegistry.register(HOST_POOL, _host_pool, HookType.AROUND)
    if os.environ.get(LISTENING):
        HookRegistry.register(_RPC, _answer, HookType.AROUND)


def _is_chosen(server_args: Any) -> bool:
    from sglang.srt.arg_groups.overrides import attention_backends_of, resolved_view

    return BACKEND in attention_backends_of(resolved_view(server_args))


def _defaults(server_args: Any, previous: Callable[[Any], None]) -> None:
    """While SGLang resolves its arguments: the page size where none was given, and which graphs it captures."""
    from sglang.srt.arg_groups.overrides import declare_resolution, model_config_of, resolved_view
    from sglang.srt.configs.model_config import AttentionArch

    previous(server_args)
    if not _is_chosen(server_args):
        return
    if resolved_view(server_args).page_size is None:
        declare_resolution(server_args, BACKEND, page_size=DEFAULT_PAGE_SIZE)
    if model_config_of(server_args).attention_arch == AttentionArch.MLA:
        _prefill_without_graphs(server_args)


def _prefill_without_graphs(server_args: Any) -> None:
    """Prefill expands latents, as many as are cached, which no graph holds: none are captured unless asked for."""
    from sglang.srt.arg_groups.overrides import declare_resolution, resolving_view
    from sglang.srt.model_executor.cuda_graph_config import Backend, Phase, with_phase

    graphs = resolving_view(server_args).cuda_graph_config
    asked_for = (Phase.PREFILL, "backend") in getattr(server_args, "_cuda_graph_config_locked", ())
    if graphs.prefill.backend != Backend.DISABLED and not asked_for:
        eager = with_phase(graphs, Phase.PREFILL, backend=Backend.DISABLED)
        declare_resolution(server_args, f"{BACKEND}_prefill", cuda_graph_config=eager)


def _check_options(server_args: Any, previous: Callable[[Any], None]) -> None:
    """While SGLang resolves its arguments: refuses, before it starts any process, what cannot work."""
    previous(server_args)
    if _is_chosen(server_args):
        from slimkv.integrations.sglang import refusals, settings

        config = settings.parse(server_args)
        refusals.check_options(server_args)
        refusals.check_deterministic(server_args, config)


def _lazy(name: str) -> Callable[..., Any]:
    """A function of ``slimkv.integrations.sglang.sizing`` that is imported at its first call."""

    def around(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        from slimkv.integrations.sglang import sizing

        return getattr(sizing, name)(original, *args, **kwargs)

    around.__name__ = name
    return around


def _pool_class(original: Callable[..., type], kvc: Any, *, kind: str, default: type) -> type:
    """Around ``KVCacheConfigurator._resolve_kv_pool_class``."""
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
        return original(kvc, kind=kind, default=default)
    check_hooks(TARGETS)
    if default is not expected:
        raise SlimKVError(f"slimkv's pages take the place of SGLang's plain pool, not of {default.__name__}")
    return bind(sized_plan(kvc), TARGETS, ours)


def _host_pool(original: Callable[..., Any], **asked: Any) -> Any:
    """Around ``build_kv_host_pool``."""
    from slimkv.integrations.sglang.host_pool import host_pool
    from slimkv.integrations.sglang.pool import PackedPool

    pool = asked["kv_pool"]
    return host_pool(pool, asked) if isinstance(pool, PackedPool) else original(**asked)


def _answer(original: Callable[..., Any], scheduler: Any, request: Any) -> Any:
    """Around ``Scheduler.handle_rpc_request``."""
    from slimkv.integrations.sglang.observe import answer

    return answer(original, scheduler, request)


def _create_backend(runner: Any) -> Any:
    """The backend of a model runner: for latents, or for K and V."""
    if runner.use_mla_backend:
        from slimkv.integrations.sglang.mla.backend import SlimKVLatentBackend

        return SlimKVLatentBackend(runner)
    from slimkv.integrations.sglang.backend import SlimKVAttnBackend

    return SlimKVAttnBackend(runner)
