"""Engines in processes of their own, and the prompts they are asked."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from forked import Forked
from prompts import sharing, short_model_folder

LIMIT_SECONDS = 1800  # for one engine, on a machine that does other work
_SCENARIOS = Forked(Path(__file__).with_name("scenario.py"), LIMIT_SECONDS)
ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
}
BASE: dict[str, Any] = {
    "dtype": "float32",  # what is left to compare is the cache, not the rounding of products
    "enforce_eager": True,
    "max_model_len": 1024,
    "block_size": 32,
    "max_num_seqs": 32,
    "max_num_batched_tokens": 96,  # prompts longer than this come in chunks
    "disable_log_stats": False,
    "seed": 0,
}


def slimkv(format: str = "k4v4", **settings: Any) -> dict[str, Any]:
    """The engine arguments that switch slimkv on."""
    return {"attention_backend": "CUSTOM", "additional_config": {"slimkv": {"format": format, **settings}}}


def connector(name: str, store: Any, role: str = "kv_both", **extra: Any) -> dict[str, Any]:
    """The engine arguments of a KV connector that keeps its pages in the folder ``store``."""
    transfer: dict[str, Any] = {
        "kv_connector": name, "kv_role": role,
        "kv_connector_extra_config": {"shared_storage_path": str(store), **extra},
    }  # fmt: skip
    if name == "SlimKVPromptConnector":
        transfer["kv_connector_module_path"] = "slimkv.integrations.vllm.prompt_connector"
    return {"kv_transfer_config": transfer}


def environment(**extra: str) -> dict[str, str]:
    """For a child process. PYTHONPATH lets it find slimkv as this process does."""
    inherited = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    return {**inherited, **ENVIRONMENT, **extra}


def run_engine(engine: dict[str, Any], runs: list[dict[str, Any]], **extra: str) -> dict[str, Any]:
    """Starts an engine, runs the batches and returns what ``scenario.py`` wrote; raises with its output on failure."""
    return _SCENARIOS.run({"engine": {**BASE, **engine}, "runs": runs}, environment(**extra))


def run_engines(
    *each: tuple[dict[str, Any], list[dict[str, Any]]], in_turn: bool = False,
    own: Sequence[dict[str, str]] = (), **extra: str,
) -> list[dict[str, Any]]:  # fmt: skip
    """``run_engine`` of several engines with their runs, all at the same time or in one process, one after another.

    ``own``: environment variables of each engine, of those at the same time.
    """
    requests = [{"engine": {**BASE, **engine}, "runs": runs} for engine, runs in each]
    for request, environ in zip(requests, own, strict=False):
        request["environment"] = environ
    return _SCENARIOS.run({"engines": requests, "in_turn": in_turn}, environment(**extra))


def refusals(engine: dict[str, Any], refused: dict[str, dict[str, Any]], **extra: str) -> dict[str, str]:
    """What engines say that must not start: ``refused`` has the arguments of each beside those of ``engine``."""
    return _SCENARIOS.run({"engine": {**BASE, **engine}, "refused": refused}, environment(**extra))


def prefixed() -> list[list[int]]:
    """Requests that share six blocks and a little more."""
    return sharing(6 * BASE["block_size"] + 12)


NGRAM = {
    "speculative_config": {
        "method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4, "prompt_lookup_min": 2,
    }
}  # fmt: skip


def draft_model() -> dict[str, Any]:
    """The model drafting for itself."""
    return {"speculative_config": {"method": "draft_model", "model": short_model_folder(), "num_speculative_tokens": 3}}


def engine(**arguments: Any) -> dict[str, Any]:
    """Engine arguments with the model."""
    return {"model": short_model_folder(), **arguments}
