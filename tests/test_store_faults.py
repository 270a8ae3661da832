"""Stores under random faults: readers get exactly what was stored, or a miss."""

from __future__ import annotations

import pytest
import store_faults
from store_faults import inject_faults


@pytest.mark.parametrize("count", [60, pytest.param(1000, marks=pytest.mark.slow)])
def test_faults_never_give_a_wrong_answer(count, tmp_path):
    report = inject_faults(count, tmp_path, seed=count)
    assert report.passed, report
    assert sum(report.faults.values()) == count
    assert len(report.faults) == 14  # each kind of fault on each kind of store
    assert report.missed > count / 4, "faults that change nothing test nothing"


def test_an_unchecked_store_is_found_out(tmp_path, monkeypatch):
    """Without digests, damaged chunks are returned as data, and the fault test must report that."""
    monkeypatch.setattr("slimkv.wire.chunk_file.trailer", lambda *args: bytes(48))
    report = inject_faults(60, tmp_path)
    assert report.wrong > 0
    assert not report.passed


def test_a_broken_reader_is_found_out(tmp_path, monkeypatch):
    def load(self, entry):
        raise RuntimeError("the engine is gone")

    monkeypatch.setattr(store_faults.Chunks, "load", load)
    assert not inject_faults(8, tmp_path).passed
