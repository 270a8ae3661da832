import numpy as np
import pytest
import torch

from slimkv import Codec
from slimkv.codec.rotation import block_size, core_size, core_words, sign_bits, signed_hadamard

GOLDEN_SIGNS = [-1, 1, -1, 1, -1, 1, -1, -1, -1, 1, -1, -1, 1, 1, 1, -1]  # for 16 dimensions and the default seed
NAMED_DIMS = (64, 80, 96, 112, 128, 192, 256, 512, 576)


@pytest.mark.parametrize("dim", range(16, 1025, 16))
def test_rows_are_orthogonal(dim):
    matrix = signed_hadamard(dim, 0x51).astype(np.float64)  # exact: entries are -1, 0, 1
    assert np.array_equal(matrix @ matrix.T, block_size(dim) * np.eye(dim))
    assert dim % block_size(dim) == 0


def test_one_block_for_every_size_but_two():
    assert [d for d in range(16, 1025, 16) if block_size(d) != d] == [688, 944]
    assert all(block_size(d) == d for d in NAMED_DIMS)


def test_blocks_are_mixed_within_themselves_only():
    matrix = signed_hadamard(688, 1)
    assert block_size(688) == 16
    assert np.array_equal(matrix != 0, np.kron(np.eye(43), np.ones((16, 16))) != 0)


@pytest.mark.parametrize("dim", NAMED_DIMS)
def test_every_entry_counts(dim):
    assert set(np.unique(signed_hadamard(dim, 3))) == {-1, 1}


def test_same_seed_same_rotation_other_seed_other_rotation():
    first = signed_hadamard(128, 5).copy()
    signed_hadamard.cache_clear()
    assert np.array_equal(first, signed_hadamard(128, 5))
    seen = {sign_bits(128, seed).tobytes() for seed in range(200)}
    assert len(seen) == 200
    assert sign_bits(64, 2**63 - 1).shape == (64,)


def test_signs_are_fixed_and_balanced():
    assert sign_bits(16, 0x51).tolist() == GOLDEN_SIGNS
    signs = np.concatenate([sign_bits(1024, seed) for seed in range(64)])
    assert abs(signs.mean()) < 5 / np.sqrt(signs.size)


@pytest.mark.parametrize(("dim", "size"), [(80, 20), (96, 12), (112, 28), (192, 12), (64, 1)])
def test_words_of_the_core(dim, size):
    assert core_size(dim) == size
    core = (signed_hadamard(dim, 7) * sign_bits(dim, 7)[:, None])[:size, :size]
    for columns in (False, True):
        words = core_words(dim, columns)
        entries = [[-1 if word >> i & 1 else 1 for i in range(size)] for word in words]
        assert np.array_equal(entries, core.T if columns else core)
    assert core_words(144, True) == ()  # 36 entries do not fit a word


@pytest.mark.parametrize("dim", [64, 80, 128, 688])
def test_rotating_and_back(dim):
    codec = Codec.from_format("k4v4", dim)
    x = torch.randn(50, dim, generator=torch.Generator().manual_seed(dim))
    rotated = codec.rotate_query(x)
    torch.testing.assert_close(rotated.norm(dim=-1), x.norm(dim=-1), rtol=1e-5, atol=0)
    torch.testing.assert_close(codec.unrotate_output(rotated), x, rtol=0, atol=2e-5)
    assert (rotated - x).norm() > 0.5 * x.norm()


def test_unrotated_formats_pass_through():
    codec = Codec.from_format("ku4vu4", 64)
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(0)).half()
    assert torch.equal(codec.rotate_query(x), x.float())
    assert torch.equal(codec.unrotate_output(x), x.float())


def test_a_spike_is_spread_evenly():
    codec = Codec.from_format("k4v4", 96)
    spike = torch.zeros(96)
    spike[17] = 5.0
    torch.testing.assert_close(codec.rotate_query(spike).abs(), torch.full((96,), 5 / 96**0.5), rtol=1e-6, atol=0)
