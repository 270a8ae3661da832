"""The layers of a cold tier: finds them, and reads and writes K and V in vLLM's own cache.

K and V are written with the attention backend's own cache update. The order in which it stores values is measured once,
by writing numbered values to a scratch block. This supports every backend whose cache is a permutation of K and V; any
other raises an error.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from slimkv.errors import UnsupportedError
from slimkv.integrations.serving.cold import band
from slimkv.integrations.serving.cold.band import ColdLayer
from slimkv.integrations.serving.model import ServedModel
from slimkv.integrations.vllm.cold.compat import Attention, MLAAttention
from slimkv.integrations.vllm.model import layer_spec

_DIGIT = 8  # integers 0 to 7 survive every cache dtype, including fp8 with any scale
_FLOATS = (torch.float16, torch.bfloat16, torch.float32)
_FP8 = {"fp8": torch.float8_e4m3fn, "fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}


def find_layers(vllm_config: Any, names: Sequence[str], model: ServedModel) -> list[ColdLayer]:
    """The layers of a cache group that own their cache; raises for unsupported kinds of layers."""
    found = []
    for name in names:
        module = vllm_config.compilation_config.static_forward_context[name]
        if getattr(module, "kv_sharing_target_layer_name", None) is not None:
            continue
        if hasattr(getattr(module, "attn_backend", None), "codec_spec"):
            raise UnsupportedError(
                f"{name} already has slimkv's packed pages: leave out spec_name; vLLM's own offload moves them"
            )
        if not isinstance(module, Attention | MLAAttention):
            raise UnsupportedError(
                f"the cold tier packs K and V or latents; {name} is a {type(module).__name__}, which caches something "
                "else: use vLLM's own CPUOffloadingSpec with this model"
            )
        latent = isinstance(module, MLAAttention)
        dims = (module.kv_lora_rank, module.qk_rope_head_dim) if latent else (module.head_size, module.head_size_v)
        dtype = vllm_config.model_config.dtype
        spec, number = layer_spec(model, vllm_config, name, dims, dtype, latent)
        found.append(ColdLayer(name, number, module, spec, module.num_kv_heads))
    return found


class HotCache(band.HotCache):
    """vLLM's cache of a layer, in the order and dtype of its attention backend."""

    def __init__(self, layer: ColdLayer, num_blocks: int, block_tokens: int, dtype: torch.dtype) -> None:
        self._layer, self._tokens, self._dtype = layer, block_tokens, dtype
        self._cache: Tensor = layer.module.kv_cache
        self.device = self._cache.device
        # vLLM may split a block into several kernel blocks
        self._blocks = self._cache.unflatten(0, (num_blocks, -1))
        self._stored = _FP8.get(str(layer.module.kv_cache_dtype), self._cache.dtype)
        if self._stored not in (*_FLOATS, *_FP8.values()) or self._stored.itemsize != self._cache.itemsize:
            self._refuse(f"its cache holds {self._cache.dtype} as {layer.module.kv_cache_dtype}")
        self._order = self._find_order()
        self.sides = self._as_sides()
        self.plain_sides = self.sides if self._stored == dtype else None

    def _refuse(self, why: str) -> None:
        module = self._layer.module
        backend = getattr(module, "attn_backend", None)
        name = backend.get_name() if backend is not None else type(module.impl).__name__
        raise UnsupportedError(
            f"the cold tier does not recognise how {name} keeps K and V of {self._layer.name}: {why}. Use another "
            "attention backend or cache dtype, or vLLM's own CPUOffloadingSpec"
        )

    def read(self, blocks: Tensor, key: Tensor, value: Tensor) -> None:
        """Copies K and V of ``blocks``, int64 [n], into key and value [n * tokens, heads, dim] of the model's dtype."""
        n, scales, dims = len(blocks), self._scales(), (self._layer.spec.key_dim, self._layer.spec.value_dim)
        if self.sides is not None:
            parts: Sequence[Tensor] = [side[blocks].view(self._stored) for side in self.sides]
        else:
            shapes = [(n, self._tokens, self._layer.num_kv_heads, dim) for dim in dims]
            sizes = [torch.Size(shape[1:]).numel() for shape in shapes]
            taken = self._blocks[blocks].flatten(1)[:, self._order].view(self._stored).split(sizes, 1)
            parts = [part.reshape(shape) for part, shape in zip(taken, shapes, strict=True)]
        for i, x in enumerate((key, value)):  # parts are [n, tokens, heads, dim]
            part = parts[i] if scales is None else parts[i].to(self._dtype) * scales[i]
            x.unflatten(0, (n, self._tokens)).copy_(part)

    def write(self, slots: Tensor, key: Tensor, value: Tensor) -> None:
        """Writes key and value [tokens, heads, dim] to ``slots``, int64 [tokens]: block * block size + position."""
        self._update(self._cache, slots, key, value)

    def _update(self, cache: Tensor, slots: Tensor, key: Tensor, value: Tensor) -> None:
        module = self._layer.module
        if isinstance(module, MLAAttention):
            module.impl.do_kv_cache_update(key.squeeze(1), value, cache, slots, module.kv_cache_dtype, module._k_scale)
        else:
            module.impl.do_kv_cache_update(module, key, value, cache, slots)

    def _scales(self) -> tuple[Tensor, Tensor] | None:
        """The scales of K and V in an fp8 cache; None in other caches."""
        if self._stored in _FLOATS:
            return None
        module = self._layer.module
        value = module._k_scale if isinstance(module, MLAAttention) else module._v_scale
        return module._k_scale.to(self._dtype), value.to(self._dtype)

    def _find_order(self) -> Tensor:
        """The index within a block of each value of K [tokens, heads, dim], then of V: int64, on the cache's device."""
        if not hasattr(self._layer.module.impl, "do_kv_cache_update"):
            self._refuse("its attention writes the cache itself")
        spec, heads = self._layer.spec, self._layer.num_kv_heads
        shapes = [(self._tokens, heads, dim) for dim in (spec.key_dim, spec.value_dim)]
        counts = [torch.Size(shape).numel() for shape in shapes]
        if self._blocks[0].numel() != sum(counts):
            self._refuse(f"a block has {self._blocks[0].numel()} numbers where K and V are {sum(counts)}")
        scratch = torch.empty_strided(
            self._blocks[0].shape, self._blocks[0].stride(), dtype=self._cache.dtype, device=self.device
        )
        slots = torch.arange(self._tokens, device=self.device)
        orders, scales = [], self._scales()
        for side in range(2):
            place = torch.zeros(scratch.numel(), dtype=torch.int64, device=self.device)
            index, weight = torch.arange(1, counts[side] + 1, device=self.device), 1  # 0: the other side's values
            while weight <= counts[side]:
                digits = (index // weight % _DIGIT).to(self._dtype).view(shapes[side])
                given = [torch.zeros(shape, dtype=self._dtype, device=self.device) for shape in shapes]
                given[side] = digits
                scratch.zero_()
                self._update(scratch, slots, *given)
                seen = scratch.view(self._stored).float() * (1.0 if scales is None else scales[side].float())
                place += weight * seen.flatten().nan_to_num().round().long()
                weight *= _DIGIT
            mine = place.nonzero().flatten()
            if len(mine) != counts[side] or not torch.equal(place[mine].sort().values, index):
                self._refuse("some of the numbers written to it are missing or changed")
            orders.append(mine[place[mine].argsort()])
        return torch.cat(orders)

    def _as_sides(self) -> tuple[Tensor, Tensor] | None:
        """K and V as strided views [blocks, tokens, heads, dim] of the cache; None if strides cannot express them."""
        block, spec, heads = self._blocks[0], self._layer.spec, self._layer.num_kv_heads
        place = torch.zeros((), dtype=torch.int64, device=self.device)  # offset of each value in its block
        for size, stride in zip(block.shape, block.stride(), strict=True):
            place = place[..., None] + torch.arange(size, device=self.device) * stride
        sides, begin = [], 0
        for dim in (spec.key_dim, spec.value_dim):
            shape = self._tokens, heads, dim
            mine = place.flatten()[self._order[begin : begin + torch.Size(shape).numel()]].view(shape)
            begin += mine.numel()
            first = int(mine[0, 0, 0])
            strides = int(mine[1, 0, 0]) - first, int(mine[0, -1, 0] - first) // max(1, heads - 1), 1
            token, head, number = (torch.arange(n, device=self.device) * s for n, s in zip(shape, strides, strict=True))
            said = first + token[:, None, None] + head[:, None] + number
            if not torch.equal(said, mine):
                return None
            sides.append(self._cache.as_strided(
                (len(self._blocks), *shape), (self._blocks.stride(0), *strides), self._cache.storage_offset() + first
            ))  # fmt: skip
        return sides[0], sides[1]
