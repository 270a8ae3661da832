"""Compiles C++ to a shared library on first use, with the system's compiler, without torch headers or a build system.

The library is kept on disk, keyed by all source text, the flags and the compiler; its name ends with a digest of its
bytes, so that a damaged file is never loaded. Compiling takes a few seconds, once. The wheel contains no machine code
and works on every platform with a compiler; without one, the reference in plain torch runs.
"""

from __future__ import annotations

import atexit
import hashlib
import os
import shutil
import subprocess
import tempfile
from importlib import resources
from pathlib import Path

from slimkv.errors import SlimKVError
from slimkv.ops.cpu.isa import InstructionSet
from slimkv.paths import cache_dir, keep_code, unsafe_reason, write_whole

MAIN = "slimkv_cpu.cpp"
COMPILERS = ("c++", "g++", "clang++")
# Encoding is defined by single operations, so the compiler must not fuse them; attention fuses explicitly.
FLAGS = (
    "-std=c++17", "-O3", "-fPIC", "-shared", "-fvisibility=hidden", "-ffp-contract=off", "-fno-math-errno", "-pthread",
)  # fmt: skip
_TIMEOUT_SECONDS = 300


class CompileError(SlimKVError, RuntimeError):
    """No C++ compiler was found, or it could not compile the CPU kernels."""


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
    """The path of the library for ``isa``, compiled if necessary. ``extra_flags``: for sanitizers and tests."""
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
    folder, stem = cache or cache_dir("cpu"), f"{isa.name}-{key.hexdigest()[:32]}"
    return _find(folder, stem) or _keep(_compile(compiler, texts, flags), folder, stem)


def _find(folder: Path, stem: str) -> Path | None:
    """The cached library in ``folder``, if it is intact and only this user could have written it."""
    if unsafe_reason(folder) is not None:
        return None
    return next((path for path in sorted(folder.glob(f"{stem}-*.so")) if path.name == _name(stem, path)), None)


def _name(stem: str, library: Path | bytes) -> str:
    """The name of a library with these bytes; empty if they cannot be read."""
    try:
        content = library if isinstance(library, bytes) else library.read_bytes()
    except OSError:
        return ""
    return f"{stem}-{hashlib.sha256(content).hexdigest()[:16]}.so"


def _keep(content: bytes, folder: Path, stem: str) -> Path:
    """Stores a library in ``folder`` (in a temporary folder if that is unsafe, read-only or full); returns its path."""
    name = _name(stem, content)
    reason = keep_code(folder / name, content)
    if reason is None:
        return folder / name
    try:
        kept = Path(tempfile.mkdtemp(prefix="slimkv-cpu-"))
        atexit.register(shutil.rmtree, kept, ignore_errors=True)
        write_whole(kept / name, content)
        return kept / name
    except OSError as error:
        raise CompileError(
            f"the compiled CPU kernels can be stored neither in {folder} ({reason}) nor in {tempfile.gettempdir()} "
            f"({error.strerror or error}); free some space or set XDG_CACHE_HOME or TMPDIR to a folder of your own"
        ) from error


def _compile(compiler: str, texts: dict[str, str], flags: tuple[str, ...]) -> bytes:
    """The bytes of the compiled library."""
    try:
        with tempfile.TemporaryDirectory(prefix="slimkv-cpu-") as folder:
            for name, text in texts.items():
                (Path(folder) / name).write_text(text, encoding="utf-8")
            built = Path(folder) / "library.so"
            command = [compiler, *flags, str(Path(folder) / MAIN), "-o", str(built)]
            done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_SECONDS, check=False)
            if done.returncode:
                raise CompileError(
                    f"{compiler} could not compile the CPU kernels with {' '.join(flags)}:\n{done.stderr}"
                )
            return built.read_bytes()
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CompileError(f"{compiler} could not be run on the CPU kernels: {error}") from error
