"""Reads vLLM's ``/metrics`` and the memory of the process tree."""

from __future__ import annotations

import re
from pathlib import Path
from statistics import median

_LINE = re.compile(r"^([A-Za-z_:][\w:]*)(\{.*\})?\s+(\S+)\s*$")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')

# Reported name -> (name in the text, labels that must match). Samples of several engines are added up.
GAUGES: dict[str, tuple[str, dict[str, str]]] = {
    "running": ("vllm:num_requests_running", {}),
    "waiting": ("vllm:num_requests_waiting", {}),
    "kv_usage": ("vllm:kv_cache_usage_perc", {}),
}
COUNTERS: dict[str, tuple[str, dict[str, str]]] = {
    "stopped": ("vllm:request_success_total", {"finished_reason": "stop"}),
    "length": ("vllm:request_success_total", {"finished_reason": "length"}),
    "aborted": ("vllm:request_success_total", {"finished_reason": "abort"}),
    "errors": ("vllm:request_success_total", {"finished_reason": "error"}),
    "preemptions": ("vllm:num_preemptions_total", {}),
    "prompt_tokens": ("vllm:prompt_tokens_total", {}),
    "generation_tokens": ("vllm:generation_tokens_total", {}),
    "prefix_queries": ("vllm:prefix_cache_queries_total", {}),
    "prefix_hits": ("vllm:prefix_cache_hits_total", {}),
    "corrupted": ("vllm:corrupted_requests_total", {}),
}


def parse_metrics(text: str) -> dict[str, float]:
    """The gauges and counters above from Prometheus' text format; missing names are left out."""
    found: dict[str, float] = {}
    for line in text.splitlines():
        match = _LINE.match(line)
        if match is None or line.startswith("#"):
            continue
        labels = dict(_LABEL.findall(match[2] or ""))
        for name, (metric, wanted) in (GAUGES | COUNTERS).items():
            if match[1] == metric and all(labels.get(k) == v for k, v in wanted.items()):
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
        except OSError:  # it has ended meanwhile
            continue
        for line in status.splitlines():
            if line.startswith(("RssAnon:", "RssShmem:")):
                total += int(line.split()[1]) * 1024
    return total


def slope(times: list[float], values: list[float]) -> float:
    """The Theil-Sen slope: the median over pairs of samples, which is robust to outliers."""
    step = max(len(times) // 400, 1)  # pairs grow with the square
    points = list(zip(times, values, strict=True))[::step]
    slopes = [(b[1] - a[1]) / (b[0] - a[0]) for i, a in enumerate(points) for b in points[i + 1 :] if b[0] > a[0]]
    return median(slopes) if slopes else 0.0
