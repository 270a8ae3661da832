"""``SlimKVMLABackend``: what vLLM asks of an attention backend for latents before it runs."""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from slimkv.errors import UnsupportedError
from slimkv.integrations.vllm.compat import AttentionSpec, PageShape, with_packed_bytes
from slimkv.integrations.vllm.mla.compat import MLACommonBackend, call_after_loading, is_supported_spec
from slimkv.integrations.vllm.mla.refusals import SPARSE
from slimkv.integrations.vllm.page_sizes import CACHE_DTYPES, KERNEL_BLOCKS, PREFERRED_BLOCK, slot_bytes
from slimkv.spec import LatentSpec


class SlimKVMLABackend(PageShape, MLACommonBackend):
    """Latent attention on packed pages. A layer's class is a subclass that knows its format (``backend_for_spec``)."""

    accept_output_buffer: bool = True
    forward_includes_kv_cache_update: bool = False
    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16, torch.float32]
    supported_kv_cache_dtypes: ClassVar[list[Any]] = CACHE_DTYPES
    codec_spec: ClassVar[LatentSpec | None] = None

    @staticmethod
    def get_name() -> str:
        """The name vLLM knows it by."""
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> Any:
        """What runs a layer's attention."""
        from slimkv.integrations.vllm.mla.impl import SlimKVMLAImpl

        call_after_loading()
        return SlimKVMLAImpl

    @staticmethod
    def get_builder_cls() -> Any:
        """What prepares a step for all layers."""
        from slimkv.integrations.vllm.mla.metadata import SlimKVMLAMetadataBuilder

        return SlimKVMLAMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[Any]:
        """Tokens per block that the kernels take; vLLM cuts larger blocks into these."""
        return list(KERNEL_BLOCKS)

    @classmethod
    def get_preferred_block_size(cls, default_block_size: int) -> int:
        """Where the user asks for no block size."""
        return max(default_block_size, PREFERRED_BLOCK) if default_block_size in KERNEL_BLOCKS else PREFERRED_BLOCK

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        """Tokens are split by the shape of the batch, so no."""
        return False

    @classmethod
    def supports_combination(
        cls,
        head_size: int,
        dtype: torch.dtype,
        kv_cache_dtype: Any,
        block_size: int | None,
        use_mla: bool,
        has_sink: bool,
        use_sparse: bool,
        *others: Any,
        **more: Any,
    ) -> str | None:
        """A reason against this kind of layer, beside those vLLM finds itself."""
        return SPARSE if use_sparse else None

    @classmethod
    def customize_spec(cls, spec: AttentionSpec) -> AttentionSpec:
        """How many bytes of cache a token of this layer takes."""
        if spec.state_content_bytes is not None:
            return spec
        if not is_supported_spec(spec):
            raise UnsupportedError(f"slimkv does not know how layers with a {type(spec).__name__} use their latents")
        if cls.codec_spec is None:
            raise UnsupportedError(
                "vLLM asks for the cache of a layer whose weights it has not loaded through "
                "process_weights_after_loading, so that slimkv does not know its format; use another load format"
            )
        return with_packed_bytes(spec, slot_bytes(cls.codec_spec))
