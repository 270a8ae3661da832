"""A plugin that lets SGLang's ``torch_native`` backend run latent attention, absorbed even in prefill.

SGLang's own CPU kernels for latent attention need AMX.
"""

from __future__ import annotations


def register() -> None:
    from sglang.srt.models.deepseek_common.attention_backend_handler import AttentionBackendRegistry, AttnForwardMethod

    AttentionBackendRegistry.register("torch_native", lambda attention, batch: AttnForwardMethod.MLA)
