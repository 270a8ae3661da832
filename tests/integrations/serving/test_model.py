"""Code shared by serving engines: which calibration they load, its widths, and the part that each rank holds."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from slimkv.calibration import Calibration, LayerStatistics, ModelIdentity
from slimkv.codec import Codec
from slimkv.config import KVCacheConfig
from slimkv.errors import InputError
from slimkv.integrations.serving import model as serving
from slimkv.integrations.serving.model import ServedModel, rank_heads
from slimkv.spec import CodecSpec

FIELDS = {
    "model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 4, "head_dim": 16, "vocab_size": 97,
}  # fmt: skip
CONFIG = SimpleNamespace(**FIELDS, to_dict=lambda: FIELDS)
CPU = torch.device("cpu")


def make(**changed: int) -> Calibration:
    """A calibration with statistics for layer 0 and none for layer 1."""
    queries = torch.randn(4, 64, 16, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    offset = torch.arange(64, dtype=torch.float64).view(4, 16)
    layers = {0: LayerStatistics(queries.mT @ queries / 64, 16, key_mean=offset, first_key=offset)}
    return Calibration(ModelIdentity.of({**FIELDS, **changed}), layers, "nothing", 300)


def served(calibration=None, positions=300, ranks=(0, 1), **settings) -> ServedModel:
    config = KVCacheConfig(**{"format": "k4v4", **settings}, calibration=calibration)
    return ServedModel(config, "a-model", CONFIG, positions, lambda: ranks)


@pytest.fixture(autouse=True)
def nothing_kept(monkeypatch, tmp_path):
    serving._load.cache_clear()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def test_a_file_or_none(tmp_path):
    make().save(tmp_path / "one.safetensors")
    found = served(tmp_path / "one.safetensors").calibration
    assert found is served(str(tmp_path / "one.safetensors")).calibration, "read once"
    assert served().calibration is None
    given = make()
    assert served(given).calibration is given


def test_another_models_is_refused_and_a_longer_context_warned_of():
    with pytest.raises(InputError, match="hidden_size"):
        _ = served(make(hidden_size=128)).calibration
    with pytest.warns(UserWarning, match="up to position 300"):
        _ = served(make(), positions=4096).calibration


def test_auto_is_found_by_the_models_files(monkeypatch):
    asked = []
    monkeypatch.setattr(serving, "cached_calibration", lambda name: asked.append(name) or make())
    assert served("auto").calibration is not None
    assert asked == ["a-model"]


def test_formats_of_layers():
    model = served(layers={"1": "raw"})
    assert model.layer_spec(0, 16, 16, "torch.bfloat16") == CodecSpec.parse("k4v4", 16)
    assert model.layer_spec(1, 16, 16, "torch.float16").key.raw_dtype == "float16"
    with pytest.raises(InputError, match="the model has layers 0 to 1"):
        served(layers={"2": "raw"}).layer_spec(0, 16, 16, "float32")


def test_widths_come_from_the_calibration():
    chosen = served(make().with_formats({0: "k5v4"}), format="calibrated")
    assert chosen.layer_spec(0, 16, 16, "float32") == CodecSpec.parse("k5v4", 16)
    with pytest.raises(InputError, match="chose none for layer 1"):
        chosen.layer_spec(1, 16, 16, "float32")
    with pytest.raises(InputError, match=r"layer draft\.0 is not in the calibration"):
        chosen.layer_spec(None, 16, 16, "float32", name="draft.0")


@pytest.mark.parametrize(("ranks", "held"), [(1, 4), (2, 2), (4, 1), (8, 1)])
def test_ranks_have_what_belongs_to_their_heads(ranks, held):
    """If there are more ranks than heads, several ranks hold the same head."""
    calibration, codec = make(), Codec.from_format("k4v4", 16)
    everything = calibration.query_aware_matrices(0, codec)
    whole = calibration.key_offset(0, codec)
    for rank in range(ranks):
        first = rank * 4 // ranks
        model = served(calibration, ranks=(rank, ranks))
        assert torch.equal(model.matrices(0, codec, held), everything[first : first + held])
        offset = model.layer_offset(0, codec.spec, held, CPU)
        assert offset.known
        assert torch.equal(offset.tensor, whole[first : first + held])


def test_layers_without_statistics_learn_their_offset():
    model, codec = served(make()), Codec.from_format("k4v4", 16)
    assert model.matrices(1, codec, 4) is None
    assert not model.layer_offset(1, codec.spec, 4, CPU).known
    assert not model.layer_offset(None, codec.spec, 4, CPU).known
    assert served(center_keys=False).layer_offset(0, codec.spec, 4, CPU) is None


def test_engines_that_exchange_pages_learn_no_offset():
    model, spec = served(make()), Codec.from_format("k4v4", 16).spec
    assert model.layer_offset(0, spec, 4, CPU, exchanged=True).known
    assert model.layer_offset(1, spec, 4, CPU, exchanged=True) is None
    assert model.whole_offset(0, spec) is not None
    assert model.whole_offset(1, spec) is model.whole_offset(None, spec) is None


@pytest.mark.parametrize(
    ("total", "held", "ranks", "heads"),
    [
        (8, 4, 2, [(0, 4), (4, 8)]),
        (8, 1, 8, [(i, i + 1) for i in range(8)]),
        (2, 1, 4, [(0, 1), (0, 1), (1, 2), (1, 2)]),
    ],
)
def test_which_heads_a_rank_holds(total, held, ranks, heads):
    found = [rank_heads(total, held, rank, ranks) for rank in range(ranks)]
    assert [(s.start, s.stop) for s in found] == heads
