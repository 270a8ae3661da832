"""Tables in documents are made from reports, and the committed ones are up to date."""

from __future__ import annotations

from pathlib import Path

import pytest

from slimkv.errors import InputError
from slimkv.lab.bench import markdown
from slimkv.lab.bench.results import Baseline, Report, Rotation, Row
from slimkv.lab.report.markdown import END, rewrite

ROOT = Path(__file__).parents[3]


def report() -> Report:
    baselines = [
        Baseline("fa3_bf16", 0.3, 1.5, 0.9, "pages of 16"),
        Baseline("fa3_fp8", None, None, None, "no such kernel"),
    ]
    decode = Row("decode", "k4v4", {}, "triton", 0.2, 10, 0.51, None, 1.2e-3, None, baselines)
    prefill = Row("prefill", "k4v4", {}, "triton", 0.05, 10, 0.1, 512.3, 1.2e-3, None, [])
    rotation = [Rotation("triton", 0.1, 0.102)]
    return Report("attend", [decode, prefill], rotation, "GPU", 4.2e12, {"torch": "2"}, "today", "slimkv bench attend")


def test_a_table():
    text = markdown.table(report())
    assert "`attend` on one GPU (4.20 TB/s copy), today; torch 2; `slimkv bench attend`:" in text
    assert "| decode | `k4v4` | triton | 0.200 ms | 51% | 1.50\N{MULTIPLICATION SIGN} | 1.2e-03 |" in text
    assert "| prefill | `k4v4` | triton | 50.0 µs | 512 TFLOP/s | - | 1.2e-03 |" in text
    assert "The rotation (triton): 0.100 ms without, 0.102 ms with (+2.0%)." in text
    assert "FA3 fp8 is absent: no such kernel." in text


def test_filling_a_document(tmp_path, capsys):
    (tmp_path / "results").mkdir()
    report().save(tmp_path / "results" / "attend-gpu.json")
    document = tmp_path / "doc.md"
    document.write_text(f"before\n{markdown.START}\nold\n{END}\nafter\n", encoding="utf-8")
    assert rewrite("module", [str(document), str(tmp_path / "results")], markdown.fill) == 0
    text = document.read_text(encoding="utf-8")
    assert text.startswith("before\n")
    assert text.endswith("after\n")
    assert "old" not in text
    assert markdown.table(report()) in text
    assert markdown.fill(text, tmp_path / "results") == text
    assert rewrite("module", [], markdown.fill) == 2
    assert "usage: python -m module DOCUMENT FOLDER" in capsys.readouterr().err
    with pytest.raises(InputError, match="no <!-- bench table -->"):
        markdown.fill("nothing", tmp_path)


def test_the_kernels_document_quotes_the_committed_reports():
    text = (ROOT / "docs" / "design" / "kernels.md").read_text(encoding="utf-8")
    assert markdown.fill(text, ROOT / "benchmarks" / "results") == text, (
        "run: python -m slimkv.lab.bench.markdown docs/design/kernels.md benchmarks/results"
    )
