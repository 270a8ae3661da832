"""A served layer: when it learns its key offset, and from which tokens."""

from __future__ import annotations

import torch

from slimkv.calibration import learned_offset
from slimkv.calibration.learned_offset import MIN_TOKENS, LayerOffset
from slimkv.codec import Codec
from slimkv.codec.key_offset import offset_of_keys
from slimkv.integrations.serving.layer import ServedLayer
from slimkv.spec import page_layout

HEADS, DIM, BLOCK, TOKENS = 2, 16, 16, 40
CODEC = Codec.from_format("k4v4", DIM)
LAYOUT = page_layout(CODEC.spec, BLOCK)


def served() -> ServedLayer:
    return ServedLayer(CODEC, offset=LayerOffset(HEADS, CODEC))


def store(layer: ServedLayer, key: torch.Tensor, starts: torch.Tensor) -> None:
    pages = torch.zeros(4, HEADS, LAYOUT.page_bytes, dtype=torch.uint8)
    layer.store(key, key, layer.packed(pages, LAYOUT), torch.arange(TOKENS) + BLOCK, None, starts)


def test_the_capture_of_a_graph_reads_nothing_back(monkeypatch):
    """Reading the length of the first request back from the device would fail: it is a tensor on the meta device."""
    layer = served()
    monkeypatch.setattr(learned_offset, "is_capturing", lambda device: True)
    store(layer, torch.randn(TOKENS, HEADS, DIM), torch.zeros(3, dtype=torch.int32, device="meta"))
    assert not layer.offset.known


def test_the_first_request_alone_is_learnt_from():
    layer, key = served(), torch.randn(TOKENS, HEADS, DIM) + 3
    store(layer, key, torch.tensor([0, 25, TOKENS], dtype=torch.int32))
    assert torch.equal(layer.offset.tensor, offset_of_keys(key[:MIN_TOKENS].mean(0), key[0], CODEC))
