"""Random calls of the GPU kernels, with guard pages around the pool. Backends are compared with one another.

python tests/gpu/fuzz_gpu.py --cases 100000
compute-sanitizer --tool memcheck python tests/gpu/fuzz_gpu.py --cases 300
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import torch

# A program has no conftest.py that sets the import path.
sys.path[:0] = [str(Path(__file__).parent.parent / "fuzz"), str(Path(__file__).parent.parent.parent / "src")]

from op_cases import Fuzzer  # noqa: E402

# Few formats, head sizes and block sizes with many calls each, because kernels are compiled for each combination.
FORMATS = ("k4v4", "k3v3", "k5v4", "k8v8", "fp8", "turboquant_k8v4", "turboquant_4bit_nc", "kur4vu2", "k2vrawbf16")


def main() -> int:
    """Runs the cases and prints the calls of each backend. Returns 1 at the first wrong result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=100_000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--backends", default="cuda,triton")
    parser.add_argument("--formats", default=",".join(FORMATS))
    options = parser.parse_args()
    device = torch.zeros(0, device="cuda").device
    fuzzer = Fuzzer(
        device,
        tuple(options.backends.split(",")),
        tuple(options.formats.split(",")),
        dims=(64, 128),
        blocks=(16, 64),
        gather_backends=("triton",),
    )
    begin = time.monotonic()
    for number in range(options.first, options.first + options.cases):
        try:
            fuzzer.case(number)
        except Exception as error:  # whatever the error is, the case's number reproduces it
            print(f"case {number}: {type(error).__name__}: {error}")
            return 1
        if number % 200 == 199:
            print(f"{number + 1 - options.first} cases, calls {dict(fuzzer.calls)}, {time.monotonic() - begin:.0f} s")
    torch.cuda.synchronize()
    print(f"ok: {options.cases} cases, calls {dict(fuzzer.calls)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
