"""One vLLM engine under load, in a process of its own: ``python -m slimkv.bench.serve_engine PLAN RESULT``.

The result is written after every phase, so that an engine that fails later leaves what it had.
"""

from __future__ import annotations

import json
import random
import statistics
import sys
import time
from pathlib import Path
from typing import Any


def say(message: str) -> None:
    """Progress, at once."""
    print(message, file=sys.stderr, flush=True)


class Load:
    """An engine and the requests it is given; token ids are random, so that nothing is shared by chance."""

    def __init__(self, plan: dict[str, Any]) -> None:
        from vllm import LLM

        self.plan = plan
        start = time.perf_counter()
        self.llm = LLM(**plan["engine"])
        self.start_seconds = time.perf_counter() - start
        cache = self.llm.llm_engine.vllm_config.cache_config
        self.kv_tokens = cache.num_gpu_blocks * cache.block_size
        self.block_size = cache.block_size

    def prompt(self, number: int, length: int) -> dict[str, list[int]]:
        """The same tokens for the same number and length."""
        source = random.Random(f"{self.plan['seed']}-{number}-{length}")
        return {"prompt_token_ids": source.choices(range(3, self.plan["vocabulary"]), k=length)}

    def params(self, tokens: int) -> Any:
        """Greedy, exactly ``tokens`` tokens."""
        from vllm import SamplingParams

        return SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)

    def generate(self, prompts: list[Any], tokens: int) -> tuple[float, list[Any]]:
        """(seconds, outputs) of a batch."""
        start = time.perf_counter()
        outputs = self.llm.generate(prompts, self.params(tokens), use_tqdm=False)
        return time.perf_counter() - start, outputs

    def together(self, count: int) -> dict[str, Any]:
        """``count`` requests of the plan's context, prefilled, then decoding all at once.

        Decoding starts from the prefix cache, so that no request waits for another's prefill; the rate is the sum of
        the requests' own rates between their first and last token.
        """
        prompts = [self.prompt(i, self.plan["context"]) for i in range(count)]
        prefill, _ = self.generate(prompts, 1)
        before = self.counter("vllm:num_preemptions"), self.counter("vllm:prefix_cache_hits")
        _, outputs = self.generate(prompts, self.plan["output"])
        spans = [o.metrics.last_token_ts - o.metrics.first_token_ts for o in outputs]
        rates = [(len(o.outputs[0].token_ids) - 1) / span for o, span in zip(outputs, spans, strict=True)]
        return {
            "requests": count,
            "context": self.plan["context"],
            "output": self.plan["output"],
            "prefill_seconds": prefill,
            "decode_tokens_per_second": sum(rates),
            "milliseconds_per_token": 1000 / statistics.median(rates),
            "preemptions": self.counter("vllm:num_preemptions") - before[0],
            "prefix_hit_share": (self.counter("vllm:prefix_cache_hits") - before[1]) / (count * self.plan["context"]),
        }

    def counter(self, name: str) -> float:
        """One of vLLM's own metrics."""
        return sum(m.value for m in self.llm.get_metrics() if m.name == name)

    # -- the phases --------------------------------------------------------------------------------------------------

    def warm_up(self) -> None:
        """What compiles under the first requests is not what is measured."""
        lengths = [self.plan["context"] // 2, 40, self.plan["context"] // 4]
        self.generate([self.prompt(-1 - i, max(n, 8)) for i, n in enumerate(lengths)], 8)

    def phase_decode(self) -> dict[str, Any]:
        """The plan's number of requests at its context."""
        return self.together(self.plan["requests"])

    def phase_full(self) -> dict[str, Any]:
        """As many requests as the cache holds at once."""
        each = -(-(self.plan["context"] + self.plan["output"]) // self.block_size) * self.block_size
        fit = min(self.kv_tokens // each - 1, self.plan["engine"]["max_num_seqs"])
        if self.plan["most_requests"]:
            fit = min(fit, self.plan["most_requests"])
        return self.together(max(1, fit))

    def phase_offload(self) -> dict[str, Any]:
        """Time to the first token of one prompt: computed, from host memory, and from the device's own cache.

        Emptying the prefix cache leaves what the host holds; a short request before it lets copies to the host finish.
        """
        prompt = [self.prompt(20_000, self.plan["context"])]
        recompute, first = self.generate(prompt, 1)
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
            before = {key: self.counter(name) for key, name in names.items()}
            took, outputs = self.generate(prompt, 1)
            seconds["host"].append(took)
            for key, name in names.items():
                seconds[key].append(self.counter(name) - before[key])
            seconds["cached"].append(self.generate(prompt, 1)[0])
            same = same and outputs[0].outputs[0].token_ids == first[0].outputs[0].token_ids
        middle = {key: statistics.median(values) for key, values in seconds.items()}
        return {
            "context": self.plan["context"],
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

    def phase_poisson(self) -> dict[str, Any]:
        """Requests of mixed lengths at random times."""
        source = random.Random(self.plan["seed"])
        arrivals, now = [], 0.0
        for number in range(self.plan["arrivals"]):
            now += source.expovariate(self.plan["rate"])
            length = round(min(self.plan["context"], source.lognormvariate(0, 0.6) * self.plan["context"] / 4))
            arrivals.append((now, self.prompt(10_000 + number, max(8, length))))
        first: dict[str, float] = {}
        last: dict[str, float] = {}
        counts: dict[str, int] = {}
        due = {str(i): at for i, (at, _) in enumerate(arrivals)}
        engine, params, waiting = self.llm.llm_engine, self.params(self.plan["output"]), list(enumerate(arrivals))
        start = time.perf_counter()
        while waiting or engine.has_unfinished_requests():
            while waiting and waiting[0][1][0] <= time.perf_counter() - start:
                number, (_, prompt) = waiting.pop(0)
                engine.add_request(str(number), prompt, params)
            if not engine.has_unfinished_requests():
                time.sleep(0.001)
                continue
            for output in engine.step():
                name = output.request_id.split("-")[0]
                at, count = time.perf_counter() - start, len(output.outputs[0].token_ids)
                if count > counts.get(name, 0):
                    first.setdefault(name, at)
                    last[name], counts[name] = at, count
        total = time.perf_counter() - start
        waits = sorted(first[n] - due[n] for n in first)
        between = sorted((last[n] - first[n]) / (counts[n] - 1) for n in first)
        return {
            "requests": len(arrivals),
            "rate": self.plan["rate"],
            "prompt_tokens": sum(len(p["prompt_token_ids"]) for _, p in arrivals),
            "seconds": total,
            "output_tokens_per_second": sum(counts.values()) / total,
            **{f"time_to_first_token_p{p}": percentile(waits, p) for p in (50, 99)},
            **{f"time_per_output_token_p{p}": percentile(between, p) for p in (50, 99)},
        }


def percentile(ordered: list[float], percent: int) -> float:
    """Of sorted numbers, the nearest rank."""
    return ordered[max(0, -(-percent * len(ordered) // 100) - 1)]


def main() -> None:
    """Runs a plan."""
    plan, target = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2])
    result: dict[str, Any] = {}

    def keep(**more: Any) -> None:
        result.update(more)
        target.write_text(json.dumps(result))

    load = Load(plan)
    say(f"{plan['system']}: started in {load.start_seconds:.1f} s, the cache holds {load.kv_tokens:,} tokens")
    keep(start_seconds=load.start_seconds, kv_tokens=load.kv_tokens, block_size=load.block_size)
    load.warm_up()
    for phase in plan["phases"]:
        begin = time.perf_counter()
        keep(**{phase: getattr(load, f"phase_{phase}")()})
        say(f"{plan['system']}: {phase} in {time.perf_counter() - begin:.1f} s: {json.dumps(result[phase])}")


if __name__ == "__main__":
    main()
