"""State sizes of hybrid models, compared with those that vLLM reports for the same configurations."""

import re
from pathlib import Path

import pytest

from slimkv.errors import InputError, UnsupportedError
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
LATENT = {
    "num_hidden_layers": 4, "num_attention_heads": 32, "hidden_size": 2304, "kv_lora_rank": 512, "qk_rope_head_dim": 64,
    "layer_types": ["linear_attention"] * 3 + ["full_attention"],
}  # fmt: skip
KIMI_LINEAR = {
    **LATENT, "model_type": "kimi_linear", "linear_num_heads": 24, "linear_head_dim": 128, "linear_conv_kernel_dim": 4,
}  # fmt: skip
BAILING = {
    **LATENT, "model_type": "bailing_hybrid", "head_dim": 64, "linear_num_heads": 32, "linear_head_dim": 128,
    "short_conv_kernel_size": 4, "linear_conv_kernel_dim": 4, "layer_group_size": 4,
}  # fmt: skip
MINIMAX = {
    "model_type": "minimax", "num_hidden_layers": 8, "num_attention_heads": 64, "num_key_value_heads": 8,
    "head_dim": 128, "hidden_size": 6144, "layer_types": (["linear_attention"] * 7 + ["full_attention"]),
}  # fmt: skip
LFM2 = {
    "model_type": "lfm2", "num_hidden_layers": 4, "num_attention_heads": 32, "num_key_value_heads": 8,
    "hidden_size": 2048, "conv_L_cache": 3, "layer_types": ["conv", "conv", "full_attention", "conv"],
}  # fmt: skip
LLAMA = {"model_type": "llama", "num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 128}


@pytest.mark.parametrize(
    ("config", "layers", "numbers"),
    [
        (QWEN3_NEXT, 36, 2 * 3 * (2 * 16 * 128 + 32 * 128) + 2 * 32 * 128 * 128),
        (NEMOTRON_H, 2, 2 * 3 * (128 * 64 + 2 * 8 * 128) + 4 * 128 * 64 * 128),
        (FALCON_H1, 4, 2 * 3 * (24 * 128 + 2 * 256) + 4 * 24 * 128 * 256),
        (JAMBA, 7, 2 * 3 * 8192 + 2 * 8192 * 16),
        (KIMI_LINEAR, 3, 2 * 3 * (3 * 24 * 128) + 4 * 24 * 128 * 128),
        (BAILING, 3, 2 * 3 * (3 * 32 * 128) + 4 * 32 * 128 * 128),
        (MINIMAX, 7, 2 * 64 * 128 * 128),
        (LFM2, 3, 2 * 2 * 2048),
    ],
)
def test_states(config, layers, numbers):
    assert shape_of(config).state == StateShape(layers, numbers)


def test_a_model_without_states():
    assert shape_of(LLAMA).state is None


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({**LLAMA, "layer_types": ["mamba", "attention"]}, "'llama' has 1 layers .* of unknown size"),
        ({**LLAMA, "layer_types": ["conv", "attention"]}, "with a recurrent state of unknown size"),
        ({**NEMOTRON_H, "mamba_ssm_dtype": "int4"}, "state in int4 .known are float32"),
        ({**NEMOTRON_H, "hybrid_override_pattern": "M-G*"}, "layer type 'G' is unknown"),
    ],
)
def test_states_of_unknown_size_are_refused(config, message):
    with pytest.raises(UnsupportedError, match=message):
        shape_of(config)


def _values_of_models_code(name: str, config: dict) -> tuple[int, int]:
    """How many values transformers keeps: (convolution state without its oldest column, recurrent state)."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    few = {"num_hidden_layers": 2, "vocab_size": 32, "intermediate_size": 32, "pad_token_id": 0}
    model = transformers.AutoModelForCausalLM.from_config(transformers.CONFIG_MAPPING[name](**few, **config)).eval()
    with torch.no_grad():
        layer = model(torch.arange(1, 6)[None]).past_key_values.layers[0]
    columns = [x for x in layer.conv_states.values() if x is not None]
    states = [x for x in layer.recurrent_states.values() if x is not None]
    return sum(x[..., 1:].numel() for x in columns), sum(x.numel() for x in states)


KEEPS = re.compile(r"\b(update_conv_state|update_recurrent_state|set_linear_cache)\(")
EXPERTS = {
    "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "n_group": 1, "topk_group": 1,
    "n_shared_experts": 1,
}  # fmt: skip
SMALL = {
    "kimi_linear": {
        **EXPERTS, "kv_lora_rank": 32, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 16,
        "num_attention_heads": 4, "num_key_value_heads": 4, "linear_num_heads": 6, "linear_head_dim": 24,
        "linear_conv_kernel_dim": 3, "layer_types": ["linear_attention", "full_attention"], "hidden_size": 48,
    },
    "bailing_hybrid": {
        **EXPERTS, "kv_lora_rank": 32, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 16,
        "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 24, "short_conv_kernel_size": 3,
        "layer_group_size": 2, "hidden_size": 48,
    },
    "lfm2": {
        "num_attention_heads": 4, "num_key_value_heads": 2, "conv_L_cache": 4, "hidden_size": 48,
        "layer_types": ["conv", "full_attention"],
    },
    "olmo_hybrid": {
        "num_attention_heads": 4, "num_key_value_heads": 2, "linear_num_key_heads": 4, "linear_num_value_heads": 4,
        "linear_key_head_dim": 16, "linear_value_head_dim": 24, "linear_conv_kernel_dim": 3,
        "layer_types": ["linear_attention", "full_attention"], "hidden_size": 64,
    },
}  # fmt: skip


@pytest.mark.parametrize("name", SMALL)
def test_states_have_as_many_values_as_transformers_keeps(name):
    config = pytest.importorskip("transformers").CONFIG_MAPPING[name](num_hidden_layers=2, **SMALL[name]).to_dict()
    convolution, recurrent = _values_of_models_code(name, SMALL[name])
    dtype = 4 if config.get("linear_num_heads") else 2
    assert shape_of(config).state == StateShape(1, 2 * convolution + dtype * recurrent)
    assert convolution > 0


def test_no_model_of_transformers_has_states_of_no_bytes():
    """For every model class that keeps states, the default configuration gives a positive state size or is refused."""
    transformers = pytest.importorskip("transformers")
    counted = 0
    for file in sorted(Path(transformers.__file__).parent.glob("models/*/modeling_*.py")):
        name = file.parent.name
        if name not in transformers.CONFIG_MAPPING or not KEEPS.search(file.read_text(encoding="utf-8")):
            continue
        config = transformers.CONFIG_MAPPING[name]().to_dict()
        if set(config.get("layer_types") or ()) == {"full_attention"}:
            continue
        try:
            state = shape_of(config).state
        except (UnsupportedError, InputError):
            continue
        assert state is not None, name
        assert state.sequence_bytes > 0, name
        counted += 1
    assert counted >= 7


def test_blocks_are_what_vllm_makes_of_them():
    """Qwen3-Next: vLLM logs blocks of 544 tokens for bf16 and of 2,112 tokens for k4v4."""
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
