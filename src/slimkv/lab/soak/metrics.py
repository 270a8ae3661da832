"""Reads vLLM's ``/metrics`` and the memory of the process tree."""

from __future__ import annotations

import re
from pathlib import Path
from statistics import median

_LINE = re.compile(r"^([A-Za-z_:][\w:]*)(?:\{(.*)\})?\s+(\S+)\s*$")
_REASON = re.compile(r'finished_reason="(\w+)"')

# Reported name -> the metric, with the finish reason of requests. Samples of several engines are summed.
GAUGES = {
    "running": "vllm:num_requests_running",
    "waiting": "vllm:num_requests_waiting",
    "kv_usage": "vllm:kv_cache_usage_perc",
}
COUNTERS = {
    "stopped": "vllm:request_success_total stop",
    "length": "vllm:request_success_total length",
    "aborted": "vllm:request_success_total abort",
    "errors": "vllm:request_success_total error",
    "preemptions": "vllm:num_preemptions_total",
    "prompt_tokens": "vllm:prompt_tokens_total",
    "generation_tokens": "vllm:generation_tokens_total",
    "prefix_queries": "vllm:prefix_cache_queries_total",
    "prefix_hits": "vllm:prefix_cache_hits_total",
    "corrupted": "vllm:corrupted_requests_total",
}


def parse_metrics(text: str) -> dict[str, float]:
    """The gauges and counters above from Prometheus' text format; missing names are left out."""
    names = {metric: name for name, metric in (GAUGES | COUNTERS).items()}
    found: dict[str, float] = {}
    for match in filter(None, map(_LINE.match, text.splitlines())):
        reason = _REASON.search(match[2] or "")
        name = names.get(f"{match[1]} {reason[1]}" if reason else match[1])
        if name is not None:
            found[name] = found.get(name, 0.0) + float(match[3])
    return found


def session_memory(session: int) -> int:
    """Bytes of private memory (anonymous and shared, not files) of all processes of a session."""
    total = 0
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        try:
            fields = (folder / "stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
            if int(fields[3]) != session:
                continue
            status = (folder / "status").read_text(encoding="utf-8", errors="replace")
        except OSError:  # the process has ended
            continue
        for line in status.splitlines():
            if line.startswith(("RssAnon:", "RssShmem:")):
                total += int(line.split()[1]) * 1024
    return total


def slope(times: list[float], values: list[float]) -> float:
    """The Theil-Sen slope: the median over pairs of samples, which is robust to outliers."""
    step = max(len(times) // 400, 1)  # the number of pairs is quadratic
    points = list(zip(times, values, strict=True))[::step]
    slopes = [(b[1] - a[1]) / (b[0] - a[0]) for i, a in enumerate(points) for b in points[i + 1 :] if b[0] > a[0]]
    return median(slopes) if slopes else 0.0
