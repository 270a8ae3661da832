"""``SlimKVLatentPool``: packed latents in place of SGLang's ``MLATokenToKVPool``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from slimkv import ops
from slimkv.errors import UnsupportedError
from slimkv.integrations.sglang.compat import MLATokenToKVPool
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
        """Stores latent [tokens, latent_dim] and rope [tokens, rope_dim] of the ``index``-th layer in ``slots``."""
        latent, rope = latent.reshape(len(slots), -1), rope.reshape(len(slots), -1)
        ops.store_latent(latent, rope, self.packed(index), slots, backend=self.plan.config.backend)

    def gather(self, index: int, slots: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """The latents [tokens, latent_dim] and rope parts [tokens, rope_dim] in ``slots`` of the ``index``-th layer."""
        return ops.gather_latent(self.packed(index), slots, dtype=dtype)
