"""The guide shows the committed results."""

from __future__ import annotations

from pathlib import Path

import pytest

from slimkv.errors import InputError
from slimkv.lab.suite import document

ROOT = Path(__file__).parents[3]


def test_the_guide_is_up_to_date():
    text = (ROOT / "docs" / "guides" / "suite.md").read_text(encoding="utf-8")
    assert document.fill(text, ROOT / "benchmarks" / "results") == text, (
        "run: python -m slimkv.lab.suite.document docs/guides/suite.md benchmarks/results"
    )


def test_a_document_without_markers_is_refused(tmp_path):
    with pytest.raises(InputError, match="has no <!-- suite results -->"):
        document.fill("nothing", tmp_path)
