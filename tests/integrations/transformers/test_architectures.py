"""Every generating class of transformers: the stock answer, or a refusal that says why."""

from __future__ import annotations

from collections import Counter

import pytest
from architecture_table import state
from architectures import classes
from outcomes import ERROR, REFUSED, SAME, Row, outcome

# One class for each way in which architectures differ, and its expected outcome.
SAMPLE = {
    "LlamaForCausalLM": "fused",
    "MistralForCausalLM": "fused",  # sliding windows in every layer
    "Gemma2ForCausalLM": "fused",  # eager, soft cap
    "Gemma3ForConditionalGeneration": "fused",  # sliding and full layers; a vision tower
    "Gemma3nForCausalLM": "fused",  # layers that share keys and values
    "Gemma4ForCausalLM": "fused",  # head sizes that differ by layer
    "GptOssForCausalLM": "fused",  # sinks
    "GPT2LMHeadModel": "fused",
    "BertLMHeadModel": "fused",  # makes its own mask
    "PaliGemmaForConditionalGeneration": "fused",  # modules with is_causal=False
    "FalconH1ForCausalLM": "fused",  # attention and state space in one layer
    "Qwen3NextForCausalLM": "fused",  # linear-attention layers
    "BartForConditionalGeneration": "fused",  # self-attention packed, cross-attention stock
    "WhisperForConditionalGeneration": "fused",
    "DeepseekV3ForCausalLM": "decoded",  # caches latents
    "DeepseekV32ForCausalLM": "decoded",  # sparse indices, unless the attention implementation is named sdpa
    "T5ForConditionalGeneration": "decoded",  # position bias
    "BloomForCausalLM": "decoded",  # its own attention, with views of keys
    "FalconForCausalLM": "decoded",
    "GitForCausalLM": "decoded",  # its own attention, which adds masks
    "DiffLlamaForCausalLM": "decoded",  # repeats values
    "RecurrentGemmaForCausalLM": "decoded",  # its mask does not match the layer
    "DeepseekV4ForCausalLM": "stock",  # its own kind of cache
    "MambaForCausalLM": "refused",  # no keys and values
    "XLNetLMHeadModel": "refused",
}


# Slow to build, or similar to another class.
IN_TAIL = {
    "DeepseekV32ForCausalLM", "DiffLlamaForCausalLM", "FalconForCausalLM", "Gemma3ForConditionalGeneration",
    "GitForCausalLM", "PaliGemmaForConditionalGeneration", "RecurrentGemmaForCausalLM",
    "WhisperForConditionalGeneration", "XLNetLMHeadModel",
}  # fmt: skip


def problem(row: Row) -> str | None:
    """The problem with a row, or None."""
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
    assert found == SAMPLE[name] or (found, SAMPLE[name]) == ("fused", "decoded")  # other versions may allow fusion


@pytest.mark.slow
def test_every_class():
    rows = [row for name in classes() if not (row := outcome(name)).stock]
    assert [x for x in map(problem, rows) if x is not None] == []
    assert len(rows) >= 150
    states = Counter(state(row.to_dict()) for row in rows)
    # The others use no cache or their own kind of cache, so there is nothing to pack.
    assert states["fused"] + states["decoded"] >= 0.9 * len(rows), states
    assert ERROR not in states
