"""A cold tier under SGLang's own attention: the GPU cache is SGLang's, and pages are packed in host memory.

SGLang's host pool of opaque page rows (see ``host_pool``) copies between host memory and a staging slab. Pages of
SGLang's cache are encoded into the slab before a copy out, and decoded from it after a copy in. Both run on SGLang's
transfer streams, one per direction; each direction has its own half of the slab.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NoReturn

import torch
from sglang.srt.mem_cache.device_pool_info import KVBufferLayout
from torch import Tensor

from slimkv.errors import UnsupportedError
from slimkv.integrations.serving.cold.band import Band, BandCodec, ColdLayer, HotCache
from slimkv.integrations.serving.model import ServedModel
from slimkv.integrations.sglang.compat import MHATokenToKVPool, get_server_args, model_config_of
from slimkv.integrations.sglang.host_pool import MiniMaxM3Nvfp4MainKVPoolHost, host_pool, page_rows
from slimkv.integrations.sglang.names import cold_settings
from slimkv.integrations.sglang.pool import PackedPool
from slimkv.integrations.sglang.sizing import served_model
from slimkv.spec import page_layout

PIECE_BYTES = 64 << 20  # bytes of a band's K and V, in the model's dtype, that are encoded or decoded at a time
MAX_BAND_LAYERS = 8  # layers that are loaded together; attention of the first waits for all
ROW_ALIGNMENT = 128  # bytes, required by SGLang's copy kernel


def build_host_pool(original: Callable[..., Any], **asked: Any) -> Any:
    """Wraps ``build_kv_host_pool``: host memory for slimkv's pools, and for SGLang's if there is a cold tier."""
    pool, server_args = asked["kv_pool"], get_server_args()
    if isinstance(pool, PackedPool):
        return host_pool(pool, pool.get_device_pool_infos()[0].buffer_info, asked)
    config = cold_settings(server_args)
    if config is None:
        return original(**asked)
    return cold_host_pool(pool, served_model(server_args, model_config_of(server_args), config), asked)


def cold_host_pool(pool: Any, model: ServedModel, asked: dict[str, Any]) -> ColdHostPool:
    """Host memory with packed pages for SGLang's ``pool``; ``asked``: the arguments of ``build_kv_host_pool``."""
    with torch.inference_mode(False):  # tensors outlive the step that creates them
        codecs = band_codecs(pool, model)
        band = codecs[0].band
        piece = max(1, PIECE_BYTES // (codecs[0].tokens * codecs[0].token_bytes()))
        slab = torch.zeros(len(codecs), 2 * piece, band.block_bytes, dtype=torch.uint8, device=codecs[0].device)
    if slab.is_cuda and band.block_bytes % ROW_ALIGNMENT:
        raise UnsupportedError(
            f"SGLang copies rows of a multiple of {ROW_ALIGNMENT} bytes, and packed pages of {len(band.layers)} "
            f"layers have {band.block_bytes}: use --page-size 64"
        )
    return host_pool(pool, page_rows(slab, pool.page_size), asked, partial(ColdHostPool, codecs))


def band_codecs(pool: Any, model: ServedModel) -> list[BandCodec]:
    """The codecs of bands with equally many layers; raises unless K and V are plain tensors of one format."""
    if type(pool) is not MHATokenToKVPool:
        raise UnsupportedError(f"slimkv's cold tier does not know SGLang's {type(pool).__name__}: leave out 'cold'")
    info = pool.get_device_pool_infos()[0]
    cache, heads = info.buffer_info, info.buffer_info.head_num
    if cache.buffers.layout != KVBufferLayout.NHD or cache.scales is not None:
        raise UnsupportedError(
            "slimkv's cold tier reads K and V as [slots, heads, dim]; this cache has scales, or its layout is "
            f"{cache.buffers.layout.value}: leave out 'cold'"
        )
    specs = {model.layer_spec(i, cache.head_dim, cache.v_head_dim, str(cache.dtype)) for i in info.layer_ids}
    if len(specs) > 1:
        raise UnsupportedError("SGLang's host memory has pages of one size: give all layers of 'cold' one format")
    spec = specs.pop()
    layout = page_layout(spec, pool.page_size)
    layers = [ColdLayer(f"layer {i}", i, None, spec, heads) for i in info.layer_ids]
    caches = [
        HotCache(*(side.unflatten(0, (-1, pool.page_size)) for side in pair))
        for pair in zip(cache.buffers.k, cache.buffers.v, strict=True)
    ]
    offsets = [model.layer_offset(x.number, spec, heads, caches[0].device) for x in layers]
    size = next(n for n in range(MAX_BAND_LAYERS, 0, -1) if len(layers) % n == 0)
    return [
        BandCodec(model, Band(tuple(layers[at]), layout, 1, 0), caches[at], offsets[at], cache.dtype, positions=False)
        for at in (slice(first, first + size) for first in range(0, len(layers), size))
    ]


class ColdHostPool(MiniMaxM3Nvfp4MainKVPoolHost):
    """Host memory with packed pages: one row of bytes per page and band of layers."""

    def __init__(self, codecs: Sequence[BandCodec], rows: Any, ratio: float, *args: Any, **kwargs: Any) -> None:
        """``ratio``: bytes of host memory over bytes of the cache; in SGLang's own pools it is a ratio of tokens."""
        hot_bytes = codecs[0].tokens * codecs[0].token_bytes()  # bytes that a row's page takes in SGLang's cache
        super().__init__(rows, ratio * hot_bytes / rows.row_bytes, *args, **kwargs)
        self._codecs, self._piece = codecs, self.device_num_pages // 2
        self.device_slots = self.device_capacity_tokens + self.page_size  # slots of the cache, not of the slab
        if self.device_slab.is_cuda:
            for band, codec in enumerate(codecs):
                codec.warm(self._staging(band, 0, self._piece))

    def _staging(self, band: int, first: int, pages: int) -> Tensor:
        """Rows ``first`` to ``first + pages`` of the slab, as uint8 [pages, heads of the band, page bytes]."""
        return self.device_slab[band, first : first + pages].unflatten(1, (self._codecs[band].band.heads, -1))

    def _pieces(self, host_pages: Tensor, device_pages: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """(host pages, rows within a half of the slab, pages of the cache) of each piece."""
        for host, device in zip(host_pages.split(self._piece), device_pages.split(self._piece), strict=True):
            rows = torch.arange(len(host), dtype=host.dtype, device=host.device)  # SGLang's kernel needs equal dtypes
            yield host, rows, device.to(self.device_slab.device, torch.int64, non_blocking=True)

    def backup_from_device_all_layer_physical(
        self, device_pool: Any, host_indices: Tensor, device_indices: Tensor, io_backend: str
    ) -> None:
        """Copies pages from the cache to host memory; indices count pages."""
        for host, rows, pages in self._pieces(host_indices, device_indices):
            for band, codec in enumerate(self._codecs):
                codec.encode(pages, 0, self._staging(band, 0, len(pages)))
            super().backup_from_device_all_layer_physical(device_pool, host, rows, io_backend)

    def _load_layer_pages(
        self, host_pages: Tensor, device_pages: Tensor, layer_id: int, io_backend: str, *, is_draft: bool
    ) -> None:
        """Copies pages from host memory to the cache. SGLang loads layers in order; the first of a band loads all."""
        band, others = divmod(layer_id, len(self._codecs[0].band.layers))
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
