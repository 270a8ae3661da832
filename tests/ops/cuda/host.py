"""Compiles the CUDA kernels for the CPU (host.h) and launches them there, so that their logic is tested without a GPU.

Every kernel takes one struct by value, mirrored here by a ``ctypes.Structure``. ``HOST_TESTABLE(name, Args)`` after the
kernel makes it callable.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path

import slimkv

HERE = Path(__file__).parent
SOURCES = Path(slimkv.__file__).parent / "ops" / "cuda" / "source"
FLAGS = [
    "-Og",  # hundreds of libraries run for milliseconds each: -O1 takes twice as long to compile them
    "-march=native",
    "-ffp-contract=off",
    "-std=c++17",
    "-shared",
    "-fPIC",
    "-Wall",
    "-Wno-unknown-pragmas",
    "-Wno-unused-function",
    "-Wno-unused-variable",
    "-Wno-unused-but-set-variable",
    "-DSLIMKV_HOST",
]
has_compiler = shutil.which("g++") is not None
LAG = "SLIMKV_HOST_LAG"  # environment variable: warps that lag behind the others (host.h)


class LaunchError(RuntimeError):
    """Divergent lanes at a collective, memory written out of bounds, or arguments of the wrong size."""


def _cache() -> Path:
    """The folder of libraries, named by a hash of their inputs. Any of them may be deleted at any time."""
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    folder = Path(root) / "slimkv" / "host"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@lru_cache
def _processor() -> str:
    """The meaning of ``-march=native`` on this machine."""
    return subprocess.run(
        ["g++", "-march=native", "-E", "-dM", "-x", "c++", "/dev/null"], capture_output=True, check=True, text=True
    ).stdout


def _included(source: Path) -> list[Path]:
    """``source`` and all files that it may include, under any ``#if``."""
    found, left = set(), [source]
    while left:
        path = left.pop()
        if path in found:
            continue
        found.add(path)
        for name in re.findall(r'^#\s*include "(.+)"', path.read_text(), re.MULTILINE):
            left.append(next(at for folder in (path.parent, HERE, SOURCES) if (at := folder / name).exists()))
    return sorted(found)


def _key(source: Path, options: list[str]) -> str:
    digest = hashlib.sha256(_processor().encode())
    for path in _included(source):
        digest.update(path.read_bytes())
    digest.update(" ".join(options).encode())
    return digest.hexdigest()[:24]


@lru_cache(maxsize=64)
def _library(path: str) -> ctypes.CDLL:
    return ctypes.CDLL(path)


def compile(source: Path, defines: Mapping[str, int | str] | None = None) -> ctypes.CDLL:
    """The library of a ``.cu`` file (a path in the package's source folder, or elsewhere) with ``-D`` options."""
    source = source if source.is_absolute() else SOURCES / source
    options = [*FLAGS, *(f"-D{name}={value}" for name, value in sorted((defines or {}).items()))]
    target = _cache() / f"{source.stem}-{_key(source, options)}.so"
    if not target.exists():
        with tempfile.TemporaryDirectory(dir=_cache()) as folder:
            built = Path(folder) / "built.so"
            command = ["g++", *options, f"-I{HERE}", f"-I{SOURCES}", "-x", "c++", str(source), "-o", str(built)]
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                raise RuntimeError(f"{' '.join(command)}\n{done.stderr}")
            built.replace(target)
    return _library(str(target))


def launch(
    library: ctypes.CDLL,
    name: str,
    *,
    grid: tuple[int, int] | tuple[int],
    threads: int,
    shared: int = 0,
    args: ctypes.Structure,
) -> None:
    """Runs every block of ``grid`` (x, y), one after the other; raises ``LaunchError``."""
    x, y = grid if len(grid) == 2 else (grid[0], 1)
    function = getattr(library, f"host_launch_{name}")
    library.host_error.restype = ctypes.c_char_p
    if function(x, y, threads, shared, ctypes.byref(args), ctypes.sizeof(args)):
        raise LaunchError(f"{name}: {library.host_error().decode()}")
