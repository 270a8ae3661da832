"""Random calls through the public functions on every CPU backend, and a sample in Triton's interpreter."""

from __future__ import annotations

import pytest

pytest.importorskip("hypothesis")

import torch
from budget import count
from op_cases import Fuzzer

from slimkv.ops.cpu import module

CPU = ("reference", *(("cpu",) if module.build_failure() is None else ()))


def run(cases: int, backends: tuple[str, ...], **options) -> None:
    fuzzer = Fuzzer(torch.device("cpu"), backends, **options)
    for number in range(cases):
        try:
            fuzzer.case(number)
        except Exception as error:
            raise AssertionError(f"case {number}: {error}") from error
    assert all(fuzzer.calls[backend] for backend in backends)


def test_backends_of_the_cpu():
    run(count(100), CPU, beyond=True)


def test_triton_on_a_sample():
    pytest.importorskip("triton")
    run(count(4), ("reference", "triton"), formats=("k4v4", "k3v5"), dims=(32, 64), blocks=(16,))


@pytest.mark.slow
def test_backends_of_the_cpu_at_length():
    run(count(20_000), CPU, beyond=True)


@pytest.mark.slow
def test_triton_at_length():
    pytest.importorskip("triton")
    run(count(200), ("reference", "triton"), dims=(32, 64, 80), blocks=(16, 32))
