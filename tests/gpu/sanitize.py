"""A few small calls of every kernel, for a memory checker:

compute-sanitizer --tool memcheck --report-api-errors no python tests/gpu/sanitize.py [store attend prefill latent]

Without names, all parts run. With SLIMKV_AS_DEVICE=rtx4090, they run the kernels without wgmma. The tools racecheck and
initcheck work as well. In kernels with barriers for a part of the block (latents of up to 16 query rows, verification
of 5 or more queries), racecheck may report a write and a read that such a barrier, or one of the whole block,
separates. Look them up in the machine code.

Exits with 1 if a result is wrong, so that a run without reports still tests something.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

# A program has no conftest.py that sets the import path.
TESTS = Path(__file__).parent.parent
sys.path[:0] = [str(TESTS.parent / at) for at in ("src", "benchmarks", "tests", "tests/ops", "tests/ops/cuda")]

from attention_cases import Case, build, exact  # noqa: E402
from latent_cases import Case as LatentCase  # noqa: E402
from latent_cases import build as build_latent  # noqa: E402
from store_cases import Case as StoreCase  # noqa: E402
from store_cases import build as build_store  # noqa: E402
from store_cases import expected  # noqa: E402
from test_prefill_bytes_cuda import CONFIGS  # noqa: E402
from test_prefill_bytes_cuda import attend_and_check as attend_in_bytes  # noqa: E402
from test_prefill_cuda import LONG, attend_and_check  # noqa: E402
from test_prefill_integers_cuda import attend_and_check as attend_in_integers  # noqa: E402
from test_prefill_integers_cuda import hold_to_a_small_gpu  # noqa: E402

from slimkv import ops  # noqa: E402
from slimkv.ops import PackedKV  # noqa: E402
from slimkv.ops.attention.cuda import prefill, prefill_config, prefill_defines  # noqa: E402
from slimkv.ops.attention.cuda.prefill_config import warp_config  # noqa: E402
from slimkv.ops.cuda.device import device_of  # noqa: E402
from slimkv.ops.store.cuda.launch import format_refusal  # noqa: E402

MIXED = Case(num_kv_heads=1, lens=(70, 20, 33, 0, 41), queries=(36, 1, 4, 1, 41))
ATTEND = [
    Case(),
    Case(num_splits=3, page=64, lens=(130, 1, 64)),
    Case(format="k3v5", dim=80, lens=(33, 5), queries=(3, 1), window=7, sinks=True, softcap=5.0, padding=2),
    Case(format="turboquant_k8v4", dim=112, value_dim=48),
    replace(MIXED, fresh=True),
    Case(format="k5v5", dim=128, page=64, lens=(700, 40, 1), queries=(1, 1, 1)),
    Case(format="k6v4", dim=256, group=2, page=64, lens=(300, 70), queries=(2, 1), softcap=5.0),
    Case(dim=128, page=64, lens=(900, 130, 16), queries=(8, 3, 1)),  # 32 query rows: pairs of warpgroups
    Case(dim=128, page=64, lens=(900, 130, 16), queries=(16, 9, 1)),
]
STORE = [
    StoreCase(),
    StoreCase(format="k3v5", dim=80, slots="aligned"),
    StoreCase(format="turboquant_k8v4", dim=112, value_dim=48, page=64, slots="unaligned"),
    StoreCase(format="kfp8v4", dim=112, value_dim=48, page=64, slots="unaligned"),
    StoreCase(tokens=2100, dim=64, heads=1, slots="aligned", page=128),
]
LATENT = [  # few and many rows, full and partial tiles, several work tiles per thread block
    LatentCase(format="c4", latent_dim=512, rope_dim=64, heads=16, lens=(300, 5, 64), queries=(1, 1, 1), page=64),
    LatentCase(format="c4r8", latent_dim=512, rope_dim=64, heads=25, lens=(300, 5, 64), queries=(2, 1, 1), page=16),
    LatentCase(format="c6r7", lens=(70, 0, 33), queries=(3, 1, 2)),
]


def latent_errors(device: torch.device) -> list[float]:
    """The largest relative error of each latent case, with the CUDA kernels on sm_90 and Triton's elsewhere."""
    errors = []
    for case in LATENT:
        built = build_latent(case, device)
        out = built.attend(backend="cuda" if torch.cuda.get_device_capability(device) == (9, 0) else "triton")
        want, _ = built.exact
        off = (out.double().cpu() - want).norm(dim=-1) / want.norm(dim=-1).clamp(min=1e-9)
        print(f"latent {case}: relative error {off.max():.1e}")
        errors.append(float(off.max()))
    return errors


def prefill_calls(device: torch.device) -> list[Callable[[], object]]:
    """A checked call of every prefill configuration that the device runs."""
    launch, tile, limited = prefill.launcher(device), 1 << 20, device_of(device)
    long = replace(LONG, dim=128, num_kv_heads=2, lens=(700, 7, 300), queries=(200, 1, 33))
    if limited.warpgroups:
        configs = [config for unpack in prefill_defines.Unpack for config in prefill_config.configs(long.spec, unpack)]
        calls = [partial(attend_and_check, long, device, launch, config=config) for config in configs]
        calls += [partial(attend_and_check, long, device, launch, tile)]  # several passes
        for dim, configs in CONFIGS.items():
            calls += [partial(attend_in_bytes, replace(long, dim=dim), device, launch, config=c) for c in configs]
        return calls
    cases = [replace(long, dim=dim, group=4) for dim in prefill_config.HEAD_DIMS]
    in_bytes = prefill_config.eight_bit_head_dims(single_warps=True)
    return [
        *(partial(attend_and_check, c, device, launch, config=warp_config(c.spec, limited)) for c in cases),
        *(partial(attend_in_integers, case, device, launch) for case in cases if case.dim in in_bytes),
    ]


def prefill_failures(device: torch.device) -> int:
    """The number of prefill calls with wrong rows."""
    wrong = 0
    with pytest.MonkeyPatch.context() as patch:
        if not device_of(device).warpgroups:
            hold_to_a_small_gpu(patch)
        for number, call in enumerate(prefill_calls(device)):
            try:
                call()
            except AssertionError as error:
                print(f"prefill {number}: {error}")
                wrong += 1
            else:
                print(f"prefill {number}: as the reference")
    return wrong


def store_failures(device: torch.device) -> int:
    """The number of stores that wrote wrong bytes."""
    wrong = 0
    for case in STORE:
        key, value, slots, pages, codec = build_store(case, device)
        want = expected(key, value, slots, pages, codec, case.layout)
        for backend in ("triton",) if format_refusal(case.layout) else ("triton", "cuda"):
            written = pages.clone()
            ops.store_kv(key, value, PackedKV(written, codec, case.layout), slots, backend=backend)
            ops.gather_kv(PackedKV(written, codec, case.layout), slots, backend="triton")
            same = torch.equal(written, want)
            print(f"store {case} {backend}: {'same bytes' if same else 'DIFFERENT'}")
            wrong += not same
    return wrong


def attend_failures(device: torch.device) -> int:
    """The number of attention calls with wrong rows."""
    wrong = 0
    for case in ATTEND:
        built = build(case, device)
        want, _ = exact(built)
        for backend in ("triton",) if case.fresh else ("triton", "cuda"):
            out = ops.attend(
                **built.arguments(), num_splits=case.num_splits if backend == "triton" else None, backend=backend
            )
            rows = slice(0, sum(case.queries))
            off = (out[rows].double() - want[rows]).norm(dim=-1) / want[rows].norm(dim=-1).clamp(min=1e-9)
            print(f"attend {case} {backend}: relative error {off.max():.1e}")
            wrong += not off.max() < 1e-2
    return wrong


def latent_failures(device: torch.device) -> int:
    """The number of latent cases with wrong rows."""
    return sum(not error < 2e-2 for error in latent_errors(device))


PARTS = {"store": store_failures, "attend": attend_failures, "prefill": prefill_failures, "latent": latent_failures}


def main() -> int:
    """Runs the named parts. Returns 1 if a result is wrong, and 2 if a name is unknown."""
    unknown = set(sys.argv[1:]) - set(PARTS)
    if unknown:
        print(f"{', '.join(sorted(unknown))}: parts are {', '.join(PARTS)}", file=sys.stderr)
        return 2
    device = torch.zeros(0, device="cuda").device
    wrong = sum(PARTS[name](device) for name in sys.argv[1:] or PARTS)
    torch.cuda.synchronize()
    return min(wrong, 1)


if __name__ == "__main__":
    sys.exit(main())
