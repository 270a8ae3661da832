"""Builds pools and batches without an engine."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from slimkv.config import KVCacheConfig
from slimkv.integrations.serving.model import ServedModel
from slimkv.integrations.sglang.pool import SlimKVPool, bind
from slimkv.integrations.sglang.sizing import CachePlan, LayerPages
from slimkv.spec import CodecSpec, page_layout

HEADS, DIM, PAGE = 2, 64, 16


def make_plan(formats: list[str], page_size: int = PAGE, label: str | None = None, **config: Any) -> CachePlan:
    layers = tuple(
        LayerPages(i, page_layout(CodecSpec.parse(f, DIM).with_raw_dtype("float32"), page_size), HEADS)
        for i, f in enumerate(formats)
    )
    model = ServedModel(KVCacheConfig(formats[0], **config), "", None, 2048, lambda: (0, 1), random_weights=True)
    return CachePlan(model, page_size, {label: layers})


def make_pool(formats: list[str], size: int = 8 * PAGE, page_size: int = PAGE, **others: Any) -> SlimKVPool:
    arguments = {
        "head_num": HEADS, "head_dim": DIM, "layer_num": len(formats), "device": "cpu", "enable_memory_saver": False,
    }  # fmt: skip
    plan = make_plan(formats, page_size)
    return bind(plan, ())(size, page_size=page_size, dtype=torch.float32, **(arguments | others))


class Mode(SimpleNamespace):
    """Stands in for SGLang's forward mode."""

    def is_decode_or_idle(self) -> bool:
        return self.name == "DECODE"

    def is_target_verify(self) -> bool:
        return self.name == "TARGET_VERIFY"


def make_batch(mode: str, requests: list[int], seq_lens: list[int], new: list[int], slots: torch.Tensor) -> Any:
    """Stands in for SGLang's ``ForwardBatch``. ``seq_lens`` follow SGLang's convention for ``mode``."""
    return SimpleNamespace(
        forward_mode=Mode(name=mode), batch_size=len(requests), req_pool_indices=torch.tensor(requests),
        seq_lens=torch.tensor(seq_lens), seq_lens_cpu=torch.tensor(seq_lens), extend_seq_lens_cpu=new,
        input_ids=torch.zeros(sum(new)), positions=torch.zeros(sum(new)), out_cache_loc=slots, spec_info=None,
    )  # fmt: skip
