"""Two threads, each on its own CUDA stream, share kernels and get the same results as alone."""

from __future__ import annotations

import threading

import pytest
import torch
from attention_cases import Case, build

from slimkv import ops

pytestmark = pytest.mark.gpu
CASES = [Case(lens=(700, 33, 90)), Case(format="k3v5", lens=(400, 20), queries=(1, 4))]


@pytest.mark.parametrize("backend", ["cuda", "triton"])
def test_two_streams(backend, device):
    built = [build(case, device) for case in CASES]
    alone = [ops.attend(**x.arguments(), backend=backend) for x in built]
    torch.cuda.synchronize()
    wrong: list[int] = []

    def run(number: int) -> None:
        stream = torch.cuda.Stream(device)
        with torch.cuda.stream(stream):
            for _ in range(200):
                out = ops.attend(**built[number].arguments(), backend=backend)
                stream.synchronize()
                rows = slice(0, sum(CASES[number].queries))
                if not torch.equal(out[rows], alone[number][rows]):
                    wrong.append(number)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(CASES))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
