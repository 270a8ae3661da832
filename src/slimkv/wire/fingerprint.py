"""``Fingerprint``: the identity of packed bytes. Processes may exchange pages if their fingerprints are equal.

It contains everything that decoding needs and everything that determines the encoded K and V (or latents): layout,
formats, sizes, rotation, codebooks, key offsets, the model with its weights. Query-aware rounding and scale policies
are not part of it: they choose other codes for the same vectors, but decoding does not use them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import astuple, dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from torch import Tensor

from slimkv.calibration.learned_offset import offset_digest
from slimkv.codec.codebook import codebook
from slimkv.codec.rotation import signed_hadamard
from slimkv.errors import CorruptDataError, InputError
from slimkv.spec import LAYOUT_VERSION, CodecSpec, Kind, PageLayout, parse_spec

VERSION = 3
# The fields of ``Fingerprint`` that JSON holds as they are.
_PLAIN_FIELDS = ("block_size", "seed", "dtype", "weights", "layout_version", "codebook")


@dataclass(frozen=True)
class LayerFingerprint:
    """The contents of one layer's pages."""

    number: int  # the layer's number in the model
    format: str  # canonical, with the dtype of raw sides spelled out
    num_kv_heads: int  # over all ranks
    key_dim: int
    value_dim: int
    window: int | None = None  # the window of a sliding layer, in tokens
    key_offset: str = ""  # digest of the key offsets of all heads; empty without offsets
    token_rows: bool = False  # whether pages store latents in token rows, not in fragment order
    index_bytes: int = 0  # bytes per token of the indexer's keys (sparse latents), which follow each page

    @classmethod
    def of(
        cls, number: int, spec: CodecSpec, num_kv_heads: int, dtype: str, window: int | None = None,
        key_offset: Tensor | None = None, token_rows: bool = False, index_bytes: int = 0,
    ) -> LayerFingerprint:  # fmt: skip
        """The fingerprint of a layer that stores ``spec`` in a model that computes in ``dtype``.

        ``key_offset``: bfloat16 [num_kv_heads, key_dim] of all heads, or None if keys are not centred.
        """
        plain = spec.with_raw_dtype(dtype)
        sizes = num_kv_heads, plain.key_dim, plain.value_dim
        digest = offset_digest(key_offset)
        return cls(number, plain.canonical_format, *sizes, window, digest, token_rows, index_bytes)

    def spec(self, seed: int) -> CodecSpec:
        """The spec of the codec that reads these pages."""
        return parse_spec(self.format, self.key_dim, self.value_dim, seed=seed)

    def layout(self, seed: int, block_size: int) -> PageLayout:
        """The layout of its pages."""
        return PageLayout(self.spec(seed), block_size, self.token_rows)

    def page_bytes(self, seed: int, block_size: int) -> int:
        """Bytes of a page and of the indexer's keys after it."""
        return self.layout(seed, block_size).page_bytes + block_size * self.index_bytes


@dataclass(frozen=True)
class Fingerprint:
    """See the module docstring. Two fingerprints are equal if and only if their pages may be exchanged."""

    layers: tuple[LayerFingerprint, ...]  # in order of their numbers
    block_size: int  # tokens of a page
    seed: int  # the seed of the rotation
    dtype: str  # the dtype in which the model computes
    model: tuple[tuple[str, Any], ...]  # fields of the model's configuration, by name
    weights: str  # sha256 that identifies the model's weights
    layout_version: int = LAYOUT_VERSION
    codebook: str = ""  # sha256 of the levels and rotations that decode the layers; filled in by ``of``

    @classmethod
    def of(
        cls, layers: Iterable[LayerFingerprint], *, block_size: int, seed: int, dtype: str, model: Mapping[str, Any],
        weights: str,
    ) -> Fingerprint:  # fmt: skip
        """The fingerprint of a cache written by this version of slimkv."""
        ordered = tuple(sorted(layers, key=lambda layer: layer.number))
        if not ordered:
            raise InputError("a fingerprint needs at least one layer that stores keys and values")
        fields = tuple(sorted((name, json.loads(json.dumps(value, sort_keys=True))) for name, value in model.items()))
        return cls(ordered, block_size, seed, dtype, fields, weights, codebook=_tables_digest(ordered, seed))

    def to_json(self) -> str:
        """One line of JSON, identical for equal fingerprints."""
        fields = {
            "version": VERSION,
            **{name: getattr(self, name) for name in _PLAIN_FIELDS},
            "model": dict(self.model),
            "layers": [list(astuple(x)) for x in self.layers],
        }
        return json.dumps(fields, sort_keys=True, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str, where: str) -> Fingerprint:
        """Parses the output of ``to_json``; ``where`` names its source in errors."""
        try:
            given = json.loads(text)
            if given["version"] != VERSION:
                raise InputError(
                    f"{where} has a fingerprint of version {given['version']}; this slimkv reads version {VERSION}"
                )
            found = cls(
                layers=tuple(LayerFingerprint(*layer) for layer in given["layers"]),
                model=tuple(sorted(given["model"].items())),
                **{name: given[name] for name in _PLAIN_FIELDS},
            )
            found._check_fields()
            return found
        except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
            if isinstance(error, InputError):
                raise
            raise CorruptDataError(f"{where} contains no slimkv fingerprint ({error!r})") from error

    def _check_fields(self) -> None:
        """Raises ``ValueError`` for values that slimkv never writes."""
        numbers = [layer.number for layer in self.layers]
        if not numbers or numbers != sorted(set(numbers)):
            raise ValueError(f"layers {numbers} are not numbered in order")
        for name, value in (("seed", self.seed), ("layout_version", self.layout_version), ("a layer", numbers[0])):
            _check_count(name, value, 0)
        for name in ("dtype", "weights", "codebook"):
            if not isinstance(getattr(self, name), str):
                raise ValueError(f"{name} is {getattr(self, name)!r}")
        for layer in self.layers:
            _check_count("num_kv_heads", layer.num_kv_heads, 1)
            if layer.window is not None:
                _check_count("window", layer.window, 1)
            if not isinstance(layer.key_offset, str) or not isinstance(layer.token_rows, bool):
                raise ValueError(f"key_offset is {layer.key_offset!r}, token_rows {layer.token_rows!r}")
            _check_count("index_bytes", layer.index_bytes, 0)
            layer.layout(self.seed, self.block_size)

    @property
    def hash(self) -> str:
        """sha256 of ``to_json``, in hex."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()

    def differences(self, other: Fingerprint) -> list[str]:
        """``name is A, not B`` for every field in which ``other`` (B) differs from this one (A)."""
        out = [
            f"{name.replace('_', ' ')} is {getattr(self, name)}, not {getattr(other, name)}"
            for name in ("layout_version", "block_size", "seed", "dtype")
            if getattr(self, name) != getattr(other, name)
        ]
        mine, theirs = dict(self.model), dict(other.model)
        out += [
            f"model {name} is {mine.get(name, 'absent')}, not {theirs.get(name, 'absent')}"
            for name in sorted({*mine, *theirs})
            if mine.get(name) != theirs.get(name)
        ]
        if self.weights != other.weights:
            out.append(f"weights are {self.weights[:12]}, not {other.weights[:12]}")
        out += _layer_differences(self.layers, other.layers)
        if self.codebook != other.codebook and not out:
            out.append(f"codebook is {self.codebook[:12]}, not {other.codebook[:12]}")
        return out

    def check_same(self, other: Fingerprint, what: str) -> None:
        """Raises unless ``other``, an engine's fingerprint, equals this fingerprint of ``what``."""
        if different := self.differences(other):
            raise InputError(
                f"{what} was written by another cache: its {'; its '.join(different)}. Its bytes have another "
                "meaning here: use the settings it was written with, or another folder or file"
            )


def _check_count(name: str, value: object, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name} is {value!r}")


def _layer_differences(mine: tuple[LayerFingerprint, ...], theirs: tuple[LayerFingerprint, ...]) -> list[str]:
    numbers = [x.number for x in mine], [x.number for x in theirs]
    if numbers[0] != numbers[1]:
        return [f"layers with packed pages are {_short(numbers[0])}, not {_short(numbers[1])}"]
    out = []
    for name in LayerFingerprint.__dataclass_fields__:
        changed = [(a, b) for a, b in zip(mine, theirs, strict=True) if getattr(a, name) != getattr(b, name)]
        if changed:
            first, second = changed[0]
            more = f" (and {len(changed) - 1} more layers)" if len(changed) > 1 else ""
            was, now = ("none" if x == "" else x for x in (getattr(first, name), getattr(second, name)))
            out.append(f"{name} of layer {first.number} is {was}, not {now}{more}")
    return out


def _short(numbers: list[int]) -> str:
    return f"{len(numbers)} ({', '.join(map(str, numbers[:8]))}{', ...' if len(numbers) > 8 else ''})"


def _tables_digest(layers: tuple[LayerFingerprint, ...], seed: int) -> str:
    """sha256 of the levels and rotations of every kind of vector that the layers store."""
    kinds = set()
    for layer in layers:
        spec = layer.spec(seed)
        for side, dim in ((spec.key, spec.key_dim), (spec.value, spec.value_dim)):
            kinds.add((side.bits if side.kind == Kind.LLOYD else 0, side.rotated, dim))
    digest = hashlib.sha256()
    for kind in sorted(kinds):
        digest.update(_side_digest(*kind, seed).encode())
    return digest.hexdigest()


@lru_cache(maxsize=256)
def _side_digest(bits: int, rotated: bool, dim: int, seed: int) -> str:
    digest = hashlib.sha256(f"{bits} {rotated} {dim}".encode())
    if bits:
        book = codebook(bits, dim)
        digest.update(np.float32(book.unit).tobytes())
        digest.update(book.levels_by_code.astype("<f4").tobytes())
    if rotated:
        digest.update(np.asarray(signed_hadamard(dim, seed)).astype("i1").tobytes())
    return digest.hexdigest()
