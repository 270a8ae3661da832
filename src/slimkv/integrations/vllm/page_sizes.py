"""Block sizes, head sizes, bytes per token, and one backend class per format."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from slimkv.spec import BLOCK_SIZES, SLICE_DIMS, TILE_TOKENS, CodecSpec, PageLayout

KERNEL_BLOCKS = [size for size in BLOCK_SIZES if size >= TILE_TOKENS]
PREFERRED_BLOCK = 64
PREFERRED_DENSE_BLOCK = 32  # decode is 0 to 2% slower than with 64, but a prefix hit recomputes half as much
MAX_HEAD_SIZE = 512  # limit of the kernels' registers
CACHE_DTYPES = ["auto", "float16", "bfloat16", "float32"]


def supports_head_size(head_size: int) -> bool:
    """Whether ``head_size`` is a multiple of 16 up to 512."""
    return head_size % SLICE_DIMS == 0 and SLICE_DIMS <= head_size <= MAX_HEAD_SIZE


def slot_bytes(spec: CodecSpec) -> int:
    """Bytes per token and KV head in blocks of at least one tile."""
    page = PageLayout(spec, TILE_TOKENS).page_bytes
    assert page % TILE_TOKENS == 0, f"{spec.format}: {page} bytes do not divide among {TILE_TOKENS} tokens"
    return page // TILE_TOKENS


@lru_cache(maxsize=256)
def backend_for_spec(base: type[Any], spec: CodecSpec, cross_layer_blocks: bool = False) -> type[Any]:
    """A subclass of ``base`` for layers with ``spec``: vLLM groups layers by class and asks the class for sizes."""
    name = f"{base.__name__}_{spec.format}_{spec.key_dim}_{spec.value_dim}"
    fields = {"codec_spec": spec, "cross_layer_blocks": cross_layer_blocks, "__module__": base.__module__}
    return type(name, (base,), fields)
