"""``SlimKVMLABackend``: the interface that vLLM queries for latents before it runs."""

from __future__ import annotations

from typing import Any, ClassVar

from slimkv.integrations.vllm.backend import PackedBackend
from slimkv.integrations.vllm.mla.compat import MLACommonBackend, is_supported_spec
from slimkv.integrations.vllm.mla.impl import SlimKVMLAImpl
from slimkv.integrations.vllm.mla.metadata import SlimKVMLAMetadataBuilder
from slimkv.integrations.vllm.refusals import SPARSE


class SlimKVMLABackend(PackedBackend, MLACommonBackend):
    """Latent attention on packed pages. A layer's class is a subclass that knows its format (``backend_for_spec``)."""

    held: ClassVar[str] = "latents"
    is_supported_spec = staticmethod(is_supported_spec)
    impl, builder = SlimKVMLAImpl, SlimKVMLAMetadataBuilder

    @classmethod
    def supports_combination(cls, *layer: Any) -> str | None:
        """Why this kind of layer is not supported, in addition to vLLM's own reasons."""
        use_sparse = layer[6]
        return SPARSE if use_sparse and not cls.is_sparse() else None
