"""``SlimKVPool``: the pages of SGLang's KV cache, in one slab of bytes with a row per layer and page.

SGLang addresses tokens by slot and allocates whole pages of slots, so slot s is position s % page_size of block
s // page_size. Padding goes to block 0.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any, ClassVar, NoReturn

import torch
from torch import Tensor

from slimkv import ops
from slimkv.errors import InputError, UnsupportedError
from slimkv.integrations.serving.layer import ServedLayer
from slimkv.integrations.serving.model import shared_codec
from slimkv.integrations.sglang import compat
from slimkv.integrations.sglang.sizing import CachePlan, LayerPages
from slimkv.ops import PackedKV


class PackedPool(compat.KVCache):
    """The common part of the pools for K and V and for latents: the slab, and copies of its tokens.

    Each model gets a subclass with its plan (``bind``).
    """

    plan: ClassVar[CachePlan]
    hooks: ClassVar[tuple[str, ...]] = ()

    def __init__(self, size: int, page_size: int, dtype: torch.dtype, **others: Any) -> None:
        compat.check_hooks(self.hooks)
        if others.get("post_capture_active"):
            raise UnsupportedError("slimkv allocates its pages before graphs are captured, not after")
        if others.get("quant_method") is not None:
            raise UnsupportedError("slimkv stores its own formats: leave out SGLang's own quantisation of the cache")
        if page_size != self.plan.page_size:
            raise InputError(f"SGLang builds pages of {page_size} tokens, but planned {self.plan.page_size}")
        super().__init__(size=size, page_size=page_size, dtype=dtype, **others)

    def _create_buffers(self) -> None:
        """Allocates the slab; SGLang calls it while it constructs the pool."""
        # Some models bypass set_kv_buffer and write K and V into a pool of the model's dtype; uint8 prevents that.
        self.dtype = self.store_dtype = torch.uint8
        self.layers: tuple[LayerPages, ...] = self.plan.groups[self.allocation_label]
        self._check_shapes()
        self.num_blocks = -(-(self.size + self.page_size) // self.page_size)
        sizes = [self.num_blocks * pages.row_bytes for pages in self.layers]
        own = torch.cuda.use_mem_pool(self.custom_mem_pool) if self.enable_custom_mem_pool else nullcontext()
        with self.memory_saver_adapter.region(compat.GPU_MEMORY_TYPE_KV_CACHE), own:
            self._slab = torch.zeros(sum(sizes), dtype=torch.uint8, device=self.device)
        # SGLang divided memory by the bytes per token that slimkv reported, so both must agree.
        sized = self.plan.token_bytes(self.allocation_label) * self.num_blocks * self.page_size
        if self._slab.nbytes != sized:
            raise UnsupportedError(f"slimkv allocated {self._slab.nbytes} bytes where SGLang was told {sized}")
        self._pages = tuple(
            piece.view(self.num_blocks, pages.num_kv_heads, pages.layout.page_bytes)
            for piece, pages in zip(self._slab.split(sizes), self.layers, strict=True)
        )
        self.served = tuple(self._served(pages) for pages in self.layers)

    def _check_shapes(self) -> None:
        """Raises unless the layers that SGLang builds match those for which it planned memory."""
        asked = self._shape()
        if len(self.layers) != self.layer_num:
            raise UnsupportedError(f"SGLang builds {self.layer_num} layers of cache, but planned {len(self.layers)}")
        for pages in self.layers:
            spec = pages.layout.spec
            if (pages.num_kv_heads, spec.key_dim, spec.value_dim) != asked:
                raise UnsupportedError(
                    f"SGLang builds layer {pages.layer} with {asked[0]} KV heads of {asked[1]} and {asked[2]} "
                    f"dimensions, but planned {pages.num_kv_heads} of {spec.key_dim} and {spec.value_dim}"
                )

    def _shape(self) -> tuple[int, int, int]:
        """KV heads, and the sizes of a token's two parts: K and V, or latent and rope part."""
        raise NotImplementedError

    def _served(self, pages: LayerPages) -> ServedLayer:
        return ServedLayer(shared_codec(pages.layout.spec, self._slab.device))

    def _clear_buffers(self) -> None:
        del self._slab, self._pages

    def packed(self, index: int) -> PackedKV:
        """The pages of the pool's ``index``-th layer, whose key offset may still be unknown.

        The stream waits for pages of this layer that are being loaded from host memory.
        """
        if self.layer_transfer_counter is not None:
            self.layer_transfer_counter.wait_until(index)
        return self.served[index].packed(self._pages[index], self.layers[index].layout)

    def move_kv_cache(self, tgt_loc: Tensor, src_loc: Tensor) -> None:
        """Copies single tokens between slots, in all layers."""
        for pages, of in zip(self._pages, self.layers, strict=True):
            ops.copy_tokens(pages, src_loc, tgt_loc, layout=of.layout)

    def get_cpu_copy(self, indices: Tensor, mamba_indices: Any = None, req_pool_index: Any = None) -> Any:
        """The tokens in slots ``indices`` as rows on the host: per layer, a list of pieces with one tensor each."""
        torch.get_device_module(self.device).synchronize()
        copies = []
        for pages, of in zip(self._pages, self.layers, strict=True):
            pieces = indices.split(self.cpu_offloading_chunk_size)
            rows = (ops.read_tokens(pages, slots, layout=of.layout) for slots in pieces)
            copies.append([[piece.to("cpu", non_blocking=True)] for piece in rows])
        torch.get_device_module(self.device).synchronize()
        return copies

    def load_cpu_copy(
        self, kv_cache_cpu: Any, indices: Tensor, mamba_indices: Any = None, req_pool_index: Any = None
    ) -> None:
        """The inverse of ``get_cpu_copy``, into other slots."""
        torch.get_device_module(self.device).synchronize()
        for pages, of, copied in zip(self._pages, self.layers, kv_cache_cpu, strict=True):
            for slots, (rows,) in zip(indices.split(self.cpu_offloading_chunk_size), copied, strict=True):
                ops.write_tokens(rows.to(pages.device, non_blocking=True), pages, slots, layout=of.layout)
        torch.get_device_module(self.device).synchronize()

    def get_contiguous_buf_infos(self) -> tuple[list[int], list[int], list[int]]:
        """Addresses, bytes and bytes per page of every layer's rows."""
        return (
            [pages.data_ptr() for pages in self._pages],
            [pages.nbytes for pages in self._pages],
            [of.row_bytes for of in self.layers],
        )

    def _refuse(self, layer: Any, *_: Any, **__: Any) -> NoReturn:
        number = getattr(layer, "layer_id", layer)
        raise UnsupportedError(
            f"the caller in the traceback reads or writes cached tensors of layer {number}, but slimkv's cache holds "
            "codes for its own attention backend: serve this model or option with SGLang's own attention backend"
        )

    get_key_buffer = get_value_buffer = get_kv_buffer = get_mla_kv_buffer = _refuse
    set_kv_buffer = set_kv_buffer_prefix_valid = set_mla_kv_buffer = _refuse

    def get_device_pool_infos(self) -> tuple[Any, ...]:
        """Describes the rows of pages to SGLang's hierarchical cache."""
        from slimkv.integrations.sglang.host_pool import device_pool_infos

        return device_pool_infos(self)


class SlimKVPool(PackedPool, compat.MHATokenToKVPool):
    """K and V of all layers as codes."""

    def _create_buffers(self) -> None:
        """See ``PackedPool``."""
        self.k_scale_buffer = self.v_scale_buffer = None
        self.native_k_scale_buffer = self.native_v_scale_buffer = None
        self.dq_k_buffer = self.dq_v_buffer = None
        super()._create_buffers()

    def _served(self, pages: LayerPages) -> ServedLayer:
        model, spec, held = self.plan.model, pages.layout.spec, pages.num_kv_heads
        codec = shared_codec(spec, self._slab.device)
        offset = model.layer_offset(pages.layer, spec, held, codec.device, exchanged=self.plan.transfers)
        matrices = model.matrices(pages.layer, codec, held)
        return ServedLayer(codec, matrices, offset, self.plan.config.backend)

    def _shape(self) -> tuple[int, int, int]:
        return self.head_num, self.head_dim, self.v_head_dim

    def _init_kv_copy_and_warmup(self) -> None:
        """Does nothing: ``move_kv_cache`` replaces SGLang's copy of token rows."""
        self._kv_copy_config = None

    def get_kv_size_bytes(self) -> tuple[int, int]:
        """The bytes of the slab, counted as K's, because K and V are not separate."""
        return self._slab.nbytes, 0

    def store(
        self, index: int, slots: Tensor, key: Tensor, value: Tensor, matrix_index: Tensor | None = None,
        starts: Tensor | None = None,
    ) -> None:  # fmt: skip
        """Stores key and value [tokens, num_kv_heads, dim] of the pool's ``index``-th layer in ``slots`` [tokens].

        ``matrix_index`` and ``starts``: ``index`` and ``starts`` of ``ServedLayer.store``.
        """
        self.served[index].store(key, value, self.packed(index), slots, matrix_index, starts)


def bind(plan: CachePlan, hooks: tuple[str, ...], pool: type[PackedPool] = SlimKVPool) -> type[Any]:
    """The pool class for one model; SGLang constructs it with the arguments of its own pool."""
    return type(pool.__name__, (pool,), {"plan": plan, "hooks": hooks, "__module__": pool.__module__})
