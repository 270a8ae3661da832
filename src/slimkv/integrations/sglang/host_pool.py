"""SGLang's hierarchical cache with packed pages: each page of a layer moves as one row of bytes.

SGLang's host pools store K and V as tensors of tokens, except one for another packed cache, whose rows are whole pages
with codes and scales. That pool treats rows as opaque bytes, so slimkv uses it.
"""

from __future__ import annotations

from typing import Any

from sglang.srt.mem_cache.device_pool_info import DevicePoolInfo, PageRowBufferInfo
from sglang.srt.mem_cache.hicache_storage import PoolName
from sglang.srt.mem_cache.hybrid_cache.hybrid_pool_assembler import _get_allocator_type, get_memory
from sglang.srt.mem_cache.pool_host.minimax_m3_nvfp4 import MiniMaxM3Nvfp4MainKVPoolHost
from torch import Tensor

from slimkv.errors import UnsupportedError
from slimkv.integrations.sglang.compat import MHATokenToKVPool, check_hooks
from slimkv.integrations.sglang.names import HOST_POOL


def page_rows(slab: Tensor, page_size: int) -> PageRowBufferInfo:
    """SGLang's description of ``slab``, uint8 [layers, pages, bytes]."""
    return PageRowBufferInfo(
        slab=slab, rows=tuple(slab.unbind(0)), row_bytes=slab.shape[2], page_size=page_size, num_pages=slab.shape[1]
    )


def device_pool_infos(pool: Any) -> tuple[DevicePoolInfo, ...]:
    """SGLang's description of the rows of a device pool."""
    check_hooks((HOST_POOL,))
    if not isinstance(pool, MHATokenToKVPool):
        raise UnsupportedError("packed latents have no host memory in SGLang: leave out --enable-hierarchical-cache")
    sizes = {of.row_bytes for of in pool.layers}
    if len(sizes) > 1:
        raise UnsupportedError(
            f"--enable-hierarchical-cache moves pages of one size, and layers of this cache have pages of "
            f"{sorted(sizes)} bytes: give all layers one format"
        )
    rows = page_rows(pool._slab.view(len(pool.layers), pool.num_blocks, sizes.pop()), pool.page_size)
    layers = tuple(range(pool.start_layer, pool.start_layer + pool.layer_num))
    name = PoolName.KV
    return (DevicePoolInfo(pool_name=name, indices_from_pool=name, layer_ids=layers, buffer_info=rows),)


def host_pool(
    pool: Any, rows: PageRowBufferInfo, asked: dict[str, Any], kind: Any = MiniMaxM3Nvfp4MainKVPoolHost
) -> Any:
    """Host memory for ``pool``, whose pages move as ``rows``; ``asked``: the arguments of ``build_kv_host_pool``."""
    if asked.get("mtp_draft_device_pools"):
        raise UnsupportedError("slimkv's host pool excludes a drafter's cache: leave out --enable-hierarchical-cache")
    memory, host_size = get_memory(), asked.get("host_size")
    return kind(
        rows, memory.hicache_ratio, memory.hicache_size if host_size is None else host_size, asked["page_size"],
        memory.hicache_mem_layout, allocator_type=_get_allocator_type(), device_capacity_tokens=pool.size,
        start_layer=pool.start_layer, end_layer=pool.end_layer, pool_label=asked.get("pool_label", "kv"),
        pin_memory=rows.slab.is_cuda,
    )  # fmt: skip
