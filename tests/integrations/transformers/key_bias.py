"""Tiny models whose keys have a large constant part, one for each place where model families put a key bias.

The biases of real models lie in dimensions that RoPE hardly rotates (wavelengths beyond the context), so that they are
the same vector at every position. Here they lie in the last dimensions of both halves of a head, and RoPE's base is
large.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from tiny import SHAPE
from torch import Tensor

LAYERS, HEADS, KV_HEADS, HEAD_DIM, HIDDEN = 2, 4, 2, 32, 128
BIAS_NORM = 300.0
_ROPE = {"rope_type": "default", "rope_theta": 1e6}
_SHAPE = {
    **SHAPE, "num_hidden_layers": LAYERS, "hidden_size": HIDDEN, "rope_parameters": _ROPE, "initializer_range": 0.1,
}  # fmt: skip
_HEAD_DIM = {"head_dim": _SHAPE.pop("head_dim")}  # for classes that do not compute it from the hidden size
_HALF_ROTATED = {**_ROPE, "partial_rotary_factor": 0.5}


@dataclass(frozen=True)
class Family:
    """The configuration of a model family, and the location of its key biases."""

    config: Callable[[], Any]
    attentions: Callable[[Any], list[Any]]  # the attention modules of a model
    bias: Callable[[Any], Tensor]  # attention module -> view [num_kv_heads, head_dim] of its key bias


def _layers(name: str) -> Callable[[Any], list[Any]]:
    return lambda model: [getattr(layer, name) for layer in model.get_decoder().layers]


def _own(module: Any) -> Tensor:
    """The bias of a separate key projection."""
    return module.k_proj.bias.view(-1, HEAD_DIM)


def _qwen2_vl() -> Any:
    text = {**_SHAPE, "rope_parameters": {**_ROPE, "mrope_section": [4, 6, 6]}}
    vision = {"depth": 1, "embed_dim": 32, "hidden_size": HIDDEN, "num_heads": 2, "mlp_ratio": 1}
    markers = {"image_token_id": 93, "video_token_id": 94, "vision_start_token_id": 95, "vision_end_token_id": 96}
    return transformers.Qwen2VLConfig(text_config=text, vision_config=vision, **markers)


def _gpt_oss() -> Any:
    kinds = ["sliding_attention", "full_attention"]
    return transformers.GptOssConfig(
        **_SHAPE,
        **_HEAD_DIM,
        layer_types=kinds,
        sliding_window=24,
        num_local_experts=2,
        num_experts_per_tok=2,
    )


def _falcon(new_decoder_architecture: bool) -> Any:
    kv_heads = KV_HEADS if new_decoder_architecture else HEADS
    return transformers.FalconConfig(
        **{**_SHAPE, "num_kv_heads": kv_heads}, new_decoder_architecture=new_decoder_architecture, multi_query=False,
        bias=True, alibi=False,
    )  # fmt: skip


def _opt() -> Any:
    own = {"ffn_dim": 64, "word_embed_proj_dim": HIDDEN, "init_std": 0.1}
    return transformers.OPTConfig(**{**_SHAPE, "num_attention_heads": HEADS, **own})


def _gpt2() -> Any:
    return transformers.GPT2Config(
        vocab_size=97, n_embd=HIDDEN, n_layer=LAYERS, n_head=HEADS, n_positions=512, initializer_range=0.1,
        bos_token_id=1, eos_token_id=None,
    )  # fmt: skip


FAMILIES: dict[str, Family] = {
    "qwen2": Family(lambda: transformers.Qwen2Config(**_SHAPE), _layers("self_attn"), _own),
    "qwen2_vl": Family(_qwen2_vl, _layers("self_attn"), _own),
    "gpt_oss": Family(_gpt_oss, _layers("self_attn"), _own),
    "glm4": Family(
        lambda: transformers.Glm4Config(
            **{**_SHAPE, **_HEAD_DIM, "rope_parameters": _HALF_ROTATED}, attention_bias=True
        ),
        _layers("self_attn"),
        _own,
    ),
    "phi": Family(
        lambda: transformers.PhiConfig(**{**_SHAPE, "rope_parameters": _HALF_ROTATED}), _layers("self_attn"), _own
    ),
    "starcoder2": Family(lambda: transformers.Starcoder2Config(**_SHAPE, use_bias=True), _layers("self_attn"), _own),
    "opt": Family(_opt, _layers("self_attn"), _own),
    # One projection for queries, keys and values. The place of the keys in it differs between these families.
    "falcon": Family(
        lambda: _falcon(True),
        lambda model: [block.self_attention for block in model.transformer.h],
        lambda module: module.query_key_value.bias.view(KV_HEADS, HEADS // KV_HEADS + 2, HEAD_DIM)[:, -2],
    ),
    "falcon_old": Family(
        lambda: _falcon(False),
        lambda model: [block.self_attention for block in model.transformer.h],
        lambda module: module.query_key_value.bias.view(HEADS, 3, HEAD_DIM)[:, 1],
    ),
    "gpt2": Family(
        _gpt2,
        lambda model: [block.attn for block in model.transformer.h],
        lambda module: module.c_attn.bias.view(3, HEADS, HEAD_DIM)[1],
    ),
}
_WINDOW = {**_HEAD_DIM, "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 24}
HEALTHY: dict[str, Callable[[], Any]] = {  # no bias
    "llama": lambda: transformers.LlamaConfig(**_SHAPE),
    "gemma2": lambda: transformers.Gemma2Config(
        **_SHAPE, **_WINDOW, attn_logit_softcapping=5.0, query_pre_attn_scalar=32
    ),
    "gemma3": lambda: transformers.Gemma3TextConfig(**_SHAPE, **_WINDOW, query_pre_attn_scalar=32),
}


def constant(kv_heads: int, seed: int) -> Tensor:
    """A vector of norm ``BIAS_NORM`` per KV head, [kv_heads, head_dim], in dimensions that RoPE hardly rotates."""
    vector = torch.zeros(kv_heads, 2, HEAD_DIM // 2)
    vector[..., -3:] = torch.randn(kv_heads, 2, 3, generator=torch.Generator().manual_seed(seed))
    vector = vector.flatten(1)
    return vector * (BIAS_NORM / vector.norm(dim=-1, keepdim=True))


def biased_model(name: str, bias: bool = True) -> Any:
    """A model of ``FAMILIES`` or ``HEALTHY`` with fixed random weights, in eval mode.

    Args:
        bias: whether the keys of a model of ``FAMILIES`` have a large constant part.
    """
    family = FAMILIES.get(name)
    torch.manual_seed(0)
    config = family.config() if family is not None else HEALTHY[name]()
    config._attn_implementation = "eager" if name in ("gpt_oss", "gemma2") else "sdpa"  # these have no sdpa
    of = transformers.AutoModelForImageTextToText if name == "qwen2_vl" else transformers.AutoModelForCausalLM
    model = of.from_config(config).eval()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter_name.endswith("sinks"):
                parameter.normal_()
            elif parameter_name.endswith("bias"):  # some classes do not initialise them
                parameter.zero_()
        if bias and family is not None:
            for number, module in enumerate(family.attentions(model)):
                view = family.bias(module)
                view.copy_(constant(view.shape[0], number))
                if name == "gpt_oss":
                    _see_sinks(module, view)
    return model


def _see_sinks(module: Any, bias: Tensor) -> None:
    """Shrinks queries along the constant. Otherwise scores would be so large that sinks get all attention or none."""
    weight = module.q_proj.weight.view(HEADS, HEAD_DIM, -1)
    weight[:, bias.abs().sum(0) > 0] *= 0.02
