"""Builds the native fuzz driver, draws layouts for it, and runs it.

python tests/fuzz/cpu_driver.py --cases 1000000 --sanitize
"""

from __future__ import annotations

import argparse
import ctypes
import hashlib
import os
import platform
import random
import struct
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from slimkv.errors import SpecError
from slimkv.ops.cpu import isa
from slimkv.ops.cpu.compiler import FLAGS, find_compiler, source_texts
from slimkv.ops.cpu.module import layout_tables
from slimkv.ops.cpu.structures import CLayout
from slimkv.paths import cache_dir
from slimkv.spec import CodecSpec, PageLayout

SOURCE = Path(__file__).with_suffix(".cpp")
SIDES = ("1", "2", "3", "4", "5", "6", "7", "8", "u2", "u3", "u4", "u8", "ur4", "fp8", "rawbf16", "rawfp16", "rawfp32")
DIMS = (16, 16, 32, 32, 48, 48, 64, 64, 80, 96, 112, 128, 160, 256)  # small ones more often, because they are fast
BLOCKS = (1, 16, 32, 64, 128)
SANITIZERS = "-fsanitize=address,undefined"


def random_layouts(count: int, seed: int) -> list[PageLayout]:
    """Random layouts over all kinds of keys and values, head sizes and block sizes."""
    chance, out = random.Random(seed), []
    while len(out) < count:
        format = f"k{chance.choice(SIDES)}v{chance.choice(SIDES)}"
        key_dim = chance.choice(DIMS)
        value_dim = key_dim if chance.random() < 0.7 else chance.choice(DIMS)
        try:
            spec = CodecSpec.parse(format, key_dim, value_dim)
            out.append(PageLayout(spec, chance.choice(BLOCKS)))
        except SpecError:
            continue
    return out


def write_layouts(layouts: list[PageLayout], path: Path) -> None:
    """Writes the structures and the tables that they point to, for ``load_layouts`` of the driver."""
    parts = [struct.pack("<I", len(layouts))]
    for layout in layouts:
        tables = layout_tables(layout)
        arrays = {array.ctypes.data: array.tobytes() for array in tables._kept}
        pointers = list(_pointers(tables.structure, 0))
        parts.append(struct.pack("<I", ctypes.sizeof(CLayout)) + bytes(tables.structure))
        parts.append(struct.pack("<I", len(pointers)))
        for offset, address in pointers:
            parts.append(struct.pack("<II", offset, len(arrays[address])) + arrays[address])
    path.write_bytes(b"".join(parts))


def _pointers(x: Any, base: int):
    for name, kind, *_ in x._fields_:
        offset, value = base + getattr(type(x), name).offset, getattr(x, name)
        if kind is ctypes.c_void_p and value:
            yield offset, value
        elif isinstance(value, ctypes.Structure):
            yield from _pointers(value, offset)
        elif isinstance(value, ctypes.Array) and issubclass(value._type_, ctypes.Structure):
            for i, part in enumerate(value):
                yield from _pointers(part, offset + i * ctypes.sizeof(value._type_))


def build(folder: Path, sanitize: bool, name: str | None = None) -> Path:
    """Compiles the driver for an instruction set in ``folder``, with or without sanitizers. The binary is cached."""
    compiler = find_compiler()
    assert compiler is not None
    flags = [f for f in FLAGS if f not in ("-shared", "-fvisibility=hidden", "-O3")]
    extra = ["-O1", "-g", SANITIZERS, "-fno-sanitize-recover=all", "-DSLIMKV_ALWAYS_THREADS"] if sanitize else ["-O2"]
    command = [compiler, *flags, *isa.find(name).flags, *extra]
    texts = source_texts()
    parts = [*command, platform.processor(), SOURCE.read_text(), *(f"{file}\0{text}" for file, text in texts.items())]
    digest = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:24]
    target = cache_dir("host") / f"cpu_driver-{digest}"
    if not target.exists():
        for file, text in texts.items():
            (folder / file).write_text(text)
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent) as beside:
            built = Path(beside) / "driver"
            command += [f"-I{folder}", str(SOURCE), "-o", str(built)]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            assert done.returncode == 0, done.stderr
            built.replace(target)
    return target


def run(driver: Path, layouts: Path, first: int, count: int, threads: int = 1, timeout: float = 3600) -> str:
    """Runs the driver and returns its output; raises with that output if it fails."""
    done = subprocess.run(
        [str(driver), str(layouts), str(first), str(count), str(threads)], capture_output=True, text=True,
        check=False, timeout=timeout, env={**os.environ, "UBSAN_OPTIONS": "halt_on_error=1:print_stacktrace=1"},
    )  # fmt: skip
    if done.returncode or not done.stdout.startswith("ok "):
        raise AssertionError(f"{done.stdout[-2000:]}\n{done.stderr[-6000:]}")
    return done.stdout.strip()


def main() -> None:
    """Runs any number of cases in one process."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=1_000_000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--layouts", type=int, default=400)
    parser.add_argument("--seed", type=int, default=0, help="of the layouts")
    parser.add_argument("--isa", default=None, help="an instruction set that runs here; default: the best one")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--sanitize", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        layouts = Path(folder, "layouts")
        write_layouts(random_layouts(options.layouts, options.seed), layouts)
        driver = build(Path(folder), options.sanitize, options.isa)
        begin = time.monotonic()
        try:
            print(run(driver, layouts, options.first, options.cases, options.threads))
        except AssertionError as error:
            sys.exit(str(error))
        print(f"{options.cases} cases in {time.monotonic() - begin:.0f} s")


if __name__ == "__main__":
    main()
