"""Bands: consecutive layers of one format, whose heads are encoded and decoded together like those of one layer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from slimkv import ops
from slimkv.calibration.learned_offset import LayerOffset
from slimkv.calibration.positions import matrix_index
from slimkv.errors import InputError, UnsupportedError
from slimkv.integrations.serving.cold.rows import LayerRows
from slimkv.integrations.serving.model import ServedModel, shared_codec
from slimkv.spec import BLOCK_SIZES, CodecSpec, PageLayout

NO_SPREAD_LEFT = 1.0  # largest accepted ratio of the keys' error to their spread


@dataclass(frozen=True)
class ColdLayer:
    """One layer; ``module`` is the engine's. A latent counts as K and its rope part as V, with one KV head."""

    name: str
    number: int | None  # its number in the model; None: a drafter's layer
    module: Any
    spec: CodecSpec
    num_kv_heads: int

    def page(self, tokens: int) -> tuple[PageLayout, int]:
        """The layout of the pages that hold a block of ``tokens`` tokens, and their number."""
        fitting = [size for size in BLOCK_SIZES if size > 1 and tokens % size == 0]
        if not fitting:
            raise UnsupportedError(
                f"the cold tier packs blocks of a multiple of 16 tokens, and {self.name} has blocks of {tokens}: set "
                "--block-size"
            )
        return PageLayout(self.spec, fitting[-1]), tokens // fitting[-1]


class HotCache:
    """The engine's cache of a layer, in the model's dtype: ``key`` and ``value`` [blocks, tokens, heads, dim]."""

    def __init__(self, key: Tensor, value: Tensor) -> None:
        self.plain_sides: tuple[Tensor, Tensor] | None = key, value  # None if K and V are not plain tensors
        self.device = key.device

    def read(self, blocks: Tensor, key: Tensor, value: Tensor) -> None:
        """Copies K and V of ``blocks``, int64 [n], into key and value [n * tokens, heads, dim] of the model's dtype."""
        for side, x in zip(self.plain_sides or (), (key, value), strict=True):
            x.copy_(side[blocks].flatten(0, 1))

    def write(self, slots: Tensor, key: Tensor, value: Tensor) -> None:
        """Writes key and value [tokens, heads, dim] to ``slots``, int64 [tokens]: block * block size + position."""
        for side, x in zip(self.plain_sides or (), (key, value), strict=True):
            side[slots // side.shape[1], slots % side.shape[1]] = x


@dataclass(frozen=True)
class Band:
    """Consecutive layers of one format, and the layout of their blocks in host memory."""

    layers: tuple[ColdLayer, ...]
    layout: PageLayout
    pages: int  # per block
    offset: int  # in bytes, within a block in host memory

    @property
    def heads(self) -> int:
        """KV heads of all layers."""
        return sum(layer.num_kv_heads for layer in self.layers)

    @property
    def block_bytes(self) -> int:
        """Bytes of one block of these layers."""
        return self.pages * self.heads * self.layout.page_bytes


def bands_of(layers: Sequence[ColdLayer], block_tokens: int) -> tuple[Band, ...]:
    """Divides a cache group's layers, with blocks of ``block_tokens`` tokens, into bands."""
    out: list[Band] = []
    for layer in layers:
        layout, pages = layer.page(block_tokens)
        if out and out[-1].layout == layout and (out[-1].layers[0].number is None) == (layer.number is None):
            out[-1] = Band((*out[-1].layers, layer), layout, pages, out[-1].offset)
        else:
            out.append(Band((layer,), layout, pages, out[-1].offset + out[-1].block_bytes if out else 0))
    return tuple(out)


def block_bytes(bands: Sequence[Band]) -> int:
    """Bytes of one block of all bands in host memory."""
    return bands[-1].offset + bands[-1].block_bytes


class BandCodec:
    """Encodes and decodes the blocks of a band."""

    def __init__(
        self, model: ServedModel, band: Band, caches: Sequence[HotCache], offsets: Sequence[LayerOffset | None],
        dtype: torch.dtype, *, positions: bool = True,
    ) -> None:  # fmt: skip
        """``positions``: whether the engine reports where blocks begin in a prompt. Without that, matrices by position
        range are not used."""
        self.band, self._caches, self._dtype, self._settings = band, caches, dtype, model.settings
        self.tokens = band.pages * band.layout.block_size  # per block
        self.device = caches[0].device
        self._codec = shared_codec(band.layout.spec, self.device)
        known = [x for x in offsets if x is not None]
        self._offsets = known if len(known) == len(offsets) else []  # empty: keys are not centred
        self._offset = torch.cat([x.tensor for x in self._offsets]) if self._offsets else None
        self._matrices: Tensor | None = None
        each = [model.matrices(x.number, self._codec, x.num_kv_heads) for x in band.layers]
        found = [x for x in each if x is not None and (positions or x.ndim == 3)]
        if model.calibration is not None and len(found) == len(each):
            self._matrices = torch.cat(found, -3).contiguous()
            self._edges = model.calibration.position_edges(model.max_positions)
        self._unchecked = model.settings.max_score_error > 0
        sides = [x.plain_sides for x in caches] if self.device.type == "cuda" else []
        self._rows = LayerRows.of(sides)
        self._warming = False

    def token_bytes(self) -> int:
        """Bytes of one token's K and V in the model's dtype."""
        spec = self.band.layout.spec
        return self.band.heads * (spec.key_dim + spec.value_dim) * self._dtype.itemsize

    def staging(self, blocks: int) -> Tensor:
        """A buffer on the caches' device for the pages of ``blocks`` blocks."""
        band = self.band
        shape = blocks * band.pages, band.heads, band.layout.page_bytes
        return torch.empty(shape, dtype=torch.uint8, device=self.device)

    def _packed(self, staging: Tensor) -> ops.PackedKV:
        return ops.PackedKV(staging, self._codec, self.band.layout, self._offset)

    def _dense(self, tokens: int) -> tuple[Tensor, Tensor]:
        spec, device = self.band.layout.spec, self.device
        key, value = (
            torch.empty(tokens, self.band.heads, dim, dtype=self._dtype, device=device)
            for dim in (spec.key_dim, spec.value_dim)
        )
        return key, value

    def _by_layer(self, *tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
        sizes = [layer.num_kv_heads for layer in self.band.layers]
        return zip(*(x.split(sizes, 1) for x in tensors), strict=True)

    def encode(self, blocks: Tensor, first_block: int, staging: Tensor) -> None:
        """Encodes ``blocks`` of a prompt, int64 [n], into ``staging``; the first is the prompt's ``first_block``-th."""
        count = len(blocks) * self.tokens
        key, value = self._dense(count)
        if self._rows is not None:
            self._rows.copy(blocks, key, value, read=True)
        else:
            for cache, (k, v) in zip(self._caches, self._by_layer(key, value), strict=True):
                cache.read(blocks, k, v)
        slots = torch.arange(count, device=blocks.device)
        if not self._warming:
            self._learn(key)
        index = None
        if self._matrices is not None and self._matrices.ndim == 4:
            index = matrix_index(slots + first_block * self.tokens, self._edges).to(torch.int32)
        rounding = None if self._matrices is None else ops.Rounding(self._matrices, index)
        ops.store_kv(key, value, self._packed(staging), slots, rounding, backend=self._settings.backend)
        if self._unchecked and not self._warming:
            self._check(key, staging, slots)

    def decode(self, staging: Tensor, blocks: Tensor) -> None:
        """Decodes the pages in ``staging`` into ``blocks``."""
        key, value = self._dense(len(blocks) * self.tokens)
        taken = torch.arange(len(key), device=blocks.device)
        ops.gather_kv(self._packed(staging), taken, out=(key, value))
        if self._rows is not None:
            self._rows.copy(blocks, key, value, read=False)
            return
        slots = (blocks[:, None] * self.tokens + taken[: self.tokens]).flatten()
        for cache, (k, v) in zip(self._caches, self._by_layer(key, value), strict=True):
            cache.write(slots, k, v)

    def warm(self, staging: Tensor) -> None:
        """Compiles the kernels for one and for many blocks. It runs them on block 0, which engines reserve."""
        self._warming = True
        for n in (1, len(staging) // self.band.pages):
            blocks = torch.zeros(n, dtype=torch.int64, device=self.device)
            self.encode(blocks, 0, staging[: n * self.band.pages])
            self.decode(staging[: n * self.band.pages], blocks)
        self._warming = False

    def _learn(self, key: Tensor) -> None:
        """Learns the offset, once, from the first blocks that leave the cache, which are the start of a prompt."""
        if all(x.known for x in self._offsets):
            return
        stored, nothing = torch.ones(len(key), dtype=torch.bool, device=key.device), key[:0]
        for offset, (k,) in zip(self._offsets, self._by_layer(key), strict=True):
            offset.learn(k, stored, nothing)
        assert self._offset is not None
        self._offset.copy_(torch.cat([x.tensor for x in self._offsets]))

    def _check(self, key: Tensor, staging: Tensor, slots: Tensor) -> None:
        """Checks, once, that the keys' quantisation error is smaller than their spread."""
        self._unchecked = False
        back, _ = ops.gather_kv(self._packed(staging), slots)
        for layer, (k, b) in zip(self.band.layers, self._by_layer(key, back), strict=True):
            error, spread = (b - k.float()).norm(), (k.float() - k.float().mean(0)).norm()
            if error > NO_SPREAD_LEFT * spread and len(k) > 1 and spread > 0:
                raise InputError(
                    f"the cold tier would lose the keys of {layer.name} in {layer.spec.format}: their error is "
                    f"{float(error / spread):.1f} times their spread. Run slimkv calibrate MODEL and give the "
                    "file as calibration, or give this layer more bits (layers)"
                )
