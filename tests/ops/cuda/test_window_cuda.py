"""Decode in CUDA, emulated on a CPU: tokens before every query's window may hold any bytes."""

from __future__ import annotations

from dataclasses import replace

import host
import pytest
import torch
from attention_cases import build
from test_attention import poisoned_out, request_of
from test_decode_cuda import CPU, SMALL_GPU, TINY, launch

from slimkv.ops.attention.cuda import decode as attend_cuda


@pytest.mark.skipif(not host.has_compiler, reason="needs g++")
@pytest.mark.parametrize(("format", "queries"), [("k4v4", 1), ("k5v5", 3), ("kur4vu4", 1), ("fp8", 3)])
@pytest.mark.parametrize("poison", [0xFF, 0xF0])  # invalid scales, and large ones
def test_what_no_query_sees_changes_no_bit(format, queries, poison):
    case = replace(TINY, format=format, window=9, lens=(140,), queries=(queries,))
    outs = []
    for poisoned in (False, True):
        built = build(case, CPU)
        if poisoned:
            built.poison(built.positions(0)[: 140 - queries - 9 + 1], poison)
        out, lse = poisoned_out(case, built)
        attend_cuda.attend_packed(request_of(built, out, lse), SMALL_GPU, launch)
        outs.append(out)
    assert outs[0].isfinite().all()
    assert torch.equal(*outs)
