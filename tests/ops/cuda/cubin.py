"""Registers, local and shared memory of the kernels of a cubin, from its ELF sections; needs no CUDA tools."""

from __future__ import annotations

import struct
from collections import Counter
from dataclasses import dataclass

_SYMTAB = 2  # type of a section
_FRAME_SIZE, _REGISTERS = 0x11, 0x2F  # attributes of .nv.info, each with a symbol and a number
# Opcodes of sm_90a: the one that starts and awaits wgmmas; HGMMA with A in shared memory and in registers.
_WARPGROUP, _PRODUCTS = 0x9C5, (0x9F0, 0xDF0)


@dataclass(frozen=True)
class Resources:
    """Resources of a kernel: registers and bytes of local memory (spills, arrays) per thread, static shared memory.

    ``serialized``: for lack of registers, the compiler makes every wgmma wait for the previous one.
    """

    registers: int
    local_bytes: int
    shared_bytes: int
    serialized: bool


def resources(code: bytes) -> dict[str, Resources]:
    """The resources of each kernel, by name."""
    sections = list(_sections(code))
    names = _symbols(sections)
    about = b"".join(data for name, _, data in sections if name == ".nv.info")
    frames, registers = ({names[x]: n for x, n in _attributes(about, which)} for which in (_FRAME_SIZE, _REGISTERS))
    shared = {name.removeprefix(".nv.shared."): len(data) for name, _, data in sections}
    kernels = {name.removeprefix(".text."): data for name, _, data in sections if name.startswith(".text.")}
    return {
        kernel: Resources(registers[kernel], frames[kernel], shared.get(kernel, 0), _is_serialized(data))
        for kernel, data in kernels.items()
    }


def _is_serialized(text: bytes) -> bool:
    opcodes = Counter(struct.unpack_from("<H", text, at)[0] & 0xFFF for at in range(0, len(text), 16))
    return 0 < 2 * sum(opcodes[product] for product in _PRODUCTS) <= opcodes[_WARPGROUP]


def _sections(code: bytes):
    """The (name, type, bytes) of each section."""
    assert code[:5] == b"\x7fELF\x02", "not a 64-bit ELF"
    (start,) = struct.unpack_from("<Q", code, 0x28)
    size, count, of_names = struct.unpack_from("<HHH", code, 0x3A)
    headers = [struct.unpack_from("<IIQQQQIIQQ", code, start + i * size) for i in range(count)]
    at = headers[of_names][4]
    for name, kind, _, _, offset, length, *_ in headers:
        yield code[at + name : code.index(b"\0", at + name)].decode(), kind, code[offset : offset + length]


def _symbols(sections) -> list[str]:
    """The names of symbols, in order."""
    strings = next(data for name, _, data in sections if name == ".strtab")
    table = next(data for _, kind, data in sections if kind == _SYMTAB)
    starts = [struct.unpack_from("<I", table, at)[0] for at in range(0, len(table), 24)]
    return [strings[start : strings.index(b"\0", start)].decode() for start in starts]


def _attributes(data: bytes, wanted: int):
    """(symbol, value) of each attribute of the wanted kind."""
    at = 0
    while at + 4 <= len(data):
        form, attribute, size = struct.unpack_from("<BBH", data, at)
        if form == 4 and attribute == wanted:
            yield struct.unpack_from("<II", data, at + 4)
        at += 4 + (size if form == 4 else 0)
