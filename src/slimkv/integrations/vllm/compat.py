"""The parts of vLLM that slimkv uses; no other module checks versions.

Importing this module raises an error unless the tested release is installed.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from typing import Any

import torch

from slimkv.integrations.serving.versions import check_tested

TESTED = (0, 32)

logger = logging.getLogger("vllm.slimkv")  # vLLM shows the logs of its child loggers

VERSION = check_tested("vLLM", "vllm", TESTED)

from vllm import envs  # noqa: E402
from vllm.config import get_current_vllm_config  # noqa: E402
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata  # noqa: E402
from vllm.distributed.parallel_state import get_dcp_group, get_tp_group  # noqa: E402
from vllm.forward_context import get_forward_context  # noqa: E402
from vllm.v1.attention.backend import (  # noqa: E402
    AttentionBackend,
    AttentionCGSupport,
    AttentionImpl,
    AttentionMetadataBuilder,
    AttentionType,
    CommonAttentionMetadata,
)
from vllm.v1.kv_cache_interface import (  # noqa: E402
    AttentionSpec,
    ChunkedLocalAttentionSpec,
    CrossAttentionSpec,
    EncoderOnlyAttentionSpec,
    FullAttentionSpec,
    KVCacheLayout,
    SlidingWindowSpec,
)


class Rule(Enum):
    """How a KV connector of vLLM may be used with packed pages."""

    IN_PROCESS = "only the same engine reads the pages it writes"
    FOLDER = "it shares a folder, which is marked with the fingerprint"
    HANDSHAKE = "it talks to other processes, and its handshake carries the fingerprint"
    PEERS = "it talks to other processes, whose fingerprint the user states"
    CHILDREN = "it holds other connectors"
    REFUSED = "it cannot work"


# What was reviewed in the tested release: KV connectors, and why some are refused; speculative methods and options.
REVIEWED = json.loads(Path(__file__).with_name("reviewed.json").read_text(encoding="utf-8"))
CONNECTORS = {name: (Rule[rule], why) for name, (rule, why) in REVIEWED["connectors"].items()}
_stated: dict[str, str] = {}  # fingerprints in NIXL's handshakes, by engine id


def state_in_handshake(engine_id: str, fingerprint: str) -> None:
    """Adds ``fingerprint`` to the hash that NIXL peers compare before one reads from the other."""
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl import base_worker

    plain = base_worker.compute_nixl_compatibility_hash

    def with_fingerprint(vllm_config: Any, *args: Any, **kwargs: Any) -> str:
        own = _stated.get(vllm_config.kv_transfer_config.engine_id)
        return plain(vllm_config, *args, **kwargs) + (f", {own}" if own is not None else "")

    if not _stated:
        base_worker.compute_nixl_compatibility_hash = with_fingerprint
    _stated[engine_id] = fingerprint


FOLDER_KEYS = {"SlimKVPromptConnector": "shared_storage_path", "ExampleConnector": "shared_storage_path"}
NATIVE_OFFLOAD = "OffloadingConnector"
IN_MEMORY_SPEC = "CPUOffloadingSpec"  # spec of the native offload; others have tiers that outlive the engine
TIERING_SPEC = "TieringOffloadingSpec"
COLD_SPEC = "SlimKVOffloadingSpec"  # slimkv's own: packs the blocks that leave vLLM's cache
# Layouts in which the tokens of a block and head are contiguous, preferred first.
LAYOUTS = (KVCacheLayout.LBHNC, KVCacheLayout.BLHNC, KVCacheLayout.LHBNC, KVCacheLayout.BHLNC)
CROSS_LAYER_LAYOUT = KVCacheLayout.BLHNC  # the native offload copies a block of all layers at once

_DELEGATED = (CrossAttentionSpec, EncoderOnlyAttentionSpec)
_PACKS = (FullAttentionSpec, SlidingWindowSpec, ChunkedLocalAttentionSpec)


def is_delegated(spec: object) -> bool:
    """Whether the layers of a cache spec are left to vLLM's own backend."""
    return isinstance(spec, _DELEGATED)


def is_supported_spec(spec: object) -> bool:
    """Whether slimkv supports layers with exactly this cache spec class; a subclass may use its cache differently."""
    return type(spec) in _PACKS


def stock_backend(head_size: int, attn_type: str) -> type[AttentionBackend]:
    """The backend that vLLM itself would choose for encoder or cross attention."""
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

        return CPUAttentionBackend
    from vllm.utils.import_utils import resolve_obj_by_qualname
    from vllm.v1.attention.selector import AttentionSelectorConfig

    wanted = AttentionSelectorConfig(
        head_size=head_size,
        dtype=torch.get_default_dtype(),
        kv_cache_dtype="auto",
        block_size=None,
        attn_type=attn_type,
    )
    return resolve_obj_by_qualname(current_platform.get_attn_backend_cls(None, attn_selector_config=wanted))


def layout_is_chosen() -> bool:
    """Whether the user chose the cache's memory layout."""
    return envs.VLLM_KV_CACHE_LAYOUT is not None


def tensor_parallel_rank() -> tuple[int, int]:
    """This process's tensor-parallel rank, and the number of ranks."""
    group = get_tp_group()
    return group.rank_in_group, group.world_size


def tensor_parallel_gather(tensor: torch.Tensor) -> list[torch.Tensor]:
    """``tensor``, on the CPU, of every tensor-parallel rank; all ranks must call it."""
    group = get_tp_group()
    found = [torch.empty_like(tensor) for _ in range(group.world_size)]
    torch.distributed.all_gather(found, tensor.contiguous(), group=group.cpu_group)
    return found


def before_new_weights(check: Callable[..., None]) -> None:
    """Calls ``check(vllm_config, *arguments)`` before ``reload_weights``, and before another process sends weights."""
    from vllm.v1.worker.gpu_worker import Worker

    def wrapped(original: Callable[..., None], **more: Any) -> Callable[..., None]:
        def load(self: Any, *args: Any, **kwargs: Any) -> None:
            check(self.vllm_config, *args, **kwargs, **more)
            original(self, *args, **kwargs)

        return load

    Worker.reload_weights = wrapped(Worker.reload_weights)
    Worker.start_weight_update = wrapped(Worker.start_weight_update, weights_iterator=())


def forward_metadata(layer_name: str) -> Any:
    """The current step's metadata for a layer; None while vLLM profiles memory."""
    steps = get_forward_context().attn_metadata
    return steps.get(layer_name) if isinstance(steps, dict) else steps


def layer_number(name: str) -> int | None:
    """``model.layers.7.self_attn.attn`` -> 7; None for a layer without a number."""
    numbers = [int(part) for part in name.split(".") if part.isdigit()]
    return numbers[0] if numbers else None
