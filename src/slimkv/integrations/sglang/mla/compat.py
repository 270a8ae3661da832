"""The parts of SGLang's latent attention that slimkv uses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.models.deepseek_common.attention_backend_handler import (
    AttentionBackendRegistry,
    AttnForwardMethod,
    get_attn_backend,
    is_in_breakable_cuda_graph,
    is_in_tc_piecewise_cuda_graph,
)
from sglang.srt.models.deepseek_common.utils import FORWARD_ABSORB_CORE_ATTENTION_BACKENDS
from sglang.srt.models.deepseek_v2 import DeepseekV2AttentionMLA

from slimkv.errors import UnsupportedError
from slimkv.integrations.sglang.names import BACKEND


def register_forward_methods(ours: type, drafts: str | None) -> None:
    """Registers slimkv's choice of forward method: prefill expands latents into K and V, all other steps absorb.

    Prefill in a graph absorbs too, as with SGLang's own backends, because the number of latents to expand is unknown
    there. SGLang also asks for a drafter's layers, whose backend is not ``ours`` but the one named ``drafts``.
    """

    def choose(attention: Any, batch: Any) -> Any:
        if drafts is not None and not isinstance(get_attn_backend(), ours):
            attention.current_attention_backend = drafts
            return AttentionBackendRegistry.get_handler(drafts)(attention, batch)
        captured = is_in_tc_piecewise_cuda_graph() or is_in_breakable_cuda_graph()
        expands = batch.forward_mode.is_extend_without_speculative() and not captured
        return AttnForwardMethod.MHA if expands else AttnForwardMethod.MLA

    AttentionBackendRegistry.register(BACKEND, choose)
    if BACKEND not in FORWARD_ABSORB_CORE_ATTENTION_BACKENDS:  # passes latents and rope parts separately
        FORWARD_ABSORB_CORE_ATTENTION_BACKENDS.append(BACKEND)


def dense_attention(device: torch.device) -> Callable[..., Any] | None:
    """SGLang's FlashAttention-3, for prefill on a GPU; None on a CPU, where plain torch is used."""
    if device.type == "cpu":
        return None
    capability = torch.cuda.get_device_capability(device)
    if capability[0] not in (8, 9):
        raise UnsupportedError(
            f"slimkv's latent attention prefills with SGLang's FlashAttention-3, which runs on compute capability 8.x "
            f"and 9.0, not on {capability[0]}.{capability[1]}; use SGLang's own attention backend"
        )
    try:
        from sgl_kernel.flash_attn import flash_attn_varlen_func
    except ImportError as error:
        raise UnsupportedError(
            "slimkv's latent attention prefills with FlashAttention-3 of sgl-kernel, which cannot be imported: "
            f"{error}; install sgl-kernel"
        ) from error
    return flash_attn_varlen_func
