"""Sizes of a run: larger models get fewer windows and contexts on a CPU."""

from __future__ import annotations

import pytest

from slimkv.lab.suite.settings import CPU_PARAMETERS, lighter, make_settings


def test_a_larger_model_reads_less_on_a_cpu():
    settings = make_settings("quick", "m", device="cpu")
    assert lighter(settings, CPU_PARAMETERS) == (settings, [])
    less, (note,) = lighter(settings, 2 * CPU_PARAMETERS)
    assert (less.size.windows, less.size.contexts) == (settings.size.windows // 2, settings.size.contexts // 2)
    assert less.size.formats == settings.size.formats
    assert "300 million parameters" in note
    assert "windows 3 in place of 6" in note
    least, _ = lighter(settings, 10**12)
    assert (least.size.windows, least.size.contexts, least.size.position_tokens) == (2, 1, 512)


@pytest.mark.parametrize(("name", "changes"), [("full", {}), ("quick", {"windows": 7}), ("smoke", {"contexts": 3})])
def test_what_a_user_chose_stays(name, changes):
    settings = make_settings(name, "m", device="cpu", **changes)
    assert lighter(settings, 10**12) == (settings, [])


def test_formats_do_not_make_it_a_choice_of_counts():
    settings = make_settings("quick", "m", device="cpu", formats=("k4v4",), calibration="none")
    assert lighter(settings, 10**12)[1]
