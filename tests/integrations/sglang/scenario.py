"""Runs SGLang engines, each request in a fork of this process (``forked.serve``), and returns their results.

The engine's scheduler is a separate process, as in real use. With ``spawned``, it also starts from scratch and loads
slimkv through the plugin. Otherwise it is forked, which saves two imports of SGLang.
"""

from __future__ import annotations

import fcntl
import multiprocessing
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


@contextmanager
def alone(path: str | None) -> Iterator[None]:
    """Holds a lock on the file ``path``, if given, so that concurrent engines are timed one after another."""
    if path is None:
        yield
        return
    with open(path, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def run_engine(request: dict[str, Any]) -> dict[str, Any]:
    import sglang

    if not request["spawned"]:
        start_method = multiprocessing.set_start_method
        multiprocessing.set_start_method = lambda _, force=False: start_method("fork", force=force)
    engine = sglang.Engine(**request["engine"])
    tokens: dict[str, list[list[int]]] = {}
    cached: dict[str, list[int]] = {}
    retracted: dict[str, int] = {}
    verified: dict[str, int] = {}
    updated: dict[str, list[Any]] = {}
    seconds: dict[str, float] = {}
    logprobs: dict[str, list[list[dict[int, float]]]] = {}
    prompt_logprobs: dict[str, list[list[float]]] = {}
    try:
        for run in request["runs"]:
            if run.get("reset"):
                engine.flush_cache()
            if "weights" in run:
                updated[run["name"]] = list(engine.update_weights_from_disk(run["weights"])[:2])
            params = {"temperature": 0, "max_new_tokens": run["max_tokens"], "ignore_eos": not run.get("may_end")}
            batches = [[p] for p in run["prompts"]] if run.get("one_by_one") else [run["prompts"]]
            most = {"return_logprob": True, "top_logprobs_num": run["logprobs"]} if "logprobs" in run else {}
            if run.get("prompt_logprobs"):
                most |= {"return_logprob": True, "logprob_start_len": 0}
            name = run["name"]
            with alone(run.get("lock")):
                begin = time.perf_counter()
                outputs = [
                    o for batch in batches for o in engine.generate(input_ids=batch, sampling_params=params, **most)
                ]
                seconds[name] = time.perf_counter() - begin
            if run.get("prompt_logprobs"):
                prompt_logprobs[name] = [[x[0] for x in o["meta_info"]["input_token_logprobs"][1:]] for o in outputs]
            if "logprobs" in run:
                logprobs[name] = [
                    [{token: logprob for logprob, token, _ in step} for step in o["meta_info"]["output_top_logprobs"]]
                    for o in outputs
                ]
            tokens[name] = [o["output_ids"] for o in outputs]
            cached[name] = [o["meta_info"]["cached_tokens"] for o in outputs]
            retracted[name] = sum(o["meta_info"]["num_retractions"] for o in outputs)
            verified[name] = sum(o["meta_info"].get("spec_verify_ct", 0) for o in outputs)
        info = engine.get_server_info()
        state = info["internal_states"][0]
    finally:
        engine.shutdown()
    return {
        "tokens": tokens,
        "cached": cached,
        "retracted": retracted,
        "verified": verified,  # number of verified chains of drafted tokens
        "updated": updated,  # success and message of runs that load weights
        "seconds": seconds,
        "logprobs": logprobs,  # of the most likely tokens at each position, for runs that request them
        "prompt_logprobs": prompt_logprobs,  # of all prompt tokens except the first
        "max_total_num_tokens": info["max_total_num_tokens"],
        "page_size": info["page_size"],
        "kv_gib": state["memory_usage"]["kvcache"],
    }


def main() -> None:
    sys.path.insert(0, str(Path(__file__).parents[1] / "shared"))
    import torch
    from forked import serve

    entry = ("entrypoints.engine", "managers.scheduler", "managers.detokenizer_manager", "models.llama")
    # With CUDA, importing SGLang initialises the device, and forks could not use it afterwards.
    serve(run_engine, [] if torch.version.cuda else [f"sglang.srt.{name}" for name in entry])


if __name__ == "__main__":
    main()
