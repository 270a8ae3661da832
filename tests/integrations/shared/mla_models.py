"""Small models of latent attention with random weights.

They use YaRN: with plain RoPE, vLLM's CPU build generates different tokens for a batch than for its requests alone. The
sizes of the latent are those that vLLM's CPU kernel supports.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers

LAYERS = 3
YARN = {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 256, "beta_fast": 32,
    "beta_slow": 1, "mscale": 0.707, "mscale_all_dim": 0.707,
}  # fmt: skip
SIZES: dict[str, Any] = {
    "hidden_size": 128, "intermediate_size": 128, "moe_intermediate_size": 64, "num_hidden_layers": LAYERS,
    "num_attention_heads": 4, "num_key_value_heads": 4, "kv_lora_rank": 512, "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 32, "v_head_dim": 48, "n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2,
    "n_group": 1, "topk_group": 1, "moe_layer_freq": 1, "first_k_dense_replace": LAYERS, "vocab_size": 512,
    "max_position_embeddings": 1024, "rope_parameters": YARN, "initializer_range": 0.1, "tie_word_embeddings": False,
    "bos_token_id": None, "eos_token_id": None, "pad_token_id": 0,
}  # fmt: skip
LONG = [[(5 * j * j + 11 * i) % 500 + 3 for j in range(200 + 93 * i)] for i in range(3)]
PROMPTS = [[(7 * i + 3 * j * j) % 500 + 3 for j in range(5 + 67 * i)] for i in range(4)]


def deepseek_v2(**sizes: int) -> Any:
    """Queries have no low-rank projection, as in V2-Lite. ``sizes`` override ``SIZES``."""
    config = transformers.DeepseekV2Config(**SIZES | sizes, q_lora_rank=None, topk_method="greedy")
    return transformers.DeepseekV2ForCausalLM(config)


def deepseek_v3() -> Any:
    """Low-rank queries, interleaved RoPE."""
    return transformers.DeepseekV3ForCausalLM(transformers.DeepseekV3Config(**SIZES, q_lora_rank=64))


def saved(make: Any, folder: Any) -> str:
    """Saves the model with random weights and returns the folder."""
    torch.manual_seed(0)
    make().eval().save_pretrained(folder)
    return str(folder)


def with_drafting_layer(folder: str) -> str:
    """Adds a layer for multi-token prediction (MTP) to a saved DeepSeek-V3: a copy of its last layer, with an MTP head.

    It drafts nonsense, which verification must reject.
    """
    from safetensors.torch import load_file, save_file

    path = Path(folder)
    weights = load_file(path / "model.safetensors")
    own, new = f"model.layers.{LAYERS - 1}.", f"model.layers.{LAYERS}."
    more = {name.replace(own, new): x.clone() for name, x in weights.items() if name.startswith(own)}
    size = SIZES["hidden_size"]
    more |= {f"{new}{name}.weight": torch.ones(size) for name in ("enorm", "hnorm", "shared_head.norm")}
    more[f"{new}eh_proj.weight"] = 0.1 * torch.randn(size, 2 * size)
    more[f"{new}embed_tokens.weight"] = weights["model.embed_tokens.weight"].clone()
    more[f"{new}shared_head.head.weight"] = weights["lm_head.weight"].clone()
    save_file({**weights, **more}, path / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((path / "config.json").read_text())
    config |= {"num_nextn_predict_layers": 1, "first_k_dense_replace": LAYERS + 1}
    (path / "config.json").write_text(json.dumps(config))
    return folder


def transformers_tokens(folder: str, prompts: list[list[int]], count: int) -> list[list[int]]:
    """Greedy tokens by transformers, for one prompt after another."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    out = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        made = model.generate(ids, max_new_tokens=count, do_sample=False, attention_mask=torch.ones_like(ids))
        out.append(made[0, len(prompt) :].tolist())
    return out
