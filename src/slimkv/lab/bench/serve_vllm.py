"""vLLM under load, for ``slimkv.lab.bench.serve_engine``."""

from __future__ import annotations

import heapq
import statistics
import time
from typing import Any

from slimkv.lab.bench.serve_engine import Answer, Follow, Load


class VLLMLoad(Load):
    """vLLM's engine in this process."""

    def start(self) -> None:
        """See ``Load``."""
        from vllm import LLM

        self.llm = LLM(**self.plan["arguments"])
        cache = self.llm.llm_engine.vllm_config.cache_config
        self.kv_tokens = cache.num_gpu_blocks * cache.block_size
        self.block_size = cache.block_size

    def _params(self, tokens: int) -> Any:
        """Greedy, exactly ``tokens`` tokens."""
        from vllm import SamplingParams

        return SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)

    def generate(self, prompts: list[list[int]], tokens: int) -> list[Answer]:
        """See ``Load``."""
        asked = [{"prompt_token_ids": prompt} for prompt in prompts]
        outputs = self.llm.generate(asked, self._params(tokens), use_tqdm=False)
        return [Answer(len(o.outputs[0].token_ids), o.metrics.first_token_ts, o.metrics.last_token_ts) for o in outputs]

    def counters(self) -> dict[str, float]:
        """See ``Load``; tokens from a host or cold tier count as hits too."""
        names = {
            "preemptions": "vllm:num_preemptions", "prefix_hits": "vllm:prefix_cache_hits",
            "tier_hits": "vllm:external_prefix_cache_hits",
            "verified": "vllm:spec_decode_num_drafts", "accepted": "vllm:spec_decode_num_accepted_tokens",
        }  # fmt: skip
        found = {short: self._counter(name) for short, name in names.items()}
        return {**found, "prefix_hits": found["prefix_hits"] + found.pop("tier_hits")}

    def serve_arrivals(
        self, arrivals: list[tuple[float, list[int]]], tokens: int, follow: Follow | None = None
    ) -> list[Answer]:
        """See ``Load``."""
        answers: list[Answer | None] = [None] * len(arrivals)
        engine, params = self.llm.llm_engine, self._params(tokens)
        waiting = [(due, number, prompt) for number, (due, prompt) in enumerate(arrivals)]
        heapq.heapify(waiting)
        dues = [due for due, _ in arrivals]
        start = time.perf_counter()
        while waiting or engine.has_unfinished_requests():
            while waiting and waiting[0][0] <= time.perf_counter() - start:
                _, number, prompt = heapq.heappop(waiting)
                engine.add_request(str(number), {"prompt_token_ids": prompt}, params)
            if not engine.has_unfinished_requests():
                time.sleep(0.001)
                continue
            for output in engine.step():
                number = int(output.request_id.split("-")[0])
                at, ids, known = time.perf_counter() - start, output.outputs[0].token_ids, answers[number]
                if len(ids) > (known.tokens if known else 0):
                    answers[number] = Answer(len(ids), known.first_token if known else at, at, dues[number])
                after = follow(number, list(ids), at) if output.finished and follow is not None else None
                if after is not None:
                    heapq.heappush(waiting, (after[0], len(answers), after[1]))
                    answers.append(None)
                    dues.append(after[0])
        return [answer for answer in answers if answer is not None]

    def phase_offload(self) -> dict[str, Any]:
        """Timings of the plan's prompt and, under ``short``, of a shorter one if the plan has it."""
        short = self.plan["short_context"]
        shorter = {"short": self._offload(short)} if short else {}
        return {**self._offload(self.plan["context"]), **shorter}

    def _offload(self, context: int) -> dict[str, Any]:
        """Time to the first token of one prompt: computed, from host memory, and from the device's prefix cache.
        Resetting the prefix cache keeps the host copies; a short request before it lets copies to the host finish.
        """
        prompt = [self.prompt(20_000, context)]
        recompute, first = self._timed(prompt)
        seconds: dict[str, list[float]] = {"host": [], "cached": [], "bytes": [], "copy": [], "hits": []}
        names = {
            "bytes": "vllm:kv_offload_load_bytes",
            "copy": "vllm:kv_offload_load_time",
            "hits": "vllm:external_prefix_cache_hits",
        }
        same = True
        for i in range(self.plan["rounds"]):
            self.generate([self.prompt(20_001 + i, 40)], 4)
            time.sleep(1)
            if not self.llm.reset_prefix_cache():
                raise RuntimeError("vLLM did not empty its prefix cache")
            before = {key: self._counter(name) for key, name in names.items()}
            took, outputs = self._timed(prompt)
            seconds["host"].append(took)
            for key, name in names.items():
                seconds[key].append(self._counter(name) - before[key])
            seconds["cached"].append(self._timed(prompt)[0])
            same = same and outputs == first
        middle = {key: statistics.median(values) for key, values in seconds.items()}
        return {
            "context": context,
            "layout": self.llm.llm_engine.vllm_config.cache_config.kv_cache_layout,
            "recompute_seconds": recompute,
            "host_seconds": middle["host"],
            "cached_seconds": middle["cached"],
            "load_seconds": middle["copy"],
            "load_bytes": middle["bytes"],
            "external_hits": middle["hits"],
            "same_token": same,
            "all_host_seconds": seconds["host"],
        }

    def _timed(self, prompts: list[list[int]]) -> tuple[float, list[int]]:
        """(seconds, first tokens) of a batch."""
        asked = [{"prompt_token_ids": prompt} for prompt in prompts]
        start = time.perf_counter()
        outputs = self.llm.generate(asked, self._params(1), use_tqdm=False)
        return time.perf_counter() - start, [o.outputs[0].token_ids[0] for o in outputs]

    def _counter(self, name: str) -> float:
        """One of vLLM's own metrics."""
        return sum(m.value for m in self.llm.get_metrics() if m.name == name)
