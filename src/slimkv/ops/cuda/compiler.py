"""Compiles CUDA C++ to machine code on first use with NVRTC, without nvcc, a host compiler or CUDA headers.

Machine code is kept on disk, keyed by all source text, the options, the compiler's version and the architecture.
"""

from __future__ import annotations

import hashlib
from importlib import resources
from pathlib import Path
from typing import Any

from slimkv.errors import SlimKVError
from slimkv.paths import cache_dir, keep_code, unsafe_reason

_MAGIC = b"slimkv-cubin-1\n"


class CompileError(SlimKVError, RuntimeError):
    """NVRTC rejected a kernel, or the driver rejected its machine code."""


def source_texts() -> dict[str, str]:
    """The text of every source file by its path in the source folder, as ``#include`` names it."""
    root = resources.files("slimkv.ops.cuda") / "source"
    return {
        f"{folder.name}/{file.name}": file.read_text(encoding="utf-8")
        for folder in root.iterdir()
        if folder.is_dir()
        for file in folder.iterdir()
        if file.name.endswith((".cu", ".cuh"))
    }


def compile_kernels(source: str, defines: dict[str, int], architecture: str, cache: Path | None = None) -> bytes:
    """Machine code of ``source`` (such as decode/decode.cu) with ``defines`` for ``architecture`` (such as sm_90).

    A virtual architecture (compute_89) yields PTX, which the driver compiles for newer GPUs.
    """
    from cuda.bindings import nvrtc

    texts = source_texts()
    options = [
        f"--gpu-architecture={architecture}",
        "-std=c++17",
        "--device-as-default-execution-space",
        *(f"-D{name}={value}" for name, value in sorted(defines.items())),
    ]
    version = nvrtc.nvrtcVersion()[1:]
    key = hashlib.sha256()
    for part in (source, *sorted(texts), *(texts[name] for name in sorted(texts)), *options, str(version)):
        key.update(part.encode() + b"\0")
    path = (cache or cache_dir("cuda")) / f"{Path(source).stem}-{key.hexdigest()[:32]}.cubin"
    code = _read_cached(path)
    if code is None:
        code = _compile(nvrtc, source, texts, options)
        _write_cached(path, code)
    return code


def _compile(nvrtc: Any, source: str, texts: dict[str, str], options: list[str]) -> bytes:
    headers = {name: text for name, text in texts.items() if name != source}
    program = _checked(
        nvrtc,
        nvrtc.nvrtcCreateProgram(
            texts[source].encode(),
            source.encode(),
            len(headers),
            [text.encode() for text in headers.values()],
            [name.encode() for name in headers],
        ),
    )
    try:
        result = nvrtc.nvrtcCompileProgram(program, len(options), [option.encode() for option in options])
        if result[0].value:
            log = b" " * _checked(nvrtc, nvrtc.nvrtcGetProgramLogSize(program))
            nvrtc.nvrtcGetProgramLog(program, log)
            raise CompileError(f"NVRTC could not compile {source} with {' '.join(options)}:\n{log.decode()}")
        size, get = nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN
        if options[0].startswith("--gpu-architecture=compute_"):
            size, get = nvrtc.nvrtcGetPTXSize, nvrtc.nvrtcGetPTX
        code = b" " * _checked(nvrtc, size(program))
        _checked(nvrtc, get(program, code))
        return code
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def _checked(nvrtc: Any, result: tuple) -> Any:
    if result[0].value:
        raise CompileError(f"NVRTC: {nvrtc.nvrtcGetErrorString(result[0])[1].decode()}")
    return result[1] if len(result) > 1 else None


def _read_cached(path: Path) -> bytes | None:
    """The machine code in ``path`` if it is intact and only this user could have written it; otherwise None."""
    if unsafe_reason(path.parent) is not None:
        return None
    try:
        content = path.read_bytes()
    except OSError:
        return None
    digest, code = content[len(_MAGIC) : len(_MAGIC) + 32], content[len(_MAGIC) + 32 :]
    return code if content.startswith(_MAGIC) and hashlib.sha256(code).digest() == digest else None


def _write_cached(path: Path, code: bytes) -> None:
    keep_code(path, _MAGIC + hashlib.sha256(code).digest() + code)
