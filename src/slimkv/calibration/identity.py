"""Which model a calibration belongs to."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from slimkv.errors import InputError

# What makes queries what they are, apart from the weights; named alike by every version of transformers and by engines.
_FIELDS = (
    "model_type",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "sliding_window",
)
_NESTED = ("text_config", "llm_config", "language_config")


@dataclass(frozen=True)
class ModelIdentity:
    """The fields of a model's configuration that must agree, as sorted (name, value) pairs."""

    fields: tuple[tuple[str, Any], ...]

    @classmethod
    def of(cls, config: Any) -> ModelIdentity:
        """Of a transformers configuration, or of one as a mapping; of a nested text model where there is one."""
        given: Mapping[str, Any] = config if isinstance(config, Mapping) else config.to_dict()
        for name in _NESTED:
            if isinstance(given.get(name), Mapping):
                given = given[name]
                break
        return cls.from_fields({name: given[name] for name in _FIELDS if given.get(name) is not None})

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any]) -> ModelIdentity:
        """Of fields as ``to_fields`` gives them."""
        return cls(tuple(sorted(fields.items())))

    def to_fields(self) -> dict[str, Any]:
        """The fields as a dict."""
        return dict(self.fields)

    @property
    def hash(self) -> str:
        """sha256 of the fields, in hex."""
        return hashlib.sha256(json.dumps(self.fields).encode()).hexdigest()

    def check_same(self, other: ModelIdentity, what: str) -> None:
        """Raises unless ``other``, a model's identity, is this one; names the fields that differ."""
        mine, theirs = self.to_fields(), other.to_fields()
        different = [
            f"{name} is {theirs.get(name, 'absent')}, the calibration has {mine.get(name, 'none')}"
            for name in _FIELDS
            if mine.get(name) != theirs.get(name)
        ]
        if different:
            raise InputError(
                f"{what} was made for another model ({'; '.join(different)}): run slimkv calibrate for this one"
            )
