"""A cold tier under SGLang's own attention: its cache is unchanged, and pages that go to host memory are packed.

SGLang's host pool of opaque page rows (see ``host_pool``) copies between host memory and a staging slab. Before a copy
out, pages of SGLang's cache are encoded into the slab; after a copy in, they are decoded from it. Both run on SGLang's
transfer streams, one for each direction, and each direction has its own half of the slab.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NoReturn

import torch
from sglang.srt.mem_cache.device_pool_info import KVBufferLayout, MHABufferInfo, PageRowBufferInfo
from torch import Tensor

from slimkv.errors import UnsupportedError
from slimkv.integrations.serving.cold.band import Band, BandCodec, ColdLayer
from slimkv.integrations.sglang import compat, refusals
from slimkv.integrations.sglang.host_pool import MiniMaxM3Nvfp4MainKVPoolHost, _get_allocator_type, get_memory
from slimkv.integrations.sglang.names import HOST_POOL, cold_settings
from slimkv.integrations.sglang.sizing import CachePlan, plan_for

PIECE_BYTES = 64 << 20  # of K and V of a band in the model's dtype that are encoded or decoded at a time
MAX_BAND_LAYERS = 8  # that are loaded together; attention of the first of them waits for all
ROW_ALIGNMENT = 128  # of SGLang's copy kernel

_plan: CachePlan | None = None  # of this process's model, from ``prepare``


def prepare(kvc: Any) -> None:
    """Plans the packed pages of the cache that SGLang is about to build, if they are asked for."""
    global _plan
    config = cold_settings(kvc.server_args)
    if config is None or kvc.is_draft_worker:
        return
    compat.check_hooks((HOST_POOL,))
    refusals.check_cold_model(kvc)
    _plan = plan_for(kvc, config)


def cold_host_pool(pool: Any, asked: dict[str, Any]) -> ColdHostPool:
    """The host pool of packed pages of ``pool``; ``asked``: the arguments of ``build_kv_host_pool``."""
    if _plan is None:
        raise UnsupportedError("SGLang built a cache without asking slimkv, whose cold tier does not know it")
    if asked.get("mtp_draft_device_pools"):
        raise UnsupportedError("slimkv's cold tier excludes a drafter's cache: leave out 'cold'")
    memory, host_size = get_memory(), asked.get("host_size")
    return ColdHostPool(
        pool, _plan, memory.hicache_ratio, memory.hicache_size if host_size is None else host_size,
        asked.get("pool_label", "kv"), _get_allocator_type(),
    )  # fmt: skip


class PoolCache:
    """A layer of SGLang's cache: K and V [slots, heads, dim], in pages of ``tokens`` slots."""

    def __init__(self, key: Tensor, value: Tensor, tokens: int) -> None:
        self._buffers, self.device = (key, value), key.device
        self.plain_sides = key.unflatten(0, (-1, tokens)), value.unflatten(0, (-1, tokens))

    def read(self, blocks: Tensor, key: Tensor, value: Tensor) -> None:
        """K and V of ``blocks``, int64 [n], into [n * tokens, heads, dim]."""
        for side, out in zip(self.plain_sides, (key, value), strict=True):
            out.copy_(side[blocks].flatten(0, 1))

    def write(self, slots: Tensor, key: Tensor, value: Tensor) -> None:
        """K and V [tokens, heads, dim] to int64 ``slots`` [tokens]."""
        for buffer, x in zip(self._buffers, (key, value), strict=True):
            buffer[slots] = x


class ColdHostPool(MiniMaxM3Nvfp4MainKVPoolHost):
    """Host memory with packed pages of ``pool``, a row of bytes for each page and band of layers.

    ``ratio``: of host memory to the cache, in bytes; ``size``: of host memory, in GB, instead of it if not 0.
    """

    def __init__(
        self, pool: Any, plan: CachePlan, ratio: float, size: float, label: str = "kv", allocator: str = "default"
    ) -> None:
        info = _plain_buffers(pool, plan)
        layers, page = plan.groups[None], plan.page_size
        self._band_layers = next(n for n in range(MAX_BAND_LAYERS, 0, -1) if len(layers) % n == 0)
        hot_bytes = info.head_num * (info.head_dim + info.v_head_dim) * info.dtype.itemsize  # of a token in a layer
        self._piece = max(1, PIECE_BYTES // (page * hot_bytes * self._band_layers))
        with torch.inference_mode(False):  # they outlive the step that creates them
            self._codecs = tuple(
                _band_codec(plan, info, slice(first, first + self._band_layers))
                for first in range(0, len(layers), self._band_layers)
            )
            row_bytes = self._codecs[0].band.block_bytes
            shape = len(self._codecs), 2 * self._piece, row_bytes
            slab = torch.zeros(shape, dtype=torch.uint8, device=info.device)
        if slab.is_cuda and row_bytes % ROW_ALIGNMENT:
            raise UnsupportedError(
                f"SGLang copies rows of a multiple of {ROW_ALIGNMENT} bytes, and packed pages of {self._band_layers} "
                f"layers have {row_bytes}: use --page-size 64"
            )
        staging = PageRowBufferInfo(
            slab=slab, rows=tuple(slab.unbind(0)), row_bytes=row_bytes, page_size=page, num_pages=slab.shape[1]
        )
        capacity = pool.size if pool.host_capacity_tokens is None else pool.host_capacity_tokens
        super().__init__(
            staging, ratio * len(layers) * hot_bytes / plan.token_bytes(None), size, page, refusals.HOST_LAYOUT,
            allocator_type=allocator, device_capacity_tokens=capacity, start_layer=pool.start_layer,
            end_layer=pool.end_layer, pool_label=label, pin_memory=slab.is_cuda,
        )  # fmt: skip
        self.device_slots = len(info.buffers.k[0])  # of the cache, not of the slab
        if slab.is_cuda:
            for band, codec in enumerate(self._codecs):
                codec.warm(self._staging(band, 0, self._piece))
        compat.logger.info(
            "slimkv: the cold tier holds %d tokens in %.1f GiB of host memory.",
            self.size,
            self.kv_buffer.nbytes / 2**30,
        )

    def _staging(self, band: int, first: int, pages: int) -> Tensor:
        """Rows ``first`` to ``first + pages`` of the slab, as uint8 [pages, heads of the band, page bytes]."""
        of = self._codecs[band].band
        return self.device_slab[band, first : first + pages].view(pages, of.heads, of.layout.page_bytes)

    def _pieces(self, host_pages: Tensor, device_pages: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Of each piece: its pages of host memory, its rows of a half of the slab, its pages of the cache."""
        for host, device in zip(host_pages.split(self._piece), device_pages.split(self._piece), strict=True):
            rows = torch.arange(len(host), device=host.device)
            yield host, rows, device.to(self.device_slab.device, torch.int64, non_blocking=True)

    def backup_from_device_all_layer_physical(
        self, device_pool: Any, host_indices: Tensor, device_indices: Tensor, io_backend: str
    ) -> None:
        """Cache -> host memory; the indices are those of pages."""
        for host, rows, pages in self._pieces(host_indices, device_indices):
            for band, codec in enumerate(self._codecs):
                codec.encode(pages, 0, self._staging(band, 0, len(pages)))
            super().backup_from_device_all_layer_physical(device_pool, host, rows, io_backend)

    def _load_layer_pages(
        self, host_pages: Tensor, device_pages: Tensor, layer_id: int, io_backend: str, *, is_draft: bool
    ) -> None:
        """Host memory -> cache. SGLang loads layers in order; the first one of a band brings the others."""
        band, others = divmod(layer_id, self._band_layers)
        if others:
            return
        for host, rows, pages in self._pieces(host_pages, device_pages):
            super()._load_layer_pages(host, rows + self._piece, band, io_backend, is_draft=is_draft)
            self._codecs[band].decode(self._staging(band, self._piece, len(pages)), pages)

    def _refuse_storage(self, *_: Any, **__: Any) -> NoReturn:
        raise UnsupportedError(
            "slimkv's cold tier does not write to storage, because the stored bytes would not record their format and "
            "key offset: detach the storage backend"
        )

    get_data_page = get_dummy_flat_data_page = set_from_flat_data_page = get_page_buffer_meta = _refuse_storage


def _plain_buffers(pool: Any, plan: CachePlan) -> MHABufferInfo:
    """K and V of SGLang's cache; raises unless they are plain tensors [slots, heads, dim] of the plan's layers."""
    if type(pool) is not compat.MHATokenToKVPool:
        raise UnsupportedError(f"slimkv's cold tier does not know SGLang's {type(pool).__name__}: leave out 'cold'")
    info = pool.get_device_pool_infos()[0].buffer_info
    layers = plan.groups[None]
    if len({(of.layout, of.num_kv_heads) for of in layers}) > 1:
        raise UnsupportedError("SGLang's host memory has pages of one size: give all layers of 'cold' one format")
    spec = layers[0].layout.spec
    expected = len(layers), layers[0].num_kv_heads, spec.key_dim, spec.value_dim
    there = len(info.buffers.k), info.head_num, info.head_dim, info.v_head_dim
    if info.buffers.layout != KVBufferLayout.NHD or info.scales is not None or there != expected:
        raise UnsupportedError(
            f"slimkv's cold tier reads K and V as [slots, heads, dim]; SGLang's cache is {info.buffers.layout.value} "
            f"with (layers, heads, key and value size) {there} where {expected} were planned: leave out 'cold'"
        )
    return info


def _band_codec(plan: CachePlan, info: MHABufferInfo, which: slice) -> BandCodec:
    model, pages = plan.model, plan.groups[None][which]
    spec, heads = pages[0].layout.spec, pages[0].num_kv_heads
    band = Band(
        tuple(ColdLayer(f"layer {of.layer}", of.layer, None, spec, heads) for of in pages), pages[0].layout, 1, 0
    )
    caches = [
        PoolCache(k, v, plan.page_size) for k, v in zip(info.buffers.k[which], info.buffers.v[which], strict=True)
    ]
    offsets = [model.layer_offset(of.layer, spec, heads, info.device) if model.centres(spec) else None for of in pages]
    return BandCodec.of(model, band, caches, offsets, info.dtype, positions=False)
