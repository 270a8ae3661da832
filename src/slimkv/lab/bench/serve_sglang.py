"""SGLang under load, for ``slimkv.lab.bench.serve_engine``."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from slimkv.lab.bench.serve_engine import Answer, Follow, Load


class SGLangLoad(Load):
    """SGLang's engine: the scheduler is another process; this one sends requests and receives tokens."""

    def start(self) -> None:
        """See ``Load``."""
        import sglang

        self.engine = sglang.Engine(**self.plan["arguments"])
        info = self.engine.get_server_info()
        self.kv_tokens, self.block_size = int(info["max_total_num_tokens"]), int(info["page_size"])
        self._counters = dict.fromkeys(("preemptions", "prefix_hits", "verified", "accepted"), 0.0)

    @staticmethod
    def _params(tokens: int) -> dict[str, Any]:
        """Greedy, exactly ``tokens`` tokens."""
        return {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}

    def _count(self, info: dict[str, Any]) -> None:
        self._counters["preemptions"] += info["num_retractions"]
        self._counters["prefix_hits"] += info["cached_tokens"]
        verified = info.get("spec_verify_ct", 0)
        self._counters["verified"] += verified
        if verified:  # prefill produces the first token, and each verification one more than it accepts
            self._counters["accepted"] += info["completion_tokens"] - 1 - verified

    def generate(self, prompts: list[list[int]], tokens: int) -> list[Answer]:
        """See ``Load``. The scheduler reports when a request's prefill, which produces the first token, ended."""
        answers = []
        for output in self.engine.generate(input_ids=prompts, sampling_params=self._params(tokens)):
            info = output["meta_info"]
            self._count(info)
            answers.append(
                Answer(info["completion_tokens"], info["prefill_finished_time"], info["request_finished_ts"])
            )
        return answers

    def counters(self) -> dict[str, float]:
        """See ``Load``."""
        return dict(self._counters)

    def serve_arrivals(
        self, arrivals: list[tuple[float, list[int]]], tokens: int, follow: Follow | None = None
    ) -> list[Answer]:
        """See ``Load``. Every request is streamed, token by token."""
        assert follow is None  # ``ServeSettings`` refuses sessions

        async def one(start: float, due: float, prompt: list[int]) -> Answer:
            await asyncio.sleep(max(0.0, due - (time.perf_counter() - start)))
            stream = await self.engine.async_generate(
                input_ids=prompt, sampling_params=self._params(tokens), stream=True
            )
            first, last, info = 0.0, 0.0, {}
            async for piece in stream:
                last, info = time.perf_counter() - start, piece["meta_info"]
                first = first or last
            self._count(info)
            return Answer(info["completion_tokens"], first, last, due)

        async def everything() -> list[Answer]:
            start = time.perf_counter()
            return await asyncio.gather(*(one(start, due, prompt) for due, prompt in arrivals))

        return self.engine.loop.run_until_complete(everything())

    def stop(self) -> None:
        """See ``Load``."""
        self.engine.shutdown()
