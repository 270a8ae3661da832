import math

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention as attend

from page_blocks import pack_block, unpack_block
from slimkv import Codec, CodecSpec, PageLayout
from slimkv.codec import pack
from slimkv.errors import InputError

FORMATS = [
    "k4v4",
    "k5v4",
    "k3v3",
    "k2v2",
    "turboquant_k8v4",
    "turboquant_4bit_nc",
    "turboquant_k3v4_nc",
    "turboquant_3bit_nc",
    "kur4vur4",
    "fp8",
    "k1v7",
]


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize(("dim", "value_dim"), [(64, 64), (80, 80), (192, 128)])
def test_attention_in_rotated_space_is_attention_on_the_decoded_vectors(format, dim, value_dim):
    generator = torch.Generator().manual_seed(dim)
    q, k, v = (torch.randn(2, n, d, generator=generator) for n, d in ((7, dim), (40, dim), (40, value_dim)))
    codec = Codec.from_format(format, dim, value_dim)
    key, value = codec.encode_key(k), codec.encode_value(v)
    plain = attend(q, codec.decode_key(key), codec.decode_value(value))
    inside = attend(codec.rotate_query(q), codec.decode_key(key, rotated=True), codec.decode_value(value, rotated=True))
    torch.testing.assert_close(codec.unrotate_output(inside), plain, rtol=1e-4, atol=1e-5)
    if codec.spec.value.rotated:  # without an effect of the rotation, the test would pass trivially
        assert (inside - plain).norm() > 0.5 * plain.norm()


@pytest.mark.parametrize("format", FORMATS)
def test_compress_is_encode_and_pack(format):
    codec = Codec.from_format(format, 96)
    x = torch.randn(2, 3, 96, generator=torch.Generator().manual_seed(1))
    layout = PageLayout(codec.spec, 1)
    assert torch.equal(codec.pack_key(x), pack.pack_vectors(layout.key, codec.encode_key(x)))
    assert torch.equal(codec.unpack_key(codec.pack_key(x)), codec.decode_key(codec.encode_key(x)))
    assert torch.equal(codec.unpack_value(codec.pack_value(x)), codec.decode_value(codec.encode_value(x)))
    assert codec.pack_key(x).shape[-1] == 96 * codec.spec.key.bits // 8 + 2 * codec.spec.key.field_count


def test_decoding_an_encoded_vector_again_changes_little():
    codec = Codec.from_format("k6v6", 128)
    x = torch.randn(100, 128, generator=torch.Generator().manual_seed(5))
    once = codec.decode_key(codec.encode_key(x))
    assert (once - x).norm() / x.norm() < 0.03


def test_blocks_of_pages_decode_to_the_same_vectors():
    codec = Codec.from_format("k3v5", 80, 64)
    layout = PageLayout(codec.spec, 32)
    generator = torch.Generator().manual_seed(2)
    k, v = torch.randn(4, 32, 80, generator=generator), torch.randn(4, 32, 64, generator=generator)
    pages = pack_block(layout, codec.encode_key(k), codec.encode_value(v))
    key, value = unpack_block(layout, pages)
    assert torch.equal(codec.decode_key(key), codec.decode_key(codec.encode_key(k)))
    assert torch.equal(codec.decode_value(value), codec.decode_value(codec.encode_value(v)))


def test_compression_ratio_is_the_pages():
    codec = Codec.from_format("k4v4", 128)
    assert codec.compression_ratio() == PageLayout(codec.spec, 16).compression_ratio == 512 / 132
    assert codec.compression_ratio(1) == 512 / 144  # the bytes of a single token are padded to a multiple of 16


def test_to_returns_itself_on_the_same_device():
    codec = Codec.from_format("k4v4", 64)
    assert codec.to("cpu") is codec
    assert codec.to(torch.device("cpu")) is codec
    assert "k4v4" in repr(codec)
    assert "cpu" in repr(codec)


def test_wrong_inputs_are_named():
    codec = Codec.from_format("k4v4", 64)
    with pytest.raises(InputError, match="key vectors have 32 dimensions; this codec needs 64"):
        codec.encode_key(torch.zeros(32))
    with pytest.raises(
        InputError, match=r"value dtype torch\.float64 is not supported; use float16, bfloat16 or float32"
    ):
        codec.encode_value(torch.zeros(64, dtype=torch.float64))
    with pytest.raises(InputError, match="query vectors have 16"):
        codec.rotate_query(torch.zeros(16))


def test_empty_batches():
    codec = Codec.from_format("k4v4", 64)
    assert codec.pack_key(torch.zeros(0, 64)).shape == (0, 34)
    assert codec.unpack_key(torch.zeros(0, 34, dtype=torch.uint8)).shape == (0, 64)


def test_other_seeds_give_other_codes_and_the_same_quality():
    x = torch.randn(500, 64, generator=torch.Generator().manual_seed(8))
    codes, errors = [], []
    for seed in (1, 2):
        codec = Codec(CodecSpec.parse("k4v4", 64, seed=seed))
        encoded = codec.encode_key(x)
        codes.append(encoded.codes)
        errors.append(float((codec.decode_key(encoded) - x).norm() / x.norm()))
    assert (codes[0] != codes[1]).float().mean() > 0.5
    assert math.isclose(*errors, rel_tol=0.03)


@pytest.mark.gpu
@pytest.mark.parametrize("format", [*FORMATS, "k6v7", "k8v8"])
@pytest.mark.parametrize("dim", [64, 80, 128, 576])
def test_the_gpu_gives_the_same_bytes(format, dim):
    x = torch.randn(300, dim, generator=torch.Generator().manual_seed(dim))
    x = x * torch.logspace(-6, 6, 300)[:, None]
    codec = Codec.from_format(format, dim)
    there = codec.to("cuda")
    assert there.to("cuda") is there
    assert torch.equal(there.pack_key(x.cuda()).cpu(), codec.pack_key(x))
    assert torch.equal(there.pack_value(x.cuda()).cpu(), codec.pack_value(x))
    torch.testing.assert_close(there.unpack_key(there.pack_key(x.cuda())).cpu(), codec.unpack_key(codec.pack_key(x)))
