"""What serving engines share: which calibration is meant, its widths, and the matrices of a rank's heads."""

from __future__ import annotations

import pytest
import torch

from slimkv.calibration import Calibration, LayerStatistics, ModelIdentity, serving
from slimkv.codec import Codec
from slimkv.errors import InputError

CONFIG = {
    "model_type": "llama", "hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4,
    "num_key_value_heads": 4, "head_dim": 16, "vocab_size": 97,
}  # fmt: skip


def make(**changed: int) -> Calibration:
    queries = torch.randn(4, 64, 16, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    layers = {0: LayerStatistics(queries.mT @ queries / 64, 16)}
    return Calibration(ModelIdentity.of({**CONFIG, **changed}), layers, "nothing", 300)


@pytest.fixture(autouse=True)
def nothing_kept():
    serving._load.cache_clear()


def test_a_file_or_none(tmp_path):
    make().save(tmp_path / "one.safetensors")
    found = serving.served_calibration(tmp_path / "one.safetensors", "a-model", CONFIG, 300)
    assert found is serving.served_calibration(str(tmp_path / "one.safetensors"), "a-model", CONFIG, 300), "read once"
    assert serving.served_calibration(None, "a-model", CONFIG, 300) is None
    given = make()
    assert serving.served_calibration(given, "a-model", CONFIG, 300) is given


def test_another_models_is_refused_and_a_longer_context_warned_of():
    with pytest.raises(InputError, match="hidden_size"):
        serving.served_calibration(make(hidden_size=128), "a-model", CONFIG, 300)
    with pytest.warns(UserWarning, match="up to position 300"):
        serving.served_calibration(make(), "a-model", CONFIG, 4096)


def test_auto_is_found_by_the_models_files(monkeypatch):
    asked = []
    monkeypatch.setattr(serving, "cached_calibration", lambda name: asked.append(name) or make())
    assert serving.served_calibration("auto", "a-folder", CONFIG, 300) is not None
    assert asked == ["a-folder"]


def test_widths():
    chosen = make().with_formats({0: "k5v4"})
    assert serving.chosen_format(chosen, 0) == "k5v4"
    for calibration, layer in ((chosen, 1), (make(), 0)):
        with pytest.raises(InputError, match=f"chose none for layer {layer}"):
            serving.chosen_format(calibration, layer)


@pytest.mark.parametrize(("ranks", "held"), [(1, 4), (2, 2), (4, 1), (8, 1)])
def test_ranks_have_the_matrices_of_their_heads(ranks, held):
    """Where there are more ranks than heads, several hold the same one."""
    calibration, codec = make(), Codec.from_format("k4v4", 16)
    everything = calibration.query_aware_matrices(0, codec)
    for rank in range(ranks):
        first = rank * 4 // ranks
        got = serving.rank_matrices(calibration, 0, codec, held, rank, ranks, 300)
        assert torch.equal(got, everything[first : first + held])
