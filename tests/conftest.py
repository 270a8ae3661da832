"""Setup of all tests: without a GPU, kernels run in Triton's interpreter; uninitialised memory is poisoned."""

from __future__ import annotations

import gc
import os
import sys
from contextlib import suppress
from functools import wraps
from pathlib import Path

# Waiting OpenMP threads sleep, because on a busy machine spinning takes as long as the work. torch reads this variable
# when it is imported, here and in the processes that tests start.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))  # for modules that test folders share, such as documents.py
sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))  # tested scripts, which import one another

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # Triton reads it on its first import

torch.set_num_threads(1)  # tests run side by side


if os.environ.get("TRITON_INTERPRET") == "1":
    import quick_interpreter

    quick_interpreter.install()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--regenerate-golden", action="store_true", help="rewrite the golden files: a new page format")
    parser.addoption("--full", action="store_true", help="the whole matrix of kernel tests even without a GPU (hours)")
    parser.addoption(
        "--shard", metavar="I/N", help="only every N-th test, from the I-th on: N processes share the work"
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "full: part of the full matrix, for a GPU or --full")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes() -> None:
    """Compiles the CPU kernels before the workers start; each would otherwise compile them during collection."""
    from slimkv.ops.cpu import compiler, isa

    with suppress(compiler.CompileError):  # the tests of the CPU kernels are then skipped
        compiler.build_library(isa.find())


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Without a GPU, skips ``gpu`` tests and, without ``--full``, deselects ``full`` ones; applies ``--shard``."""
    keep = items
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
        if not config.getoption("--full"):
            keep = [item for item in items if not item.get_closest_marker("full")]
    shard = config.getoption("--shard")
    if shard is not None:
        index, _, count = shard.partition("/")
        if not (index.isdigit() and count.isdigit() and int(index) < int(count)):
            raise pytest.UsageError(f"--shard {shard!r} is not I/N with 0 <= I < N, such as 0/8")
        keep = keep[int(index) :: int(count)]
    kept = set(map(id, keep))
    config.hook.pytest_deselected(items=[item for item in items if id(item) not in kept])
    items[:] = keep


def pytest_collection_finish() -> None:
    """Freezes the imported modules, so that the garbage collector does not traverse their millions of objects."""
    gc.freeze()


def pytest_unconfigure() -> None:
    gc.unfreeze()  # a library that counts its objects at exit would report frozen ones as leaks


POISON_BYTE = 0xA5
_FACTORIES = ("empty", "empty_like", "empty_strided")
_METHODS = ("new_empty", "new_empty_strided")


def poison(tensor: torch.Tensor) -> torch.Tensor:
    """Fills ``tensor`` in place: NaN for floats, True for bools, 0xA5 in every byte of other types."""
    if tensor.numel() == 0 or tensor.device.type == "meta" or type(tensor) is not torch.Tensor:
        return tensor
    with torch.no_grad():
        if tensor.is_floating_point() or tensor.is_complex():
            tensor.fill_(float("nan"))
        elif tensor.dtype == torch.bool:
            tensor.fill_(True)
        else:
            filler = bytes([POISON_BYTE]) * tensor.element_size()
            tensor.fill_(int.from_bytes(filler, "little", signed=tensor.dtype.is_signed))
    return tensor


@pytest.fixture(autouse=True)
def poisoned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Results that depend on uninitialised memory become NaN or bytes of 0xA5, not accidental zeros."""

    def wrap(function):
        @wraps(function)
        def poisoned(*args, **kwargs):
            return poison(function(*args, **kwargs))

        return poisoned

    for name in _FACTORIES:
        monkeypatch.setattr(torch, name, wrap(getattr(torch, name)))
    for name in _METHODS:
        monkeypatch.setattr(torch.Tensor, name, wrap(getattr(torch.Tensor, name)))
