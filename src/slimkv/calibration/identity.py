"""The identity of a model: fields of its configuration, and a digest of its weights."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from slimkv.errors import InputError

# The fields that determine queries, besides the weights, as transformers and the engines name them.
_FIELDS = (
    "model_type", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
    "head_dim", "vocab_size", "sliding_window",
)  # fmt: skip
_NESTED = ("text_config", "llm_config", "language_config")
_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
_PIECES, _PIECE_BYTES = 64, 1 << 14


def text_fields(config: Any) -> Mapping[str, Any]:
    """The fields of a transformers configuration (or mapping); of its text model if there is one."""
    given: Mapping[str, Any] = config if isinstance(config, Mapping) else config.to_dict()
    return next((given[name] for name in _NESTED if isinstance(given.get(name), Mapping)), given)


def _defaults(fields: Mapping[str, Any]) -> dict[str, int]:
    """The values that every engine assumes for missing fields; some engines add them to the configuration."""
    hidden, heads = fields.get("hidden_size"), fields.get("num_attention_heads")
    if not isinstance(hidden, int) or not isinstance(heads, int) or heads < 1:
        return {}
    return {"head_dim": hidden // heads, "num_key_value_heads": heads}


@dataclass(frozen=True)
class ModelIdentity:
    """The fields of a model's configuration that must match, as sorted (name, value) pairs."""

    fields: tuple[tuple[str, Any], ...]

    @classmethod
    def of(cls, config: Any) -> ModelIdentity:
        """From a transformers configuration or a mapping; uses the nested text model if there is one."""
        given = text_fields(config)
        return cls.from_fields({name: given[name] for name in _FIELDS if given.get(name) is not None})

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any]) -> ModelIdentity:
        """From the output of ``to_fields``."""
        return cls(tuple(sorted({**_defaults(fields), **fields}.items())))

    def to_fields(self) -> dict[str, Any]:
        """The fields as a dict."""
        return dict(self.fields)

    @property
    def hash(self) -> str:
        """sha256 of the fields, in hex."""
        return hashlib.sha256(json.dumps(self.fields).encode()).hexdigest()

    def check_same(self, other: ModelIdentity, what: str) -> None:
        """Raises unless ``other``, a model's identity, equals this one; names the fields that differ."""
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


def model_folder(name: str) -> Path | None:
    """The folder with a model's files: ``name`` itself, or its snapshot in the Hugging Face cache; else None."""
    if Path(name).is_dir():
        return Path(name)
    try:
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(name, local_files_only=True))
    except Exception:  # not installed, not a hub name, never fetched: the hub has an error class for each
        return None


def _weight_files(folder: Path) -> list[Path]:
    return sorted(p for p in folder.iterdir() if p.suffix in _SUFFIXES and p.is_file()) if folder.is_dir() else []


def folder_digest(folder: Path) -> str:
    """sha256 that identifies the weights in a model's folder.

    It covers the size and ``_PIECES`` evenly spaced pieces of every weight file, which takes milliseconds for a large
    model. Another checkpoint of the same model has another digest.
    """
    files = _weight_files(folder)
    if not files:
        raise InputError(f"{folder} contains no weight files ({', '.join(_SUFFIXES)}) to identify the model by")
    digest = hashlib.sha256()
    for path in files:
        size = path.stat().st_size
        digest.update(f"{size} ".encode())
        with path.open("rb") as file:
            for i in range(_PIECES):
                file.seek(max(0, size - _PIECE_BYTES) * i // (_PIECES - 1))
                digest.update(file.read(_PIECE_BYTES))
    return digest.hexdigest()


def parameter_digest(parameters: Iterable[tuple[str, Tensor]]) -> str:
    """sha256 that identifies weights in memory, from up to 256 values of every parameter."""
    digest = hashlib.sha256(b"in memory ")
    for name, tensor in sorted(parameters, key=lambda item: item[0]):
        flat = tensor.detach().flatten()
        some = flat[:: max(1, flat.numel() // 256)].float().cpu()
        digest.update(f"{name} {list(tensor.shape)} ".encode())
        digest.update(some.numpy().tobytes())
    return digest.hexdigest()


def weights_digest(name_or_path: str | None) -> str | None:
    """``folder_digest`` of the model that a configuration names; None if its folder or weights are unknown."""
    folder = model_folder(name_or_path) if name_or_path else None
    return folder_digest(folder) if folder is not None and _weight_files(folder) else None
