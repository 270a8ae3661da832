"""``report.html`` of a run: one self-contained page."""

from __future__ import annotations

from html import escape

from slimkv.lab.evals.harness import RAW
from slimkv.lab.evals.statistics import NOT_DISTINGUISHABLE
from slimkv.lab.report.charts import Axis, Bar, Estimate, Series, bars, chart, intervals, shaded
from slimkv.lab.report.page import Plot, document, plot_cards, table, td, tile, tr, versions_line
from slimkv.lab.report.plots import position_plots, quality_plot
from slimkv.lab.suite.summary import SHOWN, Column, Document, first_part, parts_of, words

_TONE = {NOT_DISTINGUISHABLE: "same", "worse": "worse", "better": "better"}


def _rows(results: Document, *needed: str) -> list[Document]:
    return [row for row in results["summary"]["rows"] if all(row.get(name) is not None for name in needed)]


def _answers_plot(results: Document) -> list[Plot]:
    found = []
    for row in _rows(results, "answers"):
        word = row["answers_test"]["verdict"] if "answers_test" in row else None
        share, tone = row["answers"], "raw" if row["format"] == RAW else _TONE.get(word or "", "same")
        found.append(Estimate(row["format"], share["value"], share["low"], share["high"], tone))
    if not found:
        return []
    caption = (
        "Share of questions answered exactly, with 95% intervals. Shaded: raw. Grey: not distinguishable from raw."
    )
    return [("Synthetic tasks", caption, intervals("exact match over all tasks and lengths", found))]


def _length_plot(results: Document) -> list[Plot]:
    right: dict[str, dict[int, list[int]]] = {}
    for row in results["summary"]["tasks"]:
        cell = right.setdefault(row["format"], {}).setdefault(row["length"], [0, 0])
        cell[0] += row["right"]
        cell[1] += row["asked"]
    if not right or max(len(lengths) for lengths in right.values()) < 2:
        return []
    series = [
        Series(name, list(lengths), [100 * a / b for a, b in lengths.values()]) for name, lengths in right.items()
    ]
    svg = chart("Tasks by length", Axis("tokens of context", log=True), Axis("exact match", unit="%"), series)
    return [("Tasks by length", "Share of questions answered exactly, all tasks together.", svg)]


def _speed_plots(results: Document) -> list[Plot]:
    plots: list[Plot] = []
    if decoded := _rows(results, "decode"):
        lines = [
            Bar(row["format"], row["decode"]["tokens_per_second"], f"{row['decode']['tokens_per_second']:.1f} "
                f"({row['decode']['over_stock']:.2f}x)", row["format"] == RAW)
            for row in decoded
        ]  # fmt: skip
        context = next(iter(parts_of(results, "generate")))["settings"]["context"]
        caption = f"Tokens per second of generate with {context:,} tokens in the cache, and over the stock cache."
        plots.append(("Decoding", caption, bars("tokens per second", lines)))
    if fitting := _rows(results, "tokens_fit"):
        lines = [Bar(r["format"], r["tokens_fit"], f"{r['tokens_fit']:,}", r["format"] == RAW) for r in fitting]
        caption = f"Tokens of one sequence in {results['settings']['memory']}, scales and page padding included."
        plots.append(("Tokens that fit", caption, bars("tokens", lines)))
    return plots


def _verdict(test: Document) -> str:
    return f' <span class="tag {_TONE[test["verdict"]]}">{escape(test["verdict"])}</span>'


def _cell(column: Column, row: Document) -> str:
    test = row.get(column.key)
    if not column.is_test or test is None:
        return td(column.text(row))
    tip = f"{column.fmt.format(test['low'])} to {column.fmt.format(test['high'])}, p {test['p_corrected']:.2g}"
    return f'<td title="{escape(tip)}">{escape(column.fmt.format(test["difference"]))}{_verdict(test)}</td>'


def _costs(results: Document) -> str:
    """The main table, grouped by caches of equal size."""
    rows = {row["format"]: row for row in results["summary"]["rows"]}
    order = [name for group in results["summary"]["groups"] for name in group]
    firsts = {group[0] for group in results["summary"]["groups"][1:]}
    columns = [
        *SHOWN[:1], Column("smaller than bf16", "smaller", "{:.2f}x"), *SHOWN[2:11],
        Column("over raw", "drafts.over_raw", "{:.3f}x"), Column("prefill s", "decode.prefill_seconds", "{:.2f}"),
    ]  # fmt: skip
    kept = [column for column in columns if any(column.text(row) for row in rows.values())]
    body = []
    for name in dict.fromkeys([*order, *rows]):
        cells = [td(name), *(_cell(column, rows[name]) for column in kept)]
        body.append(tr(cells, "same-bytes" if name in firsts else ""))
    caption = (
        "A line separates caches of different sizes. Hover for intervals and corrected p-values. "
        "Perplexity is tested by a paired bootstrap over blocks of tokens; answers by McNemar's test and a paired "
        "bootstrap over contexts, whichever p-value is larger; both are corrected for the number of caches (Holm)."
    )
    return table(["cache", *(column.title for column in kept)], body, "costs", note=caption)


def _grid(title: str, head: list[str], lines: list[list[str]], name: str, style: str = "") -> str:
    """A section with a table; nothing without lines."""
    return f"<h2>{title}</h2>{table(head, map(tr, lines), name, style)}" if lines else ""


def _task_cell(row: Document | None) -> str:
    if row is None:
        return td(None)
    tip = f"{row['value']:.0%} ({row['low']:.0%} to {row['high']:.0%})"
    tip += f"; {row['test']['verdict']} (p {row['test']['p']:.2g})" if "test" in row else ""
    return shaded(row["value"], f"{row['right']}/{row['asked']}", tip)


def _task_grid(results: Document) -> str:
    by_key = {(row["task"], row["length"], row["format"]): row for row in results["summary"]["tasks"]}
    names = list(dict.fromkeys(name for _, _, name in by_key))
    lines = [
        [td(f"{task}, {length:,} tokens"), *(_task_cell(by_key.get((task, length, name))) for name in names)]
        for task, length in dict.fromkeys(key[:2] for key in by_key)
    ]
    return _grid("Task by task", ["task", *names], lines, "tasks", "grid-table")


def _needle_grid(results: Document) -> str:
    cells = [cell for part in parts_of(results, "needle") for cell in part["cells"]]
    columns = list(dict.fromkeys((cell["context"], cell["depth"]) for cell in cells))
    lines: dict[str, list[str]] = {}
    for cell in sorted(cells, key=lambda cell: columns.index((cell["context"], cell["depth"]))):
        line = lines.setdefault(cell["format"], [td(cell["format"])])
        line.append(shaded(cell["found"] / cell["tried"], f"{cell['found']}/{cell['tried']}"))
    head = ["needles found", *(f"{context:,} at {depth:.0%}" for context, depth in columns)]
    return _grid("Needle in a haystack", head, list(lines.values()), "needle", "grid-table")


def _lm_eval_table(results: Document) -> str:
    rows = _rows(results, "lm_eval")
    scores = list(dict.fromkeys((t, m) for row in rows for t, found in row["lm_eval"].items() for m in found))
    lines = []
    for row in rows:
        line, tests = [td(row["format"])], row.get("lm_eval_tests", {})
        for task, metric in scores:
            value, test = row["lm_eval"].get(task, {}).get(metric), tests.get(f"{task}/{metric}")
            line.append(f"<td>{'' if value is None else f'{value:.4f}'}{_verdict(test) if test else ''}</td>")
        lines.append(line)
    return _grid("lm-evaluation-harness", ["cache", *(f"{t}: {m}" for t, m in scores)], lines, "lm-eval")


def _tiles(results: Document) -> str:
    rows = {row["format"]: row for row in results["summary"]["rows"]}
    packed = [row for row in rows.values() if row["format"] != RAW]
    tiles = []
    lossless = [
        row
        for row in packed
        if row.get("smaller") and row.get("answers_test", {}).get("verdict") == NOT_DISTINGUISHABLE
    ]
    if lossless:
        best = max(lossless, key=lambda row: (row["smaller"], -row.get("kl", 0.0)))
        caption = f"smaller than bf16: {best['format']}, answers to the tasks {NOT_DISTINGUISHABLE} from raw"
        tiles.append(tile(f"{best['smaller']:.2f}x", caption))
    for calibrated, other in (("k4v4+cal", "turboquant_4bit_nc"), ("k3v3+cal", "turboquant_3bit_nc")):
        if rows.get(calibrated, {}).get("kl") and rows.get(other, {}).get("kl"):
            caption = f"KL divergence of {calibrated} relative to {other}, at about equal bytes"
            tiles.append(tile(f"{rows[calibrated]['kl'] / rows[other]['kl']:.2f}x", caption))
    asked = rows[RAW].get("answers")
    if asked:
        tiles.append(tile(f"{asked['asked']} questions", f"asked of every cache; raw: {asked['value']:.0%} right"))
    return f'<div class="tiles">{"".join(tiles)}</div>' if tiles else ""


def _failures(results: Document) -> str:
    failed = [part for part in results["parts"] if part["status"] == "failed"]
    if not failed:
        return ""
    lines = "".join(f"<li><b>{escape(p['title'])}</b>: {escape(p['error'].splitlines()[0])}</li>" for p in failed)
    return f'<div class="card failed after"><h3>Failed</h3><ul class="words">{lines}</ul></div>'


def html(results: Document) -> str:
    """The page."""
    points = [(row["format"], row["bytes_per_token"], row["kl"]) for row in _rows(results, "kl", "bytes_per_token")]
    plots = [quality_plot(points)] if points else []
    plots += _answers_plot(results)
    if (found := first_part(results, "positions")) is not None:
        rows = [(row["format"], row["kl"], row.get("bytes", ())) for row in found["rows"]]
        plots += position_plots(found["edges"], rows)
    plots += _length_plot(results) + _speed_plots(results)
    run, sentences = results["run"], "".join(f"<li>{escape(line)}</li>" for line in words(results))
    parts = [[td(p["title"]), td(p["status"]), td(p["seconds"], "{:.1f}")] for p in results["parts"]]
    calibration = first_part(results, "calibration")
    on = f"Calibrated on {calibration['source']}. " if calibration is not None else ""
    body = f"""<h1>slimkv suite {escape(results["suite"])}: {escape(results["model"])}</h1>
<div class="sub">{escape(results["engine"])}, {escape(run["device"])}, {run["cpu_threads"]} threads,
{escape(run["date"])}</div>
{_tiles(results)}{_failures(results)}
{plot_cards(plots)}
<h2>Quality and cost of each cache</h2>
{_costs(results)}
<h2>Findings</h2><div class="card"><ul class="words">{sentences}</ul></div>
{_task_grid(results)}{_needle_grid(results)}{_lm_eval_table(results)}
{_grid("Parts of this run", ["part", "status", "seconds"], parts, "parts")}
<footer>{escape(on)}Command: {escape(run["command"])}. {escape(versions_line(run["versions"]))}.
{results["seconds"]:.0f} seconds.</footer>"""
    return document(f"slimkv suite: {results['model']}", body)
