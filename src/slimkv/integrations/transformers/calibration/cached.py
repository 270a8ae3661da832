"""The calibration of a cache: a given one, a file, or one made on first use and saved."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from slimkv.calibration import Calibration, ModelIdentity
from slimkv.calibration.identity import parameter_digest
from slimkv.errors import InputError, SlimKVError
from slimkv.formats import AUTO
from slimkv.integrations.serving.listener import Progress, silent
from slimkv.integrations.transformers.calibration.collect import gather_calibration
from slimkv.paths import cache_dir

T = TypeVar("T")
_RECIPE = "sampled"  # the kind of tokens, part of a calibration's file name


def find_calibration(
    calibration: Calibration | str | Path | None, config: Any, model: Any | None, progress: Progress = silent
) -> Calibration | None:
    """The calibration for a cache of a model with ``config``, checked to be for it; see ``SlimKVCache``."""
    if calibration is None:
        return None
    if calibration == AUTO:
        if model is None:
            raise InputError(
                "calibration='auto' runs the model once: give the model itself instead of its config, or a file from "
                "slimkv calibrate"
            )
        return auto_calibration(model, progress=progress)
    found = calibration if isinstance(calibration, Calibration) else Calibration.load(calibration)
    found.check_model(config)
    return found


def auto_calibration(model: Any, folder: Path | None = None, progress: Progress = silent) -> Calibration:
    """The calibration of ``model`` on its own samples: loaded from ``folder``, or made and saved there.

    The file's name is a digest of the model's configuration and a sample of its weights. By default the folder is
    ``slimkv.paths.cache_dir("calibrations")``.
    """
    folder = folder if folder is not None else cache_dir("calibrations")
    path = folder / f"{fingerprint(model)}-{_RECIPE}.safetensors"

    def make() -> Calibration:
        gather_calibration(model, costs=False, progress=progress).save(path)
        return Calibration.load(path)

    return load_or_make(path, Calibration.load, make)


def load_or_make(path: Path, load: Callable[[Path], T], make: Callable[[], T]) -> T:
    """Loads a file, or calls ``make``, which writes it and returns its contents.

    Only one of several processes makes it. A damaged or outdated file is regenerated.
    """
    from filelock import FileLock

    path.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(path.with_suffix(".lock")):
        if path.is_file():
            try:
                return load(path)
            except (SlimKVError, ValueError):
                path.unlink()
        return make()


def fingerprint(model: Any) -> str:
    """A key of a model's configuration and weights: its type and 32 hexadecimal digits."""
    identity = ModelIdentity.of(model.config)
    digest = hashlib.sha256((identity.hash + parameter_digest(model.named_parameters())).encode())
    return f"{identity.to_fields().get('model_type', 'model')}-{digest.hexdigest()[:32]}"
