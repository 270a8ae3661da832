"""Calibration in SGLang: which file is meant, the widths it chose, and the matrices of a rank's own heads."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("sglang")

from plans import DIM, HEADS, PAGE

from slimkv.calibration import Calibration, LayerStatistics, ModelIdentity
from slimkv.config import KVCacheConfig
from slimkv.errors import InputError
from slimkv.integrations.sglang import calibration as ours
from slimkv.integrations.sglang.pool import bind, shared_codec
from slimkv.integrations.sglang.sizing import CachePlan, LayerPages
from slimkv.spec import CodecSpec, page_layout

pytestmark = pytest.mark.sglang

CONFIG = {
    "model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": HEADS, "head_dim": DIM, "vocab_size": 97,
}  # fmt: skip
MODEL = SimpleNamespace(hf_text_config=CONFIG)


def make_calibration(seed: int = 0, **changed: int) -> Calibration:
    """Two layers whose queries live in a few directions."""
    generator = torch.Generator().manual_seed(seed)
    layers = {}
    for layer in range(2):
        queries = torch.randn(HEADS, 4 * DIM, DIM, generator=generator, dtype=torch.float64)
        queries *= torch.logspace(0, -2, DIM, dtype=torch.float64)
        layers[layer] = LayerStatistics(
            queries.mT @ queries / (4 * DIM), 32, *torch.ones(2, HEADS, dtype=torch.float64)
        )
    return Calibration(ModelIdentity.of({**CONFIG, **changed}), layers, "nothing")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(ours, "cache_dir", lambda kind: tmp_path / kind)
    monkeypatch.setattr(ours, "attention_tp", lambda: (0, 1))
    (tmp_path / "calibrations").mkdir()
    return tmp_path / "calibrations"


def test_a_file_of_this_model(folder):
    make_calibration().save(folder / "one.safetensors")
    found = ours.find_calibration(KVCacheConfig(calibration=str(folder / "one.safetensors")), MODEL)
    assert sorted(found.layers) == [0, 1]
    assert ours.find_calibration(KVCacheConfig(), MODEL) is None


def test_a_file_of_another_model_is_refused(folder):
    make_calibration(hidden_size=128).save(folder / "other.safetensors")
    with pytest.raises(InputError, match="hidden_size"):
        ours.find_calibration(KVCacheConfig(calibration=str(folder / "other.safetensors")), MODEL)


def test_auto_finds_the_one_made_before(folder):
    auto = KVCacheConfig(calibration="auto")
    with pytest.raises(InputError, match="found none for this model"):
        ours.find_calibration(auto, MODEL)
    make_calibration(hidden_size=128).save(folder / "llama-other.safetensors")
    (folder / "broken.safetensors").write_bytes(b"nothing")
    make_calibration().save(folder / "llama-this.safetensors")
    assert ours.find_calibration(auto, MODEL).identity == ModelIdentity.of(CONFIG)
    make_calibration(1).save(folder / "llama-too.safetensors")
    with pytest.raises(InputError, match=r"several .*llama-this\.safetensors, llama-too\.safetensors"):
        ours.find_calibration(auto, MODEL)


def test_widths_come_from_the_calibration():
    chosen = make_calibration().with_formats({0: "k5v4"})
    assert ours.calibrated_format(chosen, 0) == "k5v4"
    with pytest.raises(InputError, match="chose none for layer 1"):
        ours.calibrated_format(chosen, 1)


@pytest.mark.parametrize(("rank", "ranks", "held"), [(0, 1, 2), (0, 2, 1), (1, 2, 1), (3, 4, 1)])
def test_a_rank_has_the_matrices_of_its_own_heads(rank, ranks, held, monkeypatch):
    """Where there are more ranks than heads, several hold the same one."""
    monkeypatch.setattr(ours, "attention_tp", lambda: (rank, ranks))
    calibration, codec = make_calibration(), shared_codec(CodecSpec.parse("k4v4", DIM), torch.device("cpu"))
    everything = calibration.query_aware_matrices(0, codec)
    first = rank * HEADS // ranks
    assert torch.equal(ours.query_aware_matrices(calibration, 0, codec, held), everything[first : first + held])


def test_the_pool_stores_with_them(folder):
    """Other codes at the same bytes; layers that the calibration does not know are rounded to the nearest."""
    key, value = torch.randn(2, 16, HEADS, DIM, generator=torch.Generator().manual_seed(0))
    stored = []
    for calibration in (None, make_calibration()):
        layers = tuple(LayerPages(i, page_layout(CodecSpec.parse("k3v4", DIM), PAGE), HEADS) for i in range(3))
        plan = CachePlan(KVCacheConfig("k3v4"), calibration, PAGE, {None: layers})
        pool = bind(plan, ())(
            4 * PAGE, page_size=PAGE, dtype=torch.float32, head_num=HEADS, head_dim=DIM, layer_num=3, device="cpu",
            enable_memory_saver=False,
        )  # fmt: skip
        for layer in range(3):
            pool.set_kv_buffer(SimpleNamespace(layer_id=layer), torch.arange(PAGE, 2 * PAGE), key, value)
        stored.append([pool.layer_pages(layer)[0].clone() for layer in range(3)])
    plain, calibrated = stored
    assert [torch.equal(a, b) for a, b in zip(plain, calibrated, strict=True)] == [False, False, True]
