"""Checks and times every configuration of the prefill kernels on Hopper.

    python benchmarks/prefill_configs.py [--json FILE] [--cells PATTERN ...]

First runs every configuration on a short case: the output must be bitwise identical in two runs, and its largest error
against the reference (the same arithmetic in torch) is printed. Then prints the time of every configuration on each
selected cell. All runs share one process.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from slimkv.lab.bench.attention import Case
from slimkv.lab.bench.cells import CELLS, AttendCell, choose
from slimkv.lab.bench.timing import Timer
from slimkv.ops.attention import reference
from slimkv.ops.attention.api import AttendRequest, checked_request
from slimkv.ops.attention.cuda import prefill
from slimkv.ops.attention.cuda.prefill_config import configs
from slimkv.ops.attention.cuda.prefill_defines import PrefillConfig, Unpack
from slimkv.ops.cuda.device import device_of

CHECKED = AttendCell("", batch=2, context=4096, queries=300, num_heads=8, num_kv_heads=2)


def request_of(case: Case) -> AttendRequest:
    """The checked request that ``attend`` builds from the case."""
    return checked_request(case.query, case.kv, replace(case.batch, min_query_len=0), case.options)


def named(case: Case) -> dict[str, PrefillConfig]:
    """All configurations for the head size and codes of a case, by name."""
    return {
        f"{config.unpack.value}-{config.rows}-rows-{8 if config.eight_bit else 16}bit": config
        for unpack in Unpack
        for eight_bit in (False, True)
        for config in configs(case.cell.layout.spec, unpack, eight_bit)
    }


def check(name: str, config: PrefillConfig, dim: int, device: torch.device) -> float:
    """Largest relative error of a row against the reference. Raises if two runs differ in any bit."""
    torch.manual_seed(0)
    wanted = "8bit" if config.eight_bit else "16bit"
    request = request_of(Case.create(replace(CHECKED, head_dim=dim, prefill=wanted), "cuda", device))
    outs = []
    for _ in range(2):
        outs.append(torch.full_like(request.out, torch.nan))
        prefill.attend_prefill(replace(request, out=outs[-1]), prefill.launcher(device), config=config)
    if not torch.equal(*outs):
        raise SystemExit(f"{name}, head size {dim}: not the same bits twice")
    want = torch.empty_like(request.out, dtype=torch.float32)
    reference.run(replace(request, out=want))
    return float(((outs[0].float() - want).norm(dim=-1) / want.norm(dim=-1)).max())


def main() -> int:
    """Command-line entry point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--cells", nargs="*", default=[])
    options = parser.parse_args()
    device = torch.device("cuda")
    if not device_of(device).warpgroups:
        print("these kernels are for compute capability 9.0", file=sys.stderr)
        return 2
    for dim in (64, 128):
        case = Case.create(replace(CHECKED, head_dim=dim), "cuda", device)
        for name, config in named(case).items():
            print(f"{name:24} d{dim}: worst row {check(name, config, dim, device):.1e}", flush=True)
    every = CELLS["attend"] + CELLS["attend_more"]
    cells = tuple(cell for cell in every if cell.prefill == "8bit" or cell.name.startswith("chunk-64q"))
    timer, rows = Timer(device), []
    for cell in choose(cells, options.cells, None):
        torch.manual_seed(0)
        case = Case.create(cell, "cuda", device)
        request, launch = request_of(case), prefill.launcher(device)
        for name, config in named(case).items():
            ms = timer(partial(prefill.attend_prefill, request, launch, config=config))
            rows.append({"cell": cell.name, "config": name, "ms": ms, "tflops": cell.flops / ms / 1e9})
            print(f"{cell.name:32} {name:24} {ms:8.3f} ms {rows[-1]['tflops']:7.0f} TFLOP/s", flush=True)
        del case, request, launch
        torch.cuda.empty_cache()
    if options.json:
        options.json.write_text(json.dumps(rows, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
