"""``SlimKVBackend``: what vLLM asks of an attention backend before it runs; sizes above all."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, ClassVar

import torch

from slimkv.errors import UnsupportedError
from slimkv.integrations.vllm.compat import (
    AttentionBackend,
    AttentionSpec,
    AttentionType,
    PageShape,
    is_delegated,
    packed,
    packs,
)
from slimkv.spec import BLOCK_SIZES, SLICE_DIMS, TILE_TOKENS, CodecSpec, PageLayout

KERNEL_BLOCKS = [size for size in BLOCK_SIZES if size >= TILE_TOKENS]
PREFERRED_BLOCK = 64
MAX_HEAD_SIZE = 512  # what the kernels hold in registers
CACHE_DTYPES = ["auto", "float16", "bfloat16", "float32"]


def slot_bytes(spec: CodecSpec) -> int:
    """Bytes per token and KV head, in blocks of any size of a tile or more."""
    region = PageLayout(spec, TILE_TOKENS).region_bytes
    assert region % TILE_TOKENS == 0, f"{spec.word}: {region} bytes do not divide among {TILE_TOKENS} tokens"
    return region // TILE_TOKENS


class SlimKVBackend(PageShape, AttentionBackend):
    """Attention on packed pages. A layer's class is a subclass that knows the layer's format (see ``bound``)."""

    accept_output_buffer: bool = True
    forward_includes_kv_cache_update: bool = False
    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16, torch.float32]
    supported_kv_cache_dtypes: ClassVar[list[Any]] = CACHE_DTYPES
    codec_spec: ClassVar[CodecSpec | None] = None

    @staticmethod
    def get_name() -> str:
        """The name vLLM knows it by."""
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> Any:
        """What runs a layer's attention."""
        from slimkv.integrations.vllm.impl import SlimKVImpl

        return SlimKVImpl

    @staticmethod
    def get_builder_cls() -> Any:
        """What prepares a step for all layers."""
        from slimkv.integrations.vllm.metadata import SlimKVMetadataBuilder

        return SlimKVMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[Any]:
        """Tokens per block that the kernels take; vLLM cuts larger blocks into these."""
        return list(KERNEL_BLOCKS)

    @classmethod
    def get_preferred_block_size(cls, default_block_size: int) -> int:
        """Where the user asks for no block size."""
        return max(default_block_size, PREFERRED_BLOCK) if default_block_size in KERNEL_BLOCKS else PREFERRED_BLOCK

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        """Multiples of 16 up to 512."""
        return head_size % SLICE_DIMS == 0 and SLICE_DIMS <= head_size <= MAX_HEAD_SIZE

    @classmethod
    def supports_attn_type(cls, attn_type: str) -> bool:
        """All; encoder and cross attention are handed to vLLM's own backend."""
        return attn_type in list(AttentionType)

    @classmethod
    def supports_sliding_window(cls) -> bool:
        """Yes."""
        return True

    @classmethod
    def supports_sink(cls) -> bool:
        """Learned logits that join the softmax: yes."""
        return True

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        """Keys are split by the shape of the batch, so no."""
        return False

    @classmethod
    def customize_spec(cls, spec: AttentionSpec) -> AttentionSpec:
        """How many bytes of cache a token of this layer takes."""
        if spec.state_content_bytes is not None or is_delegated(spec):
            return spec
        if not packs(spec):
            raise UnsupportedError(f"slimkv does not know how layers with a {type(spec).__name__} use their cache")
        if cls.codec_spec is None:
            raise UnsupportedError(
                "vLLM asks for the cache of a layer whose weights it has not loaded through "
                "process_weights_after_loading, so that slimkv does not know its format; use another load format"
            )
        return packed(spec, slot_bytes(cls.codec_spec))


@lru_cache(maxsize=256)
def bound(base: type[SlimKVBackend], spec: CodecSpec) -> type[SlimKVBackend]:
    """``base`` for layers whose pages hold ``spec``: vLLM groups layers by class and asks the class for sizes."""
    name = f"{base.__name__}_{spec.word}_{spec.key_dim}_{spec.value_dim}"
    return type(name, (base,), {"codec_spec": spec, "bytes_per_token": slot_bytes(spec), "__module__": base.__module__})
