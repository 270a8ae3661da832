"""Kernel arguments as ctypes structures, parsed from the C++ sources, so that nothing is declared twice."""

from __future__ import annotations

import ctypes
import re
from importlib import resources
from typing import Any

_SCALARS: dict[str, Any] = {
    "u8": ctypes.c_uint8, "u16": ctypes.c_uint16, "i32": ctypes.c_int32, "u32": ctypes.c_uint32, "i64": ctypes.c_int64,
    "u64": ctypes.c_uint64, "float": ctypes.c_float,
}  # fmt: skip
_ITEM = re.compile(r"(\*?)(?:const )?(\w+)(?:\[(\d+)\])?")


def declared(package: str, source: str, *names: str, known: tuple[type[ctypes.Structure], ...] = ()) -> list[Any]:
    """``struct name`` for each name, from the file ``source`` in the source folder of ``package``."""
    text = (resources.files(package) / "source" / source).read_text(encoding="utf-8")
    return parse_structures(text, source, *names, known=known)


def parse_structures(text: str, source: str, *names: str, known: tuple[type[ctypes.Structure], ...] = ()) -> list[Any]:
    """``struct name`` of ``text`` for each name, with the alignment of C; ``source`` is for messages.

    Fields are numbers, pointers, arrays of known length, and structures: earlier ones of ``names``, or ``known``.
    """
    text = re.sub(r"//[^\n]*", "", text)
    kinds = {**_SCALARS, **{structure.__name__: structure for structure in known}}
    for name in names:
        body = re.search(rf"struct (?:alignas\(\d+\) )?{name} {{(.*?)}};", text, re.DOTALL)
        if body is None:
            raise LookupError(f"{source} declares no struct {name}")
        fields: list[tuple[str, Any]] = []
        for declaration in filter(None, (" ".join(part.split()) for part in body[1].split(";"))):
            kind, _, rest = declaration.removeprefix("const ").partition(" ")
            if kind.endswith("*"):
                kind, rest = kind[:-1], "*" + rest
            for item in rest.split(","):
                word = _ITEM.fullmatch(item.strip())
                if word is None or (not word[1] and kind not in kinds):
                    raise ValueError(f"{name} of {source}: cannot read {declaration!r}")
                scalar = ctypes.c_void_p if word[1] else kinds[kind]
                fields.append((word[2], scalar * int(word[3]) if word[3] else scalar))
        kinds[name] = type(name, (ctypes.Structure,), {"_fields_": fields})
    return [kinds[name] for name in names]
