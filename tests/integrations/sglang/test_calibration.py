"""Calibration in SGLang: which file is meant, the widths it chose, and the matrices of a rank's own heads."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("sglang")

from plans import DIM, HEADS, PAGE, make_batch

from slimkv.calibration import Calibration, LayerStatistics, ModelIdentity, serving
from slimkv.calibration.rotary import Rotary
from slimkv.config import KVCacheConfig
from slimkv.errors import InputError
from slimkv.integrations.sglang import calibration as ours
from slimkv.integrations.sglang import key_offset
from slimkv.integrations.sglang.metadata import BlockTables, GraphTables, eager_step
from slimkv.integrations.sglang.pool import bind, shared_codec
from slimkv.integrations.sglang.sizing import CachePlan, LayerPages
from slimkv.spec import CodecSpec, page_layout

pytestmark = pytest.mark.sglang

CONFIG = {
    "model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": HEADS, "head_dim": DIM, "vocab_size": 97,
}  # fmt: skip
CONTEXT = 300  # positions: three ranges
MODEL = SimpleNamespace(hf_text_config=CONFIG, context_len=CONTEXT, model_path="a-folder")


def make_calibration(turning: bool = False, **changed: int) -> Calibration:
    """Two layers whose queries live in a few directions; ``turning``: which depend on their positions."""
    generator = torch.Generator().manual_seed(0)
    rotary = Rotary.none()
    if turning:
        halves = torch.arange(DIM).view(2, -1).T.contiguous()
        rotary = Rotary(halves, torch.full((DIM // 2,), 0.005, dtype=torch.float64))
    layers = {}
    for layer in range(2):
        queries = torch.randn(HEADS, 4 * DIM, DIM, generator=generator, dtype=torch.float64)
        queries *= torch.logspace(0, -2, DIM, dtype=torch.float64)
        layers[layer] = LayerStatistics(queries.mT @ queries / (4 * DIM), DIM, rotary=rotary)
    return Calibration(ModelIdentity.of({**CONFIG, **changed}), layers, "nothing", CONTEXT)


@pytest.fixture(autouse=True)
def one_rank(monkeypatch):
    for module in (ours, key_offset):
        monkeypatch.setattr(module, "attention_tp", lambda: (0, 1))
    serving._load.cache_clear()


def test_a_file_of_this_model(tmp_path):
    make_calibration().save(tmp_path / "one.safetensors")
    found = ours.load_calibration(KVCacheConfig(calibration=str(tmp_path / "one.safetensors")), MODEL)
    assert sorted(found.layers) == [0, 1]
    assert ours.load_calibration(KVCacheConfig(), MODEL) is None


def test_a_file_of_another_model_is_refused(tmp_path):
    make_calibration(hidden_size=128).save(tmp_path / "other.safetensors")
    with pytest.raises(InputError, match="hidden_size"):
        ours.load_calibration(KVCacheConfig(calibration=str(tmp_path / "other.safetensors")), MODEL)


def test_auto_is_the_one_kept_for_the_models_files(monkeypatch):
    asked = []
    monkeypatch.setattr(serving, "cached_calibration", lambda name: asked.append(name) or make_calibration())
    assert ours.load_calibration(KVCacheConfig(calibration="auto"), MODEL).identity == ModelIdentity.of(CONFIG)
    assert asked == ["a-folder"]


def test_a_longer_context_is_warned_of():
    longer = SimpleNamespace(hf_text_config=CONFIG, context_len=4096, model_path="")
    with pytest.warns(UserWarning, match="up to position 300"):
        ours.load_calibration(KVCacheConfig(calibration=make_calibration()), longer)


def test_widths_come_from_the_calibration():
    chosen = make_calibration().with_formats({0: "k5v4"})
    assert serving.chosen_format(chosen, 0) == "k5v4"
    with pytest.raises(InputError, match="chose none for layer 1"):
        serving.chosen_format(chosen, 1)


@pytest.mark.parametrize(("rank", "ranks", "held"), [(0, 1, 2), (0, 2, 1), (1, 2, 1), (3, 4, 1)])
def test_a_rank_has_the_matrices_of_its_own_heads(rank, ranks, held, monkeypatch):
    """Where there are more ranks than heads, several hold the same one."""
    monkeypatch.setattr(ours, "attention_tp", lambda: (rank, ranks))
    calibration, codec = make_calibration(), shared_codec(CodecSpec.parse("k4v4", DIM), torch.device("cpu"))
    everything = calibration.query_aware_matrices(0, codec, None, CONTEXT)
    first = rank * HEADS // ranks
    matrices = ours.query_aware_matrices(calibration, 0, codec, held, CONTEXT)
    assert torch.equal(matrices, everything[first : first + held])


def calibrated_pool(calibration: Calibration | None):
    layers = tuple(LayerPages(i, page_layout(CodecSpec.parse("k3v4", DIM), PAGE), HEADS) for i in range(3))
    config = KVCacheConfig("k3v4", calibration=calibration)
    plan = CachePlan(config, calibration, PAGE, CONTEXT, {None: layers})
    return bind(plan, ())(
        4 * PAGE, page_size=PAGE, dtype=torch.float32, head_num=HEADS, head_dim=DIM, layer_num=3, device="cpu",
        enable_memory_saver=False,
    )  # fmt: skip


def test_the_pool_stores_with_them():
    """Other codes at the same bytes; layers that the calibration does not know are rounded to the nearest."""
    key, value = torch.randn(2, 16, HEADS, DIM, generator=torch.Generator().manual_seed(0))
    stored = []
    for calibration in (None, make_calibration()):
        pool = calibrated_pool(calibration)
        for layer in range(3):
            pool.set_kv_buffer(SimpleNamespace(layer_id=layer), torch.arange(PAGE, 2 * PAGE), key, value)
        stored.append([pool.packed(layer).pages.clone() for layer in range(3)])
    plain, calibrated = stored
    assert [torch.equal(a, b) for a, b in zip(plain, calibrated, strict=True)] == [False, False, True]


def test_tokens_are_rounded_by_their_positions():
    pool = calibrated_pool(make_calibration(turning=True))
    assert pool.plan.position_edges == (128, 256, 512)
    key, value = torch.randn(2, 16, HEADS, DIM, generator=torch.Generator().manual_seed(0))
    slots, pages = torch.arange(PAGE, 2 * PAGE), []
    for number in range(3):
        pool.store(0, slots, key, value, torch.full((16,), number, dtype=torch.int32))
        pages.append(pool.packed(0).pages.clone())
    assert not torch.equal(pages[0], pages[2])
    with pytest.raises(InputError, match="give its index"):
        pool.set_kv_buffer(SimpleNamespace(layer_id=0), slots, key, value)


def test_a_steps_ranges_follow_the_positions():
    """In and outside graphs."""
    tables = BlockTables(torch.zeros(4, CONTEXT, dtype=torch.int32), PAGE, None, (128, 256, 512))
    batch = make_batch("DECODE", [0, 1, 2], [128, 129, 300], [1, 1, 1], torch.zeros(3, dtype=torch.int64))
    batch.positions = torch.tensor([127, 128, 299])
    assert eager_step(batch, tables).matrix_index.tolist() == [0, 1, 2]
    graph = GraphTables(4, 4, tables, torch.device("cpu"))
    step = graph.step(3, 1)
    graph.fill(batch, step, 0)
    assert step.matrix_index.tolist() == [0, 1, 2]
    assert step.matrix_index.dtype == torch.int32
