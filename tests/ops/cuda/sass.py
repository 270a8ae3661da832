"""Machine code of a representative set of kernels, to compare before and after a change that should not alter it.

    python tests/ops/cuda/sass.py write before.json      # on one commit
    python tests/ops/cuda/sass.py write after.json       # on another
    python tests/ops/cuda/sass.py compare before.json after.json
    python tests/ops/cuda/sass.py table                  # registers, spills and instructions of every variant

Compiles with NVRTC for sm_90 and sm_90a, disassembles with the cuobjdump of Triton's package; needs no GPU.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

import torch

from slimkv.ops.attention.cuda import prefill, prefill_config
from slimkv.ops.attention.cuda.decode_config import VERIFY, config_for
from slimkv.ops.attention.cuda.decode_defines import kernel_defines
from slimkv.ops.attention.cuda.prefill_config import AHEAD, FIRST, FUSED
from slimkv.ops.attention.cuda.prefill_defines import PrefillConfig, attend_defines, unpack_defines
from slimkv.ops.cuda.compiler import compile_kernels
from slimkv.ops.cuda.device import Device
from slimkv.ops.latent.cuda import launch as latent
from slimkv.ops.latent.cuda.config import config_for as latent_config_for
from slimkv.ops.store.cuda import launch as store
from slimkv.ops.store.cuda import vectors as store_vectors
from slimkv.spec import CodecSpec, LatentSpec, PageLayout

H200 = Device(
    multiprocessors=132, shared_of_multiprocessor=233472, shared_of_block=232448, copy_engine=True, warpgroups=True
)
FP16, BF16, FP32 = 0, 1, 2
DECODE_FORMATS = ("k4v4", "k2v2", "k3v3", "k5v5", "k6v6", "k6v4", "k7v7", "kfp8vu4", "ku4vu4", "k8v8")
Variant = tuple[str, dict[str, int], str]  # source, defines, architecture


def _layout(format: str, dim: int, value_dim: int | None = None, block_size: int = 16) -> PageLayout:
    return PageLayout(CodecSpec.parse(format, dim, value_dim), block_size)


def _decode(
    format: str, dim: int = 128, group: int = 4, queries: int = 1, dtype: int = BF16,
    window: bool = False, softcap: bool = False, block_size: int = 16, value_dim: int | None = None,
) -> Variant:  # fmt: skip
    layout = _layout(format, dim, value_dim, block_size)
    config = config_for(H200, layout, group, queries)
    assert config is not None
    defines = dict(kernel_defines(layout, config, dtype, dtype, window, softcap))
    return config.source, defines, "sm_90a" if config.source == VERIFY else "sm_90"


def _store(
    format: str,
    dim: int = 128,
    dtype: torch.dtype = torch.bfloat16,
    few: bool = False,
    query_aware: int = 0,  # matrices per head: 2 stands for several
) -> Variant:
    rows = (dtype, True)
    plan = store._plan(_layout(format, dim), torch.device("cpu"), rows, rows, True, few, query_aware)
    return store.SOURCE, dict(plan.defines), "sm_90"


def _store_latent(format: str) -> Variant:
    rows = (torch.bfloat16, True)
    layout = PageLayout(LatentSpec.parse(format), 64)
    plan = store_vectors._plan(layout, torch.device("cpu"), rows, rows, True)
    return plan.source, dict(plan.defines), "sm_90"


def _unpack(format: str, dim: int, eight_bit: bool = False) -> Variant:
    layout = _layout(format, dim)
    config = prefill_config.configs(layout.spec, FIRST, eight_bit)[0]
    return prefill.UNPACK, dict(unpack_defines(layout, config)), "sm_90"


def _prefill(format: str, dim: int, config: PrefillConfig, window: bool = False, softcap: bool = False) -> Variant:
    return prefill.ATTEND, dict(attend_defines(_layout(format, dim), config, BF16, BF16, window, softcap)), "sm_90a"


def _first(dim: int) -> PrefillConfig:
    return prefill_config.configs(CodecSpec.parse("k4v4", dim), FIRST)[0]


def _every_prefill(format: str, dim: int) -> dict[str, Variant]:
    """Each configuration of the table."""
    spec = CodecSpec.parse(format, dim)

    def name(config: PrefillConfig) -> str:
        bits = 8 if config.eight_bit else 16
        return f"prefill-{format}-d{dim}-{config.unpack.value}-{config.rows}-rows-{bits}bit"

    return {
        name(config): _prefill(format, dim, config)
        for unpack in (FIRST, AHEAD, FUSED)
        for eight_bit in (False, True)
        for config in prefill_config.configs(spec, unpack, eight_bit)
    }


def _latent(format: str, heads: int) -> Variant:
    layout, bf16 = PageLayout(LatentSpec.parse(format), 64), torch.bfloat16
    config = latent_config_for(layout, heads, H200)
    return config.kernel.source, latent.kernel_defines(layout, config, bf16, bf16, bf16), "sm_90a"


def variants() -> dict[str, Variant]:
    """The variants to compile, by name."""
    return {
        **{f"decode-{f}": _decode(f) for f in DECODE_FORMATS},
        "decode-k4v4-8-columns": _decode("k4v4", group=8),
        "decode-k4v4-16-columns": _decode("k4v4", queries=4),
        "decode-k4v4-32-columns": _decode("k4v4", queries=8),
        **{f"decode-k4v4-{4 * q}-columns": _decode("k4v4", queries=q) for q in (10, 12, 14, 16)},
        "decode-d256-32-columns": _decode("k4v4", 256, queries=8),
        "decode-d256-16-columns": _decode("k4v4", 256, 16),
        "decode-k5v5-8-columns": _decode("k5v5", group=8),
        "decode-d64-8-columns": _decode("k4v4", 64, 8),
        "decode-d96": _decode("k4v4", 96, 1),
        "decode-d256-softcap": _decode("k4v4", 256, 2, softcap=True),
        "decode-d192-128": _decode("k4v4", 192, value_dim=128, block_size=64),
        "decode-window-fp16": _decode("k4v4", window=True, dtype=FP16, block_size=64),
        "decode-d80-fp32": _decode("k7v1", 80, dtype=FP32),
        **{f"store-{f}": _store(f) for f in ("k4v4", "k5v6", "fp8")},
        "store-k4v4-few": _store("k4v4", few=True),
        "store-k4v4-fp32": _store("k4v4", dtype=torch.float32),
        "store-d96": _store("k3v2", 96),
        "store-query-aware": _store("k4v4", query_aware=1),
        "store-query-aware-few": _store("k4v4", few=True, query_aware=1),
        "store-query-aware-positions": _store("k4v4", query_aware=2),
        "store-query-aware-d256": _store("k4v4", 256, query_aware=1),
        **{f"store-{f}": _store_latent(f) for f in ("c4", "c4r8", "c6r8")},
        "prefill-unpack-k4v4": _unpack("k4v4", 128),
        "prefill-unpack-k5vu4": _unpack("k5vu4", 64),
        **{n: v for dim in prefill_config.HEAD_DIMS for n, v in _every_prefill("k4v4", dim).items()},
        **_every_prefill("k5vu4", 96),
        "prefill-window": _prefill("k4v4", 128, _first(128), window=True),
        "prefill-d256-softcap": _prefill("k4v4", 256, _first(256), softcap=True),
        "prefill-unpack-d256": _unpack("k4v4", 256),
        **{f"latent-{f}-{heads}-heads": _latent(f, heads) for f in ("c4", "c4r8", "c6r8") for heads in (8, 16, 32, 64)},
        "prefill-unpack-8bit": _unpack("k4v4", 128, eight_bit=True),
    }


def cuobjdump(*options: str, code: bytes) -> str:
    """The output of cuobjdump for machine code."""
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(code)
        file.flush()
        return subprocess.run([tool, *options, file.name], capture_output=True, text=True, check=True).stdout


def instructions(code: bytes) -> list[str]:
    """All instructions of all kernels with their encodings, in order."""
    return [re.sub(r"\s+", " ", line).strip() for line in cuobjdump("-sass", code=code).splitlines() if "/*" in line]


def opcodes(lines: list[str]) -> Counter[str]:
    """The number of occurrences of each opcode, without padding."""
    found = (re.match(r"/\*[0-9a-f]+\*/ (?:@!?U?P\w+ )?([A-Z0-9_]+)", line) for line in lines)
    return Counter(match[1] for match in found if match and match[1] != "NOP")


def compare(before: dict[str, list[str]], after: dict[str, list[str]]) -> list[str]:
    """One line for every variant that differs."""
    lines = []
    for name in sorted(before.keys() & after.keys()):
        if before[name] != after[name]:
            old, new = opcodes(before[name]), opcodes(after[name])
            counts = {op: (old[op], new[op]) for op in sorted(old.keys() | new.keys()) if old[op] != new[op]}
            lines.append(f"{name}: {old.total()} -> {new.total()} instructions; counts that differ: {counts}")
    return lines


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("write", "compare", "table"))
    parser.add_argument("files", nargs="*", type=Path)
    parser.add_argument("--only", default="", help="variants whose name contains this")
    options = parser.parse_args()
    if options.command == "compare":
        before, after = (json.loads(file.read_text()) for file in options.files)
        different = compare(before, after)
        print(*different, f"{len(before.keys() & after.keys()) - len(different)} variants are the same", sep="\n")
        return 1 if different else 0
    written = {}
    for name, (source, defines, architecture) in variants().items():
        if options.only not in name:
            continue
        code = compile_kernels(source, defines, architecture)
        written[name] = instructions(code)
        usage = re.findall(r"Function (\w+):\s+REG:(\d+) STACK:(\d+)", cuobjdump("-res-usage", code=code))
        print(name, opcodes(written[name]).total(), *(f"{f}: {r} registers, {s} stack" for f, r, s in usage), sep="  ")
    if options.command == "write":
        options.files[0].write_text(json.dumps(written))
    return 0


if __name__ == "__main__":
    sys.exit(main())
