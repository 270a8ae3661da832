"""Safetensors files with a version and a checksum, written atomically."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from slimkv.errors import CorruptDataError, InputError, MissingDependencyError, UnsupportedError
from slimkv.paths import whole_file

FORMAT, VERSION = "slimkv-calibration", 3


def write(path: Path, about: dict[str, Any], tensors: dict[str, Tensor], format: str = FORMAT) -> None:
    """Writes the file atomically; ``about`` is stored as JSON."""
    save_file = of_safetensors("save_file")
    header = {"format": format, "version": str(VERSION), "about": json.dumps(about, sort_keys=True)}
    header["sha256"] = _checksum(header, tensors)
    with whole_file(path) as temporary:
        save_file(tensors, temporary, metadata=header)


def read(path: Path, format: str = FORMAT) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """``about`` and the tensors of a file; raises if it is damaged or of another version."""
    if not path.is_file():
        raise InputError(f"there is no calibration file {path}; make one with slimkv calibrate MODEL -o {path}")
    header, tensors = _read(path)
    if header.get("format") != format:
        raise CorruptDataError(
            f"{path} is a safetensors file, but not a {format}: its format is {header.get('format')}"
        )
    if header.get("version") != str(VERSION):
        raise UnsupportedError(
            f"{path} is a calibration of version {header.get('version')}; this slimkv reads version {VERSION}: "
            f"make it again with slimkv calibrate MODEL -o {path}"
        )
    if header.get("sha256") != _checksum(header, tensors):
        raise CorruptDataError(
            f"{path} was altered: its checksum does not match; make it again with slimkv calibrate MODEL -o {path}"
        )
    try:
        about = json.loads(header["about"])
    except (KeyError, ValueError, RecursionError) as error:
        raise CorruptDataError(f"{path} has no readable metadata ({error!r}); make it again") from error
    if not isinstance(about, dict):
        raise CorruptDataError(f"{path} has metadata of type {type(about).__name__}, not a mapping; make it again")
    return about, tensors


def _read(path: Path) -> tuple[dict[str, str], dict[str, Tensor]]:
    safe_open, broken = of_safetensors("safe_open"), of_safetensors("SafetensorError")
    try:
        with safe_open(path, framework="pt") as file:
            return dict(file.metadata() or {}), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (broken, OSError, ValueError) as error:
        raise CorruptDataError(
            f"{path} is not a complete calibration file ({error}); make it again with slimkv calibrate"
        ) from error


def _checksum(header: dict[str, str], tensors: dict[str, Tensor]) -> str:
    """sha256 over the header (without the checksum) and every tensor's name, shape and bytes."""
    digest = hashlib.sha256(json.dumps(sorted((k, v) for k, v in header.items() if k != "sha256")).encode())
    for name in sorted(tensors):
        tensor = tensors[name].contiguous()
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        digest.update(tensor.flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def of_safetensors(name: str, files: str = "calibration files") -> Any:
    """The attribute ``name`` of safetensors; raises if the package is not installed."""
    try:
        import safetensors
        import safetensors.torch
    except ImportError as error:
        raise MissingDependencyError(f"{files} need safetensors: pip install safetensors") from error
    return getattr(safetensors, name, None) or getattr(safetensors.torch, name)
