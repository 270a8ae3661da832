"""The settings of a suite run: three sizes, on a CPU and on a GPU, and the options of the command."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch

from slimkv.errors import InputError
from slimkv.lab.evals.harness import RAW, WITH_CALIBRATION, check_formats
from slimkv.lab.evals.texts import SHIPPED
from slimkv.lab.models import parse_dtype

SMOKE, QUICK, FULL = "smoke", "quick", "full"
TRANSFORMERS, VLLM = "transformers", "vllm"
ENGINES = (TRANSFORMERS, VLLM)
AUTO, NO_CALIBRATION = "auto", "none"

_FEW = ("fp8", "turboquant_4bit_nc", "k4v4", "k4v4+cal")
# Pairs of about equal bytes: 8 bits, 6, 4 and 3.
_PAIRS = ("fp8", "turboquant_k8v4", "k6v6+cal", "turboquant_4bit_nc", "k4v4", "k4v4+cal", "turboquant_3bit_nc",
          "k3v3+cal")  # fmt: skip
_MANY = (*_PAIRS, "k3v3", "k8v8", "k6v6", "k5v5", "k5v5+cal", "turboquant_k3v4_nc", "k3v4+cal", "k2v2", "k2v2+cal")


@dataclass(frozen=True)
class Size:
    """The counts and lengths of a size."""

    formats: tuple[str, ...]  # in addition to raw
    windows: int  # of text, for perplexity, agreement and KL divergence
    window_tokens: int
    position_tokens: int  # of one long window, for KL divergence by position
    needle_contexts: tuple[int, ...]
    needle_depths: tuple[float, ...]
    lengths: tuple[int, ...]  # of the synthetic tasks
    contexts: int  # for each task and length
    questions: int  # about each context
    decode_context: int  # tokens in the cache while decoding is timed
    decode_tokens: int
    decode_rounds: int
    limit: int | None  # examples of each task of lm-evaluation-harness; None: all

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            least = min(value) if isinstance(value, tuple) and field.name != "formats" and value else value
            if isinstance(value, tuple) and not value:
                raise InputError(f"{field.name} must name at least one")
            if isinstance(least, int) and least < 1:
                raise InputError(f"{field.name} must be at least 1, not {least}")
        for depth in self.needle_depths:
            if not 0 <= depth <= 1:
                raise InputError(f"a depth must be between 0 and 1, not {depth}")


_DEPTHS = (0.1, 0.5, 0.9)
SIZES: dict[tuple[str, bool], Size] = {  # by name and whether there is a GPU
    (SMOKE, False): Size(_FEW, 4, 256, 512, (192,), (0.5,), (384,), 1, 4, 256, 8, 1, 8),
    (QUICK, False): Size(_PAIRS, 6, 384, 1536, (384,), (0.25, 0.75), (512, 1024), 2, 8, 512, 8, 3, 40),
    (FULL, False): Size(_MANY, 24, 1024, 8192, (512, 2048), _DEPTHS, (512, 1024, 2048, 4096), 12, 8, 4096, 32, 3, None),
    (SMOKE, True): Size(_FEW, 8, 1024, 4096, (1024,), (0.5,), (2048,), 2, 8, 4096, 32, 1, 32),
    (QUICK, True): Size(
        _PAIRS, 32, 2048, 16384, (4096, 16384), _DEPTHS, (2048, 4096, 8192, 16384, 32768), 10, 8, 16384, 64, 3, 200,
    ),
    (FULL, True): Size(
        _MANY, 128, 2048, 32768, (4096, 16384, 65536), (0.0, 0.25, 0.5, 0.75, 1.0),
        (2048, 4096, 8192, 16384, 32768, 65536, 131072), 40, 8, 32768, 64, 3, None,
    ),
}  # fmt: skip
NAMES = (SMOKE, QUICK, FULL)
CPU_PARAMETERS = 150_000_000  # of the largest model for which a CPU keeps the sizes
PARTS = ("memory", "agreement", "positions", "needle", "tasks", "lm-eval", "drafts", "generate", "attend", "serve")


@dataclass(frozen=True)
class SuiteSettings:
    """One run."""

    name: str  # smoke, quick, full
    model: str
    size: Size
    engine: str = TRANSFORMERS
    device: str = "cpu"
    dtype: str = "float32"
    calibration: str = AUTO  # auto, a file, or none
    text: str = SHIPPED
    memory: str = "8GiB"  # that tokens have to fit into
    tasks: tuple[str, ...] = ()  # of lm-evaluation-harness
    task_folder: str | None = None  # further task definitions for it
    parts: tuple[str, ...] = PARTS
    seed: int = 0

    def __post_init__(self) -> None:
        if self.engine not in ENGINES:
            raise InputError(f"unknown engine {self.engine!r}; known are {', '.join(ENGINES)}")
        parse_dtype(self.dtype)
        for part in self.parts:
            if part not in PARTS:
                raise InputError(f"unknown part {part!r}; known are {', '.join(PARTS)}")
        check_formats([f for f in self.size.formats if f != RAW], self.calibration != NO_CALIBRATION)
        if RAW in self.size.formats or len(set(self.size.formats)) != len(self.size.formats):
            raise InputError(
                f"list each format once, and leave out raw, which is always measured: not {','.join(self.size.formats)}"
            )
        if "calibrated" in self.size.formats:
            raise InputError("'calibrated' has another format in each layer; name formats such as k4v4+cal")

    @property
    def formats(self) -> tuple[str, ...]:
        """Every cache, the stock one first."""
        return (RAW, *self.size.formats)


def make_settings(name: str, model: str, *, device: str | None = None, **changes: Any) -> SuiteSettings:
    """The settings of a size for a model; ``changes`` replaces fields of ``SuiteSettings`` and of its ``Size``.

    A change of None leaves the field alone. Without ``calibration`` (``none``) the sizes drop their calibrated formats.
    """
    if name not in NAMES:
        raise InputError(f"unknown size {name!r}; known are {', '.join(NAMES)}")
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    on_gpu = not device.startswith("cpu")
    changes = {key: value for key, value in changes.items() if value is not None}
    size = SIZES[name, on_gpu]
    if changes.get("calibration") == NO_CALIBRATION and "formats" not in changes:
        size = replace(size, formats=tuple(f for f in size.formats if not f.endswith(WITH_CALIBRATION)))
    own = {field.name for field in fields(Size)}
    size = replace(size, **{key: _tuple(value) for key, value in changes.items() if key in own})
    rest = {key: _tuple(value) for key, value in changes.items() if key not in own}
    rest.setdefault("dtype", "bfloat16" if on_gpu else "float32")
    rest.setdefault("memory", "40GiB" if on_gpu else "8GiB")
    return SuiteSettings(name, model, size, device=device, **rest)


def _tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, Sequence) and not isinstance(value, str) else value


def lighter(settings: SuiteSettings, parameters: int) -> tuple[SuiteSettings, list[str]]:
    """The settings for a model with this many parameters, and a note of changes: on a CPU, larger models read less.

    Counts set by the user, ``full`` and GPUs are not changed.
    """
    size, share = settings.size, CPU_PARAMETERS / max(parameters, 1)
    usual = replace(SIZES[settings.name, False], formats=size.formats)
    if not settings.device.startswith("cpu") or settings.name == FULL or size != usual or share > 0.75:
        return settings, []
    less: dict[str, Any] = {
        "windows": max(2, round(size.windows * share)), "contexts": max(1, round(size.contexts * share)),
        "position_tokens": max(512, int(size.position_tokens * share) // 256 * 256),
    }  # fmt: skip
    told = ", ".join(f"{name} {value} in place of {getattr(size, name)}" for name, value in less.items())
    note = f"on a CPU with {parameters / 1e6:,.0f} million parameters: {told}; set one of them to choose it yourself"
    return replace(settings, size=replace(size, **less)), [note]
