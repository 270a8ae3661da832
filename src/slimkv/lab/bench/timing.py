"""How long a call takes: CUDA graphs and events on a GPU, the wall clock elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from statistics import median

import torch
from torch import Tensor

_COPY_BYTES = 2**31
_CPU_MS = 200  # short calls are repeated for this long
_TARGET_MS = 2.0  # duration of one graph


@lru_cache(maxsize=4)
def copy_bandwidth(device: torch.device) -> float:
    """Bytes per second (read plus written) of a copy that exceeds every cache."""
    size = _COPY_BYTES if device.type == "cuda" else _COPY_BYTES // 64
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)

    def copy() -> None:
        target.copy_(source)

    return 2 * size / (1e-3 * Timer(device, replays=10).eager(copy))


@dataclass
class Timer:
    """Median times in milliseconds of calls on one device."""

    device: torch.device
    replays: int = 20
    _before_ms: dict[tuple[Callable[[], object], int], float] = field(default_factory=dict)

    def __call__(
        self, call: Callable[[], object], *, cold: bool = True, before: Callable[[], object] | None = None
    ) -> float:
        """One call, replayed from a graph on a GPU; ``cold`` flushes the L2 cache before each call and subtracts that
        time. ``before`` runs before each call instead of the flush, and is subtracted too.
        """
        if self.device.type != "cuda":
            return self.eager(call)
        call()  # compiles
        once = self._replay(self._capture([call]), 3)
        repeats = max(1, min(20, int(_TARGET_MS / max(once, 1e-3))))
        if before is None and cold:
            before = self._flush
        if before is None:
            return self._replay(self._capture([call] * repeats), self.replays) / repeats
        total = self._replay(self._capture([before, call] * repeats), self.replays)
        if (before, repeats) not in self._before_ms:
            self._before_ms[before, repeats] = self._replay(self._capture([before] * repeats), self.replays)
        return (total - self._before_ms[before, repeats]) / repeats

    def eager(self, call: Callable[[], object]) -> float:
        """One call at a time, without a graph."""
        call()
        if self.device.type == "cuda":
            return self._events(call, self.replays)
        times: list[float] = []
        while len(times) < 5 or (len(times) < 1000 and sum(times) < _CPU_MS):
            start = time.perf_counter()
            call()
            times.append(1e3 * (time.perf_counter() - start))
        return median(times)

    def _replay(self, graph: torch.cuda.CUDAGraph, count: int) -> float:
        graph.replay()
        return self._events(graph.replay, count)

    def _events(self, call: Callable[[], object], count: int) -> float:
        pairs = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(count)]
        for start, end in pairs:
            start.record()
            call()
            end.record()
        torch.cuda.synchronize()
        return median(start.elapsed_time(end) for start, end in pairs)

    def _capture(self, calls: list[Callable[[], object]]) -> torch.cuda.CUDAGraph:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for call in dict.fromkeys(calls):
                call()  # libraries allocate in their first call on a stream
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for call in calls:
                call()
        return graph

    def _flush(self) -> None:
        """Fills the L2 cache with clean lines: writing back dirty lines would slow down the next kernel."""
        source, sink = _flush_buffers(self.device)
        torch.sum(source, 0, keepdim=True, out=sink)


@lru_cache(maxsize=4)
def _flush_buffers(device: torch.device) -> tuple[Tensor, Tensor]:
    size = 4 * torch.cuda.get_device_properties(device).L2_cache_size
    return torch.zeros(size // 4, device=device), torch.zeros(1, device=device)
