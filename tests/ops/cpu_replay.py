"""Records calls of the compiled CPU library as scripts that need only ctypes, to repeat them under a sanitizer."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import attention_cases
import torch
from torch import Tensor

from slimkv.ops.attention import cpu as attention
from slimkv.ops.attention.api import checked_request as attend_request
from slimkv.ops.cpu import structures
from slimkv.ops.cpu.compiler import build_library
from slimkv.ops.cpu.isa import InstructionSet
from slimkv.ops.cpu.module import layout_tables

# Holds the bytes of every structure and array, and replaces their pointers by the addresses of its own copies.
SCRIPT = """
import ctypes
blobs = {blobs!r}
memory = [(ctypes.c_char * max(len(b), 1)).from_buffer_copy(b or bytes(1)) for b in blobs]
for blob, offset, target, inside in {pointers!r}:
    address = ctypes.addressof(memory[target]) + inside
    ctypes.c_uint64.from_buffer(memory[blob], offset).value = address
for function, blob in {calls!r}:
    status = getattr(library, function)(ctypes.c_void_p(ctypes.addressof(memory[blob])))
    assert status == 0, (function, status)
print("ok")
"""


def build_sanitized(isa: InstructionSet, sanitizer: str, folder: Path) -> Path:
    """The library for ``isa`` with a sanitizer compiled in."""
    flags = (f"-fsanitize={sanitizer}", "-DSLIMKV_ALWAYS_THREADS", "-fno-omit-frame-pointer", "-g", "-O1")
    if sanitizer == "undefined":
        flags = (*flags, "-fno-sanitize-recover=all")
    return build_library(isa, flags, folder)


class _Recorder:
    """Records the memory that calls point to, by its address in this process."""

    def __init__(self) -> None:
        self.blobs: list[bytes] = []
        self.pointers: list[tuple[int, int, int, int]] = []
        self._known: dict[int, tuple[int, int]] = {}  # address -> (length, blob)

    def tensor(self, x: Tensor) -> None:
        storage = x.untyped_storage()
        data = ctypes.string_at(storage.data_ptr(), storage.nbytes()) if storage.nbytes() else b""
        self.bytes_at(storage.data_ptr(), data)

    def bytes_at(self, address: int, data: bytes) -> int:
        self.blobs.append(data)
        self._known[address] = len(data), len(self.blobs) - 1
        return len(self.blobs) - 1

    def structure(self, x: ctypes.Structure) -> int:
        """Records a structure whose pointers lead to recorded memory. Returns its index."""
        index = self.bytes_at(ctypes.addressof(x), bytes(x))
        self._point(x, index, 0)
        return index

    def _point(self, x: Any, blob: int, base: int) -> None:
        for name, kind, *_ in x._fields_:
            offset, value = base + getattr(type(x), name).offset, getattr(x, name)
            if kind is ctypes.c_void_p and value:
                self.pointers.append((blob, offset, *self._find(value)))
            elif isinstance(value, ctypes.Structure):
                self._point(value, blob, offset)
            elif isinstance(value, ctypes.Array) and issubclass(value._type_, ctypes.Structure):
                for i, part in enumerate(value):
                    self._point(part, blob, offset + i * ctypes.sizeof(value._type_))

    def _find(self, address: int) -> tuple[int, int]:
        for start, (length, blob) in self._known.items():
            if start <= address < start + max(length, 1):
                return blob, address - start
        raise AssertionError(f"nothing was recorded at {address:#x}")


def record(case: dict[str, Any], path: Path, threads: int) -> Path:
    """Writes a script that attends, gathers, stores and attends again for ``case``."""
    built = attention_cases.build(attention_cases.Case(**{"dtype": "fp32", **case}), torch.device("cpu"))
    recorder = _Recorder()
    out = torch.zeros(*built.query.shape[:2], built.layout.spec.value_dim)
    request = attend_request(**built.arguments(), out=out, lse=torch.zeros(built.query.shape[:2]))
    prepared = attention._call(request)
    call, kept = prepared.args, prepared.kept
    call.threads = threads
    tables = layout_tables(built.layout)
    for array in tables._kept:
        recorder.bytes_at(array.ctypes.data, array.tobytes())
    held = [built.pages, built.query, out, request.lse, request.seq_lens, *(x for x in kept if isinstance(x, Tensor))]
    for x in (*held, *(built.fresh or ())):
        assert x is not None
        recorder.tensor(x)
    recorder.structure(tables.structure)
    attend_blob = recorder.structure(call)
    # The tokens of the first sequence are gathered, and then stored to the same slots.
    slots = built.positions(0)
    spec = built.layout.spec
    dtypes = [getattr(torch, f.raw_dtype) if f.kind == "raw" else torch.float32 for f in (spec.key, spec.value)]
    key, value = (
        torch.zeros(len(slots), built.pages.shape[1], dim, dtype=dtype)
        for dim, dtype in zip((spec.key_dim, spec.value_dim), dtypes, strict=True)
    )
    for x in (slots, key, value):
        recorder.tensor(x)
    common = {
        "layout": tables.address,
        "pages": structures.pages_of(built.pages),
        "key": structures.vectors_of(key),
        "value": structures.vectors_of(value),
        "slots": slots.data_ptr(),
        "tokens": len(slots),
        "wide_slots": 1,
        "threads": threads,
    }
    gather_call, store_call = structures.CTokensCall(**common), structures.CTokensCall(**common)
    calls = [
        ("slimkv_attend", attend_blob),
        ("slimkv_gather", recorder.structure(gather_call)),
        ("slimkv_store", recorder.structure(store_call)),
        ("slimkv_attend", attend_blob),
    ]
    script = path.with_suffix(".py")
    script.write_text(SCRIPT.format(blobs=recorder.blobs, pointers=recorder.pointers, calls=calls))
    return script
