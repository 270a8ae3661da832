"""A plugin for SGLang with which ``torch_native`` attends latents: absorbed, also in prefill.

SGLang's own CPU kernels of latent attention need AMX.
"""

from __future__ import annotations


def register() -> None:
    from sglang.srt.models.deepseek_common.attention_backend_handler import AttentionBackendRegistry, AttnForwardMethod

    AttentionBackendRegistry.register("torch_native", lambda attention, batch: AttnForwardMethod.MLA)
