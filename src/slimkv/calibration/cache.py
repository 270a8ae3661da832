"""Where calibrations are kept that were made once for a model's files, for every engine that serves those files."""

from __future__ import annotations

import hashlib
from pathlib import Path

from slimkv.calibration.calibration import Calibration
from slimkv.errors import InputError
from slimkv.paths import cache_dir

_WEIGHTS = ("*.safetensors", "*.bin", "*.gguf", "*.pt", "*.pth")
_SAMPLES, _SAMPLE_BYTES = 64, 256  # pieces of each file that are looked at


def model_folder(name: str) -> Path:
    """The folder with the files of a model: itself, or what the Hugging Face hub's client has of it on this machine."""
    if Path(name).is_dir():
        return Path(name)
    try:
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(name, local_files_only=True))
    except Exception as error:  # the hub's client raises many kinds, all of which mean the same here
        raise InputError(
            f"the files of {name!r} are not on this machine: give a folder, or load the model once"
        ) from error


def files_key(folder: Path) -> str:
    """Of a model's configuration and a sample of its weight files: 32 hexadecimal digits."""
    files = sorted({path for pattern in _WEIGHTS for path in folder.glob(pattern)})
    config = folder / "config.json"
    if not files or not config.is_file():
        raise InputError(f"{folder} holds no model: a config.json and weights ({', '.join(_WEIGHTS)}) are needed")
    digest = hashlib.sha256(config.read_bytes())
    for path in files:
        size = path.stat().st_size
        digest.update(f"{path.name} {size}".encode())
        with path.open("rb") as opened:
            for start in range(0, size, max(size // _SAMPLES, _SAMPLE_BYTES)):
                opened.seek(start)
                digest.update(opened.read(_SAMPLE_BYTES))
    return digest.hexdigest()[:32]


def cached_path(name: str) -> Path:
    """The file in which the calibration of model ``name`` (a folder or a hub name) is kept."""
    return cache_dir("calibrations") / f"files-{files_key(model_folder(name))}.safetensors"


def cached_calibration(name: str) -> Calibration:
    """The calibration of exactly this model's files; raises, with the command that makes it, if there is none."""
    path = cached_path(name)
    if not path.is_file():
        raise InputError(
            f"calibration='auto': no calibration of {name} is kept here; make it with slimkv calibrate {name}"
        )
    return Calibration.load(path)
