"""Builds the README's chart and tables from the reports in ``benchmarks/results``.

    python benchmarks/readme.py        # rewrites docs/images/serving.svg and the tables in README.md

The choice of reports is made here alone. ``tests/test_docs.py`` fails if the README is out of date.
"""

from __future__ import annotations

import json
from html import escape
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
CHART = ROOT / "docs" / "images" / "serving.svg"
START, END = "<!-- figures: benchmarks/readme.py -->", "<!-- end -->"

SYSTEMS = {"bf16": "bf16", "fp8": "fp8", "turboquant_4bit_nc": "vLLM 4-bit", "k4v4": "slimkv k4v4"}
_STYLE = """
text { font: 13px system-ui, sans-serif; fill: #1c2330; } .soft { fill: #5d6879; } .title { font-weight: 600; }
.bar { fill: #a9b4c4; } .ours { fill: #1f6feb; } .ground { fill: #fff; }
@media (prefers-color-scheme: dark) { text { fill: #e6eaf2; } .soft { fill: #9aa5b8; } .bar { fill: #4a5568; }
  .ours { fill: #6ea8ff; } .ground { fill: #1e2129; } }
"""  # The image has its own background because the page's colour scheme may differ from the browser's.
_WIDTH, _PANEL, _LABEL, _BAR, _GAP = 860, 420, 104, 26, 10


def load(name: str) -> dict[str, Any]:
    """Reads a report, given its file name without the extension."""
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def _short(value: float) -> str:
    return f"{value / 1e6:.2f} M" if value >= 1e6 else f"{value:,.0f}"


def _panel(left: float, title: str, values: dict[str, float]) -> list[str]:
    """A panel of horizontal bars, each with its value and its ratio to the first."""
    out = [f'<text class="title" x="{left}" y="22">{escape(title)}</text>']
    base, most = next(iter(values.values())), max(values.values())
    room = _PANEL - _LABEL - 120
    for number, (name, value) in enumerate(values.items()):
        y = 40 + number * (_BAR + _GAP)
        style = "ours" if name.startswith("slimkv") else "bar"
        width, middle = room * value / most, y + _BAR / 2 + 4.5
        out.append(f'<text x="{left}" y="{middle}">{escape(name)}</text>')
        out.append(f'<rect class="{style}" x="{left + _LABEL}" y="{y}" width="{width:.1f}" height="{_BAR}" rx="3"/>')
        told = f"{_short(value)} ({value / base:.2f}\N{MULTIPLICATION SIGN})"
        out.append(f'<text class="soft" x="{left + _LABEL + width + 8:.1f}" y="{middle}">{told}</text>')
    return out


def _attention_speed() -> dict[str, float]:
    """Tokens per second of one layer's attention, by cache; all kernels were measured in one run."""
    row = next(r for r in load("attend-h200")["rows"] if r["cell"] == "decode-32x32K" and r["backend"] == "cuda")
    times = {b["name"]: b["ms"] for b in row["baselines"]} | {"slimkv": row["ms"]}
    kernels = {"bf16": "fa3_bf16", "fp8": "fa3_fp8", "turboquant_4bit_nc": "vllm_4bit_nc", "k4v4": "slimkv"}
    return {SYSTEMS[key]: row["shape"]["batch"] / times[kernel] * 1e3 for key, kernel in kernels.items()}


def _tokens_that_fit(systems: dict[str, Any]) -> dict[str, float]:
    """Tokens that fit, as the engines report them; computed from bytes per token if vLLM's 4-bit cache did not run."""
    fits = {SYSTEMS[key]: float(systems[key]["kv_tokens"]) for key in SYSTEMS if key in systems}
    stock = load("stock-4bit-bytes")
    by_bytes = fits["bf16"] * stock["bf16_bytes_per_token"] / stock["bytes_per_token"]
    return {name: fits.get(name, by_bytes) for name in SYSTEMS.values()}


def chart() -> str:
    """The SVG chart: tokens per second of the engine and of attention alone, and tokens that fit."""
    report = load("serve-h200")
    systems, settings = report["systems"], report["settings"]
    speed = {SYSTEMS[k]: float(systems[k]["full"]["decode_tokens_per_second"]) for k in SYSTEMS if k in systems}
    rows = len(SYSTEMS) * (_BAR + _GAP)
    below = 40 + rows + 24
    height = below + 40 + rows + 34
    told = (
        f"vLLM {report['versions']['vllm']}, one {report['device']}, a model shaped like Llama-3.1-8B, requests of "
        f"{settings['context'] // 1024}K tokens, at most {settings['most_requests']} at once"
    )
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="-10 -8 {_WIDTH + 20} {height + 16}" width="{_WIDTH}" '
        'role="img" aria-label="Tokens per second and tokens that fit, by cache">',
        f"<style>{_STYLE}</style>",
        f'<rect class="ground" x="-10" y="-8" width="{_WIDTH + 20}" height="{height + 16}" rx="4"/>',
        *_panel(0, "Tokens per second, as many requests as fit", speed),
        *_panel(_PANEL + 20, "Tokens that fit into the same memory", _tokens_that_fit(systems)),
        f'<g transform="translate(0 {below})">',
        *_panel(0, "Attention of one layer, tokens per second", _attention_speed()),
        f'<text class="soft" x="{_PANEL + 20}" y="60">Attention: 32 sequences of 32K tokens; FlashAttention-3</text>',
        f'<text class="soft" x="{_PANEL + 20}" y="80">for bf16 and fp8, vLLM\u2019s own kernel for 4-bit.</text>',
        f'<text class="soft" x="{_PANEL + 20}" y="100">vLLM 4-bit: tokens computed from bytes per token.</text>',
        "</g>",
        f'<text class="soft" x="0" y="{height - 8}">{escape(told)}</text>',
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


def _quality(format: str) -> tuple[str, str]:
    """Bytes per token, and KL divergence with the relative increase in perplexity."""
    row = next(r for r in load("smollm2_wikitext2_centred")["rows"] if r["format"] == format)
    return f"{row['bytes_per_token']:,.0f}", f"{row['kl']:.4f} ({row['over_raw']:+.1%})"


def table() -> str:
    """The README's tables of results, with the commands that measure them."""
    serve, attend = load("serve-h200"), load("attend-h200")
    systems, settings = serve["systems"], serve["settings"]
    bf16, ours = systems["bf16"], systems["k4v4"]

    def times(a: float, b: float) -> str:
        return f"**{a / b:.2f}\N{MULTIPLICATION SIGN}**"

    def against(cell: str, name: str = "fa3_bf16") -> str:
        row = next(r for r in attend["rows"] if r["cell"] == cell and r["backend"] == "cuda")
        ratio = next(b["ratio"] for b in row["baselines"] if b["name"] == name)
        return f"**{ratio:.2f}\N{MULTIPLICATION SIGN}**"

    full = ours["full"]["decode_tokens_per_second"], bf16["full"]["decode_tokens_per_second"]
    decode = ours["decode"]["decode_tokens_per_second"], bf16["decode"]["decode_tokens_per_second"]
    shape = "model shaped like Llama-3.1-8B, H200"
    serving, kernel = "`slimkv bench serve`", "`slimkv bench attend`"
    rows = [
        (f"tokens that fit into the same memory; vLLM, {shape}", times(ours["kv_tokens"], bf16["kv_tokens"]), serving),
        (
            f"tokens per second with as many requests of 16K tokens as fit, at most {settings['most_requests']}; same",
            times(*full),
            serving,
        ),
        ("tokens per second, 16 requests of 16K tokens; same", times(*decode), serving),
        (
            "attention, decode, 32 sequences of 32K tokens; FlashAttention-3 in bf16, H200",
            against("decode-32x32K"),
            kernel,
        ),
        ("attention, decode, 1 sequence of 128K tokens; same", against("decode-1x128K"), kernel),
        ("attention, prefill, 2,048 queries over 32K tokens; same", against("prefill-2048q-1x32K"), kernel),
    ]
    quality = [
        ("`k3v3`, calibrated", *_quality("k3v3+cal")),
        ("`k4v4`, calibrated", *_quality("k4v4+cal")),
        ("`k4v4`", *_quality("k4v4")),
        ("`turboquant_4bit_nc`, vLLM's 4-bit recipe", *_quality("turboquant_4bit_nc")),
        ("`k5v5`, calibrated", *_quality("k5v5+cal")),
        ("`k6v6`", *_quality("k6v6")),
        ("`fp8`", *_quality("fp8")),
    ]
    out = ["| `k4v4` against bf16 | | printed by |", "| --- | --- | --- |"]
    out += [f"| {what} | {value} | {command} |" for what, value, command in rows]
    out += [
        "",
        "| SmolLM2-135M on WikiText-2, every key and value through the codec | bytes per token | KL (perplexity) |",
    ]
    out += ["| --- | --- | --- |", *(f"| {what} | {size} | {value} |" for what, size, value in quality)]
    return "\n".join(out)


def filled(readme: str) -> str:
    """The README with current tables."""
    before, rest = readme.split(START, 1)
    _, after = rest.split(END, 1)
    return f"{before}{START}\n{table()}\n{END}{after}"


if __name__ == "__main__":
    CHART.write_text(chart(), encoding="utf-8")
    readme = ROOT / "README.md"
    readme.write_text(filled(readme.read_text(encoding="utf-8")), encoding="utf-8")
