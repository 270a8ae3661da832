"""The structures that Python passes to kernels have the names, offsets and sizes that their sources declare."""

from __future__ import annotations

import ctypes
import subprocess
from importlib import resources

import pytest

from slimkv.ops.attention.cuda import decode, prefill
from slimkv.ops.cpu import structures
from slimkv.ops.cpu.compiler import find_compiler
from slimkv.ops.latent.cuda import launch as latent
from slimkv.ops.store.cuda.args import StoreArgs
from slimkv.ops.structures import parse_structures


def fields_of(structure: type[ctypes.Structure]) -> list[tuple[str, int, int]]:
    """Names, offsets and sizes of the fields, in order."""
    of = [(name, getattr(structure, name)) for name, *_ in structure._fields_]
    return [(name, field.offset, field.size) for name, field in of]


def test_declarations_are_laid_out_as_a_compiler_does():
    text = """
struct Fault {
  i64 where, at;  // a comment; with a semicolon
  const i32 *from, *to;
};

struct alignas(16) Call {
  float scale;
  Fault faults[2];
  u32 words[3];
  u8* out;
};
"""
    fault, call = parse_structures(text, "types.h", "Fault", "Call")
    assert fields_of(fault) == [("where", 0, 8), ("at", 8, 8), ("from", 16, 8), ("to", 24, 8)]
    assert fields_of(call) == [("scale", 0, 4), ("faults", 8, 64), ("words", 72, 12), ("out", 88, 8)]
    with pytest.raises(LookupError, match=r"types.h declares no struct Pages"):
        parse_structures(text, "types.h", "Pages")
    with pytest.raises(ValueError, match="cannot read 'Fault faults"):
        parse_structures(text, "types.h", "Call")


@pytest.mark.skipif(find_compiler() is None, reason="no compiler")
def test_a_compiler_lays_out_the_structures_of_the_cpu_library_alike(tmp_path):
    known = [kind for name, kind in vars(structures).items() if name.startswith("C") and hasattr(kind, "_fields_")]
    lines = ["#include <cstddef>", '#include "types.h"']
    for kind in known:
        name = kind.__name__
        lines.append(f"static_assert(sizeof({name}) == {ctypes.sizeof(kind)});")
        lines += [f"static_assert(offsetof({name}, {field}) == {offset});" for field, offset, _ in fields_of(kind)]
    source = tmp_path / "layout.cpp"
    source.write_text("\n".join(lines))
    folder = resources.files("slimkv.ops.cpu") / "source"
    command = [str(find_compiler()), "-std=c++17", "-fsyntax-only", f"-I{folder}", str(source)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert len(known) == 9
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("kind", [StoreArgs, decode.Args, latent.Args, prefill.PrefillArgs], ids=str)
def test_arguments_of_cuda_kernels(kind):
    """There are no gaps between fields, except for alignment."""
    end = 0
    for (name, offset, size), (_, field) in zip(fields_of(kind), kind._fields_, strict=True):
        assert 0 <= offset - end < ctypes.alignment(field), name
        assert offset % ctypes.alignment(field) == 0, name
        end = offset + size
    assert 0 <= ctypes.sizeof(kind) - end < 8


def test_a_tuple_becomes_a_structure_or_an_array():
    made = decode.Args(key_table=(1, 2), key_sign_bits=tuple(range(8)))
    assert (made.key_table.low, made.key_table.high, made.key_table.signs) == (1, 2, 0)
    assert list(made.key_sign_bits) == list(range(8))
