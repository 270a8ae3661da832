"""What a user may set: the ``slimkv`` entry of vLLM's ``--additional-config``, checked word by word.

{"slimkv": {"format": "k4v4", "first_layers": 2, "edge_format": "fp8", "layers": {"7": "raw", "10-12": "k6v4"}}}
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from slimkv.errors import InputError
from slimkv.ops.attend import REGISTRY as ATTEND
from slimkv.spec import CodecSpec, ScalePolicy, parse_policy

KEY = "slimkv"
EXAMPLE = '--attention-backend CUSTOM --additional-config \'{"slimkv": {"format": "k4v4"}}\''
FRESH = ("codes", "raw")
CALIBRATED = "calibrated"
_ANY_HEAD = 64  # a head size every format takes: words are checked before the model is known


@dataclass(frozen=True)
class Settings:
    """Everything a user chose.

    Attributes:
        format: how K and V are stored, as ``CodecSpec.parse`` reads it; ``calibrated``: each layer as the calibration
            chose.
        first_layers, last_layers: how many layers at either end are stored as ``edge_format`` instead.
        edge_format: their format.
        layers: (first index, last index, format) of layers that are stored otherwise; later entries win over earlier
            ones and over ``edge_format``; -1 is the last layer.
        fresh: ``codes``: new tokens attend one another through their codes, as everybody will who reads them later,
            so that a prefix-cache hit gives what a miss gave. ``raw``: they attend one another's unquantised K and V,
            which is a little closer to the stock cache and makes results depend on how a prompt was cut into chunks.
        key_policy, value_policy: scale policies of Lloyd-Max sides; None is the format's own.
        calibration: a file from ``slimkv calibrate``, with which Lloyd-Max keys are rounded, or None.
        impl: an implementation of store and attend by name; None is the best one for the device.
    """

    format: str = "k4v4"
    first_layers: int = 0
    last_layers: int = 0
    edge_format: str = "raw"
    layers: tuple[tuple[int, int, str], ...] = ()
    fresh: str = "codes"
    key_policy: ScalePolicy | None = None
    value_policy: ScalePolicy | None = None
    calibration: Path | None = None
    impl: str | None = field(default=None)

    def format_of(self, index: int | None, layers: int) -> str:
        """The format word of layer ``index`` of a model with ``layers`` layers (None: a layer without a number)."""
        word = self.format
        if index is None or not 0 <= index < layers:
            return word
        if index < self.first_layers or index >= layers - self.last_layers:
            word = self.edge_format
        for start, end, special in self.layers:
            if start <= index <= end or index - layers == start:
                word = special
        return word

    def check_layers(self, layers: int) -> None:
        """Raises unless every layer that is named exists in a model with ``layers`` layers."""
        for start, end, word in self.layers:
            if end >= layers or -start > layers:
                name = str(start) if start == end else f"{start}-{end}"
                raise InputError(
                    f"slimkv: layer {name} is to be stored as {word}, but the model has layers 0 to {layers - 1}"
                )
        if self.first_layers + self.last_layers > layers:
            raise InputError(
                f"slimkv: the first {self.first_layers} and the last {self.last_layers} layers are more than the "
                f"model's {layers}"
            )


def wanted(additional_config: object) -> bool:
    """Whether the engine's additional config has settings for slimkv."""
    return isinstance(additional_config, Mapping) and KEY in additional_config


def parse(additional_config: object) -> Settings:
    """The engine's whole additional config -> checked settings."""
    if not wanted(additional_config):
        raise InputError(
            f"the attention backend CUSTOM is slimkv's, but the additional config has no {KEY!r} entry; use {EXAMPLE}"
        )
    assert isinstance(additional_config, Mapping)
    given = additional_config[KEY]
    if isinstance(given, str):
        given = {"format": given}
    if not isinstance(given, Mapping):
        raise InputError(f"slimkv: settings must be an object or a format word, not {given!r}; use {EXAMPLE}")
    known = [f.name for f in fields(Settings)]
    for name in given:
        if name not in known:
            close = difflib.get_close_matches(str(name), known, 1)
            hint = f"; did you mean {close[0]!r}?" if close else "."
            raise InputError(f"slimkv: unknown setting {name!r}{hint} Known are {', '.join(known)}.")
    calibrated = given.get("format") == CALIBRATED
    if calibrated and given.get("calibration") is None:
        raise InputError("slimkv: format 'calibrated' takes the widths from a file: name it as calibration")
    return Settings(
        format=CALIBRATED if calibrated else _format(given, "format", "k4v4"),
        first_layers=_count(given, "first_layers"),
        last_layers=_count(given, "last_layers"),
        edge_format=_format(given, "edge_format", "raw"),
        layers=_layers(given.get("layers", {})),
        fresh=_choice(given, "fresh", FRESH),
        key_policy=_policy(given, "key_policy"),
        value_policy=_policy(given, "value_policy"),
        calibration=_file(given, "calibration"),
        impl=_impl(given),
    )


def _word(value: object, where: str) -> str:
    if not isinstance(value, str):
        raise InputError(f"slimkv: {where} must be a format word such as k4v4, not {value!r}")
    CodecSpec.parse(value, _ANY_HEAD)  # raises SpecError, which lists the known words
    return value


def _format(given: Mapping[str, Any], name: str, default: str) -> str:
    return _word(given.get(name, default), name)


def _count(given: Mapping[str, Any], name: str) -> int:
    value = given.get(name, 0)
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise InputError(f"slimkv: {name} must be a number of layers, not {value!r}")
    return value


def _layers(given: object) -> tuple[tuple[int, int, str], ...]:
    if not isinstance(given, Mapping):
        raise InputError(
            f'slimkv: layers must map layers to formats, as in {{"0": "raw", "4-6": "k6v4"}}, not {given!r}'
        )
    out = []
    for name, word in given.items():
        match = re.fullmatch(r"(-?\d+)|(\d+)-(\d+)", str(name))
        if match is None or (match[2] and int(match[3]) < int(match[2])):
            raise InputError(f"slimkv: layers has {name!r}, which is neither a layer's number nor a range such as 4-6")
        start, end = (int(match[2]), int(match[3])) if match[2] else (int(match[1]), int(match[1]))
        out.append((start, end, _word(word, f"the format of layer {name}")))
    return tuple(out)


def _choice(given: Mapping[str, Any], name: str, choices: tuple[str, ...]) -> str:
    value = given.get(name, choices[0])
    if value not in choices:
        raise InputError(f"slimkv: {name} must be one of {', '.join(choices)}, not {value!r}")
    return value


def _policy(given: Mapping[str, Any], name: str) -> ScalePolicy | None:
    value = given.get(name)
    return None if value is None else parse_policy(str(value))


def _file(given: Mapping[str, Any], name: str) -> Path | None:
    value = given.get(name)
    if value is None:
        return None
    if not isinstance(value, str) or not Path(value).is_file():
        raise InputError(f"slimkv: {name} must name an existing file, not {value!r}")
    return Path(value)


def _impl(given: Mapping[str, Any]) -> str | None:
    value = given.get("impl")
    if value is not None and value not in ATTEND.names:
        raise InputError(f"slimkv: impl must be one of {', '.join(ATTEND.names)}, not {value!r}")
    return value
