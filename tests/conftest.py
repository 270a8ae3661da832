"""For all tests: kernels run in Triton's interpreter where there is no GPU; uninitialised memory is poison."""

from __future__ import annotations

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when triton is first imported

torch.set_num_threads(1)  # tests run side by side


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--regenerate-golden", action="store_true", help="rewrite the golden files: a new page format")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests marked ``gpu`` are skipped where there is none."""
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


POISON_BYTE = 0xA5
_FACTORIES = ("empty", "empty_like", "empty_strided")
_METHODS = ("new_empty", "new_empty_strided")


def poison(tensor: torch.Tensor) -> torch.Tensor:
    """Fills ``tensor`` in place: NaN for floats, 0xA5 in every byte of everything else."""
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
    """A result that reads memory nobody wrote becomes NaN or 0xA5, not an accidental zero."""

    def wrap(function):
        def poisoned(*args, **kwargs):
            return poison(function(*args, **kwargs))

        return poisoned

    for name in _FACTORIES:
        monkeypatch.setattr(torch, name, wrap(getattr(torch, name)))
    for name in _METHODS:
        monkeypatch.setattr(torch.Tensor, name, wrap(getattr(torch.Tensor, name)))
