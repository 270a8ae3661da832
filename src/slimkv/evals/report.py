"""``report.html`` and ``report.json`` of the demonstration."""

from __future__ import annotations

import json
from dataclasses import asdict
from html import escape
from pathlib import Path

from slimkv.evals.showcase import Answer, Showcase
from slimkv.evals.svg import Axis, Series, chart

_STYLE = """
:root { color-scheme: light dark; --ink: #1c2330; --soft: #5d6879; --line: #dfe4ec; --card: #ffffff; --page: #f4f6fa;
  --accent: #1f6feb; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6eaf2; --soft: #9aa5b8; --line: #303848; --card: #1a202c;
  --page: #11151d; --accent: #6ea8ff; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink); font: 16px/1.55 system-ui, sans-serif; }
main { max-width: 1180px; margin: 0 auto; padding: 40px 24px 64px; }
h1 { font-size: 30px; margin: 0 0 4px; letter-spacing: -0.02em; }
h2 { font-size: 19px; margin: 40px 0 12px; }
.sub, footer { color: var(--soft); }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(190px, 1fr)); gap: 14px; margin: 26px 0 0; }
.card { background: var(--card); border: 1px solid var(--line); border-radius: 12px; padding: 18px 20px; }
.big { font-size: 28px; font-weight: 650; letter-spacing: -0.02em; color: var(--accent); }
.pair { display: grid; grid-template-columns: repeat(auto-fit, minmax(320px, 1fr)); gap: 14px; }
.pair h3, .plots h3 { margin: 0 0 8px; font-size: 15px; }
.pair p { margin: 0; white-space: pre-wrap; }
.plots { display: grid; grid-template-columns: repeat(auto-fit, minmax(440px, 1fr)); gap: 14px; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { text-align: right; padding: 7px 10px; border-bottom: 1px solid var(--line); white-space: nowrap; }
th:first-child, td:first-child { text-align: left; font-weight: 600; }
th { color: var(--soft); font-weight: 500; font-size: 14px; }
svg { width: 100%; height: auto; display: block; }
svg text { font: 12px system-ui, sans-serif; fill: var(--soft); }
svg .grid { stroke: var(--line); stroke-width: 1; }
svg .line { fill: none; stroke-width: 2.2; }
svg .name { font-weight: 600; stroke: none; }
footer { margin-top: 40px; font-size: 14px; overflow-wrap: anywhere; }
@media (max-width: 520px) { .plots { grid-template-columns: 1fr; } }
"""
_COLOURS = ("#1f6feb", "#e8590c", "#2b8a3e", "#9c36b5", "#c92a2a", "#0b7285", "#b08900", "#5c677d")


def _style() -> str:
    rules = [
        f"svg .line.c{i} {{ stroke: {c}; }} svg circle.c{i}, svg text.name.c{i} {{ fill: {c}; }}"
        for i, c in enumerate(_COLOURS)
    ]
    return _STYLE + "\n".join(rules)


def _size(count: float) -> str:
    return f"{count / 2**20:.1f} MiB" if count >= 2**20 else f"{count / 2**10:.0f} KiB"


def _tile(big: str, small: str) -> str:
    return f'<div class="card"><div class="big">{escape(big)}</div><div class="sub">{escape(small)}</div></div>'


def _answer(answer: Answer) -> str:
    detail = f"{answer.tokens} tokens at {answer.tokens_per_second:.1f} tokens/s, cache {_size(answer.cache_bytes)}"
    return (
        f'<div class="card"><h3>{escape(answer.cache)}</h3><p>{escape(answer.text.strip())}</p>'
        f'<p class="sub">{escape(detail)}</p></div>'
    )


def _plots(showcase: Showcase) -> list[tuple[str, str]]:
    quality = showcase.quality.rows
    size, kl = [r.bytes_per_token for r in quality], [max(r.kl, 1e-6) for r in quality]
    points = Series("formats", size, kl, [r.format for r in quality], line=False)
    title = "Quality against bytes per token"
    by_bytes = chart(title, Axis("cache bytes per token"), Axis("KL divergence, nats", log=True), [points])
    curves = [Series(c.format, showcase.contexts, [b / 2**20 for b in c.bytes]) for c in showcase.memory]
    memory = chart("Memory against context", Axis("context, tokens"), Axis("cache, MiB"), curves)
    layers = [
        Series(r.format, list(range(len(r.output))), [max(e, 1e-9) for e in r.output]) for r in showcase.layers.rows
    ]
    error = "relative error of attention output"
    by_layer = chart("Error of every layer", Axis("layer"), Axis(error, log=True), layers)
    return [(title, by_bytes), ("Memory against context", memory), ("Error of every layer", by_layer)]


def html(showcase: Showcase) -> str:
    """One self-contained page."""
    stock, packed = showcase.answers
    ratio = packed.bf16_bytes / packed.cache_bytes
    best = next((r for r in showcase.quality.rows if r.format == packed.cache), showcase.quality.rows[0])
    rows = "".join(
        f"<tr><td>{escape(r.format)}</td><td>{r.bytes_per_token:,.0f}</td>"
        f"<td>{showcase.quality.raw_bytes_per_token / r.bytes_per_token:.2f}x</td><td>{r.perplexity:.3f}</td>"
        f"<td>{r.over_raw:+.2%}</td><td>{r.top1:.1%}</td><td>{r.kl:.4f}</td></tr>"
        for r in showcase.quality.rows
    )
    plots = "".join(f'<div class="card"><h3>{escape(name)}</h3>{svg}</div>' for name, svg in _plots(showcase))
    run, quality = showcase.run, showcase.quality
    versions = ", ".join(f"{name} {version}" for name, version in run.versions.items())
    tiles = "".join(
        (
            _tile(f"{ratio:.2f}x smaller", f"{packed.cache} cache against bfloat16, as allocated"),
            _tile(_size(packed.cache_bytes), f"for {showcase.context_tokens + packed.tokens} tokens; bfloat16 takes "
                  + _size(packed.bf16_bytes)),
            _tile(f"{packed.tokens_per_second:.1f} tokens/s", f"DynamicCache: {stock.tokens_per_second:.1f}"),
            _tile(f"{best.top1:.1%}", f"same next token as the plain cache ({best.format}, {quality.mode})"),
        )
    )  # fmt: skip
    measured = f"{quality.windows} windows of {quality.window_tokens} tokens"
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>slimkv on {escape(showcase.model)}</title><style>{_style()}</style></head>
<body><main>
<h1>slimkv on {escape(showcase.model)}</h1>
<div class="sub">{escape(run.device)}, {run.cpu_threads} threads, {escape(run.date)}</div>
<div class="tiles">{tiles}</div>
<h2>One question, both caches</h2>
<p class="sub">{escape(showcase.question)} ({showcase.context_tokens} tokens of context)</p>
<div class="pair">{_answer(stock)}{_answer(packed)}</div>
<h2>What each format costs</h2>
<div class="card scroll"><table id="quality"><thead>
<tr><th>format</th><th>bytes per token</th><th>smaller than bf16</th>
<th>perplexity</th><th>over plain</th><th>same next token</th><th>KL</th></tr></thead><tbody>
<tr><td>plain</td><td>{quality.raw_bytes_per_token:,.0f}</td><td>1.00x</td><td>{quality.raw_perplexity:.3f}</td>
<td></td><td></td><td></td></tr>{rows}</tbody></table>
<p class="sub">{escape(quality.mode)}: attention reads every key and value through the codec; {measured}.</p></div>
<h2>Plots</h2>
<div class="plots">{plots}</div>
<footer>Command: {escape(run.command)}. {escape(versions)}. {showcase.seconds:.0f} seconds.</footer>
</main></body></html>
"""


def write_report(showcase: Showcase, folder: Path) -> tuple[Path, Path]:
    """Writes ``report.html`` and ``report.json``; returns their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    page, data = folder / "report.html", folder / "report.json"
    page.write_text(html(showcase), encoding="utf-8")
    data.write_text(json.dumps(asdict(showcase), indent=2, allow_nan=False) + "\n", encoding="utf-8")
    return page, data
