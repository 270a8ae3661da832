"""Selects the sample of a long list of cases that ``make test`` runs. ``make test-all`` runs all of them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def sample(cases: Iterable[Any], every: int) -> list[Any]:
    """``cases`` for ``parametrize``, marked ``tail`` except for the first and each ``every``-th after it."""
    return [case if i % every == 0 else _in_tail(case) for i, case in enumerate(cases)]


def _in_tail(case: Any) -> Any:
    if hasattr(case, "marks"):  # a pytest.param
        return pytest.param(*case.values, marks=(*case.marks, pytest.mark.tail), id=case.id)
    return pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.tail)
