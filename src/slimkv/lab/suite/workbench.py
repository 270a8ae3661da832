"""Shared by the parts of a run: the model, its calibration, the text, and output paths."""

from __future__ import annotations

import gc
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from slimkv.calibration import Calibration
from slimkv.calibration.identity import folder_digest
from slimkv.config import AUTO
from slimkv.errors import InputError
from slimkv.integrations.serving.listener import Progress
from slimkv.lab import models
from slimkv.lab.evals.harness import RAW, STOCK, WITH_CALIBRATION, CacheKind, cache_kinds
from slimkv.lab.evals.texts import load_text, token_windows
from slimkv.lab.suite.settings import SuiteSettings
from slimkv.lab.suite.tasks import TaskMaker


class Workbench:
    """Loads everything on first use: a run whose parts are all finished loads nothing."""

    def __init__(self, settings: SuiteSettings, folder: Path) -> None:
        self.settings, self.folder = settings, folder
        self.calibration: Calibration | None = None
        self.formats = settings.formats  # without the calibrated ones if calibration failed
        self._loaded: Any = None

    @property
    def loaded(self) -> Any:
        """``slimkv.lab.models.Loaded``: the model, its tokenizer, its name."""
        if self._loaded is None:
            models.quiet_loading()
            dtype = models.parse_dtype(self.settings.dtype)
            self._loaded = models.load(self.settings.model, dtype, self.settings.device)
        return self._loaded

    def release(self) -> None:
        """Frees the model's memory, for engines that load it themselves."""
        self._loaded = None
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    @cached_property
    def tokenizer(self) -> Any:
        """The model's tokenizer, without loading the model."""
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(self.model_source)

    @cached_property
    def model_source(self) -> str:
        """The model argument for engines: a folder, or a name on the hub."""
        return models.source(self.settings.model)

    @cached_property
    def config(self) -> Any:
        """The model's configuration; raises if it cannot be read."""
        from transformers import AutoConfig

        try:
            return AutoConfig.from_pretrained(self.model_source)
        except (OSError, ValueError) as error:
            raise InputError(
                f"the model {self.settings.model!r} cannot be read ({str(error).splitlines()[0]}); give a folder with "
                f"a transformers model, a name on the hub, or a packaged model: {', '.join(models.PACKAGED)}"
            ) from error

    @cached_property
    def parameters(self) -> int:
        """The number of the model's parameters; tied ones count once."""
        from transformers import AutoModelForCausalLM

        with torch.device("meta"):
            return sum(p.numel() for p in AutoModelForCausalLM.from_config(self.config).parameters())

    @property
    def max_positions(self) -> int | None:
        """The model's context length; None if its configuration does not say."""
        return getattr(self.config.get_text_config(decoder=True), "max_position_embeddings", None)

    @cached_property
    def text(self) -> str:
        """The source of windows and of the tasks' sentences."""
        return load_text(self.settings.text)

    @cached_property
    def text_tokens(self) -> int:
        """Tokens of the text."""
        return len(self.tokenizer(self.text, add_special_tokens=False, verbose=False)["input_ids"])

    @cached_property
    def tasks(self) -> TaskMaker:
        """Makes the synthetic tasks."""
        return TaskMaker(self.tokenizer, self.text)

    def calibrate(self, progress: Progress) -> Path:
        """Loads or makes the calibration; returns the run's copy, which is passed to engines."""
        from slimkv.integrations.transformers.calibration.cached import find_calibration

        model = self.loaded.model if self.settings.calibration == AUTO else None
        self.calibration = find_calibration(self.settings.calibration, self.config, model, progress)
        assert self.calibration is not None
        path = self.folder / "calibration.safetensors"
        self.calibration.save(path)
        return path

    @property
    def used_calibration(self) -> Calibration | None:
        """The calibration if a format is marked ``+cal``, else None: without a mark, all formats would use it."""
        return self.calibration if any(name.endswith(WITH_CALIBRATION) for name in self.formats) else None

    @property
    def packed(self) -> list[str]:
        """The names of the packed caches."""
        return [format for format in self.formats if format != RAW]

    def kinds(self) -> list[CacheKind]:
        """The caches to measure, the stock one first."""
        return [STOCK, *cache_kinds(self.packed, self.used_calibration)]

    def kind(self, format: str) -> CacheKind:
        """The cache called ``format``."""
        return next(kind for kind in self.kinds() if kind.name == format)

    def measured(
        self, measure: Callable[..., Any], *inputs: Any, progress: Progress, windows: tuple[int, int] | None = None,
        more: Sequence[str] = (), **options: Any,
    ) -> dict[str, Any]:  # fmt: skip
        """The report of an eval, ``measure(model, *inputs, formats)``, on the packed caches and ``more``.

        ``windows``: the number of windows of the text and the tokens of each; they become the input.
        """
        if windows is not None:
            inputs = (token_windows(self.tokenizer, self.text, *windows),)
        report = measure(
            self.loaded.model, *inputs, [*self.packed, *more], name=self.settings.model, progress=progress,
            calibration=self.used_calibration, **options,
        )  # fmt: skip
        return asdict(report)

    @cached_property
    def model_digest(self) -> str:
        """A digest of the model's weights and configurations, in files or loaded."""
        folder = Path(self.model_source)
        if not folder.is_dir():
            from slimkv.integrations.transformers.calibration.cached import fingerprint

            return fingerprint(self.loaded.model)
        digest = hashlib.sha256(folder_digest(folder).encode())
        for path in sorted(folder.glob("*.json")):
            digest.update(path.read_bytes())
        return digest.hexdigest()[:32]

    @cached_property
    def text_digest(self) -> str:
        """A digest of the text."""
        return hashlib.sha256(self.text.encode()).hexdigest()[:16]
