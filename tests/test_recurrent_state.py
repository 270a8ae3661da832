"""States of hybrid models, against sizes that vLLM reports for the same configurations."""

import pytest

from slimkv.memory_plan import make_plan, shape_of
from slimkv.recurrent_state import StateShape, aligned_block_size

QWEN3_NEXT = {
    "model_type": "qwen3_next", "num_hidden_layers": 48, "num_attention_heads": 16, "num_key_value_heads": 2,
    "head_dim": 256, "hidden_size": 2048, "linear_num_key_heads": 16, "linear_num_value_heads": 32,
    "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4,
    "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 12,
}  # fmt: skip
NEMOTRON_H = {
    "model_type": "nemotron_h", "num_hidden_layers": 4, "num_attention_heads": 32, "num_key_value_heads": 8,
    "head_dim": 128, "hidden_size": 4096, "hybrid_override_pattern": "M-M*", "mamba_num_heads": 128,
    "mamba_head_dim": 64, "ssm_state_size": 128, "n_groups": 8, "conv_kernel": 4, "mamba_ssm_dtype": "float32",
}  # fmt: skip
FALCON_H1 = {
    "model_type": "falcon_h1", "num_hidden_layers": 4, "num_attention_heads": 12, "num_key_value_heads": 2,
    "head_dim": 128, "hidden_size": 3072, "mamba_n_heads": 24, "mamba_d_head": 128, "mamba_d_state": 256,
    "mamba_n_groups": 1, "mamba_d_conv": 4, "mamba_ssm_dtype": "float32",
}  # fmt: skip
JAMBA = {
    "model_type": "jamba", "num_hidden_layers": 8, "num_attention_heads": 32, "num_key_value_heads": 8,
    "hidden_size": 4096, "attn_layer_period": 8, "attn_layer_offset": 4, "mamba_expand": 2, "mamba_d_state": 16,
    "mamba_d_conv": 4,
}  # fmt: skip
LLAMA = {"model_type": "llama", "num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 128}


@pytest.mark.parametrize(
    ("config", "layers", "numbers"),
    [
        (QWEN3_NEXT, 36, 2 * 3 * (2 * 16 * 128 + 32 * 128) + 2 * 32 * 128 * 128),
        (NEMOTRON_H, 2, 2 * 3 * (128 * 64 + 2 * 8 * 128) + 4 * 128 * 64 * 128),
        (FALCON_H1, 4, 2 * 3 * (24 * 128 + 2 * 256) + 4 * 24 * 128 * 256),
        (JAMBA, 7, 2 * 3 * 8192 + 2 * 8192 * 16),
    ],
)
def test_states(config, layers, numbers):
    assert shape_of(config).state == StateShape(layers, numbers)


def test_models_without_states_and_unknown_ones():
    assert shape_of(LLAMA).state is None
    unknown = {**LLAMA, "layer_types": ["mamba", "attention"]}
    assert shape_of(unknown).state is None, "sizes that are not given are not guessed"


def test_blocks_are_what_vllm_makes_of_them():
    """Qwen3-Next: 544 tokens in bf16 and 2,112 in k4v4, as vLLM logs them."""
    plan = make_plan(shape_of(QWEN3_NEXT), ["raw", "k4v4"], 2**34)
    assert [row.hybrid_block_size for row in plan.formats] == [544, 2112]
    assert aligned_block_size(1, 520.0, 64) == 64


def test_states_take_their_share_of_the_memory():
    shape = shape_of(QWEN3_NEXT)
    plan = make_plan(shape, ["k4v4"], 2**32, sequences=4)
    assert plan.state_bytes_per_sequence == shape.state.sequence_bytes > 0
    without = make_plan(
        type(shape)(shape.name, shape.groups), ["k4v4"], 2**32 - 4 * shape.state.sequence_bytes, sequences=4
    )
    assert plan.formats[0].total_tokens == without.formats[0].total_tokens
    none = make_plan(shape, ["k4v4"], 1000)
    assert none.formats[0].tokens_per_sequence == 0


def test_a_model_without_states_has_no_such_block():
    plan = make_plan(shape_of(LLAMA), ["k4v4"], 2**30)
    assert (plan.state_bytes_per_sequence, plan.formats[0].hybrid_block_size) == (0, None)
