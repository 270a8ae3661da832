"""Enables sparse latent attention in vLLM's CPU build, which refuses it because its indexer needs GPU kernels.

A stand-in for the indexer picks tokens by their positions. Everything else is vLLM's own code.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor


def picked(positions: Tensor, count: int) -> Tensor:
    """Positions that the queries at ``positions`` attend to, int32 [tokens, count], padded with -1.

    They include the query's own position, and are not sorted.
    """
    others = torch.arange(int(positions.max()) + 1)
    scores = (others[None] * 7919 + positions[:, None] * 104729) % 1013
    scores = scores.masked_fill(others[None] == positions[:, None], 5000).masked_fill(others > positions[:, None], -1)
    best = scores.topk(min(count, len(others)), dim=1)
    out = torch.full((len(positions), count), -1, dtype=torch.int32)
    out[:, : best.indices.shape[1]] = best.indices.masked_fill(best.values < 0, -1)
    return out


def install() -> None:
    """Patches vLLM in this process."""
    from vllm.model_executor.models.deepseek_v2 import DeepseekV32IndexerCache, Indexer
    from vllm.platforms.cpu import CpuPlatform

    choose = CpuPlatform.get_attn_backend_cls.__func__

    def get_attn_backend_cls(cls: Any, selected: Any, attn_selector_config: Any, num_heads: int | None = None) -> str:
        return choose(cls, selected, attn_selector_config._replace(use_sparse=False), num_heads)

    def forward(self: Any, hidden_states: Tensor, qr: Tensor, positions: Tensor, rotary_emb: Any) -> Tensor:
        self.topk_indices_buffer[: len(positions)] = picked(positions, self.topk_tokens)
        return self.topk_indices_buffer

    CpuPlatform.get_attn_backend_cls = classmethod(get_attn_backend_cls)
    Indexer.forward = forward
    DeepseekV32IndexerCache.get_kv_cache_spec = lambda self, config: None


def with_indexer(folder: str, count: int) -> str:
    """Turns a saved DeepSeek V3 into a V3.2 whose queries attend to ``count`` tokens."""
    from safetensors.torch import load_file, save_file

    weights, path = load_file(Path(folder, "model.safetensors")), Path(folder, "config.json")
    config = json.loads(path.read_text())
    hidden, sizes = config["hidden_size"], {"k_norm.weight": (128,), "k_norm.bias": (128,)}
    sizes |= {
        "wq_b.weight": (256, config["q_lora_rank"]),
        "wk.weight": (128, hidden),
        "weights_proj.weight": (2, hidden),
    }
    for i in range(config["num_hidden_layers"] + config.get("num_nextn_predict_layers", 0)):
        weights |= {f"model.layers.{i}.self_attn.indexer.{name}": torch.ones(size) for name, size in sizes.items()}
    save_file(weights, Path(folder, "model.safetensors"), metadata={"format": "pt"})
    config |= {"architectures": ["DeepseekV32ForCausalLM"], "model_type": "deepseek_v32"}
    config |= {"index_topk": count, "index_n_heads": 2, "index_head_dim": 128}
    path.write_text(json.dumps(config))
    return folder


def restricted_tokens(folder: str, prompts: list[list[int]], made: int, count: int) -> list[list[int]]:
    """Greedy tokens by transformers, with the dense attention of a V3 masked to the picked tokens."""
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    out = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        for _ in range(made):
            size = ids.shape[1]
            seen = torch.zeros(size, size + 1, dtype=torch.bool)
            seen.scatter_(1, picked(torch.arange(size), count).long() % (size + 1), True)  # -1: extra column
            mask = torch.where(seen[None, None, :, :size], 0.0, torch.finfo(torch.float32).min)
            with torch.no_grad():
                logits = model(ids, attention_mask=mask, use_cache=False).logits
            ids = torch.cat([ids, logits[:, -1:].argmax(-1)], 1)
        out.append(ids[0, len(prompt) :].tolist())
    return out
