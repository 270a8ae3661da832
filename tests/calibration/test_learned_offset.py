"""Key offsets learnt from the first prompt: when they are set, and how they are kept on disk."""

import pytest
import torch

from slimkv import Codec
from slimkv.calibration import learned_offset
from slimkv.calibration.learned_offset import LayerOffset, kept_path, offset_digest, read_offset, write_offset
from slimkv.codec.key_offset import offset_of_keys

HEADS, DIM, TOKENS = 2, 16, 24
CODEC = Codec.from_format("k4v4", DIM)


def keys(seed: int = 0) -> torch.Tensor:
    return torch.randn(TOKENS, HEADS, DIM, generator=torch.Generator().manual_seed(seed)) + 5.0


def pages() -> torch.Tensor:
    return torch.zeros(4, HEADS, 100, dtype=torch.uint8)


def offset(**known: torch.Tensor) -> LayerOffset:
    return LayerOffset(HEADS, CODEC, **known)


def test_the_first_stored_tokens_set_it_and_nothing_later_does():
    made, stored = offset(), torch.arange(TOKENS) < 20
    made.learn(keys(), stored, pages())
    assert made.known
    torch.testing.assert_close(made.tensor, offset_of_keys(keys()[:20].mean(0), keys()[0], CODEC))
    before, address = made.tensor.clone(), made.tensor.data_ptr()
    made.learn(keys(1), stored, pages())
    assert torch.equal(made.tensor, before)
    assert made.tensor.data_ptr() == address  # captured graphs hold this address


def test_a_step_that_stores_nothing_does_not_set_it():
    made = offset()
    made.learn(keys(), torch.zeros(TOKENS, dtype=torch.bool), pages())
    assert not made.known
    assert not made.tensor.any()


def test_tokens_stored_before_anything_was_learnt_keep_their_meaning():
    made, used = offset(), pages()
    made.provisional(keys(2))
    before = made.tensor.clone()
    assert not made.known
    used[1, 0, 3] = 7
    made.learn(keys(), torch.ones(TOKENS, dtype=torch.bool), used)
    assert made.known
    assert torch.equal(made.tensor, before)
    assert made.source == "a profiling step"


def test_a_known_offset_is_never_changed():
    known = torch.randn(HEADS, DIM).bfloat16()
    made = offset(known=known)
    made.provisional(keys())
    made.learn(keys(), torch.ones(TOKENS, dtype=torch.bool), pages())
    assert torch.equal(made.tensor, known)


def test_what_one_process_learnt_the_next_one_starts_with(tmp_path):
    path = tmp_path / "a" / "layer-0.safetensors"
    first = LayerOffset.kept(path, HEADS, CODEC)
    assert not first.known
    first.learn(keys(), torch.ones(TOKENS, dtype=torch.bool), pages())
    second = LayerOffset.kept(path, HEADS, CODEC)
    assert second.known
    assert torch.equal(first.tensor, second.tensor)
    assert offset_digest(first.tensor) == offset_digest(second.tensor)


def test_of_two_that_start_at_once_the_first_to_write_wins(tmp_path):
    path = tmp_path / "layer-0.safetensors"
    one, other = (LayerOffset.kept(path, HEADS, CODEC) for _ in range(2))
    everything = torch.ones(TOKENS, dtype=torch.bool)
    one.learn(keys(1), everything, pages())
    other.learn(keys(2), everything, pages())
    assert not torch.equal(one.tensor, other.tensor)  # a change would invalidate the pages stored so far
    assert offset_digest(one.tensor) != offset_digest(other.tensor)
    found = read_offset(path, HEADS, DIM)
    assert found is not None
    assert torch.equal(found, one.tensor)


def test_a_damaged_file_is_learnt_again(tmp_path):
    path = tmp_path / "layer-0.safetensors"
    write_offset(path, torch.ones(HEADS, DIM, dtype=torch.bfloat16))
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    assert read_offset(path, HEADS, DIM) is None
    assert not path.exists()


@pytest.mark.parametrize("shape", [(HEADS + 1, DIM), (HEADS, DIM + 16)])
def test_a_file_of_another_shape_is_not_used(tmp_path, shape):
    path = tmp_path / "layer-0.safetensors"
    write_offset(path, torch.ones(shape, dtype=torch.bfloat16))
    assert read_offset(path, HEADS, DIM) is None


def test_models_and_ranks_have_places_of_their_own(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folders = []
    for name in ("a", "b"):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "config.json").write_text("{}")
        (folder / "model.safetensors").write_bytes(name.encode() * 100)
        folders.append(str(folder))
    learned_offset._files_key.cache_clear()
    specs = [CODEC.spec, Codec.from_format("k5v4", DIM).spec]
    paths = {
        kept_path(folder, layer, spec, rank, 2)
        for folder in folders for layer in (0, 1) for rank in (0, 1) for spec in specs
    }  # fmt: skip
    assert len(paths) == 16
    assert kept_path(str(tmp_path / "nowhere"), 0, CODEC.spec) is None
