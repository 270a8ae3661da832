"""What reports look like: one self-contained page, light or dark as the reader likes it, narrow or wide."""

from __future__ import annotations

from html import escape

_STYLE = """
:root { color-scheme: light dark; --ink: #1c2330; --soft: #5d6879; --line: #dfe4ec; --card: #ffffff; --page: #f4f6fa;
  --accent: #1f6feb; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6eaf2; --soft: #9aa5b8; --line: #303848; --card: #1a202c;
  --page: #11151d; --accent: #6ea8ff; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink); font: 16px/1.55 system-ui, sans-serif; }
main { max-width: 1180px; margin: 0 auto; padding: 40px 24px 64px; }
h1 { font-size: 30px; line-height: 1.2; margin: 0 0 4px; letter-spacing: -0.02em; overflow-wrap: anywhere; }
h2 { font-size: 19px; margin: 40px 0 12px; }
.sub, footer { color: var(--soft); }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(190px, 1fr)); gap: 14px; margin: 26px 0 0; }
.card { background: var(--card); border: 1px solid var(--line); border-radius: 12px; padding: 18px 20px; }
.big { font-size: 28px; font-weight: 650; letter-spacing: -0.02em; color: var(--accent); }
.pair { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(320px, 100%), 1fr)); gap: 14px; }
.pair h3, .plots h3 { margin: 0 0 8px; font-size: 15px; }
.pair p { margin: 0; white-space: pre-wrap; overflow-wrap: anywhere; }
.plots { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(440px, 100%), 1fr)); gap: 14px; }
.scroll { overflow-x: auto; }
.small { font-size: 14px; }
.pair .small { margin-top: 10px; }
.plots .small { margin: 0 0 8px; }
.after { margin-top: 14px; }
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
@media (max-width: 520px) { main { padding: 24px 14px 40px; } .card { padding: 14px; } }
"""
_COLOURS = ("#1f6feb", "#e8590c", "#2b8a3e", "#9c36b5", "#c92a2a", "#0b7285", "#b08900", "#5c677d")


def style() -> str:
    """The style sheet of a report."""
    rules = [
        f"svg .line.c{i} {{ stroke: {c}; }} svg circle.c{i}, svg text.name.c{i} {{ fill: {c}; }}"
        for i, c in enumerate(_COLOURS)
    ]
    return _STYLE + "\n".join(rules)


def tile(big: str, small: str) -> str:
    """A card with one figure and what it means."""
    return f'<div class="card"><div class="big">{escape(big)}</div><div class="sub">{escape(small)}</div></div>'


def document(title: str, body: str, more_style: str = "") -> str:
    """A whole page around ``body`` (HTML); nothing is loaded from elsewhere."""
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(title)}</title><style>{style()}{more_style}</style></head>
<body><main>
{body}
</main></body></html>
"""
