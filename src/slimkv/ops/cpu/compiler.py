"""C++ to a shared library at first use, with the machine's own compiler: no torch headers, no build system.

The library is kept on disk, keyed by all source text, the flags and the compiler. It takes a few seconds once. A wheel
that holds no machine code serves every platform that has a compiler; where there is none, the torch backends remain.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tempfile
from importlib import resources
from pathlib import Path

from slimkv.errors import SlimKVError
from slimkv.ops.cpu.isa import InstructionSet
from slimkv.paths import cache_dir

MAIN = "slimkv_cpu.cpp"
COMPILERS = ("c++", "g++", "clang++")
# Encoding is defined by single operations, so nothing may be fused; attention asks for fused ones where it wants them.
FLAGS = (
    "-std=c++17", "-O3", "-fPIC", "-shared", "-fvisibility=hidden", "-ffp-contract=off", "-fno-math-errno", "-pthread",
)  # fmt: skip
_TIMEOUT_SECONDS = 300


class CompileError(SlimKVError, RuntimeError):
    """There is no C++ compiler, or it refused the CPU kernels."""


def source_texts() -> dict[str, str]:
    """Every source file of the kernels by name."""
    folder = resources.files("slimkv.ops.cpu") / "source"
    return {f.name: f.read_text(encoding="utf-8") for f in folder.iterdir() if f.name.endswith((".cpp", ".h"))}


def find_compiler() -> str | None:
    """The C++ compiler: ``$CXX``, or the first of ``COMPILERS`` on the path."""
    wanted = os.environ.get("CXX")
    for name in (wanted.split()[0],) if wanted and wanted.strip() else COMPILERS:
        if path := shutil.which(name):
            return path
    return None


def build_library(isa: InstructionSet, extra_flags: tuple[str, ...] = (), cache: Path | None = None) -> Path:
    """The path of the library for ``isa``, compiled unless it is there. ``extra_flags``: for sanitizers and tests."""
    compiler = find_compiler()
    if compiler is None:
        raise CompileError(
            f"no C++ compiler was found ($CXX, {', '.join(COMPILERS)}); install one, for instance with: "
            "apt-get install g++"
        )
    texts, flags = source_texts(), (*FLAGS, *isa.flags, *extra_flags)
    program = Path(compiler).resolve()
    made = program.stat()
    key = hashlib.sha256()
    for part in (*sorted(texts), *(texts[name] for name in sorted(texts)), *flags, str(program), str(made.st_mtime_ns)):
        key.update(part.encode() + b"\0")
    path = (cache or cache_dir("cpu")) / f"{isa.name}-{key.hexdigest()[:32]}.so"
    if not path.is_file():
        path = _compile(compiler, texts, flags, path)
    return path


def _compile(compiler: str, texts: dict[str, str], flags: tuple[str, ...], path: Path) -> Path:
    """Compiles beside ``path`` and renames, so that other processes see all of it or nothing.

    Returns ``path``, or a file in a temporary folder where the cache cannot be written.
    """
    with tempfile.TemporaryDirectory(prefix="slimkv-cpu-") as folder:
        for name, text in texts.items():
            (Path(folder) / name).write_text(text, encoding="utf-8")
        built = Path(folder) / "library.so"
        command = [compiler, *flags, str(Path(folder) / MAIN), "-o", str(built)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_SECONDS, check=False)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise CompileError(f"{compiler} could not be run on the CPU kernels: {error}") from error
        if done.returncode:
            raise CompileError(f"{compiler} could not compile the CPU kernels with {' '.join(flags)}:\n{done.stderr}")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            descriptor, beside = tempfile.mkstemp(dir=path.parent, suffix=".so")
            os.close(descriptor)
        except OSError:  # a read-only home: the library lives as long as the process may need it
            kept = Path(tempfile.mkdtemp(prefix="slimkv-cpu-")) / path.name
            shutil.copyfile(built, kept)
            return kept
        shutil.copyfile(built, beside)
        os.replace(beside, path)
        return path
