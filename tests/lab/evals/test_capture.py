"""Captured queries, keys and values give the model's own attention output."""

import pytest
import torch

from slimkv.lab.evals.attention import attend
from slimkv.lab.evals.samples import capture_attention


def test_capture_records_what_attention_sees():
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=50,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config).eval()
    ids = torch.arange(20)[None] % 50
    before = model.config._attn_implementation
    outputs = []
    hook = model.model.layers[1].self_attn.o_proj.register_forward_pre_hook(lambda _, args: outputs.append(args[0]))
    samples = capture_attention(model, ids, queries=5)
    hook.remove()
    assert model.config._attn_implementation == before
    assert len(samples) == 2
    assert samples[1].key.shape == samples[1].value.shape == (4, 20, 16)
    assert samples[1].query.shape == (4, 5, 16)
    own = attend(samples[1].query, samples[1].key, samples[1].value, causal=True)
    theirs = outputs[0][0, -5:].reshape(5, 4, 16).transpose(0, 1)
    torch.testing.assert_close(own, theirs, rtol=1e-4, atol=1e-6)
