"""Runs vLLM engines, each request in a fork of this process (``forked.serve``), and returns their results.

vLLM keeps its choice of attention backend as long as the process lives, so only engines with the same backend may share
a process.
"""

from __future__ import annotations

import json
import math
import os
import sys
from pathlib import Path
from typing import Any

COUNTERS = (
    "vllm:external_prefix_cache_hits",
    "vllm:num_preemptions",
    "vllm:prefix_cache_hits",
    "vllm:spec_decode_num_accepted_tokens",
    "vllm:spec_decode_num_drafts",
)


def keep_chunks() -> None:
    """Keeps chunked prefill and prefix caching on, which vLLM's CPU build turns off for latent attention.

    vLLM's own CPU kernel for latents needs both off, unless the CPU has AMX. slimkv does not.
    """
    from vllm.platforms.cpu import CpuPlatform

    original = CpuPlatform.check_and_update_config.__func__

    def check_and_update_config(cls: Any, vllm_config: Any) -> None:
        scheduler, cache = vllm_config.scheduler_config, vllm_config.cache_config
        wanted = (
            (scheduler, "enable_chunked_prefill", scheduler.enable_chunked_prefill),
            (scheduler, "max_num_batched_tokens", scheduler.max_num_batched_tokens),
            (cache, "enable_prefix_caching", cache.enable_prefix_caching),
        )
        original(cls, vllm_config)
        for owner, name, value in wanted:
            setattr(owner, name, value)

    CpuPlatform.check_and_update_config = classmethod(check_and_update_config)


def exact_rows() -> None:
    """Computes every linear layer row by row; see ``row_exact``."""
    del os.environ["EXACT_ROWS"]  # so that later engines of this process do not patch again
    from row_exact import row_by_row
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod
    from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

    def around(original: Any) -> Any:
        def apply(self: Any, layer: Any, x: Any, bias: Any = None) -> Any:
            return row_by_row(lambda row: original(self, layer, row, bias), x)

        return apply

    for method in (UnquantizedLinearMethod, UnquantizedEmbeddingMethod):
        method.apply = around(method.apply)


def run_engine(request: dict[str, Any]) -> dict[str, Any]:
    from vllm import LLM, SamplingParams

    os.environ.update(request.get("environment", {}))
    if os.environ.get("KEEP_CHUNKS"):
        keep_chunks()
    if os.environ.get("SPARSE_ON_CPU"):
        import sparse_on_cpu

        sparse_on_cpu.install()
    if os.environ.get("EXACT_ROWS"):
        exact_rows()
    llm = LLM(**request["engine"])
    tokens: dict[str, list[list[int]]] = {}
    after: dict[str, dict[str, float]] = {}
    logprobs: dict[str, list[list[dict[int, float]]]] = {}
    checksums: dict[str, dict[str, str]] = {}
    refused: dict[str, str] = {}
    for run in request["runs"]:
        if "reload" in run:
            try:
                llm.collective_rpc("reload_weights", kwargs=run["reload"])
            except Exception as error:
                refused[run["name"]] = f"{type(error).__name__}: {error}"
        if run.get("checksums"):
            checksums[run["name"]] = llm.collective_rpc("compute_weight_checksums")[0]
        if run.get("reset"):
            llm.reset_prefix_cache()
        if run.get("sleep"):
            llm.sleep(level=run["sleep"])
            llm.wake_up()
        count = run["max_tokens"]
        params = SamplingParams(
            temperature=0, max_tokens=count, ignore_eos=True, logprobs=run.get("logprobs"), detokenize=False
        )
        prompts = [{"prompt_token_ids": p} for p in run["prompts"]]
        batches = [[p] for p in prompts] if run.get("one_by_one") else [prompts]
        outputs = [o for batch in batches for o in llm.generate(batch, params, use_tqdm=False)]
        tokens[run["name"]] = [list(o.outputs[0].token_ids) for o in outputs]
        after[run["name"]] = counters(llm)
        if run.get("logprobs"):
            logprobs[run["name"]] = [
                [{t: p.logprob for t, p in place.items()} for place in o.outputs[0].logprobs] for o in outputs
            ]
    config = llm.llm_engine.vllm_config
    return {
        "tokens": tokens,
        "counters": after,
        "logprobs": logprobs,
        "checksums": checksums,  # by parameter, for runs that request them
        "refused": refused,  # messages of runs whose weights were not loaded
        "blocks": config.cache_config.num_gpu_blocks,
        "block_size": config.cache_config.block_size,
        "layout": getattr(config.cache_config, "kv_cache_layout", None),
        "layers": {
            name: [type(layer.impl).__name__, getattr(spec, "format", None)]
            for name, layer in config.compilation_config.static_forward_context.items()
            if hasattr(layer, "attn_backend")  # skip recurrent layers
            for spec in [getattr(layer.attn_backend, "codec_spec", None)]
        },
    }


def settle_triton() -> None:
    """Makes every autotuned Triton kernel use its smallest configuration.

    Engines must round alike to be comparable, but autotuning may choose differently in each, and takes minutes.
    """
    from triton.runtime.autotuner import Autotuner

    original = Autotuner.__init__

    def size(config: Any) -> int:
        return config.num_stages * math.prod(v for v in config.kwargs.values() if isinstance(v, int) and v > 0)

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        self.configs = [min(self.configs, key=size)]

    Autotuner.__init__ = init


def refusals(request: dict[str, Any]) -> dict[str, Any]:
    """Error messages of engines that must not start, tried one after another in this process."""
    from vllm import LLM
    from vllm.distributed import cleanup_dist_env_and_memory

    said = {}
    for name, arguments in request["refused"].items():
        try:
            LLM(**{**request["engine"], **arguments})
            said[name] = "it started"
        except Exception as error:
            said[name] = f"{type(error).__name__}: {error}"
        cleanup_dist_env_and_memory()
    return said


def side_by_side(requests: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Runs engines at the same time, each in a fork of this process, so that vLLM is imported only once."""
    import tempfile
    import traceback

    import torch

    if torch.version.cuda:  # not is_available(): it could initialise the device, which forks then cannot use
        settle_triton()
    import vllm  # noqa: F401

    assert not torch.cuda.is_initialized(), "a child could not use the device"
    with tempfile.TemporaryDirectory() as folder:
        children = {}
        for number, request in enumerate(requests):
            child = os.fork()
            if child:
                children[child] = number
                continue
            status = 1
            try:
                Path(folder, str(number)).write_text(json.dumps(run_engine(request)))
                status = 0
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(status)  # does not wait for threads that the engine left running
        failed = []
        while children:
            child, status = os.wait()
            number = children.pop(child, None)
            if number is not None and status:
                failed.append(number)
        if failed:
            raise SystemExit(f"engines {sorted(failed)} of {len(requests)} stopped; their output is above")
        return [json.loads(Path(folder, str(number)).read_text()) for number in range(len(requests))]


def one_after_another(requests: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Runs engines with the same backend in this process, so that vLLM is imported only once."""
    from vllm.distributed import cleanup_dist_env_and_memory

    found = []
    for request in requests:
        found.append(run_engine(request))
        cleanup_dist_env_and_memory()
    return found


def counters(llm: Any) -> dict[str, float]:
    found = {m.name: m for m in llm.get_metrics()}
    return {name: found[name].value for name in COUNTERS if name in found}


def scenario(request: dict[str, Any]) -> Any:
    """Handles a request from ``engines.py``."""
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    if "engines" in request:
        return (one_after_another if request.get("in_turn") else side_by_side)(request["engines"])
    return refusals(request) if "refused" in request else run_engine(request)


def main() -> None:
    import torch

    sys.path.insert(0, str(Path(__file__).parents[1] / "shared"))
    from forked import serve

    # No imports in advance with CUDA: if one initialises the device, forks cannot use it.
    modules = ("vllm.entrypoints.llm", "vllm.v1.worker.cpu_worker", "vllm.model_executor.models.llama")
    serve(scenario, () if torch.version.cuda else modules)


if __name__ == "__main__":
    main()
