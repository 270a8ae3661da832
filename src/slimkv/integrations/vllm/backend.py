"""``SlimKVBackend``: the class that vLLM asks for sizes, layouts and supported features before it runs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

import torch

from slimkv.errors import UnsupportedError
from slimkv.integrations.vllm import compat, page_sizes
from slimkv.integrations.vllm.impl import SlimKVImpl
from slimkv.integrations.vllm.metadata import SlimKVMetadataBuilder
from slimkv.spec import CodecSpec


class PackedBackend:
    """The common part of the backends for packed K and V and for packed latents.

    A layer's cache is uint8 [blocks, num_kv_heads, tokens, bytes], the last two axes contiguous.
    """

    forward_includes_kv_cache_update: bool = False
    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16, torch.float32]
    supported_kv_cache_dtypes: ClassVar[list[Any]] = page_sizes.CACHE_DTYPES
    codec_spec: ClassVar[CodecSpec | None] = None
    held: ClassVar[str] = "cache"  # what layers store, for messages
    preferred_block: ClassVar[int] = page_sizes.PREFERRED_BLOCK
    cross_layer_blocks: ClassVar[bool] = False  # whether a block's pages must be contiguous across layers
    is_supported_spec = staticmethod(compat.is_supported_spec)
    impl: ClassVar[type]  # runs one layer's attention
    builder: ClassVar[type]  # builds a step's metadata
    get_name = staticmethod(lambda: "CUSTOM")  # in vLLM
    # Block sizes that the kernels support; vLLM splits larger blocks into these.
    get_supported_kernel_block_sizes = staticmethod(lambda kv_cache_spec=None: list(page_sizes.KERNEL_BLOCKS))
    get_impl_cls = classmethod(lambda cls: cls.impl)
    get_builder_cls = classmethod(lambda cls: cls.builder)
    # False: parts of a step and the bounds of kernels are computed from the lengths on the host.
    supports_device_cpu_query_lens_mismatch = classmethod(lambda cls: False)

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[Any, ...]:
        """The accepted memory layouts, preferred first."""
        return (compat.CROSS_LAYER_LAYOUT,) if cls.cross_layer_blocks else compat.LAYOUTS

    @classmethod
    def get_preferred_block_size(cls, default_block_size: int) -> int:
        """The default block size."""
        own = cls.preferred_block
        return max(default_block_size, own) if default_block_size in page_sizes.KERNEL_BLOCKS else own

    @classmethod
    def customize_spec(cls, spec: compat.AttentionSpec) -> compat.AttentionSpec:
        """The layer's cache spec with its packed bytes per token."""
        if spec.state_content_bytes is not None:
            return spec
        if not cls.is_supported_spec(spec):
            raise UnsupportedError(f"slimkv does not know how layers with a {type(spec).__name__} use their {cls.held}")
        if cls.codec_spec is None:
            raise UnsupportedError(
                "vLLM sizes the cache of a layer before process_weights_after_loading, so slimkv does not know the "
                "layer's format; use another load format"
            )
        return replace(spec, dtype=torch.uint8, state_content_bytes=page_sizes.slot_bytes(cls.codec_spec))


class SlimKVBackend(PackedBackend, compat.AttentionBackend):
    """Attention on packed pages. Each layer gets a subclass for its format (``backend_for_spec``)."""

    preferred_block: ClassVar[int] = page_sizes.PREFERRED_DENSE_BLOCK
    impl, builder = SlimKVImpl, SlimKVMetadataBuilder
    supports_head_size = staticmethod(page_sizes.supports_head_size)
    # All types: encoder and cross attention run on vLLM's own backend.
    supports_attn_type = classmethod(lambda cls, attn_type: attn_type in list(compat.AttentionType))

    @classmethod
    def _yes(cls) -> bool:
        return True

    supports_sliding_window = supports_sink = _yes
    supports_non_causal = _yes  # block drafters, whose tokens attend in both directions
    supports_batch_invariance = _yes  # VLLM_BATCH_INVARIANT sets ``deterministic``

    @classmethod
    def customize_spec(cls, spec: compat.AttentionSpec) -> compat.AttentionSpec:
        """See ``PackedBackend``; layers that run on vLLM's own backend keep their spec."""
        return spec if compat.is_delegated(spec) else super().customize_spec(spec)
