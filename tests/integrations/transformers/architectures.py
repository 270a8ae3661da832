"""Builds a tiny model of any generating class in the installed transformers.

Sizes follow from rules on the names of configuration fields, so that new classes can be built, too. ``EXACT`` has what
the rules cannot guess, such as sizes that must match one another.
"""

from __future__ import annotations

import copy
import logging
import re
from typing import Any

import torch
import transformers
from transformers.models.auto import modeling_auto

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, LAYERS, VOCAB, WINDOW = 128, 4, 2, 32, 4, 160, 12
LARGEST = 130e6
FIRST_SPECIAL = 120  # the first id of image, audio and other marker tokens; prompts use smaller ids

MAPPINGS = {
    "causal": "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "image-text": "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES",
    "multimodal": "MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES",
    "seq2seq": "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
    "speech": "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES",
}

# Rules for integer fields (and for fields that are None, if a rule allows it). The first pattern that matches the whole
# name applies.
RULES: list[tuple[str, int]] = [
    (r"num_kv_shared_layers", 2),
    (
        r"(.*_)?vocab_size(_per_layer_input)?|t2u_vocab_size|num_embeddings|codebook_size|"
        r"encoder_hash_byte_group_vocab",
        VOCAB,
    ),
    (r"hidden_size_per_layer_input|laurel_rank|d_rel|gated_norm_rank", 16),
    (r"num_codebooks|num_quantizers|num_code_groups", 2),
    (r"linear_conv_kernel_dim|.*conv_kernel.*|.*d_conv|.*kernel_size|.*patch_size|patch_temporal|.*_stride", -1),
    (r"first_k_dense_replace|num_dense_layers|moe_layer_start_index", 1),
    (r"(num|n)_shared_experts|moe_num_shared_experts|num_nextn_predict_layers", 1),
    (r"num_experts_per_tok(en)?|moe_topk|moe_top_k|moe_k|num_selected_experts", 2),
    (r"top_k_experts", 2),
    (r"(.*_)?(num|n)_?(routed_|local_|text_)?experts|moe_num_experts|zero_expert_num", 4),
    (r"n_group|topk_group|num_expert_group|n_groups|mamba_n_groups|mamba_ngroups|o_groups", 1),
    (r"(moe|shared|expert|shared_expert|expert_ffn|moe_latent)_?(.*_)?(intermediate|hidden)_size", 64),
    (r"(.*_)?(intermediate_size(_.*)?|ffn_dim|ffn_hidden_size|d_ff|dff|dim_ff|mlp_dim|n_inner)", 128),
    (r"(kv|q|o)_lora_rank", 32),
    (r"qk_(rope|nope)_head_dim", 16),
    (r"index_topk", 8),
    (r"index_(head_dim|n_heads)", 16),
    (r"linear_(key|value)_head_dim|linear_head_dim|mamba_d_head|mamba_head_dim|mamba_headdim", 32),
    (r"linear_num(_key|_value)?_heads", 4),
    (
        r"(.*_)?(num_key_value_heads|num_kv_heads|kv_n_heads|num_key_value_heads_.*|"
        r"num_global_key_value_heads)",
        KV_HEADS,
    ),
    (r"mamba_(n_heads|num_heads)|mamba_n_heads|n_mamba_heads", 8),
    (r"(.*_)?(num_attention_heads|attention_heads|n_heads?|num_heads|encoder_attention_heads|num_attn_heads)", HEADS),
    (
        r"(.*_)?(head_dim|kv_channels|d_kv|dim_head|head_size)|qk_head_dim|v_head_dim|rotary_dim|"
        r"query_pre_attn_scalar",
        HEAD_DIM,
    ),
    (r"(mamba_)?(d_state|state_size)|ssm_state_size|mamba_d_state|mamba_dt_rank|time_step_rank|mamba_d_ssm", 16),
    (r"(mamba_)?chunk_size|attention_chunk_size|block_size|local_radius", 8),
    (r"(.*_)?sliding_window|sliding_window_size|attention_window|keep_window_size|conf_attention_.*", WINDOW),
    (r"sliding_window_pattern|global_attn_every_n_layers|attn_layer_period|_sliding_window_pattern", 2),
    (
        r"(.*_)?(num_hidden_layers|n_layers?|num_layers|encoder_layers|decoder_layers|num_(encoder|"
        r"decoder)_layers|depth|layers|num_blocks|num_layers_per_stack)",
        LAYERS,
    ),
    (
        r"(.*_)?(hidden_size|d_model|n_embd|embed_dim|emb_dim|embedding_size|dim_model|(projection|proj|"
        r"projector_input|projector_output|output|hidden|input)_dim|word_embed_proj_dim|"
        r"hidden_size_global|conv_dim|output_channels|out_channels_vision|latent_channels)",
        HIDDEN,
    ),
    (
        r"(.*_)?(max_position_embeddings|n_positions|n_ctx|max_seq_len|seq_length|max_target_positions|"
        r"model_max_length|max_(encoder|decoder)_position_embeddings)",
        512,
    ),
    (r"max_source_positions", 40),
    (r"num_mel_bins", 16),
    (r"num_position_embeddings", 64),
    (r"spatial_merge_size", 2),
    (
        r"num_query_tokens|.*n_latents|.*num_latents|latent_query_num|image_seq_length|"
        r"mm_tokens_per_image|num_image_tokens",
        4,
    ),
    (r"relative_attention_num_buckets|position_bias_num_buckets", 8),
]
UNSET = {"num_key_value_heads": KV_HEADS, "head_dim": HEAD_DIM, "n_routed_experts": 4, "num_experts": 4}
COMPILED = [(re.compile(pattern), value) for pattern, value in RULES]

# Fields that no rule can guess, by model type: of the configuration that contains the decoder, or of a named part.
MIXED = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]
HYBRID = ["linear_attention", "full_attention", "linear_attention", "full_attention"]
SECTIONS = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 6, 6]}
EXACT: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1, 3]},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "dots1": {"n_shared_experts": 1, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1},
    "falcon_h1": {"mamba_d_ssm": 256, "mamba_n_heads": 8, "mamba_d_head": 32},
    "fun_asr_nano_adaptor": {"intermediate_size": HIDDEN // 4},
    "gemma3n_text": {"layer_types": MIXED, "num_kv_shared_layers": 2, "activation_sparsity_pattern": [0.0] * 4},
    "gemma4_assistant": {},
    "gemma4_text": {"layer_types": MIXED, "num_kv_shared_layers": 2},
    "gemma4_unified_text": {"layer_types": MIXED, "num_kv_shared_layers": 2},
    "glm4v_moe_text": {"rope_parameters": {**SECTIONS, "partial_rotary_factor": 0.5, "mrope_section": [2, 3, 3]}},
    "glm4v_text": {"rope_parameters": SECTIONS},
    "glm46v_text": {"rope_parameters": SECTIONS},
    "glm_ocr_text": {"rope_parameters": SECTIONS},
    "granitemoehybrid": {"layer_types": HYBRID},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "mamba2": {"num_heads": 8, "head_dim": 32},
    "mllama_text_model": {"cross_attention_layers": [1]},
    "mllama_vision_model": {
        "intermediate_layers_indices": [0, 2],
        "vision_output_dim": 3 * HIDDEN,
        "num_global_layers": 2,
    },
    "paddleocr_vl_text": {"rope_parameters": SECTIONS},
    "qwen2_5_vl_vision": {"fullatt_block_indexes": [1, 3]},
    "qwen2_5_vl_text": {"rope_parameters": SECTIONS},
    "qwen2_vl_text": {"rope_parameters": SECTIONS},
    "lfm2_moe": {"layer_types": ["conv", "full_attention", "conv", "full_attention"]},
    "zamba2": {"attention_hidden_size": 256, "attention_head_dim": 64, "n_mamba_heads": 8, "mamba_headdim": 32},
    "zaya": {"num_experts_per_tok": 1},
}


def classes() -> dict[str, tuple[str, str]]:
    """Class name -> (kind, model type), for every class that can generate."""
    found: dict[str, tuple[str, str]] = {}
    for kind, mapping in MAPPINGS.items():
        for model_type, names in getattr(modeling_auto, mapping).items():
            for name in (names,) if isinstance(names, str) else names:
                found.setdefault(name, (kind, model_type))
    return found


def _layer_choice(types: list[Any], count: int) -> list[int]:
    """Indices of ``count`` layers that cover as many kinds of layers as possible."""
    first = list(dict.fromkeys(types))
    chosen = [types.index(kind) for kind in first][:count]
    rest = [i for i in range(len(types)) if i not in chosen]
    return sorted(chosen + rest[: count - len(chosen)])


def overrides(default: Any, model_type: str) -> dict[str, Any]:
    """Small values for the size fields of ``default``."""
    small: dict[str, Any] = {}
    special = FIRST_SPECIAL
    fields = {
        name: value
        for name, value in vars(default).items()
        if not name.startswith("_") or name == "_sliding_window_pattern"
    }
    layers = getattr(default, "num_hidden_layers", None)
    layers = layers if isinstance(layers, int) else 0
    kinds = next(
        (list(fields[x]) for x in ("layer_types", "layers_block_type") if isinstance(fields.get(x), list)), None
    )
    chosen = _layer_choice(kinds, LAYERS) if kinds and len(kinds) >= LAYERS else None
    for name, value in fields.items():
        if name in default.sub_configs:
            continue
        if isinstance(value, list | tuple) and layers and len(value) == layers and layers > LAYERS:
            picked = [value[i] for i in chosen or range(LAYERS)]
            small[name] = type(value)(picked)
        elif (
            name.endswith(("token_id", "token_index", "_id")) and isinstance(value, int) and not isinstance(value, bool)
        ):
            if name in ("pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id"):
                small[name] = {"pad": 0, "bos": 1, "eos": 2, "dec": 1}[name[:3]]
            elif value >= VOCAB:
                small[name], special = special, special + 1
        elif isinstance(value, int) and not isinstance(value, bool):
            rule = next((size for pattern, size in COMPILED if pattern.fullmatch(name)), None)
            if rule is not None and rule != -1:
                small[name] = rule
            if name == "image_size":
                small[name] = 4 * (default.patch_size if isinstance(getattr(default, "patch_size", None), int) else 4)
    for name, size in UNSET.items():
        if name in fields and fields[name] is None:
            small[name] = size
    if fields.get("kv_lora_rank") is not None:  # latent attention: every head has its own keys, partly rotated
        small |= {"num_key_value_heads": HEADS, "head_dim": 16, "qk_head_dim": HEAD_DIM}
        small = {name: value for name, value in small.items() if name in fields}
    if isinstance(getattr(default, "rope_parameters", None), dict) or isinstance(fields.get("rope_scaling"), dict):
        small["rope_parameters"] = _rope(dict(default.rope_parameters))
    return small


def _rope(parameters: dict[str, Any]) -> dict[str, Any]:
    """Rope parameters with the sections of multimodal rotary embeddings scaled to the head size."""
    out = {}
    for name, value in parameters.items():
        if isinstance(value, dict):
            value = _rope(value)
        elif name == "mrope_section":
            factor = sum(value) / (HEAD_DIM // 2)
            value = [max(int(x / factor), 1) for x in value]
            value[0] += HEAD_DIM // 2 - sum(value)
        out[name] = value
    return out


def tiny_config(config_class: type, model_type: str, part: str = "") -> Any:
    """A configuration of ``config_class`` with small sizes."""
    default = config_class()
    small = overrides(default, model_type)
    for name in default.sub_configs:
        value = getattr(default, name, None)
        if value is not None:
            small[name] = tiny_config(type(value), value.model_type, name)
    small |= EXACT.get(model_type, {}) if not part else EXACT.get(f"{model_type}.{part}", EXACT.get(model_type, {}))
    return config_class(**small)


def build(name: str) -> Any:
    """The class ``name`` with fixed random weights, in eval mode."""
    _, model_type = classes()[name]
    logging.getLogger("transformers").setLevel(logging.ERROR)
    torch.manual_seed(0)
    model_class = getattr(transformers, name)
    config = tiny_config(transformers.CONFIG_MAPPING[model_type], model_type)
    if not isinstance(config, model_class.config_class):
        config = config.get_text_config()
    with torch.device("meta"):
        size = sum(x.numel() for x in model_class(copy.deepcopy(config)).parameters())
    if size > LARGEST:
        raise ValueError(f"{size / 1e6:.0f} million parameters: too large for a test")
    model = model_class(config).float().eval()
    spread_weights(model)
    generation = model.generation_config
    generation.eos_token_id = generation.forced_eos_token_id = generation.forced_bos_token_id = None
    generation.pad_token_id, generation.bos_token_id, generation.num_beams, generation.max_length = 0, 1, 1, 20
    if model.config.is_encoder_decoder:
        generation.decoder_start_token_id = 1
    generation.suppress_tokens = generation.begin_suppress_tokens = None
    return model


def spread_weights(model: torch.nn.Module) -> None:
    """Makes matrices so large that attention is selective. With the usual initialisation, all answers look alike."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if not parameter.is_floating_point():
                continue
            if parameter.dim() >= 2:
                fan_in = parameter[0].numel() if parameter.dim() != 3 else parameter.shape[1]
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 1.5 / fan_in**0.5)
            elif not torch.isfinite(parameter).all() or name.endswith(("sinks", "_gate")):
                parameter.copy_(torch.randn(parameter.shape, generator=generator))
