"""``CacheSize``: the bytes of a cache, and of the same tokens in bfloat16."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from slimkv.integrations.transformers.layers import PackedLayer
from slimkv.spec import BF16_BYTES


@dataclass(frozen=True)
class CacheSize:
    """The size of a cache."""

    allocated_bytes: int  # keys and values of every layer, as allocated
    bf16_bytes: int  # the same tokens in bfloat16
    tokens: int  # positions, of one sequence
    batch: int

    @classmethod
    def of(cls, layers: Iterable[Any]) -> CacheSize:
        """The size of the layers of a cache, packed and stock ones."""
        allocated = plain = tokens = batch = 0
        for layer in layers:
            if isinstance(layer, PackedLayer):
                if layer.is_initialized:
                    spec, kept = layer.pool.layout.spec, layer.tokens
                    if layer.window is not None:
                        kept = min(kept, layer.window - 1)
                    batch, tokens = layer.tables.batch, layer.tokens
                    allocated += layer.nbytes
                    numbers = batch * layer.num_kv_heads * kept * (spec.key_dim + spec.value_dim)
                    plain += BF16_BYTES * numbers
            else:
                held = [x for x in vars(layer).values() if isinstance(x, Tensor) and x.is_floating_point()]
                allocated += sum(x.numel() * x.element_size() for x in held)
                plain += sum(x.numel() * BF16_BYTES for x in held)
        return cls(allocated, plain, tokens, batch)

    @property
    def compression_ratio(self) -> float:
        """bf16 bytes over allocated bytes; 0 for an empty cache."""
        return self.bf16_bytes / self.allocated_bytes if self.allocated_bytes else 0.0

    def __str__(self) -> str:
        if not self.allocated_bytes:
            return "empty"
        bf16 = f"bf16 takes {self.bf16_bytes:,} ({self.compression_ratio:.2f}x)"
        return f"{self.tokens:,} tokens in {self.allocated_bytes:,} bytes; {bf16}"
