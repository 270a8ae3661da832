"""Every generating class of transformers: the stock answer, or a refusal that says why."""

from __future__ import annotations

from collections import Counter

import pytest
from architecture_table import state
from architectures import classes
from outcomes import ERROR, REFUSED, SAME, Row, outcome

# One of each way in which architectures differ; the value is what becomes of it.
SAMPLE = {
    "LlamaForCausalLM": "fused",
    "MistralForCausalLM": "fused",  # every layer slides
    "Gemma2ForCausalLM": "fused",  # eager, soft cap
    "Gemma3ForConditionalGeneration": "fused",  # sliding and full layers; a vision tower
    "Gemma3nForCausalLM": "fused",  # layers that share keys and values
    "Gemma4ForCausalLM": "fused",  # head sizes that differ by layer
    "GptOssForCausalLM": "fused",  # sinks
    "GPT2LMHeadModel": "fused",
    "BertLMHeadModel": "fused",  # a mask of its own making
    "PaliGemmaForConditionalGeneration": "fused",  # modules that say is_causal=False
    "FalconH1ForCausalLM": "fused",  # attention and state space in one layer
    "Qwen3NextForCausalLM": "fused",  # linear-attention layers
    "BartForConditionalGeneration": "fused",  # self-attention packed, cross-attention stock
    "WhisperForConditionalGeneration": "fused",
    "DeepseekV3ForCausalLM": "decoded",  # caches latents
    "DeepseekV32ForCausalLM": "decoded",  # sparse indices, unless attention is called sdpa
    "T5ForConditionalGeneration": "decoded",  # position bias
    "BloomForCausalLM": "decoded",  # attention of its own, with views of keys
    "FalconForCausalLM": "decoded",
    "GitForCausalLM": "decoded",  # attention of its own, which adds masks
    "DiffLlamaForCausalLM": "decoded",  # values twice
    "RecurrentGemmaForCausalLM": "decoded",  # a mask that is not the layer's
    "DeepseekV4ForCausalLM": "stock",  # a cache of its own kind
    "MambaForCausalLM": "refused",  # no keys and values
    "XLNetLMHeadModel": "refused",
}


# Slow to build, or like another one.
IN_TAIL = {
    "DeepseekV32ForCausalLM", "DiffLlamaForCausalLM", "FalconForCausalLM", "Gemma3ForConditionalGeneration",
    "GitForCausalLM", "PaliGemmaForConditionalGeneration", "RecurrentGemmaForCausalLM",
    "WhisperForConditionalGeneration", "XLNetLMHeadModel",
}  # fmt: skip


def problem(row: Row) -> str | None:
    """What is wrong with a row, or None."""
    assert row.cache is not None
    assert row.fused is not None
    for way, found in (("cache", row.cache), ("attention", row.fused)):
        if found.result not in (SAME, REFUSED) or (found.result == REFUSED and not found.detail):
            return f"{row.name} ({way}): {found.result}, {found.detail}"
    return None


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.tail) if name in IN_TAIL else name for name in SAMPLE]
)
def test_sample(name):
    if name not in classes():
        pytest.skip(f"this transformers has no {name}")
    row = outcome(name)
    if row.stock:
        pytest.skip(f"stock transformers does not run it: {row.stock}")
    assert problem(row) is None
    found = state(row.to_dict())
    assert found == SAMPLE[name] or (found, SAMPLE[name]) == ("fused", "decoded")  # other versions may do better


@pytest.mark.slow
def test_every_class():
    rows = [row for name in classes() if not (row := outcome(name)).stock]
    assert [x for x in map(problem, rows) if x is not None] == []
    assert len(rows) >= 150
    states = Counter(state(row.to_dict()) for row in rows)
    # Those that take no cache, or one of a kind of their own, have nothing to pack.
    assert states["fused"] + states["decoded"] >= 0.9 * len(rows), states
    assert ERROR not in states
