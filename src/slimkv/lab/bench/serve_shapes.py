"""Model shapes for ``slimkv bench serve``: configurations by name, or a ``config.json``.

Weights are dummies, so only the shape matters. It has everything that determines the work and the cache: layers, heads,
windows, experts, latents.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from slimkv.errors import InputError

_COMMON: dict[str, Any] = {
    "bos_token_id": 1, "eos_token_id": 2, "torch_dtype": "bfloat16", "tie_word_embeddings": False,
}  # fmt: skip
_LLAMA: dict[str, Any] = {
    **_COMMON, "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "rms_norm_eps": 1e-5,
    "attention_bias": False, "mlp_bias": False,
}  # fmt: skip
_DEEPSEEK: dict[str, Any] = {
    **_COMMON, "architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2", "hidden_act": "silu",
    "rms_norm_eps": 1e-6, "attention_bias": False, "q_lora_rank": None, "kv_lora_rank": 512, "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128, "v_head_dim": 128, "first_k_dense_replace": 1, "moe_layer_freq": 1, "n_group": 1,
    "topk_group": 1, "topk_method": "greedy", "scoring_func": "softmax", "norm_topk_prob": False,
    "routed_scaling_factor": 1.0, "rope_theta": 10000.0,
    "rope_scaling": {
        "type": "yarn", "factor": 40, "original_max_position_embeddings": 4096, "beta_fast": 32, "beta_slow": 1,
        "mscale": 0.707, "mscale_all_dim": 0.707,
    },
}  # fmt: skip

SHAPES: dict[str, dict[str, Any]] = {
    "llama-3.1-8b": {
        **_LLAMA, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 128256, "max_position_embeddings": 131072,
        "rope_theta": 500000.0,
    },
    "qwen2.5-7b": {
        **_COMMON, "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_act": "silu",
        "rms_norm_eps": 1e-6, "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28,
        "num_attention_heads": 28, "num_key_value_heads": 4, "vocab_size": 152064, "max_position_embeddings": 32768,
        "rope_theta": 1000000.0, "use_sliding_window": False,
    },
    "gemma-3": {  # the text model of 12B
        **_COMMON, "architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text",
        "hidden_activation": "gelu_pytorch_tanh", "rms_norm_eps": 1e-6, "hidden_size": 3840, "intermediate_size": 15360,
        "num_hidden_layers": 48, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 256,
        "query_pre_attn_scalar": 256, "sliding_window": 1024, "sliding_window_pattern": 6, "vocab_size": 262208,
        "max_position_embeddings": 131072, "rope_theta": 1000000.0, "rope_local_base_freq": 10000.0,
        "tie_word_embeddings": True,
        "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 8,
    },
    "gpt-oss-20b": {
        **_COMMON, "architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "hidden_act": "silu",
        "rms_norm_eps": 1e-5, "hidden_size": 2880, "intermediate_size": 2880, "num_hidden_layers": 24,
        "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64, "sliding_window": 128,
        "num_local_experts": 32, "num_experts_per_tok": 4, "swiglu_limit": 7.0, "attention_bias": True,
        "vocab_size": 201088, "max_position_embeddings": 131072, "rope_theta": 150000.0,
        "rope_scaling": {
            "rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096, "beta_fast": 32.0,
            "beta_slow": 1.0, "truncate": False,
        },
        "layer_types": ["sliding_attention", "full_attention"] * 12,
    },
    "deepseek-v2-lite": {
        **_DEEPSEEK, "hidden_size": 2048, "intermediate_size": 10944, "moe_intermediate_size": 1408,
        "num_hidden_layers": 27, "num_attention_heads": 16, "num_key_value_heads": 16, "n_routed_experts": 64,
        "n_shared_experts": 2, "num_experts_per_tok": 6, "vocab_size": 102400, "max_position_embeddings": 163840,
    },
    "smollm2-135m": {
        **_LLAMA, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9,
        "num_key_value_heads": 3, "head_dim": 64, "vocab_size": 49152, "max_position_embeddings": 8192,
        "rope_theta": 100000.0, "tie_word_embeddings": True,
    },
    "tiny": {
        **_LLAMA, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 512, "max_position_embeddings": 4096,
        "rope_theta": 10000.0,
    },
    "tiny-mla": {
        **_DEEPSEEK, "hidden_size": 128, "intermediate_size": 256, "moe_intermediate_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 4, "first_k_dense_replace": 2, "n_routed_experts": 2,
        "n_shared_experts": 1, "num_experts_per_tok": 1, "vocab_size": 512, "max_position_embeddings": 4096,
        "rope_scaling": {**_DEEPSEEK["rope_scaling"], "original_max_position_embeddings": 1024, "factor": 4},
    },
}  # fmt: skip


def shape_config(shape: str) -> dict[str, Any]:
    """The configuration of a shape: one of ``SHAPES``, or a ``config.json`` (or the folder it is in)."""
    if shape in SHAPES:
        return SHAPES[shape]
    path = Path(shape)
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        raise InputError(
            f"unknown shape {shape!r}; known are {', '.join(SHAPES)}, or give a model's config.json or its folder"
        )
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise InputError(f"{file} is not JSON: {error}") from error
    if not isinstance(config, dict) or not config.get("architectures"):
        raise InputError(f"{file} does not name an architecture, as a model's configuration does")
    return config


def text_field(config: dict[str, Any], name: str) -> int:
    """A field of the text model, which composite models keep in a nested configuration."""
    nested = (config.get(part) or {} for part in ("text_config", "llm_config", "language_config"))
    found = next((part[name] for part in (config, *nested) if part.get(name)), None)
    if found is None:
        raise InputError(f"the configuration of {config['architectures'][0]} has no {name}")
    return int(found)
