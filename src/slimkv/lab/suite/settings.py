"""The settings of a suite run: three sizes, on a CPU and on a GPU, and the options of the command."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch

from slimkv.config import AUTO, CALIBRATED
from slimkv.errors import InputError
from slimkv.lab.evals.harness import MEMORY, RAW, WITH_CALIBRATION, check_formats
from slimkv.lab.evals.texts import SHIPPED
from slimkv.lab.models import DTYPES
from slimkv.lab.settings import check_limits, setting
from slimkv.spec import parse_size

SMOKE, QUICK, FULL = "smoke", "quick", "full"
TRANSFORMERS, VLLM = "transformers", "vllm"
NO_CALIBRATION = "none"

NAMES = (SMOKE, QUICK, FULL)
_FEW = ("fp8", "turboquant_4bit_nc", "k4v4", "k4v4+cal")
# Pairs of about equal bytes: 8 bits, 6, 4 and 3.
_PAIRS = ("fp8", "turboquant_k8v4", "k6v6+cal", "turboquant_4bit_nc", "k4v4", "k4v4+cal", "turboquant_3bit_nc",
          "k3v3+cal")  # fmt: skip
_MANY = (*_PAIRS, "k3v3", "k8v8", "k6v6", "k5v5", "k5v5+cal", "turboquant_k3v4_nc", "k3v4+cal", "k2v2", "k2v2+cal")


@dataclass(frozen=True)
class Size:
    """How much a run of one size measures."""

    formats: tuple[str, ...] = setting(help="Caches to compare with raw: fp8,k4v4,k4v4+cal, ...", option="format")
    windows: int = setting(help="Windows of text for perplexity and agreement.", least=1)
    window_tokens: int = setting(help="Tokens of each window.", least=2, option="tokens")
    position_tokens: int = setting(help="Tokens of the long window.", least=2, option="positions")
    needle_contexts: tuple[int, ...] = setting(least=1)
    needle_depths: tuple[float, ...] = setting(least=0)
    lengths: tuple[int, ...] = setting(help="Context lengths of the synthetic tasks, in tokens.", least=1)
    contexts: int = setting(help="Contexts of each synthetic task and length.", least=1)
    questions: int = setting(help="Questions about each context.", least=1)
    decode_context: int = setting(help="Tokens in the cache while decoding is timed.", least=1)
    decode_tokens: int = setting(least=1)
    decode_rounds: int = setting(least=1)
    limit: int | None = setting(help="Examples of each task of lm-evaluation-harness; full: all by default.", least=1)

    def __post_init__(self) -> None:
        check_limits(self)
        if empty := [name for name in ("formats", "lengths") if not getattr(self, name)]:
            raise InputError(f"{' and '.join(empty)} must name at least one")


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
CPU_PARAMETERS = 150_000_000  # parameters of the largest model for which a CPU keeps the sizes
PARTS = ("memory", "agreement", "positions", "needle", "tasks", "lm-eval", "drafts", "generate")


@dataclass(frozen=True)
class SuiteSettings:
    """One run."""

    name: str  # smoke, quick, full
    model: str
    size: Size
    engine: str = setting(TRANSFORMERS, "Engine that answers the tasks", known=(TRANSFORMERS, VLLM))
    device: str = "cpu"
    dtype: str = setting("float32", "Data type; default: float32 on a CPU, bfloat16 on a GPU", known=DTYPES)
    calibration: str = setting(AUTO, "Calibration of +cal: a file from slimkv calibrate, auto, or none.")
    text: str = setting(SHIPPED, "A text file, a data set on the Hugging Face hub (name:config:split), or shipped.")
    memory: str = setting("8GiB", "Memory that the tokens must fit into; default: 8GiB on a CPU, 40GiB on a GPU.")
    tasks: tuple[str, ...] = setting((), "Tasks of lm-evaluation-harness, such as hellaswag,gsm8k.")
    task_folder: str | None = setting(None, "Folder with more task definitions.")
    parts: tuple[str, ...] = setting(PARTS, "Parts to measure", known=PARTS)
    seed: int = 0

    def __post_init__(self) -> None:
        check_limits(self)
        if not parse_size(self.memory):
            raise InputError(f"--memory must be more than 0 bytes, not {self.memory}; write 8GiB, for example")
        if self.task_folder is not None and not Path(self.task_folder).is_dir():
            raise InputError(f"there is no folder {self.task_folder} with task definitions")
        check_formats([f for f in self.size.formats if f != RAW], self.calibration != NO_CALIBRATION)
        if RAW in self.size.formats or len(set(self.size.formats)) != len(self.size.formats):
            raise InputError(
                f"list each format once, and leave out raw, which is always measured: not {','.join(self.size.formats)}"
            )
        if mixed := [f for f in self.size.formats if f == CALIBRATED or f.startswith(MEMORY)]:
            raise InputError(f"{mixed[0]!r} has several formats in one cache; name formats such as k4v4+cal")

    @property
    def formats(self) -> tuple[str, ...]:
        """Every cache, the stock one first."""
        return (RAW, *self.size.formats)


def make_settings(name: str, model: str, *, device: str | None = None, **changes: Any) -> SuiteSettings:
    """The settings of a size for a model; ``changes`` replaces fields of ``SuiteSettings`` and of its ``Size``.

    With the calibration ``none``, the sizes drop their calibrated formats.
    """
    if name not in NAMES:
        raise InputError(f"unknown size {name!r}; known are {', '.join(NAMES)}")
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    on_gpu = not device.startswith("cpu")
    size = SIZES[name, on_gpu]
    if changes.get("calibration") == NO_CALIBRATION and "formats" not in changes:
        size = replace(size, formats=tuple(f for f in size.formats if not f.endswith(WITH_CALIBRATION)))
    own = {field.name for field in fields(Size)}
    size = replace(size, **{key: value for key, value in changes.items() if key in own})
    rest: dict[str, Any] = {"dtype": "bfloat16", "memory": "40GiB"} if on_gpu else {}
    rest |= {key: value for key, value in changes.items() if key not in own}
    return SuiteSettings(name, model, size, device=device, **rest)


def lighter(settings: SuiteSettings, parameters: int) -> tuple[SuiteSettings, list[str]]:
    """The settings for a model with this many parameters, and a note of changes: a CPU runs larger models on less text.

    Nothing changes for ``full``, on a GPU, or if the user has set any count.
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
    note = f"on a CPU with {parameters / 1e6:,.0f} million parameters: {told}; set any of them to override all"
    return replace(settings, size=replace(size, **less)), [note]
