"""``SlimKVBackend``: the interface that vLLM queries before it runs, mainly for sizes."""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from slimkv.errors import UnsupportedError
from slimkv.integrations.vllm.compat import (
    AttentionBackend,
    AttentionSpec,
    AttentionType,
    PageShape,
    is_delegated,
    is_supported_spec,
    with_packed_bytes,
)
from slimkv.integrations.vllm.page_sizes import (
    CACHE_DTYPES,
    KERNEL_BLOCKS,
    PREFERRED_BLOCK,
    slot_bytes,
    supports_head_size,
)
from slimkv.spec import CodecSpec


class PackedBackend(PageShape):
    """The common part of the backends for packed K and V and for packed latents."""

    accept_output_buffer: bool = True
    forward_includes_kv_cache_update: bool = False
    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16, torch.float32]
    supported_kv_cache_dtypes: ClassVar[list[Any]] = CACHE_DTYPES
    codec_spec: ClassVar[CodecSpec | None] = None
    held: ClassVar[str] = "cache"  # what layers store, for messages
    preferred_block: ClassVar[int] = PREFERRED_BLOCK

    @staticmethod
    def get_name() -> str:
        """The backend's name in vLLM."""
        return "CUSTOM"

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[Any]:
        """Block sizes that the kernels support; vLLM splits larger blocks into these."""
        return list(KERNEL_BLOCKS)

    @classmethod
    def get_preferred_block_size(cls, default_block_size: int) -> int:
        """The default block size."""
        own = cls.preferred_block
        return max(default_block_size, own) if default_block_size in KERNEL_BLOCKS else own

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        """Whether it may serve under VLLM_BATCH_INVARIANT; not on latents."""
        return False

    @staticmethod
    def is_supported_spec(spec: AttentionSpec) -> bool:
        """Whether slimkv supports layers with this kind of cache spec."""
        return is_supported_spec(spec)

    @classmethod
    def customize_spec(cls, spec: AttentionSpec) -> AttentionSpec:
        """Bytes of cache per token of this layer."""
        if spec.state_content_bytes is not None:
            return spec
        if not cls.is_supported_spec(spec):
            raise UnsupportedError(f"slimkv does not know how layers with a {type(spec).__name__} use their {cls.held}")
        if cls.codec_spec is None:
            raise UnsupportedError(
                "vLLM asks for the cache of a layer whose weights it has not loaded through "
                "process_weights_after_loading, so that slimkv does not know its format; use another load format"
            )
        return with_packed_bytes(spec, slot_bytes(cls.codec_spec))


class SlimKVBackend(PackedBackend, AttentionBackend):
    """Attention on packed pages. A layer's class is a subclass that knows its format (``backend_for_spec``)."""

    preferred_block: ClassVar[int] = 32  # decode is 0 to 2% slower than with 64, a prefix hit computes half as much

    @staticmethod
    def get_impl_cls() -> Any:
        """The class that runs a layer's attention."""
        from slimkv.integrations.vllm.impl import SlimKVImpl

        return SlimKVImpl

    @staticmethod
    def get_builder_cls() -> Any:
        """The class that builds the metadata of a step."""
        from slimkv.integrations.vllm.metadata import SlimKVMetadataBuilder

        return SlimKVMetadataBuilder

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        """Multiples of 16 up to 512."""
        return supports_head_size(head_size)

    @classmethod
    def supports_attn_type(cls, attn_type: str) -> bool:
        """All types; encoder and cross attention use vLLM's own backend."""
        return attn_type in list(AttentionType)

    @classmethod
    def supports_sliding_window(cls) -> bool:
        """Yes."""
        return True

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        """Yes, with ``deterministic``, which the switch sets; contradicting settings raise an error."""
        return True

    @classmethod
    def supports_non_causal(cls) -> bool:
        """Yes: drafters of whole blocks, whose tokens attend to one another in both directions."""
        return True

    @classmethod
    def supports_sink(cls) -> bool:
        """Yes: learned logits in the softmax."""
        return True

    @classmethod
    def customize_spec(cls, spec: AttentionSpec) -> AttentionSpec:
        """See ``PackedBackend``; layers of vLLM's own backend keep their size."""
        return spec if is_delegated(spec) else super().customize_spec(spec)
