"""Models and calibrations, loaded with a progress bar."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
import typer
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from slimkv.calibration import Calibration
from slimkv.cli.output import console
from slimkv.config import AUTO, CALIBRATED
from slimkv.errors import InputError
from slimkv.formats import is_latent_format
from slimkv.integrations.serving.listener import Progress, silent
from slimkv.lab import models
from slimkv.lab.evals.harness import MEMORY, RAW, check_formats
from slimkv.lab.models import Loaded


@contextmanager
def progress_bar(lines: bool = True) -> Iterator[Progress]:
    """A progress bar on standard error; it appears with the first step.

    Without a terminal it prints a line for each stage, or nothing if ``lines`` is false.
    """
    screen = console(stderr=True)
    if not screen.is_terminal:
        yield _lines_of_progress() if lines else silent
        return
    label = TextColumn("{task.description:<40}", markup=False)
    bar = Bar(label, BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), console=screen, transient=True)
    task = bar.add_task("")

    def advance(what: str, done: int, total: int) -> None:
        bar.update(task, description=what, completed=done, total=total)
        bar.start()

    try:
        yield advance
    finally:
        bar.stop()


def _lines_of_progress() -> Progress:
    """Progress without a terminal: a line for each stage, once its first step is done."""
    last = ""

    def tell(what: str, done: int, total: int) -> None:
        nonlocal last
        if done and what != last:
            last = what
            typer.echo(f"[{done}/{total}] {what}", err=True)

    return tell


def load_quietly(model: str, threads: int | None, device: str, dtype: str, progress: Progress) -> Loaded:
    """Loads the model without the progress bars of transformers, which would break the command's own."""
    if threads is not None:
        torch.set_num_threads(threads)
    models.quiet_loading()
    progress("loading the model", 0, 1)
    return models.load(model, models.parse_dtype(dtype), device, progress)


def load_calibration(source: str | None, loaded: Loaded, progress: Progress) -> Calibration | None:
    """A calibration for the model from a file, or with ``auto`` the cached one, made on first use."""
    from slimkv.integrations.transformers.calibration.cached import find_calibration

    return find_calibration(source, loaded.model.config, loaded.model, progress)


def check_caches(formats: Sequence[str], source: str | None = None, budgets: bool = False, keys: bool = False) -> None:
    """Raises for formats and calibrations that a command cannot use, before it loads a model.

    ``budgets``: whether the command accepts shares of memory, such as ``memory=50%``. ``keys``: and measures keys.
    """
    check_formats(formats, calibrated=source is not None)
    if set(formats) <= {RAW}:
        raise InputError(f"{RAW} is the stock cache, which is measured in any case: name a packed format, such as k4v4")
    for name in formats:
        if is_latent_format(name) and keys:
            raise InputError(f"{name} is for latents, and this command measures keys: use slimkv eval agreement")
        size = name.removeprefix(MEMORY)
        if not budgets and name != size and (size.endswith("%") or not size[0].isdigit()):
            raise InputError(f"only slimkv eval positions takes {name}: give the size, such as {MEMORY}90MiB")
    if source is None:
        return
    if source != AUTO and not Path(source).is_file():
        raise InputError(f"there is no calibration file {source!r}; make one with slimkv calibrate, or use auto")
    widths = None if source == AUTO else Calibration.load(source).formats
    if CALIBRATED in formats and widths is None:
        raise InputError(
            f"the format {CALIBRATED} needs a calibration file with widths, not {source}: make one with slimkv "
            "calibrate --budget or --profile"
        )
