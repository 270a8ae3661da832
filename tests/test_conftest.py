"""Poisoning of uninitialised memory, on which other tests rely."""

import pytest
import torch


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
def test_floats_are_nan(dtype):
    base = torch.zeros(3, dtype=dtype)
    for made in (
        torch.empty(5, dtype=dtype),
        torch.empty_like(base),
        base.new_empty(4),
        torch.empty_strided((2,), (1,), dtype=dtype),
    ):
        assert made.dtype == dtype
        assert made.isnan().all()


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64])
def test_bytes_are_a5(dtype):
    for made in (torch.empty(5, dtype=dtype), torch.zeros(1, dtype=dtype).new_empty(5)):
        assert made.numel() == 5
        assert (made.view(torch.uint8) == 0xA5).all()
