"""``Calibration``: statistics of a model's queries, used to round its keys."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from slimkv.arguments import typed
from slimkv.calibration import file
from slimkv.calibration.identity import ModelIdentity
from slimkv.calibration.positions import position_edges
from slimkv.calibration.rotary import Rotary
from slimkv.calibration.statistics import LayerStatistics, pack_moments, unpack_moments
from slimkv.codec import Codec
from slimkv.codec.query_aware import query_aware_matrix
from slimkv.errors import CorruptDataError, InputError
from slimkv.spec import DEFAULT_SEED, Kind, parse_format

_MOMENT, _SCALE = "query_moment", "query_scale"
_PLANES, _FREQUENCIES = "rotary_planes", "rotary_frequencies"
# Optional tensors of a layer, named as the fields of ``LayerStatistics``, and their number of axes.
_OPTIONAL = {"key_weight": 1, "value_weight": 1, "key_mean": 2, "first_key": 2}


@dataclass(frozen=True)
class Calibration:
    """Statistics of every attention layer of one model.

    The statistics are of unquantised queries, so they fit a codec of any width and seed. ``formats`` has one format
    name per layer number if ``slimkv.calibration.bit_allocation`` chose widths.
    """

    identity: ModelIdentity
    layers: Mapping[int, LayerStatistics]
    source: str  # a description of the tokens that the model read
    max_positions: int  # positions for which the statistics are valid
    seed: int = DEFAULT_SEED  # the codec's seed for which the widths were chosen
    formats: Mapping[int, str] | None = None
    name: str = "the calibration"  # its file, for messages
    _matrices: dict[Any, Tensor] = field(default_factory=dict, repr=False, compare=False)
    _warned: list[int] = field(default_factory=list, repr=False, compare=False)

    def __repr__(self) -> str:
        return f"Calibration({len(self.layers)} layers, up to position {self.max_positions:,}, from {self.source})"

    @classmethod
    @typed
    def load(cls, path: str | Path) -> Calibration:
        """Reads a file; raises ``CorruptDataError`` if it is truncated or altered."""
        about, tensors = file.read(Path(path))
        try:
            return cls._from_file(about, tensors, str(path))
        except (KeyError, TypeError, ValueError, AttributeError, IndexError, OverflowError, RuntimeError) as error:
            if isinstance(error, CorruptDataError):
                raise
            raise CorruptDataError(
                f"{path} is not a slimkv calibration ({error!r}); make it again with slimkv calibrate"
            ) from error

    @classmethod
    def _from_file(cls, about: dict[str, Any], tensors: dict[str, Tensor], path: str) -> Calibration:
        layers = {
            int(number): _read_layer(f"{path}: layer {number}", number, sizes, tensors)
            for number, sizes in about["layers"].items()
        }
        formats = about["formats"]
        if formats is not None:
            formats = {int(number): format for number, format in formats.items()}
            for format in formats.values():
                parse_format(format)
        for name, least in (("max_positions", 1), ("codec_seed", 0)):
            value = about[name]
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise CorruptDataError(f"{path}: {name} is {value!r}")
        identity = ModelIdentity.from_fields(about["model"])
        return cls(identity, layers, str(about["source"]), about["max_positions"], about["codec_seed"], formats, path)

    def save(self, path: str | Path) -> None:
        """Writes the file atomically."""
        tensors: dict[str, Tensor] = {}
        layers = {}
        for number, statistics in sorted(self.layers.items()):
            packed, scale = pack_moments(statistics.query_moment)
            tensors[f"{_MOMENT}.{number}"], tensors[f"{_SCALE}.{number}"] = packed, scale
            for name in _OPTIONAL:
                if (tensor := getattr(statistics, name)) is not None:
                    tensors[f"{name}.{number}"] = tensor.float().cpu().contiguous()
            if statistics.rotary.turns:
                tensors[f"{_PLANES}.{number}"] = statistics.rotary.planes.to(torch.int16).contiguous()
                tensors[f"{_FREQUENCIES}.{number}"] = statistics.rotary.frequencies.double().contiguous()
            layers[str(number)] = (
                statistics.num_kv_heads, statistics.key_dim, statistics.value_dim, statistics.sliding_window,
            )  # fmt: skip
        about = {
            "model": self.identity.to_fields(),
            "config_hash": self.identity.hash,
            "layers": layers,  # number: KV heads, key size, value size, sliding window
            "source": self.source,
            "max_positions": self.max_positions,
            "codec_seed": self.seed,
            "formats": {str(k): v for k, v in self.formats.items()} if self.formats is not None else None,
        }
        file.write(Path(path), about, tensors)

    def check_model(self, config: Any) -> None:
        """Raises unless ``config`` (of transformers, or a mapping) matches the model of this calibration."""
        self.identity.check_same(ModelIdentity.of(config), self.name)

    def warn_beyond(self, positions: int) -> None:
        """Warns once if ``positions`` exceed the range for which the statistics are valid."""
        if positions > self.max_positions and not self._warned:
            self._warned.append(positions)
            warnings.warn(
                f"{self.name} is valid up to position {self.max_positions:,}; keys beyond (up to {positions:,} here) "
                "are rounded as at its end, which may be worse than no calibration: make it again with "
                f"slimkv calibrate MODEL --max-positions {positions}",
                stacklevel=2,
            )

    def position_edges(self, positions: int | None = None) -> tuple[int, ...]:
        """The ends of the ranges of ``query_aware_matrices`` for a context of ``positions`` (None: all ranges)."""
        return position_edges(min(positions or self.max_positions, self.max_positions))

    def statistics(self, layer: int) -> LayerStatistics:
        """The statistics of layer ``layer``; raises if there are none."""
        if layer not in self.layers:
            known = f"{min(self.layers)} to {max(self.layers)}" if self.layers else "none"
            raise InputError(f"{self.name} has no layer {layer}; it has {len(self.layers)} attention layers ({known})")
        return self.layers[layer]

    def query_aware_matrices(
        self, layer: int, codec: Codec, heads: slice | None = None, positions: int | None = None
    ) -> Tensor | None:
        """The rounding matrices of a layer's keys, on the codec's device.

        Args:
            layer: the layer's number in the model.
            codec: the codec of its keys, of any width and seed.
            heads: the KV heads (of a tensor-parallel rank); None: all.
            positions: the longest context; fewer ranges of positions take less memory. None: all ranges.

        Returns int8 [ranges, heads, key_dim, key_dim] for ``slimkv.ops.store_kv``, to be indexed by
        ``slimkv.calibration.positions.matrix_index`` with ``position_edges(positions)``; [heads, key_dim, key_dim] if
        there is one range, or if the layer's queries do not depend on their position; None unless the codec has
        Lloyd-Max keys, because other formats have no such rounding.
        """
        statistics = self.statistics(layer)
        if statistics.key_dim != codec.spec.key_dim:
            raise InputError(
                f"{self.name} has keys of {statistics.key_dim} dimensions in layer {layer}; the codec has "
                f"{codec.spec.key_dim}"
            )
        count = statistics.num_kv_heads
        chosen = range(count)[heads] if heads is not None else range(count)
        if len(chosen) == 0 or (heads is not None and heads.stop is not None and heads.stop > count):
            raise InputError(f"heads {heads} are not among the {count} KV heads of layer {layer}")
        if codec.spec.key.kind != Kind.LLOYD:
            return None
        edges = self.position_edges(positions)
        key = (layer, codec.spec.seed, codec.device, edges, chosen)
        if key not in self._matrices:
            with torch.inference_mode(False):  # they outlive the forward pass that creates them
                self._matrices[key] = _matrices(statistics, chosen, edges, codec).to(codec.device).contiguous()
        return self._matrices[key]

    def key_offset(self, layer: int, codec: Codec, heads: slice | None = None) -> Tensor | None:
        """The vectors that are subtracted from the keys of a layer before encoding with ``codec``.

        bfloat16 [heads, key_dim] on the codec's device; None if the statistics have no mean key.
        """
        with torch.inference_mode(False):  # it outlives the forward pass that creates it
            offset = self.statistics(layer).key_offset(self.max_positions, codec)
            if offset is None:
                return None
            return offset[heads if heads is not None else slice(None)].contiguous().to(codec.device)

    def with_formats(self, formats: Mapping[int, str], seed: int = DEFAULT_SEED) -> Calibration:
        """The same statistics with a format name for every layer."""
        return replace(self, formats=dict(formats), seed=seed)


def _matrices(statistics: LayerStatistics, heads: range, edges: tuple[int, ...], codec: Codec) -> Tensor:
    moment, rotation = statistics.query_moment[list(heads)].double(), codec.key_rotation.cpu()
    if not statistics.rotary.turns:
        return query_aware_matrix(moment, rotation)
    ranges = list(zip((0, *edges[:-1]), edges, strict=True))
    matrices = query_aware_matrix(statistics.rotary.mean_moments(moment, ranges), rotation)
    return matrices[0] if len(ranges) == 1 else matrices


def _read_layer(where: str, number: str, sizes: list[Any], tensors: dict[str, Tensor]) -> LayerStatistics:
    heads, key_dim, value_dim, window = sizes
    for name, value in (("value_dim", value_dim), ("window", window)):
        if not (isinstance(value, int) and value > 0) and not (name == "window" and value is None):
            raise CorruptDataError(f"{where}: {name} is {value!r}")
    moment = unpack_moments(tensors[f"{_MOMENT}.{number}"], tensors[f"{_SCALE}.{number}"])
    if moment.shape != (heads, key_dim, key_dim):
        raise CorruptDataError(f"{where} has moments {list(moment.shape)}, not of {heads} heads")
    if not bool(moment.isfinite().all()):
        raise CorruptDataError(f"{where} has moments that are not finite")
    rotary = Rotary.none()
    if f"{_PLANES}.{number}" in tensors:
        planes, frequencies = tensors[f"{_PLANES}.{number}"].long(), tensors[f"{_FREQUENCIES}.{number}"].double()
        fits = planes.shape == (len(frequencies), 2) and bool(((planes >= 0) & (planes < key_dim)).all())
        if not fits or not bool(frequencies.isfinite().all()):
            raise CorruptDataError(f"{where} has rotary planes that do not fit keys of {key_dim} dimensions")
        rotary = Rotary(planes, frequencies)
    optional = {name: tensors.get(f"{name}.{number}") for name in _OPTIONAL}
    for name, tensor in optional.items():
        wanted = (heads, key_dim)[: _OPTIONAL[name]]
        if tensor is not None and (tensor.shape != wanted or not bool(tensor.isfinite().all())):
            raise CorruptDataError(f"{where} has a {name} {list(tensor.shape)}, not finite {list(wanted)}")
    doubled = {name: None if tensor is None else tensor.double() for name, tensor in optional.items()}
    return LayerStatistics(moment, value_dim, rotary=rotary, sliding_window=window, **doubled)
