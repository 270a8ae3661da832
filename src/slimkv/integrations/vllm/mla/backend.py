"""``SlimKVMLABackend``: the counterpart of ``SlimKVBackend`` for latents."""

from __future__ import annotations

from typing import Any, ClassVar

from slimkv.integrations.vllm.backend import PackedBackend
from slimkv.integrations.vllm.mla.compat import MLACommonBackend, is_supported_spec
from slimkv.integrations.vllm.mla.impl import SlimKVMLAImpl
from slimkv.integrations.vllm.mla.metadata import SlimKVMLAMetadataBuilder
from slimkv.integrations.vllm.refusals import SPARSE


class SlimKVMLABackend(PackedBackend, MLACommonBackend):
    """Latent attention on packed pages. Each layer gets a subclass for its format (``backend_for_spec``)."""

    held: ClassVar[str] = "latents"
    is_supported_spec = staticmethod(is_supported_spec)
    impl, builder = SlimKVMLAImpl, SlimKVMLAMetadataBuilder

    @classmethod
    def supports_combination(cls, *layer: Any) -> str | None:
        """Why a layer is not supported, beside vLLM's own reasons; None if it is."""
        use_sparse = layer[6]
        return SPARSE if use_sparse and not cls.is_sparse() else None
