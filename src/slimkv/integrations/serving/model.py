"""The model that an engine serves: formats of its layers, its calibration, and this rank's KV heads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any

import torch
from torch import Tensor

from slimkv.calibration import Calibration
from slimkv.calibration.cache import cached_calibration
from slimkv.calibration.learned_offset import LayerOffset, kept_path
from slimkv.codec import Codec
from slimkv.codec.key_offset import wants_offset
from slimkv.config import KVCacheConfig
from slimkv.errors import InputError, SlimKVError
from slimkv.formats import AUTO, CALIBRATED
from slimkv.spec import CodecSpec

COLD_TIER = "the cold tier"
KEY = "slimkv"  # the entry of an engine's option that holds the fields of ``KVCacheConfig``
OTHER_WEIGHTS = (
    "the calibration, or the fingerprint of pages that leave the engine, belongs to the weights that this engine "
    "started with, and others are to be loaded: start an engine with the new weights"
)


def parse_settings(given: object, engine: str, deterministic: str | None = None) -> KVCacheConfig:
    """The configuration of an engine's cache from a format's name or a mapping of fields.

    ``deterministic``: the name of the engine's own switch if it is on; it sets the field ``deterministic``.
    """
    config = KVCacheConfig.parse(given)
    config.refuse(engine, "sink_tokens", "recent_tokens", "age", "memory")
    if deterministic is None:
        return config
    try:
        return replace(config, deterministic=True)
    except SlimKVError as error:
        raise type(error)(f"{deterministic} sets deterministic; {error}") from error


def parse_cold_settings(given: object) -> KVCacheConfig:
    """The configuration of packed host memory under an engine's own attention."""
    config = parse_settings(given, COLD_TIER)
    config.refuse(COLD_TIER, "fresh", "prefill", "deterministic")
    return config


@lru_cache(maxsize=8)
def _load(path: str, model: str) -> Calibration:
    """The calibration in a file, or the cached one with ``auto``, loaded once per process."""
    return cached_calibration(model) if path == AUTO else Calibration.load(path)


@lru_cache(maxsize=64)
def shared_codec(spec: CodecSpec, device: torch.device) -> Codec:
    """The codec of a spec; layers with the same spec share it and its tables."""
    return Codec(spec, device)


def rank_heads(total: int, held: int, rank: int, ranks: int) -> slice:
    """The KV heads that a rank holds of a layer's ``total``: its share, or one head that several ranks replicate."""
    first = rank * held if total >= ranks else rank * total // ranks
    return slice(first, first + held)


@dataclass(frozen=True)
class ServedModel:
    """A model and the settings of its cache."""

    settings: KVCacheConfig
    name: str  # the folder or hub name that the engine loads
    config: Any  # the text model's transformers configuration
    max_positions: int  # the longest context
    ranks: Callable[[], tuple[int, int]]  # this process's tensor-parallel rank, and the number of ranks
    random_weights: bool = False  # their key offsets are not saved for later processes

    @cached_property
    def calibration(self) -> Calibration | None:
        """The calibration of the settings, checked against this model; warns once if the context exceeds its range."""
        given = self.settings.calibration
        if given is None:
            return None
        found = given if isinstance(given, Calibration) else _load(str(given), self.name)
        found.check_model(self.config)
        found.warn_beyond(self.max_positions)
        return found

    def layer_spec(
        self, layer: int | None, key_dim: int, value_dim: int | None, raw_dtype: str, *, latent: bool = False,
        name: str | None = None,
    ) -> CodecSpec:  # fmt: skip
        """The spec of layer ``layer``; None or a number beyond the model's layers means a drafter's layer.

        ``latent``: the layer caches latents of ``key_dim`` and rope parts of ``value_dim`` dimensions. ``name``: for
        messages.
        """
        settings, num_layers = self.settings, self.config.num_hidden_layers
        settings.check_layers(num_layers)
        format = settings.format_of(layer, num_layers, latent=latent)
        if format == CALIBRATED:
            if layer is None or layer >= num_layers or self.calibration is None:
                raise InputError(
                    f"slimkv: layer {name or layer} is not in the calibration, as no drafter's layer is: name its "
                    f'format, as in {{"format": "k4v4", "layers": {{"0--1": "{CALIBRATED}"}}}}'
                )
            if (chosen := (self.calibration.formats or {}).get(layer)) is None:
                raise InputError(
                    f"slimkv: format 'calibrated' takes the widths from {self.calibration.name}, which chose none for "
                    f"layer {layer}: run slimkv calibrate with --budget or --profile"
                )
            format = chosen
        return settings.spec_of(format, key_dim, value_dim, raw_dtype)

    def _heads(self, layer: int, held: int) -> slice:
        assert self.calibration is not None
        return rank_heads(self.calibration.statistics(layer).num_kv_heads, held, *self.ranks())

    def matrices(self, layer: int | None, codec: Codec, held: int) -> Tensor | None:
        """``Calibration.query_aware_matrices`` of this rank's ``held`` KV heads; None: round to nearest."""
        known = self.calibration
        if known is None or layer is None or layer not in known.layers:
            return None
        return known.query_aware_matrices(layer, codec, self._heads(layer, held), self.max_positions)

    def centres(self, spec: CodecSpec) -> bool:
        """Whether keys stored as ``spec`` are centred."""
        return self.settings.center_keys and wants_offset(spec)

    def layer_offset(
        self, layer: int | None, spec: CodecSpec, held: int, device: torch.device, *, exchanged: bool = False
    ) -> LayerOffset | None:
        """The key offset of a layer: from the calibration, from an earlier process, or learned from the first prompt.

        None if keys are not centred. ``layer``: its number; None for a drafter's layer, whose offset is learned anew in
        every process. ``exchanged``: engines that exchange pages must subtract the same vectors, so only the
        calibration's are used.
        """
        if not self.centres(spec):
            return None
        codec, known = shared_codec(spec, device), self.calibration
        if known is not None and layer is not None and layer in known.layers:
            offset = known.key_offset(layer, codec, self._heads(layer, held))
            if offset is not None:
                return LayerOffset(held, codec, offset)
        if exchanged:
            return None
        path = None if layer is None or self.random_weights else kept_path(self.name, layer, spec, *self.ranks())
        return LayerOffset.kept(path, held, codec)

    def whole_offset(self, layer: int | None, spec: CodecSpec) -> Tensor | None:
        """The calibrated key offset of all KV heads of a layer, on the CPU; None without one."""
        known = self.calibration
        if known is None or layer is None or layer not in known.layers or not self.centres(spec):
            return None
        return known.key_offset(layer, shared_codec(spec, torch.device("cpu")))
