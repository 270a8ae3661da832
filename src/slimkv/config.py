"""``KVCacheConfig``: the one configuration of a packed cache, with the same fields and meaning in every engine."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from slimkv.arguments import describe
from slimkv.calibration import Calibration
from slimkv.calibration.guard import MAX_SCORE_ERROR
from slimkv.errors import InputError, UnsupportedError
from slimkv.formats import AUTO, CALIBRATED, RAW, RAW_LATENT, format_of_kind, is_latent_format
from slimkv.ops.attention.api import EIGHT_BIT, PREFILL, SIXTEEN_BIT
from slimkv.ops.attention.api import REGISTRY as ATTENTION
from slimkv.ops.attention.eight_bit import format_refusal
from slimkv.spec import DEFAULT_SEED, CodecSpec, ScalePolicy, parse_format, parse_policy, parse_size, parse_spec

FRESH = ("auto", "codes", "raw")
# The values that these fields may have with ``deterministic``.
_DETERMINISTIC: dict[str, tuple[object, ...]] = {
    "sink_tokens": (0,), "recent_tokens": (0,), "fresh": (AUTO, "codes"), "prefill": (AUTO, SIXTEEN_BIT),
}  # fmt: skip
_LATENT_NOT_DETERMINISTIC = "deterministic is for K and V, not for latents"
_DEFAULT_LAYER = "default"
_LAYERS = re.compile(r"(-?\d+)(?:-(-?\d+))?")


@dataclass(frozen=True)
class KVCacheConfig:
    """How an engine's KV cache is stored and read.

    An engine raises an error that names any setting it does not support.

    Attributes:
        format: the format of K and V, as in ``CodecSpec.parse`` (``k4v4``, ``fp8``, ``raw``, ...), or of the latents
            of a model with latent attention, as in ``LatentSpec.parse`` (``c4``, ``c4r8``, ``craw``). ``auto``: 4 bits,
            for K and V or for latents. ``calibrated``: the widths that the calibration chose per layer.
        layers: formats of single layers. A key is a layer's number (``0``, ``"0"``), counted from the end when negative
            (``-1``), a range that includes both ends (``"4-6"``, ``"-2--1"``), or ``"default"``, which means
            ``format``. Later entries win over earlier ones.
        fresh: how the tokens of one forward pass see one another. ``codes``: as codes, as every later step sees them,
            so that a prefix-cache hit gives the same output as a miss. ``raw``: as unquantised K and V, which is closer
            to the stock cache, but the output depends on how the prompt was chunked. ``auto``: codes if pages are
            shared between requests, raw in a private cache.
        prefill: the arithmetic of passes of more than 32 new tokens. ``16bit`` or ``8bit``, which uses 8-bit tensor
            cores and requires Lloyd-Max keys and values of up to 4 bits and ``fresh`` other than raw. ``auto``: 16
            bits. A prefix-cache hit with few remaining tokens is decoded in 16 bits, so a miss in 8 bits would differ.
        sink_tokens: the number of first tokens that are kept in the model's dtype.
        recent_tokens: the same for the last tokens.
        age: formats of older tokens, as in ``{512: "k6v6", 4096: "k4v4"}``: once 512 newer tokens follow a token, it is
            re-encoded as ``k6v6``, block by block. Younger tokens are stored in ``format``.
        memory: a limit on the bytes of the cache (a number, or ``"2GiB"``). The cache starts in ``format`` (``auto``:
            the model's dtype). As it fills, it re-encodes old tokens with fewer bits; the first and latest keep more.
        calibration: query statistics for rounding keys: a file from ``slimkv calibrate`` or a loaded ``Calibration``.
            ``auto``: the cached calibration of exactly this model. None: keys are rounded to the nearest level.
        center_keys: subtract a constant vector per layer and KV head from keys before they are encoded. It comes from
            the calibration, from a short pass of the model, or from the first prompt. ``raw`` keys and vLLM's own
            recipes are never centred.
        max_score_error: the guard's limit, in nats. Once per layer an engine compares attention scores from stored keys
            with exact ones and stops with an error beyond the limit. 0 switches the guard off.
        key_policy: the scale policy of Lloyd-Max keys; None: the default of the format.
        value_policy: the same for values.
        seed: the seed of the rotation.
        backend: the name of the backend of store and attention; None: the best one for the device.
        deterministic: the attention output of a token depends only on its own sequence, bit for bit: not on other
            requests, on chunked prefill, on prefix caching or on drafts. It requires that every token is read through
            its codes (``fresh`` is not raw) and prefill in 16 bits.
    """

    format: str = AUTO
    layers: Mapping[int | str, str] = field(default_factory=dict)
    fresh: str = AUTO
    prefill: str = AUTO
    sink_tokens: int = 0
    recent_tokens: int = 0
    age: Mapping[int, str] = field(default_factory=dict)
    memory: int | str | None = None
    calibration: Calibration | str | Path | None = None
    center_keys: bool = True
    max_score_error: float = MAX_SCORE_ERROR
    key_policy: ScalePolicy | str | None = None
    value_policy: ScalePolicy | str | None = None
    seed: int = DEFAULT_SEED
    backend: str | None = None
    deterministic: bool = False

    def __repr__(self) -> str:
        return f"KVCacheConfig({', '.join(f'{name}={getattr(self, name)!r}' for name in self.changed())})"

    def __post_init__(self) -> None:
        self._check_format("format", self.format)
        object.__setattr__(self, "layers", self._checked_layers())
        self._check_choice("fresh", FRESH)
        self._check_tiers()
        self._check_prefill()
        for name in ("sink_tokens", "recent_tokens", "seed"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise InputError(f"{name} must be an integer of 0 or more, not {value!r}")
        if (self.sink_tokens or self.recent_tokens) and self.fresh == "codes":
            raise InputError(
                f"fresh='codes' means that attention reads every token through the codec; sink_tokens="
                f"{self.sink_tokens} and recent_tokens={self.recent_tokens} mean that it does not: choose one"
            )
        for name in ("key_policy", "value_policy"):
            value = getattr(self, name)
            object.__setattr__(self, name, None if value is None else parse_policy(value))
        self._check_calibration()
        for name in ("center_keys", "deterministic"):
            if not isinstance(getattr(self, name), bool):
                raise InputError(f"{name} must be true or false, not {getattr(self, name)!r}")
        self._check_deterministic()
        limit = self.max_score_error
        if isinstance(limit, bool) or not isinstance(limit, int | float) or not 0 <= limit < math.inf:
            raise InputError(f"max_score_error must be a number of nats, or 0 for no guard, not {limit!r}")
        if self.backend is not None:
            self._check_choice("backend", ATTENTION.names)

    def _check_choice(self, name: str, known: Sequence[str]) -> None:
        if getattr(self, name) not in known:
            raise InputError(f"{name} must be one of {', '.join(known)}, not {getattr(self, name)!r}")

    def _check_prefill(self) -> None:
        self._check_choice("prefill", PREFILL)
        if self.prefill == EIGHT_BIT and (self.fresh == "raw" or self.tiered):
            raise InputError(
                f"prefill='8bit' reads every token as codes of one format; fresh={self.fresh!r}, sink_tokens="
                f"{self.sink_tokens}, recent_tokens={self.recent_tokens}, age={dict(self.age)!r} and memory="
                f"{self.memory!r} store some tokens otherwise: choose one"
            )

    def _check_deterministic(self) -> None:
        if not self.deterministic:
            return
        for name, allowed in _DETERMINISTIC.items():
            if getattr(self, name) not in allowed:
                raise InputError(
                    f"deterministic=True reads every token through its codes, in 16 bits: {name} must be one of "
                    f"{', '.join(map(repr, allowed))}, not {getattr(self, name)!r}"
                )
        for format in (self.format, *self.layers.values()):
            if is_latent_format(format):
                raise UnsupportedError(f"{_LATENT_NOT_DETERMINISTIC}, and the format is {format!r}")

    def _check_tiers(self) -> None:
        if not isinstance(self.age, Mapping):
            raise InputError(f'age must map ages in tokens to formats, as in {{512: "k4v4"}}, not {self.age!r}')
        object.__setattr__(self, "age", {_tokens(age): format for age, format in self.age.items()})
        for age, format in self.age.items():
            parse_format(format)
            if age <= self.recent_tokens:
                raise InputError(f"age names {age} tokens, but recent_tokens={self.recent_tokens} keeps those raw")
        if self.memory is not None:
            object.__setattr__(self, "memory", parse_size(self.memory))
        chosen = [name for name, given in (("age", self.age), ("memory", self.memory is not None)) if given]
        others = chosen[1:] + (["layers"] if self.layers else []) + (["format"] if self.format == CALIBRATED else [])
        if chosen and others:
            raise InputError(
                f"{chosen[0]}={getattr(self, chosen[0])!r} chooses the formats of all layers, and so does {others[0]}="
                f"{getattr(self, others[0])!r}: choose one"
            )

    @property
    def tiered(self) -> bool:
        """Whether one layer stores tokens in several formats."""
        return bool(self.sink_tokens or self.recent_tokens or self.age or self.memory is not None)

    def _check_format(self, where: str, format: object) -> None:
        if not isinstance(format, str):
            hint = "; formats of single layers go into layers" if isinstance(format, Mapping) else ""
            raise InputError(f"{where} must be a format name such as 'k4v4', not {format!r}{hint}")
        if format != CALIBRATED:
            if format != AUTO and not is_latent_format(format):
                parse_format(format)
        elif self.calibration is None:
            raise InputError(
                f"{where} {CALIBRATED!r} needs a calibration made for a budget: run slimkv calibrate with --budget, "
                "and pass the file as calibration"
            )

    def _checked_layers(self) -> Mapping[int | str, str]:
        if not isinstance(self.layers, Mapping):
            raise InputError(
                f'layers must map layers to formats, as in {{"0": "raw", "4-6": "k6v4"}}, not {self.layers!r}'
            )
        kept: dict[int | str, str] = {}
        for where, format in self.layers.items():
            self._check_format(f"the format of layer {where}", format)
            if where == _DEFAULT_LAYER:
                if self.format not in (AUTO, format):
                    raise InputError(
                        f"format is {self.format!r} and layers has 'default': {format!r}; give one of them"
                    )
                object.__setattr__(self, "format", format)
                continue
            _parse_layers(where)
            kept[where] = format
        return kept

    def _check_calibration(self) -> None:
        given = self.calibration
        if given is None or given == AUTO or isinstance(given, Calibration):
            return
        if not isinstance(given, (str, Path)) or not Path(given).is_file():
            raise InputError(
                f"calibration must be an existing file from slimkv calibrate, 'auto' or None, not {given!r}"
            )

    @classmethod
    def parse(cls, given: object) -> KVCacheConfig:
        """A configuration from a format name, a mapping of fields (an engine's options) or another configuration."""
        if isinstance(given, KVCacheConfig):
            return given
        if isinstance(given, str):
            return cls(format=given)
        if not isinstance(given, Mapping):
            raise InputError(f"slimkv settings must be a format name or a mapping of fields, not {describe(given)}")
        known = [f.name for f in fields(cls)]
        for name in given:
            if name not in known:
                raise InputError(unknown_setting(name, known))
        return cls(**given)

    def format_of(self, layer: int | None, num_layers: int, *, latent: bool = False) -> str:
        """The format of layer ``layer`` in a model of ``num_layers``; ``format`` if that is None or beyond them.

        ``latent``: whether the layer caches latents. A format of the other kind raises an error, except for a drafter's
        layer, which is numbered after the model's layers: that takes ``raw`` or the default of its kind.
        """
        if latent and self.deterministic and not (layer is not None and layer >= num_layers):
            raise UnsupportedError(f"{_LATENT_NOT_DETERMINISTIC}, and this model caches latents")
        found = self.format
        if layer is not None and 0 <= layer < num_layers:
            for where, format in self.layers.items():
                if layer in _range(where, num_layers):
                    found = format
        elif layer is not None and layer >= num_layers and found != CALIBRATED and is_latent_format(found) != latent:
            found = RAW if found in (RAW, RAW_LATENT) else AUTO
        return format_of_kind(found, latent)

    def layer_formats(self, num_layers: int, *, latent: bool = False) -> list[str]:
        """The format of every layer; raises if ``layers`` names a layer that the model does not have."""
        self.check_layers(num_layers)
        return [self.format_of(i, num_layers, latent=latent) for i in range(num_layers)]

    def check_layers(self, num_layers: int) -> None:
        """Raises if ``layers`` names a layer that a model of ``num_layers`` layers does not have."""
        for where in self.layers:
            ends = _parse_layers(where)
            if any(not -num_layers <= end < num_layers for end in ends) or not _range(where, num_layers):
                raise InputError(f"layers names {where!r}, but the model has layers 0 to {num_layers - 1}")

    def reads_fresh_raw(self, shared_pages: bool) -> bool:
        """Whether new tokens see one another's unquantised K and V; ``shared_pages``: requests share pages."""
        codes = shared_pages or self.deterministic or self.prefill == EIGHT_BIT
        return self.fresh == "raw" or (self.fresh == AUTO and not codes)

    def prefill_of(self, spec: CodecSpec, shared_pages: bool) -> str:
        """``AttendOptions.prefill`` of a layer stored as ``spec``, depending on whether pages are shared between
        requests. Raises ``UnsupportedError`` if ``8bit`` is requested and the format does not support it.
        """
        if self.prefill == EIGHT_BIT and (reason := format_refusal(spec)) is not None:
            raise UnsupportedError(f"prefill='8bit': {reason}; leave prefill at 'auto'")
        return SIXTEEN_BIT if self.prefill == AUTO and (shared_pages or self.deterministic) else self.prefill

    def spec_of(self, format: str, key_dim: int, value_dim: int | None, dtype: str) -> CodecSpec:
        """The spec of a layer in ``format``, in a model of this ``dtype`` (``torch.bfloat16``)."""
        policies = {"key_policy": self.key_policy, "value_policy": self.value_policy}
        spec = parse_spec(format, key_dim, value_dim, **policies, seed=self.seed)
        return spec.with_raw_dtype(dtype.removeprefix("torch."))

    def refuse(self, engine: str, *names: str) -> None:
        """Raises ``UnsupportedError`` if a field in ``names``, which ``engine`` does not support, is set."""
        for name in self.changed():
            if name in names:
                raise UnsupportedError(
                    f"{engine} does not support {name}={getattr(self, name)!r}; leave it at {_DEFAULTS[name]!r}"
                )

    def changed(self) -> Iterator[str]:
        """The names of the fields that differ from their defaults."""
        return (name for name, default in _DEFAULTS.items() if getattr(self, name) != default)


_DEFAULTS: dict[str, Any] = {
    f.name: f.default if not callable(f.default_factory) else f.default_factory() for f in fields(KVCacheConfig)
}


def unknown_setting(name: object, known: list[str]) -> str:
    """The error message for an unknown setting."""
    close = difflib.get_close_matches(str(name), known, 1)
    hint = f"did you mean {close[0]!r}? " if close else ""
    return f"slimkv has no setting {name!r}; {hint}known are {', '.join(known)}"


def _tokens(age: object) -> int:
    """A key of ``age``: a number of tokens, or its digits, because keys in JSON are strings."""
    if isinstance(age, bool) or not (isinstance(age, int) or (isinstance(age, str) and age.isdigit())) or int(age) < 1:
        raise InputError(f"age has {age!r}; a key must be a number of tokens, 1 or more")
    return int(age)


def _parse_layers(where: object) -> tuple[int, ...]:
    """The bounds in a key of ``layers``: one layer, or both ends of a range."""
    if isinstance(where, int) and not isinstance(where, bool):
        return (where,)
    match = _LAYERS.fullmatch(where.strip()) if isinstance(where, str) else None
    if match is None:
        raise InputError(
            f"layers has {where!r}, which is neither a layer's number (0, -1), a range such as '4-6' or '-2--1', "
            "nor 'default'"
        )
    return tuple(int(end) for end in match.groups() if end is not None)


def _range(where: object, num_layers: int) -> range:
    """The layers that a key of ``layers`` names in a model of ``num_layers``; empty if its ends are swapped."""
    ends = [end + num_layers if end < 0 else end for end in _parse_layers(where)]
    return range(ends[0], ends[-1] + 1)
