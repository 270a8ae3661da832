"""fake_quantize: the forward pass rounds as engines do, the gradient is passed straight through."""

import pytest
import torch

import slimkv
from slimkv.cache import PagedPool
from slimkv.errors import InputError
from slimkv.spec import CodecSpec

BATCH, HEADS, TOKENS, DIM = 2, 3, 50, 32


def pair(dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    key, value = (torch.randn(BATCH, HEADS, TOKENS, DIM, generator=generator).to(dtype) for _ in range(2))
    return key.requires_grad_(), value.requires_grad_()


@pytest.mark.parametrize("format", ["k4v4", "k5v3", "fp8", "raw", "turboquant_4bit_nc"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_forward_is_what_a_pool_gives_back(format, dtype):
    key, value = pair(dtype)
    offset = torch.randn(HEADS, DIM).bfloat16()
    got = slimkv.fake_quantize(key, value, format, key_offset=offset)
    spec = CodecSpec.parse(format, DIM).with_raw_dtype(str(dtype).removeprefix("torch."))
    centred = format in ("k4v4", "k5v3", "fp8")
    pool = PagedPool(spec, 2, HEADS, key_offset=offset if centred else None)
    rows = [x.detach().transpose(1, 2).reshape(-1, HEADS, DIM).contiguous() for x in (key, value)]
    pool.store(*rows, torch.arange(len(rows[0])))
    for mine, stored in zip(got, pool.gather(torch.arange(len(rows[0])), dtype), strict=True):
        assert torch.equal(mine, stored.unflatten(0, (BATCH, TOKENS)).transpose(1, 2))
        assert mine.dtype == dtype


def test_the_gradient_passes_straight_through():
    key, value = pair()
    got = slimkv.fake_quantize(key, value, "k4v4")
    weight = torch.randn(2, *key.shape)
    (got[0] * weight[0] + got[1] * weight[1]).sum().backward()
    assert torch.equal(key.grad, weight[0])
    assert torch.equal(value.grad, weight[1])


def test_a_constant_of_the_keys_costs_nothing():
    key, value = pair()
    shifted = key.detach() + 300.0
    errors = [
        float((slimkv.fake_quantize(x, value, "k4v4")[0] - x).norm() / key.norm()) for x in (key.detach(), shifted)
    ]
    assert errors[1] < 1.05 * errors[0]
    plain = slimkv.KVCacheConfig(format="k4v4", center_keys=False)
    assert float((slimkv.fake_quantize(shifted, value, plain)[0] - shifted).norm() / key.norm()) > 10 * errors[0]


def test_shapes_that_do_not_fit_are_refused():
    key, value = pair()
    with pytest.raises(InputError, match="batch, num_kv_heads, tokens, dim"):
        slimkv.fake_quantize(key, value[:, :, 1:])
