"""The instruction sets that the compiled CPU kernels are built for, and the best one of this machine."""

from __future__ import annotations

import platform
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from slimkv.errors import InputError


@dataclass(frozen=True)
class InstructionSet:
    """One build of the library."""

    name: str
    machines: tuple[str, ...]  # as ``platform.machine()`` calls them; empty: any
    features: frozenset[str]  # required features of the processor
    flags: tuple[str, ...]  # compiler flags


_X86 = ("x86_64", "amd64", "AMD64")
_ARM = ("aarch64", "arm64")
_AVX2_FLAGS = ("-mavx2", "-mfma", "-mf16c", "-mbmi2")
_AVX512_FLAGS = ("-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", *_AVX2_FLAGS)
_AVX512 = frozenset({"avx512f", "avx512bw", "avx512dq", "avx512vl", "avx2", "fma", "f16c", "bmi2"})

# Best first.
INSTRUCTION_SETS = (
    InstructionSet("avx512_vnni", _X86, _AVX512 | {"avx512_vnni"}, (*_AVX512_FLAGS, "-mavx512vnni")),
    InstructionSet("avx512", _X86, _AVX512, _AVX512_FLAGS),
    InstructionSet("avx2", _X86, frozenset({"avx2", "fma", "f16c", "bmi2"}), _AVX2_FLAGS),
    InstructionSet("neon_dotprod", _ARM, frozenset({"asimddp"}), ("-march=armv8.2-a+dotprod",)),
    InstructionSet("neon", _ARM, frozenset(), ("-march=armv8-a",)),
    InstructionSet("generic", (), frozenset(), ()),
)


@cache
def cpu_features() -> frozenset[str]:
    """The processor's features under their Linux names; empty if unknown."""
    if sys.platform == "darwin" and platform.machine() == "arm64":
        return frozenset({"asimddp"})  # all 64-bit Apple processors that run macOS
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return frozenset()
    for line in text.splitlines():
        name, _, words = line.partition(":")
        if name.strip() in ("flags", "Features"):
            return frozenset(words.split())
    return frozenset()


def usable() -> list[InstructionSet]:
    """The instruction sets that run on this machine, best first; the last is plain C++."""
    machine, features = platform.machine(), cpu_features()
    return [s for s in INSTRUCTION_SETS if (not s.machines or machine in s.machines) and s.features <= features]


def find(name: str | None = None) -> InstructionSet:
    """The best instruction set of this machine, or ``name`` if it runs here."""
    here = usable()
    if name is None:
        return here[0]
    for found in here:
        if found.name == name:
            return found
    raise InputError(f"instruction set {name!r} does not run here; supported are {', '.join(s.name for s in here)}")
