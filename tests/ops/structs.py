"""Structures as a C++ source declares them, for comparison with their ctypes mirrors."""

from __future__ import annotations

import ctypes
import re
from pathlib import Path

_SCALARS = {
    "u8": ctypes.c_uint8,
    "u16": ctypes.c_uint16,
    "i32": ctypes.c_int32,
    "u32": ctypes.c_uint32,
    "i64": ctypes.c_int64,
    "u64": ctypes.c_uint64,
    "float": ctypes.c_float,
}
Field = tuple[str, int, int]  # name, offset, size


def declared(source: Path, name: str, known: dict[str, type] | None = None) -> type[ctypes.Structure]:
    """``struct name`` of ``source``, laid out by the same rules of alignment; ``known``: structures it may hold."""
    text = re.sub(r"//[^\n]*", "", source.read_text())
    body = re.search(rf"struct (?:alignas\(\d+\) )?{name} {{(.*?)\n}};", text, re.DOTALL)
    if body is None:
        raise LookupError(f"{source.name} declares no struct {name}")
    fields: list[tuple[str, type]] = []
    for declaration in filter(None, (" ".join(part.split()) for part in body[1].split(";"))):
        kind, _, rest = declaration.removeprefix("const ").partition(" ")
        if kind.endswith("*"):
            kind, rest = kind[:-1], "*" + rest
        for item in rest.split(","):
            word = re.fullmatch(r"(\*?)(?:const )?(\w+)(?:\[(\d+)\])?", item.strip())
            if word is None:
                raise ValueError(f"{name} of {source.name}: cannot read {declaration!r}")
            scalar = ctypes.c_void_p if word[1] else {**_SCALARS, **(known or {})}[kind]
            fields.append((word[2], scalar * int(word[3]) if word[3] else scalar))
    return type(name, (ctypes.Structure,), {"_fields_": fields})


def fields_of(structure: type[ctypes.Structure]) -> list[Field]:
    """Names, offsets and sizes, in order."""
    of = [(name, getattr(structure, name)) for name, *_ in structure._fields_]
    return [(name, field.offset, field.size) for name, field in of]
