"""Models with random weights that run in milliseconds, one for every kind of attention that the cache supports."""

from __future__ import annotations

from typing import Any

import torch
import transformers

LOSSLESS = "krawfp32vrawfp32"
LOSSLESS_LATENT = "crawfp32rrawfp32"

SHAPE: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 97,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
    "initializer_range": 0.3,
}


def _config(kind: str) -> Any:
    window = {"sliding_window": 24}
    if kind == "llama":
        return transformers.LlamaConfig(**SHAPE)
    if kind == "mha":
        return transformers.LlamaConfig(**{**SHAPE, "num_key_value_heads": 4})
    if kind == "mistral":  # sliding windows in every layer
        return transformers.MistralConfig(**SHAPE, **window)
    if kind == "gemma2":  # alternating sliding and full layers, soft cap
        return transformers.Gemma2Config(**SHAPE, **window, attn_logit_softcapping=5.0, query_pre_attn_scalar=32)
    if kind == "gemma3":  # sliding and full layers
        kinds = ["sliding_attention", "full_attention", "sliding_attention"]
        return transformers.Gemma3TextConfig(**SHAPE, **window, layer_types=kinds, query_pre_attn_scalar=32)
    if kind == "gpt_oss":  # sliding and full layers, sinks
        kinds = ["sliding_attention", "full_attention", "sliding_attention"]
        return transformers.GptOssConfig(
            **SHAPE, **window, layer_types=kinds, num_local_experts=2, num_experts_per_tok=1
        )
    if kind == "llama4":  # chunked and full layers
        kinds = ["chunked_attention", "full_attention", "chunked_attention"]
        return transformers.Llama4TextConfig(
            **SHAPE, attention_chunk_size=24, layer_types=kinds, num_local_experts=2, num_experts_per_tok=1,
            intermediate_size_mlp=64, no_rope_layers=[1, 0, 1],
        )  # fmt: skip
    if kind == "qwen3_next":  # linear attention and full attention
        kinds = ["linear_attention", "full_attention", "linear_attention"]
        return transformers.Qwen3NextConfig(
            **SHAPE, layer_types=kinds, num_experts=2, num_experts_per_tok=1, moe_intermediate_size=32,
            shared_expert_intermediate_size=32, linear_num_key_heads=2, linear_num_value_heads=2,
            linear_key_head_dim=16, linear_value_head_dim=16,
        )  # fmt: skip
    raise AssertionError(kind)


def tiny(kind: str = "llama", dtype: torch.dtype = torch.float32, attention: str | None = None, layers: int = 3) -> Any:
    """A model of ``kind`` with fixed random weights, in eval mode."""
    torch.manual_seed(0)
    config = _config(kind)
    config.num_hidden_layers = layers
    if getattr(config, "layer_types", None) is not None:
        config.layer_types = config.layer_types[:layers]
    # gemma2 and gpt-oss do not support sdpa; their stock attention is eager
    config._attn_implementation = attention or ("eager" if kind in ("gemma2", "gpt_oss") else "sdpa")
    model = transformers.AutoModelForCausalLM.from_config(config).to(dtype).eval()
    with torch.no_grad():  # sinks and some biases are not initialised
        for name, parameter in model.named_parameters():
            if not torch.isfinite(parameter).all() or name.endswith("sinks"):
                parameter.copy_(torch.randn_like(parameter))
    return model


def tokens(batch: int, count: int, seed: int = 0) -> torch.Tensor:
    """Random ids [batch, count] without padding."""
    return torch.randint(2, 97, (batch, count), generator=torch.Generator().manual_seed(seed))


def padded(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Three sequences, two of them with left padding (one by more than a block)."""
    ids = tokens(3, count)
    mask = torch.ones_like(ids)
    mask[0, :5], mask[2, :21] = 0, 0
    return ids * mask, mask


def generate(model, ids, mask, cache, new=24, **kwargs):
    """Generates tokens and logits, greedily by default."""
    kwargs = {"do_sample": False, **kwargs}
    return model.generate(
        ids, attention_mask=mask, past_key_values=cache, max_new_tokens=new, output_logits=True,
        return_dict_in_generate=True, **kwargs,
    )  # fmt: skip
