"""What Python hands to kernels has the names, offsets and sizes that their sources declare."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest
from structs import declared, fields_of

from slimkv.ops.attention.cuda import decode
from slimkv.ops.cpu import structures
from slimkv.ops.gather.cuda import launch as gather
from slimkv.ops.latent.cuda import launch as latent
from slimkv.ops.store.cuda import args as store

OPS = Path(structures.__file__).parents[1]
CPU = OPS / "cpu" / "source" / "types.h"
CPU_NAMES = (
    "Plane", "Piece", "Side", "Layout", "Pages", "Vectors", "Fault", "StoreCall", "GatherCall", "AttendCall",
)  # fmt: skip
CUDA = {
    ("store/format.cuh", "SideArgs"): store.SideArgs,
    ("store/format.cuh", "StoreArgs"): store.StoreArgs,
    ("vectors/decode.cuh", "GatherSide"): gather.GatherSide,
    ("vectors/gather.cu", "GatherArgs"): gather.GatherArgs,
    ("decode/shape.cuh", "DecodeArgs"): decode.Args,
    ("latent/args.cuh", "LatentArgs"): latent.Args,
}


@pytest.mark.parametrize("name", CPU_NAMES)
def test_structures_of_the_cpu_library(name):
    known = {other: getattr(structures, f"C{other}") for other in CPU_NAMES if other != name}
    wanted, mirror = declared(CPU, name, known), getattr(structures, f"C{name}")
    assert fields_of(mirror) == fields_of(wanted)
    assert ctypes.sizeof(mirror) == ctypes.sizeof(wanted)


@pytest.mark.parametrize(("source", "name"), CUDA)
def test_arguments_of_cuda_kernels(source, name):
    known = {"Table": latent._Table, **{other: mirror for (_, other), mirror in CUDA.items() if other != name}}
    wanted, mirror = declared(OPS / "cuda" / "source" / source, name, known), CUDA[source, name]
    assert fields_of(mirror) == fields_of(wanted)
    assert ctypes.sizeof(mirror) == ctypes.sizeof(wanted)


def test_other_names_and_places_are_noticed(tmp_path):
    source = tmp_path / "types.h"
    source.write_text("struct Fault {\n  i64 where, at;  // a comment; with a semicolon\n  const i32 *from, *to;\n};\n")
    found = declared(source, "Fault")
    assert fields_of(found) == [("where", 0, 8), ("at", 8, 8), ("from", 16, 8), ("to", 24, 8)]
    assert fields_of(found) != fields_of(structures.CFault)
    with pytest.raises(LookupError, match="declares no struct Pages"):
        declared(source, "Pages")
