"""Random calls of the CUDA kernels, emulated lane by lane on a CPU."""

from __future__ import annotations

import pytest

pytest.importorskip("hypothesis")

import host
from budget import count
from emulated_cases import KINDS, run_cases

pytestmark = pytest.mark.skipif(not host.has_compiler, reason="needs g++")


@pytest.mark.parametrize("kind", KINDS)
def test_a_sample(kind):
    assert run_cases(kind, count(2))


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_at_length(kind):
    assert run_cases(kind, count(200)) > 100
