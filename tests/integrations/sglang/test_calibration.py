"""Calibration in SGLang: the pool rounds keys with the calibration's matrices, by position."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("sglang")

from plans import DIM, HEADS, PAGE, make_batch

from slimkv.calibration import Calibration, LayerStatistics, ModelIdentity
from slimkv.calibration.rotary import Rotary
from slimkv.config import KVCacheConfig
from slimkv.errors import InputError
from slimkv.integrations.serving.model import ServedModel
from slimkv.integrations.sglang.metadata import BlockTables, GraphTables, eager_step
from slimkv.integrations.sglang.pool import bind
from slimkv.integrations.sglang.sizing import CachePlan, LayerPages
from slimkv.spec import CodecSpec, page_layout

pytestmark = pytest.mark.sglang

CONFIG = {
    "model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": HEADS, "head_dim": DIM, "vocab_size": 97,
}  # fmt: skip
CONTEXT = 300  # these positions fall into three ranges


def make_calibration(turning: bool = False, **changed: int) -> Calibration:
    """Statistics of two layers whose queries lie near few directions. ``turning``: queries rotate with the position."""
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


def calibrated_pool(calibration: Calibration | None):
    layers = tuple(LayerPages(i, page_layout(CodecSpec.parse("k3v4", DIM), PAGE), HEADS) for i in range(3))
    settings = KVCacheConfig("k3v4", calibration=calibration)
    plan = CachePlan(ServedModel(settings, "", CONFIG, CONTEXT, lambda: (0, 1), True), PAGE, {None: layers})
    return bind(plan, ())(
        4 * PAGE, page_size=PAGE, dtype=torch.float32, head_num=HEADS, head_dim=DIM, layer_num=3, device="cpu",
        enable_memory_saver=False,
    )  # fmt: skip


def test_the_pool_stores_with_them():
    """Codes differ with a calibration. Layers without statistics are rounded to the nearest centroid."""
    key, value = torch.randn(2, 16, HEADS, DIM, generator=torch.Generator().manual_seed(0))
    stored = []
    for calibration in (None, make_calibration()):
        pool = calibrated_pool(calibration)
        for layer in range(3):
            pool.store(layer, torch.arange(PAGE, 2 * PAGE), key, value)
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
    with pytest.raises(InputError, match="matrices by position: give Rounding"):
        pool.store(0, slots, key, value)


def test_a_steps_ranges_follow_the_positions():
    """Both in CUDA graphs and in eager steps."""
    tables = BlockTables(torch.zeros(4, CONTEXT, dtype=torch.int32), PAGE, None, (128, 256, 512))
    batch = make_batch("DECODE", [0, 1, 2], [128, 129, 300], [1, 1, 1], torch.zeros(3, dtype=torch.int64))
    batch.positions = torch.tensor([127, 128, 299])
    assert eager_step(batch, tables).matrix_index.tolist() == [0, 1, 2]
    graph = GraphTables(4, 4, tables, torch.device("cpu"))
    step = graph.step(3, 1)
    graph.fill(batch, step, 0)
    assert step.matrix_index.tolist() == [0, 1, 2]
    assert step.matrix_index.dtype == torch.int32
