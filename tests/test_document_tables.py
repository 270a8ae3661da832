"""Tables in the documentation are generated from reports, and the committed tables are up to date."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

from slimkv.cli.output import to_json
from slimkv.errors import InputError
from slimkv.lab.bench.results import Baseline, Report, Row

ROOT = Path(__file__).parents[1]
spec = importlib.util.spec_from_file_location("documents", ROOT / "benchmarks" / "documents.py")
documents = importlib.util.module_from_spec(spec)
spec.loader.exec_module(documents)


def report() -> Report:
    baselines = [
        Baseline("fa3_bf16", 0.3, 1.5, 0.9, "pages of 16"),
        Baseline("fa3_fp8", None, None, None, "no such kernel"),
    ]
    decode = Row("decode", "k4v4", {}, "triton", 0.2, 10, 0.51, None, 1.2e-3, baselines)
    prefill = Row("prefill", "k4v4", {}, "triton", 0.05, 10, 0.1, 512.3, 1.2e-3, [])
    rotated = [
        Row(f"rotation-{name}-8", "kur4vur4", {}, "triton", ms, 10, 0.1, None, None, [])
        for name, ms in (("off", 0.1), ("on", 0.102))
    ]
    rows = [decode, prefill, *rotated]
    return Report("attend", rows, "GPU", 4.2e12, {"torch": "2"}, "today", "slimkv bench attend")


def test_a_table():
    text = documents.table(report())
    assert "`attend` on one GPU (4.20 TB/s copy), today; torch 2; `slimkv bench attend`:" in text
    assert "| decode | `k4v4` | triton | 0.200 ms | 51% | 1.50\N{MULTIPLICATION SIGN} | 1.2e-03 |" in text
    assert "| prefill | `k4v4` | triton | 50.0 µs | 512 TFLOP/s | - | 1.2e-03 |" in text
    assert "The rotation (triton): 0.100 ms without, 0.102 ms with (+2.0%)." in text
    assert "FA3 fp8 is absent: no such kernel." in text


def test_filling_a_document(tmp_path):
    data = json.loads(to_json(report()))
    (tmp_path / "attend-gpu.json").write_text(json.dumps({**data, "of_an_older_version": 1}))
    assert documents.load(tmp_path / "attend-gpu.json") == report()
    text = documents.fill_kernels(f"before\n<!-- bench table -->\nold\n{documents.END}\nafter\n", tmp_path)
    assert text.startswith("before\n")
    assert text.endswith("after\n")
    assert "old" not in text
    assert documents.table(report()) in text
    assert documents.fill_kernels(text, tmp_path) == text


@pytest.mark.parametrize(("path", "fill"), documents.DOCUMENTS.items(), ids=lambda x: getattr(x, "name", ""))
def test_documents_quote_the_committed_reports(path, fill):
    text = path.read_text(encoding="utf-8")
    assert fill(text, ROOT / "benchmarks" / "results") == text, "run: python benchmarks/documents.py"
    with pytest.raises(InputError, match="the document has no <!--"):
        fill("nothing", ROOT)
