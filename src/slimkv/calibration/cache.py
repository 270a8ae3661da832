"""The on-disk cache of calibrations, keyed by model files and shared by all engines."""

from __future__ import annotations

import hashlib
from pathlib import Path

from slimkv.calibration.calibration import Calibration
from slimkv.calibration.identity import folder_digest, model_folder
from slimkv.errors import InputError
from slimkv.paths import cache_dir


def files_key(name: str) -> str:
    """A digest of configuration and weights of model ``name`` (a folder or a hub name): 32 hexadecimal digits."""
    folder = model_folder(name)
    if folder is None:
        raise InputError(f"the files of {name!r} are not on this machine: give a folder, or download the model first")
    config = folder / "config.json"
    if not config.is_file():
        raise InputError(f"{folder} contains no model: a config.json and weights are needed")
    return hashlib.sha256(config.read_bytes() + folder_digest(folder).encode()).hexdigest()[:32]


def cached_path(name: str) -> Path:
    """The file of the cached calibration of model ``name`` (a folder or a hub name)."""
    return cache_dir("calibrations") / f"files-{files_key(name)}.safetensors"


def cached_calibration(name: str) -> Calibration:
    """The cached calibration of exactly these model files; raises if there is none."""
    path = cached_path(name)
    if not path.is_file():
        raise InputError(
            f"calibration='auto': there is no cached calibration of {name}; make one with slimkv calibrate {name}"
        )
    return Calibration.load(path)
