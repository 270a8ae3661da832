"""Where a number comes from: command, versions, machine and date, written beside every result."""

from __future__ import annotations

import platform
import sys
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

_PACKAGES = ("slimkv", "torch", "transformers", "triton")


@dataclass(frozen=True)
class Provenance:
    """How to get the same number again."""

    command: str
    versions: dict[str, str]
    device: str
    cpu_threads: int
    date: str


def provenance(device: torch.device | str = "cpu") -> Provenance:
    """Of this process."""
    versions = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    device = torch.device(device)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else _cpu_name()
    program = Path(sys.argv[0])
    format = program.name
    if format == "__main__.py":  # python -m slimkv, or python -m slimkv.bench
        format = "slimkv" if program.parent.name == "slimkv" else f"slimkv {program.parent.name}"
    command = " ".join([format, *sys.argv[1:]])
    return Provenance(command, versions, name, torch.get_num_threads(), datetime.now(UTC).isoformat(timespec="seconds"))


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    return next((x.split(":", 1)[1].strip() for x in lines if x.startswith("model name")), platform.machine())


def with_provenance(report: Any, device: torch.device | str = "cpu") -> dict[str, Any]:
    """A report dataclass as a dict that says where it comes from."""
    return {**asdict(report), "run": asdict(provenance(device))}
