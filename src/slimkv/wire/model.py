"""Which model pages belong to: the fields of its configuration that decide K and V, and a digest of its weights."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from slimkv.calibration import ModelIdentity
from slimkv.errors import InputError

_ROPE = ("rope_parameters", "rope_scaling", "rope_theta", "partial_rotary_factor", "rope_local_base_freq")
_NESTED = ("text_config", "llm_config", "language_config")
_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
_PIECES, _PIECE_BYTES = 64, 1 << 14


def model_fields(config: Any) -> dict[str, Any]:
    """What of a transformers configuration (or one as a mapping) decides K and V, beside the weights."""
    given: Mapping[str, Any] = config if isinstance(config, Mapping) else config.to_dict()
    fields = ModelIdentity.of(given).to_fields()
    for name in _NESTED:
        if isinstance(given.get(name), Mapping):
            given = given[name]
            break
    fields["rope"] = _rope(given)
    return fields


def _rope(given: Mapping[str, Any]) -> dict[str, Any]:
    """Rotary embedding in one spelling: nested and plain settings in one mapping, numbers as floats."""
    found: dict[str, Any] = {}
    for name in _ROPE:
        value = given.get(name)
        if isinstance(value, Mapping):
            found |= {str(k): v for k, v in value.items()}
        elif value is not None:
            found.setdefault(name, value)
    if found.get("rope_type") is None and found.get("type") is not None:
        found["rope_type"] = found["type"]
    found.pop("type", None)
    return {name: _number(value) for name, value in sorted(found.items()) if value is not None}


def _number(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(k): _number(v) for k, v in sorted(value.items()) if v is not None}
    if isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    return value


def folder_digest(folder: Path) -> str:
    """sha256 that stands for the weights in a model's folder.

    Every weight file counts with its size and ``_PIECES`` pieces spread over it, so that a large model takes
    milliseconds and another checkpoint of the same model gives another digest.
    """
    files = sorted(p for p in folder.iterdir() if p.suffix in _SUFFIXES and p.is_file()) if folder.is_dir() else []
    if not files:
        raise InputError(f"{folder} holds no weight files ({', '.join(_SUFFIXES)}), by which a model is known")
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
    """sha256 that stands for weights that were never in a folder: up to 256 numbers of every parameter."""
    digest = hashlib.sha256(b"in memory ")
    for name, tensor in sorted(parameters, key=lambda item: item[0]):
        flat = tensor.detach().flatten()
        some = flat[:: max(1, flat.numel() // 256)].float().cpu()
        digest.update(f"{name} {list(tensor.shape)} ".encode())
        digest.update(some.numpy().tobytes())
    return digest.hexdigest()


def hub_folder(name: str) -> Path | None:
    """The local snapshot of a model on the Hugging Face hub, where it was fetched before; else None."""
    try:
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(name, local_files_only=True))
    except Exception:  # not installed, not a hub name, never fetched: the hub has an error class for each
        return None


def weights_digest(name_or_path: str | None) -> str | None:
    """The digest of the model that a configuration says it came from; None where that is not a folder with weights."""
    if not name_or_path:
        return None
    folder = Path(name_or_path)
    if not folder.is_dir():
        found = hub_folder(name_or_path)
        if found is None:
            return None
        folder = found
    return folder_digest(folder) if any(p.suffix in _SUFFIXES for p in folder.iterdir()) else None
