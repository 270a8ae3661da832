"""The synthetic tasks through vLLM, with prefix caching: one engine for each cache, in a separate process.

That process runs ``python -m slimkv.lab.suite.vllm_engine REQUEST RESULT``.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from slimkv.integrations.serving.listener import Progress
from slimkv.lab.engine_process import EngineError, environment, log_tail, require_engine, run_plan
from slimkv.lab.evals.harness import RAW, WITH_CALIBRATION
from slimkv.lab.suite.tasks import Context
from slimkv.lab.suite.workbench import Workbench

_STEP = "slimkv-suite: "  # prefix of progress lines
_CPU = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}


def engine_arguments(bench: Workbench, format: str, longest: int | None) -> dict[str, Any]:
    """Arguments of ``vllm.LLM``: the stock cache for ``raw``; otherwise slimkv's cache, for new tokens too."""
    settings = bench.settings
    arguments: dict[str, Any] = {
        "model": bench.model_source, "dtype": settings.dtype, "max_model_len": longest, "enable_prefix_caching": True,
        "seed": settings.seed,
    }  # fmt: skip
    if settings.device == "cpu":
        arguments |= {"enforce_eager": True, "max_num_seqs": 16, "block_size": 32}
    if format == RAW:
        return arguments
    packed: dict[str, Any] = {"format": format.removesuffix(WITH_CALIBRATION), "fresh": "codes"}
    if format.endswith(WITH_CALIBRATION):
        packed["calibration"] = str((bench.folder / "calibration.safetensors").resolve())
    return {**arguments, "attention_backend": "CUSTOM", "additional_config": {"slimkv": packed}}


def run_engine(bench: Workbench, format: str, contexts: Sequence[Context], progress: Progress) -> dict[str, Any]:
    """Whether each question of each context was answered (``exact``), prefix-cache hits and seconds."""
    require_engine("vllm")
    longest = max(context.length for context in contexts) + 16
    request = {
        "arguments": engine_arguments(bench, format, longest),
        "contexts": [[context.prefix, [[q.suffix, q.answer] for q in context.questions]] for context in contexts],
    }
    on_cpu = _CPU if bench.settings.device == "cpu" else {}
    progress(f"vLLM: {format}", 0, 1)

    def tell(line: str) -> None:
        if line.startswith(_STEP):
            done, total = (int(x) for x in line.removeprefix(_STEP).split("/"))
            progress(f"vLLM: {format}", done, total)

    with tempfile.TemporaryDirectory(prefix="slimkv-suite-") as scratch:
        stem = Path(scratch, "tasks")
        result, error = run_plan("slimkv.lab.suite.vllm_engine", request, stem, environment(**on_cpu), tell)
        if error or not result:
            tail = log_tail(stem.with_suffix(".log"), 2000)
            last = (tail.strip() or "it printed nothing").splitlines()[-1]
            raise EngineError(f"vLLM with {format} ended with {error}: {last[:300]}\n{tail}")
        return result


def main() -> None:
    """Answers a request."""
    from vllm import LLM, SamplingParams

    request = json.loads(Path(sys.argv[1]).read_text())
    llm = LLM(**request["arguments"], disable_log_stats=False)
    begin, exact = time.perf_counter(), []
    contexts = request["contexts"]
    for number, (prefix, questions) in enumerate(contexts):
        print(f"{_STEP}{number}/{len(contexts)}", flush=True)
        prompts = [{"prompt_token_ids": prefix + suffix} for suffix, _ in questions]
        params = [
            SamplingParams(temperature=0, max_tokens=len(a), ignore_eos=True, detokenize=False) for _, a in questions
        ]
        # The first question fills the prefix cache for the others.
        for part in (slice(0, 1), slice(1, None)):
            if prompts[part]:
                outputs = llm.generate(prompts[part], params[part], use_tqdm=False)
                found = [list(output.outputs[0].token_ids) for output in outputs]
                exact += [one == list(a) for one, (_, a) in zip(found, questions[part], strict=True)]
    totals = {m.name: m.value for m in llm.get_metrics() if hasattr(m, "value")}
    result = {
        "exact": exact,
        "seconds": time.perf_counter() - begin,
        "prefix_cache_queries": totals.get("vllm:prefix_cache_queries"),
        "prefix_cache_hits": totals.get("vllm:prefix_cache_hits"),
        "kv_tokens": llm.llm_engine.vllm_config.cache_config.num_gpu_blocks
        * llm.llm_engine.vllm_config.cache_config.block_size,
    }
    Path(sys.argv[2]).write_text(json.dumps(result))


if __name__ == "__main__":
    main()
