"""A calibration as one safetensors file: versioned, with the model's identity and a checksum."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from slimkv.calibration.calibration import Calibration
from slimkv.calibration.identity import ModelIdentity
from slimkv.calibration.statistics import LayerStatistics, pack_moments, unpack_moments
from slimkv.errors import CorruptDataError, InputError, MissingDependencyError, UnsupportedError

FORMAT, VERSION = "slimkv-calibration", 1
_MOMENT, _SCALE, _KEY_WEIGHT, _VALUE_WEIGHT = "query_moment", "query_scale", "key_weight", "value_weight"


def save(calibration: Calibration, path: Path) -> None:
    """Writes the file beside its place and then moves it there."""
    save_file = _safetensors("save_file")
    tensors: dict[str, Tensor] = {}
    layers = {}
    for number, statistics in sorted(calibration.layers.items()):
        packed, scale = pack_moments(statistics.query_moment)
        tensors[f"{_MOMENT}.{number}"], tensors[f"{_SCALE}.{number}"] = packed, scale
        for name, weight in ((_KEY_WEIGHT, statistics.key_weight), (_VALUE_WEIGHT, statistics.value_weight)):
            if weight is not None:
                tensors[f"{name}.{number}"] = weight.float().cpu()
        layers[str(number)] = [statistics.num_kv_heads, statistics.key_dim, statistics.value_dim]
    about = {
        "model": calibration.identity.to_fields(),
        "config_hash": calibration.identity.hash,
        "layers": layers,  # number: KV heads, key size, value size
        "source": calibration.source,
        "codec_seed": calibration.seed,
        "formats": {str(k): v for k, v in calibration.formats.items()} if calibration.formats is not None else None,
    }
    header = {"format": FORMAT, "version": str(VERSION), "about": json.dumps(about, sort_keys=True)}
    header["sha256"] = _checksum(header, tensors)
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    os.close(handle)
    try:
        save_file(tensors, temporary, metadata=header)
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def load(path: Path) -> Calibration:
    """See ``Calibration.load``."""
    if not path.is_file():
        raise InputError(f"there is no calibration file {path}; make one with slimkv calibrate MODEL -o {path}")
    header, tensors = _read(path)
    if header.get("format") != FORMAT:
        raise CorruptDataError(
            f"{path} is a safetensors file, but no calibration: its format is {header.get('format')}"
        )
    if header.get("version") != str(VERSION):
        raise UnsupportedError(
            f"{path} is a calibration of version {header.get('version')}; this slimkv reads version {VERSION}: "
            "make it again with slimkv calibrate"
        )
    if header.get("sha256") != _checksum(header, tensors):
        raise CorruptDataError(f"{path} was altered: its checksum does not match; make it again with slimkv calibrate")
    about = json.loads(header["about"])
    layers = {}
    for number, (heads, key_dim, value_dim) in about["layers"].items():
        moment = unpack_moments(tensors[f"{_MOMENT}.{number}"], tensors[f"{_SCALE}.{number}"])
        if moment.shape != (heads, key_dim, key_dim):
            raise CorruptDataError(f"{path}: layer {number} has moments {list(moment.shape)}, not of {heads} heads")
        weights = (tensors.get(f"{name}.{number}") for name in (_KEY_WEIGHT, _VALUE_WEIGHT))
        key_weight, value_weight = (x.double() if x is not None else None for x in weights)
        layers[int(number)] = LayerStatistics(moment, value_dim, key_weight, value_weight)
    formats = about["formats"]
    return Calibration(
        ModelIdentity.from_fields(about["model"]),
        layers,
        about["source"],
        about["codec_seed"],
        {int(k): v for k, v in formats.items()} if formats is not None else None,
        str(path),
    )


def _read(path: Path) -> tuple[dict[str, str], dict[str, Tensor]]:
    safe_open, broken = _safetensors("safe_open"), _safetensors("SafetensorError")
    try:
        with safe_open(path, framework="pt") as file:
            return dict(file.metadata() or {}), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (broken, OSError, ValueError) as error:
        raise CorruptDataError(
            f"{path} is not a whole calibration file ({error}); make it again with slimkv calibrate"
        ) from error


def _checksum(header: dict[str, str], tensors: dict[str, Tensor]) -> str:
    """sha256 over the header (without the checksum) and every tensor's name, shape and bytes."""
    digest = hashlib.sha256(json.dumps(sorted((k, v) for k, v in header.items() if k != "sha256")).encode())
    for name in sorted(tensors):
        tensor = tensors[name].contiguous()
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        digest.update(tensor.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _safetensors(name: str) -> Any:
    try:
        import safetensors
        import safetensors.torch
    except ImportError as error:
        raise MissingDependencyError("calibration files need safetensors: pip install safetensors") from error
    return getattr(safetensors, name, None) or getattr(safetensors.torch, name)
