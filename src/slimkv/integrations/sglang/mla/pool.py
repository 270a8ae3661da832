"""``SlimKVLatentPool``: packed latents in the place of SGLang's pool of them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from slimkv import ops
from slimkv.errors import UnsupportedError
from slimkv.integrations.sglang.compat import MLATokenToKVPool, unwrap_write_loc
from slimkv.integrations.sglang.pool import PackedPool


class SlimKVLatentPool(PackedPool, MLATokenToKVPool):
    """Latents and rope parts of all layers as codes."""

    def __init__(self, size: int, page_size: int, dtype: torch.dtype, **others: Any) -> None:
        if others.get("use_dsa"):
            raise UnsupportedError("slimkv does not serve sparse latent attention in SGLang")
        super().__init__(size, page_size, dtype, **others)

    def _create_buffers(self) -> None:
        super()._create_buffers()
        self.kv_buffer = list(self._pages)  # SGLang keeps their addresses

    def _shape(self) -> tuple[int, int, int]:
        return 1, self.kv_lora_rank, self.qk_rope_head_dim

    def get_kv_size_bytes(self) -> int:
        """The bytes of the slab."""
        return self._slab.nbytes

    def _clear_buffers(self) -> None:
        super()._clear_buffers()
        del self.kv_buffer

    def store(self, index: int, slots: Tensor, latent: Tensor, rope: Tensor) -> None:
        """latent [tokens, latent_dim], rope [tokens, rope_dim] of the pool's ``index``-th layer -> ``slots``."""
        latent, rope = latent.reshape(len(slots), -1), rope.reshape(len(slots), -1)
        ops.store_latent(latent, rope, self.packed(index), slots, backend=self.plan.config.backend)

    def gather(self, index: int, slots: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """The latents [tokens, latent_dim] and rope parts [tokens, rope_dim] in ``slots`` of the ``index``-th layer."""
        return ops.gather_latent(self.packed(index), slots, dtype=dtype)

    def set_mla_kv_buffer(
        self,
        layer: Any,
        loc_info: Any,
        cache_k_nope: Tensor,
        cache_k_rope: Tensor,
        layer_id_override: int | None = None,
    ) -> None:
        """cache_k_nope [tokens, 1, latent_dim], cache_k_rope [tokens, 1, rope_dim] -> the slots of ``loc_info``."""
        slots, _, _ = unwrap_write_loc(loc_info)
        number = layer.layer_id if layer_id_override is None else layer_id_override
        self.store(number - self.start_layer, slots, cache_k_nope, cache_k_rope)

    def set_kv_buffer(
        self, layer: Any, loc_info: Any, cache_k: Tensor, cache_v: Tensor, layer_id_override: int | None = None
    ) -> None:
        """cache_k [tokens, 1, latent_dim + rope_dim] -> the slots of ``loc_info``."""
        latent, rope = cache_k.split([self.kv_lora_rank, self.qk_rope_head_dim], dim=-1)
        self.set_mla_kv_buffer(layer, loc_info, latent, rope, layer_id_override)

    def get_mla_kv_buffer(self, layer: Any, loc: Tensor, dst_dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor]:
        """The latents [tokens, 1, latent_dim] and rope parts [tokens, 1, rope_dim] in the slots ``loc``."""
        latent, rope = self.gather(layer.layer_id - self.start_layer, loc, dst_dtype or torch.bfloat16)
        return latent.unsqueeze(1), rope.unsqueeze(1)
