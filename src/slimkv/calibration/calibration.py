"""``Calibration``: what is known of a model's queries, for rounding its keys."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from slimkv.calibration.identity import ModelIdentity
from slimkv.calibration.statistics import LayerStatistics
from slimkv.codec import Codec
from slimkv.codec.query_aware import query_aware_matrix
from slimkv.errors import InputError
from slimkv.spec import DEFAULT_SEED, Kind


@dataclass(frozen=True)
class Calibration:
    """Statistics of every attention layer of one model.

    The statistics are of queries as the model makes them, so they serve a codec of any width and seed. ``formats`` has
    one format name per layer number where ``slimkv.calibration.bit_allocation`` chose widths.
    """

    identity: ModelIdentity
    layers: Mapping[int, LayerStatistics]
    source: str  # what the model read
    seed: int = DEFAULT_SEED  # of the codec that the widths were chosen for
    formats: Mapping[int, str] | None = None
    name: str = "the calibration"  # where it came from, for messages
    _matrices: dict[Any, Tensor] = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def load(cls, path: str | Path) -> Calibration:
        """From a file; raises ``CorruptDataError`` if it is truncated or altered."""
        from slimkv.calibration.file import load

        return load(Path(path))

    def save(self, path: str | Path) -> None:
        """To a file, at once or not at all."""
        from slimkv.calibration.file import save

        save(self, Path(path))

    def check_model(self, config: Any) -> None:
        """Raises unless ``config`` (of transformers, or a mapping) is that of the model this was made for."""
        self.identity.check_same(ModelIdentity.of(config), self.name)

    def statistics(self, layer: int) -> LayerStatistics:
        """Of layer ``layer``; raises if there is none."""
        if layer not in self.layers:
            known = f"{min(self.layers)} to {max(self.layers)}" if self.layers else "none"
            raise InputError(f"{self.name} has no layer {layer}; it has {len(self.layers)} attention layers ({known})")
        return self.layers[layer]

    def query_aware_matrices(self, layer: int, codec: Codec, heads: slice | None = None) -> Tensor | None:
        """The rounding matrices with which keys of a layer are stored, on the codec's device.

        Args:
            layer: the layer's number in the model.
            codec: what encodes its keys; any width and seed.
            heads: which KV heads (a tensor-parallel rank's own); None: all.

        Returns int8 [heads, key_dim, key_dim] as ``slimkv.ops.store_kv`` takes it,
        or None where the codec's keys are not
        ``lloyd``, which have no such rounding.
        """
        statistics = self.statistics(layer)
        if statistics.key_dim != codec.spec.key_dim:
            raise InputError(
                f"{self.name} has keys of {statistics.key_dim} dimensions in layer {layer}; these have "
                f"{codec.spec.key_dim}"
            )
        chosen = range(statistics.num_kv_heads)[heads] if heads is not None else range(statistics.num_kv_heads)
        if heads is not None and (
            len(chosen) == 0 or (heads.stop is not None and heads.stop > statistics.num_kv_heads)
        ):
            raise InputError(f"heads {heads} are not among the {statistics.num_kv_heads} KV heads of layer {layer}")
        if codec.spec.key.kind != Kind.LLOYD:
            return None
        key = (layer, codec.spec.seed, codec.device)
        if key not in self._matrices:
            rotation = codec.key_rotation.cpu()
            self._matrices[key] = query_aware_matrix(statistics.query_moment, rotation).to(codec.device)
        return self._matrices[key][heads].contiguous() if heads is not None else self._matrices[key]

    def with_formats(self, formats: Mapping[int, str], seed: int = DEFAULT_SEED) -> Calibration:
        """The same statistics with a format name for every layer."""
        return replace(self, formats=dict(formats), seed=seed)
