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

from slimkv.ops.attention.cuda import decode, prefill, shape
from slimkv.ops.attention.cuda import prefill_shape as cuts
from slimkv.ops.attention.cuda.decode_defines import kernel_defines
from slimkv.ops.cuda.compiler import compile_kernels
from slimkv.ops.latent.cuda import launch as latent
from slimkv.ops.latent.cuda.config import config_for
from slimkv.ops.store.cuda import launch as store
from slimkv.ops.store.cuda import vectors as store_vectors
from slimkv.spec import CodecSpec, LatentSpec, PageLayout

H200 = shape.Device(
    multiprocessors=132, shared_of_multiprocessor=233472, shared_of_block=232448, copy_engine=True, warpgroups=True
)
FP16, BF16, FP32 = 0, 1, 2
DECODE_FORMATS = ("k4v4", "k2v2", "k3v3", "k5v5", "k6v6", "k6v4", "k7v7", "kfp8vu4", "ku4vu4", "k8v8")
Variant = tuple[str, dict[str, int], str]  # source, defines, architecture


def _layout(format: str, dim: int, value_dim: int | None = None, block_size: int = 16) -> PageLayout:
    return PageLayout(CodecSpec.parse(format, dim, value_dim), block_size)


def _decode(
    format: str, dim: int = 128, group: int = 4, queries: int = 1, tokens: int = 1 << 15, dtype: int = BF16,
    window: bool = False, softcap: bool = False, block_size: int = 16, value_dim: int | None = None,
) -> Variant:  # fmt: skip
    layout = _layout(format, dim, value_dim, block_size)
    cut = shape.shape_on(H200, layout, group, queries, tokens, 256)
    assert cut is not None
    defines = dict(kernel_defines(layout, cut, dtype, dtype, window, softcap))
    return decode.SOURCE, defines, "sm_90a" if cut.warpgroup else "sm_90"


def _store(
    format: str,
    dim: int = 128,
    dtype: torch.dtype = torch.bfloat16,
    few: bool = False,
    query_aware: bool = False,
    search: int = 0,
) -> Variant:
    rows = (dtype, True)
    plan = store._plan(_layout(format, dim), torch.device("cpu"), rows, rows, True, few, int(query_aware), search)
    return store.SOURCE, dict(plan.defines), "sm_90"


def _store_latent(format: str) -> Variant:
    rows = (torch.bfloat16, True)
    layout = PageLayout(LatentSpec.parse(format), 64)
    plan = store_vectors._plan(layout, torch.device("cpu"), rows, rows, True)
    return plan.source, dict(plan.defines), "sm_90"


def _unpack(format: str, dim: int, cut: cuts.Shape | None = None) -> Variant:
    return prefill.UNPACK, dict(cuts.unpack_defines(_layout(format, dim), cut or cuts.SHAPES[dim])), "sm_90"


def _prefill_bytes(dim: int, cut: cuts.Shape) -> Variant:
    return prefill.ATTEND, dict(cuts.attend_defines(_layout("k4v4", dim), cut, BF16, BF16, False, False)), "sm_90a"


def _prefill(dim: int, window: bool = False, softcap: bool = False) -> Variant:
    defines = cuts.attend_defines(_layout("k4v4", dim), cuts.SHAPES[dim], BF16, BF16, window, softcap)
    return prefill.ATTEND, dict(defines), "sm_90a"


def _prefill_fused(format: str, dim: int, shapes: dict[int, cuts.Shape] = cuts.FUSED_SHAPES) -> Variant:
    defines = cuts.attend_defines(_layout(format, dim), shapes[dim], BF16, BF16, False, False)
    return prefill.ATTEND, dict(defines), "sm_90a"


def _latent(format: str, heads: int) -> Variant:
    layout, bf16 = PageLayout(LatentSpec.parse(format), 64), torch.bfloat16
    config = config_for(layout, heads, H200)
    return config.kernel.source, latent.kernel_defines(layout, config, bf16, bf16, bf16), "sm_90a"


def variants() -> dict[str, Variant]:
    """What is compiled, by name."""
    return {
        **{f"decode-{f}": _decode(f) for f in DECODE_FORMATS},
        "decode-k4v4-short": _decode("k4v4", tokens=4096),
        "decode-k4v4-8-columns": _decode("k4v4", group=8),
        "decode-k4v4-16-columns": _decode("k4v4", queries=4),
        "decode-k4v4-32-columns": _decode("k4v4", queries=8),
        **{f"decode-k4v4-{4 * q}-columns": _decode("k4v4", queries=q) for q in (10, 12, 14, 16)},
        "decode-d256-32-columns": _decode("k4v4", 256, queries=8),
        "decode-d256-16-columns": _decode("k4v4", 256, 16),
        "decode-k5v5-8-columns": _decode("k5v5", group=8),
        "decode-d64-8-columns": _decode("k4v4", 64, 8),
        "decode-d96": _decode("k4v4", 96, 1, tokens=4096),
        "decode-d256-softcap": _decode("k4v4", 256, 2, tokens=8192, softcap=True),
        "decode-d192-128": _decode("k4v4", 192, value_dim=128, block_size=64),
        "decode-window-fp16": _decode("k4v4", window=True, dtype=FP16, block_size=64),
        "decode-d80-fp32": _decode("k7v1", 80, dtype=FP32),
        **{f"store-{f}": _store(f) for f in ("k4v4", "k5v6", "ku4vur4", "fp8")},
        "store-k4v4-few": _store("k4v4", few=True),
        "store-k4v4-fp32": _store("k4v4", dtype=torch.float32),
        "store-d96": _store("k3v2", 96),
        "store-query-aware": _store("k4v4", query_aware=True),
        "store-query-aware-few": _store("k4v4", few=True, query_aware=True),
        "store-query-aware-search": _store("k4v4", query_aware=True, search=4),
        "store-query-aware-search-few": _store("k4v4", few=True, query_aware=True, search=4),
        **{f"store-{f}": _store_latent(f) for f in ("c4", "c4r8", "c6r8")},
        "prefill-unpack-k4v4": _unpack("k4v4", 128),
        "prefill-unpack-k5vu4": _unpack("k5vu4", 64),
        "prefill-d64": _prefill(64),
        "prefill-d128": _prefill(128),
        "prefill-window": _prefill(128, window=True),
        "prefill-d256": _prefill(256),
        "prefill-d256-softcap": _prefill(256, softcap=True),
        **{f"prefill-fused-d{dim}": _prefill_fused("k4v4", dim) for dim in cuts.FUSED_SHAPES},
        **{f"prefill-wide-d{dim}": _prefill_fused("k4v4", dim, cuts.WIDE_SHAPES) for dim in cuts.WIDE_SHAPES},
        **{f"prefill-ahead-d{dim}": _prefill_fused("k4v4", dim, cuts.AHEAD_SHAPES) for dim in cuts.AHEAD_SHAPES},
        "prefill-fused-k5vu4": _prefill_fused("k5vu4", 96),
        "prefill-unpack-d256": _unpack("k4v4", 256),
        **{f"latent-{f}-{heads}-heads": _latent(f, heads) for f in ("c4", "c4r8", "c6r8") for heads in (8, 16, 64)},
        **{
            f"prefill-bytes-d{dim}-{cut.rows}-rows": _prefill_bytes(dim, cut)
            for dim, cuts in cuts.EIGHT_BIT_SHAPES.items()
            for cut in cuts
        },
        "prefill-bytes-unpack": _unpack("k4v4", 128, cuts.Shape(128, 4, True)),
    }


def cuobjdump(*options: str, code: bytes) -> str:
    """What cuobjdump says of machine code."""
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(code)
        file.flush()
        return subprocess.run([tool, *options, file.name], capture_output=True, text=True, check=True).stdout


def instructions(code: bytes) -> list[str]:
    """Every instruction with its encoding, of all kernels in order."""
    return [re.sub(r"\s+", " ", line).strip() for line in cuobjdump("-sass", code=code).splitlines() if "/*" in line]


def opcodes(lines: list[str]) -> Counter[str]:
    """How often each opcode occurs, without the padding."""
    found = (re.match(r"/\*[0-9a-f]+\*/ (?:@!?U?P\w+ )?([A-Z0-9_]+)", line) for line in lines)
    return Counter(match[1] for match in found if match and match[1] != "NOP")


def compare(before: dict[str, list[str]], after: dict[str, list[str]]) -> list[str]:
    """One line for every variant that is not the same bit for bit."""
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
