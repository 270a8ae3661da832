"""Starts engines in separate processes, and provides their arguments and prompts."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from forked import Forked
from prompts import sharing, short_model_folder

LIMIT_SECONDS = 1800  # per engine, on a busy machine
_SCENARIOS = Forked(Path(__file__).with_name("scenario.py"), LIMIT_SECONDS)
ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
}
BASE: dict[str, Any] = {
    "dtype": "float32",  # so that differences come from the cache and not from rounding in GEMMs
    "enforce_eager": True,
    "max_model_len": 1024,
    "block_size": 32,
    "max_num_seqs": 32,
    "max_num_batched_tokens": 96,  # longer prompts are prefilled in chunks
    "disable_log_stats": False,
    "seed": 0,
}


def slimkv(format: str = "k4v4", **settings: Any) -> dict[str, Any]:
    """Engine arguments that enable slimkv."""
    return {"attention_backend": "CUSTOM", "additional_config": {"slimkv": {"format": format, **settings}}}


def connector(name: str, store: Any, role: str = "kv_both", **extra: Any) -> dict[str, Any]:
    """Engine arguments for a KV connector that keeps its pages in the folder ``store``."""
    transfer: dict[str, Any] = {
        "kv_connector": name, "kv_role": role,
        "kv_connector_extra_config": {"shared_storage_path": str(store), **extra},
    }  # fmt: skip
    if name == "SlimKVPromptConnector":
        transfer["kv_connector_module_path"] = "slimkv.integrations.vllm.prompt_connector"
    return {"kv_transfer_config": transfer}


def environment(**extra: str) -> dict[str, str]:
    """Environment of a child process. PYTHONPATH is inherited, so that it finds slimkv as this process does."""
    inherited = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    return {**inherited, **ENVIRONMENT, **extra}


def run_engine(engine: dict[str, Any], runs: list[dict[str, Any]], **extra: str) -> dict[str, Any]:
    """Starts an engine, runs the batches and returns ``scenario.py``'s result. Raises with its output on failure."""
    return _SCENARIOS.run({"engine": {**BASE, **engine}, "runs": runs}, environment(**extra))


def run_engines(
    *each: tuple[dict[str, Any], list[dict[str, Any]]], in_turn: bool = False,
    own: Sequence[dict[str, str]] = (), **extra: str,
) -> list[dict[str, Any]]:  # fmt: skip
    """Runs several engines, either at the same time or one after another in one process (``in_turn``).

    ``own``: environment variables of each engine, if they run at the same time.
    """
    requests = [{"engine": {**BASE, **engine}, "runs": runs} for engine, runs in each]
    for request, environ in zip(requests, own, strict=False):
        request["environment"] = environ
    return _SCENARIOS.run({"engines": requests, "in_turn": in_turn}, environment(**extra))


def refusals(engine: dict[str, Any], refused: dict[str, dict[str, Any]], **extra: str) -> dict[str, str]:
    """Error messages of engines that must not start. ``refused``: additional arguments of each, by name."""
    return _SCENARIOS.run({"engine": {**BASE, **engine}, "refused": refused}, environment(**extra))


def prefixed() -> list[list[int]]:
    """Requests that share six blocks and 12 more tokens."""
    return sharing(6 * BASE["block_size"] + 12)


NGRAM = {
    "speculative_config": {
        "method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4, "prompt_lookup_min": 2,
    }
}  # fmt: skip


# Stock attention to latents in float32. On CPUs with AMX, stock vLLM 0.32 chooses a backend that only runs bfloat16.
STOCK_LATENTS = {"attention_backend": "CPU_MLA"}


def draft_model() -> dict[str, Any]:
    """Engine arguments for drafts by the model itself."""
    return {"speculative_config": {"method": "draft_model", "model": short_model_folder(), "num_speculative_tokens": 3}}


def engine(**arguments: Any) -> dict[str, Any]:
    """Engine arguments, including the model."""
    return {"model": short_model_folder(), **arguments}
