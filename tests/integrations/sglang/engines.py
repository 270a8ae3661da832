"""Starts engines in separate processes, and provides their arguments and prompts."""

from __future__ import annotations

import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from forked import Forked
from prompts import piece, sharing, short_model_folder

ENVIRONMENT = {
    **({} if torch.version.cuda else {"SGLANG_USE_CPU_ENGINE": "1"}),
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "TORCHDYNAMO_DISABLE": "1",  # compiling small functions would take minutes
}
PAGE = 32
LIMIT_SECONDS = 1200  # per engine
SCRIPT = Path(__file__).with_name("scenario.py")
_SCENARIOS = Forked(SCRIPT, LIMIT_SECONDS)
BASE: dict[str, Any] = {
    "device": "cpu",
    "dtype": "float32",  # so that differences come from the cache and not from rounding in GEMMs
    "attention_backend": "torch_native",
    "context_length": 1024,
    "max_running_requests": 32,
    "chunked_prefill_size": 96,  # longer prompts are prefilled in chunks
    "max_total_tokens": 6144,
    "skip_tokenizer_init": True,
    "disable_cuda_graph": True,
    "random_seed": 0,
    "log_level": "warning",
}


def override_args(format: str = "k4v4", more: dict[str, Any] | None = None, **settings: Any) -> str:
    """The JSON of ``--json-model-override-args`` with slimkv's settings."""
    return json.dumps({"slimkv": {"format": format, **settings}, **(more or {})})


def slimkv(format: str = "k4v4", more: dict[str, Any] | None = None, **settings: Any) -> dict[str, Any]:
    """Engine arguments that enable slimkv."""
    return {
        "attention_backend": "slimkv",
        "page_size": PAGE,
        "json_model_override_args": override_args(format, more, **settings),
    }


def cold(entry: Any = "k4v4", **arguments: Any) -> dict[str, Any]:
    """Engine arguments for SGLang's own attention with packed pages in host memory."""
    return {
        "json_model_override_args": json.dumps({"slimkv": {"cold": entry}}), "page_size": PAGE,
        "enable_hierarchical_cache": True, "hicache_mem_layout": "layer_first", **arguments,
    }  # fmt: skip


def environment(**extra: str) -> dict[str, str]:
    """Environment of a child process."""
    inherited = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    return {**inherited, **ENVIRONMENT, **extra}


def run_engine(
    engine: dict[str, Any], runs: list[dict[str, Any]], *, spawned: bool = False, **extra: str
) -> dict[str, Any]:
    """Starts an engine, runs the batches and returns ``scenario.py``'s result. Raises with its output on failure."""
    request = {"engine": {**BASE, **engine}, "runs": runs, "spawned": spawned}
    return _SCENARIOS.run(request, environment(**extra))


def run_engines(*each: tuple[dict[str, Any], list[dict[str, Any]]], **extra: str) -> list[dict[str, Any]]:
    """Runs several engines at the same time, each started in a new process, as users do."""
    requests = [
        {"engine": {**BASE, **engine, "port": 31000 + 100 * i, "nccl_port": 32000 + i}, "runs": runs, "spawned": True}
        for i, (engine, runs) in enumerate(each)
    ]
    with ThreadPoolExecutor(len(requests)) as pool:
        found = pool.map(lambda one: Forked(SCRIPT, LIMIT_SECONDS).run(one, environment(**extra)), requests)
        return list(found)


def plugin_path(folder: Path, name: str, register: str) -> str:
    """A PYTHONPATH with ``folder``, in which SGLang finds a plugin with the entry point ``register``."""
    info = folder / f"{name}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[sglang.srt.plugins]\n{name} = {register}\n")
    return os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])


def prefixed() -> list[list[int]]:
    """Requests that share six pages and 12 more tokens."""
    return sharing(6 * PAGE + 12)


def ngram_drafts(tokens: int = 4) -> dict[str, Any]:
    """Engine arguments for n-gram drafts, in chains of ``tokens``."""
    return {
        "speculative_algorithm": "NGRAM", "speculative_ngram_max_bfs_breadth": 1,
        "speculative_num_draft_tokens": tokens,
    }  # fmt: skip


def model_drafts(folder: str, attention: str = "torch_native", steps: int = 3) -> dict[str, Any]:
    """Engine arguments for drafts by the model in ``folder``, in chains of ``steps`` + 1 tokens including the root.

    ``attention`` is the backend that reads the draft model's own cache.
    """
    return {
        "speculative_algorithm": "STANDALONE", "speculative_draft_model_path": folder, "speculative_num_steps": steps,
        "speculative_eagle_topk": 1, "speculative_num_draft_tokens": steps + 1,
        "speculative_draft_attention_backend": attention,
    }  # fmt: skip


def many() -> list[list[int]]:
    """32 prompts of 2 to 98 tokens."""
    return [piece(37 * i, 2 + (29 * i) % 97) for i in range(32)]


def crowd() -> list[list[int]]:
    """8 prompts that outgrow a tiny cache while they decode."""
    return [piece(50 * i, 28) for i in range(8)]


def engine(**arguments: Any) -> dict[str, Any]:
    """Engine arguments, including the model."""
    return {"model_path": short_model_folder(), **arguments}


def write_windowed_model(folder: Path) -> str:
    """Writes the configuration of a small model, for dummy weights. Every second layer has a window of 40 tokens."""
    types = ["sliding_attention", "full_attention"] * 2
    config = {
        "architectures": ["Cohere2ForCausalLM"], "model_type": "cohere2", "hidden_size": 128,
        "intermediate_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
        "head_dim": 32, "vocab_size": 49152, "max_position_embeddings": 2048, "sliding_window": 40,
        "sliding_window_pattern": 2, "layer_types": types, "layer_norm_eps": 1e-5, "rope_theta": 10000.0,
        "logit_scale": 1.0, "torch_dtype": "float32", "hidden_act": "silu", "attention_bias": False,
        "tie_word_embeddings": True, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "use_qk_norm": False,
    }  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)
