"""The settings that the packed layers of a cache share, and the key offsets that follow from them."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from slimkv.calibration import Calibration
from slimkv.calibration.guard import Guard
from slimkv.codec import Codec
from slimkv.codec.key_offset import OFFSET_DTYPE, offset_of_keys
from slimkv.config import KVCacheConfig
from slimkv.errors import InputError
from slimkv.integrations.transformers.calibration.matrix_index import MatrixIndex
from slimkv.integrations.transformers.tables import TableSet, lasting

RAW_FRESH_ABOVE = 8  # up to this many new tokens (decoding, verifying a draft) attention reads codes only


@dataclass(frozen=True)
class LayerSettings:
    """State shared by the layers of a cache."""

    config: KVCacheConfig
    block_size: int
    tables: TableSet
    calibration: Calibration | None = None
    matrix_index: MatrixIndex | None = None  # for the calibration's matrices
    offsets: Mapping[int, Tensor] = field(default_factory=dict)  # key offsets by layer
    # mean key and first key of a short pass [2, num_kv_heads, key_dim], by layer; other layers learn from their tokens
    seen_keys: Mapping[int, Tensor] = field(default_factory=dict)
    guard: Guard | None = None  # shared by the caches of a model

    def attends_raw(self, new: int) -> bool:
        """Whether a pass of ``new`` tokens attends to these unquantised."""
        return new > RAW_FRESH_ABOVE and self.config.reads_fresh_raw(shared_pages=False)

    def __deepcopy__(self, memo: dict[int, Any]) -> LayerSettings:
        """A copied cache has its own tables; immutable state is shared."""
        return memo.setdefault(id(self), replace(self, tables=copy.deepcopy(self.tables, memo)))

    def known_offset(self, layer: int, codec: Codec, num_kv_heads: int) -> Tensor | None:
        """The key offset of a layer, if known before the first keys: from a file, the calibration or the model."""
        known = self.offsets.get(layer)
        if known is None and self.calibration is not None:
            known = self.calibration.key_offset(layer, codec)
        if known is None and layer in self.seen_keys:
            mean, first = self.seen_keys[layer]
            known = offset_of_keys(mean, first, codec)
        if known is None:
            return None
        if known.shape != (num_kv_heads, codec.spec.key_dim):
            raise InputError(
                f"the key offset of layer {layer} is {list(known.shape)}, but its keys have {num_kv_heads} heads of "
                f"{codec.spec.key_dim} dimensions"
            )
        with lasting():
            return known.to(codec.device, OFFSET_DTYPE).contiguous()
