"""``attend`` on centred keys: a vector of norm 1000 was subtracted from every key before it was stored.

Kernels read centred keys. Softmax ignores the resulting shift of the scores, but soft caps, sinks and the log-sum-exp
do not. Results are compared with exact attention in float64 on decoded keys with the vector added back.

Queries have small norms, so that the vector shifts scores by about 6. Soft caps and sinks of that size expose a missing
shift, and nothing saturates. The error bounds are those of the same cases without a vector.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from attention_cases import Case, build, exact
from test_attention import check, row_errors

from slimkv import ops
from slimkv.codec.key_offset import score_shift
from slimkv.errors import InputError
from slimkv.ops.merge import merge_attention_states
from tail import sample

CENTRED = Case(num_kv_heads=2, group=2, key_norm=8.0, query_norm=0.05, dtype="fp32", offset_norm=1000.0)
DECODE = replace(CENTRED, lens=(53, 16, 7), queries=(1, 3, 1))
PREFILL = replace(CENTRED, num_kv_heads=1, lens=(60, 20), queries=(34, 1))
OPTIONS = {
    "plain": {},
    "sinks": {"sinks": True},
    "softcap": {"softcap": 6.0},
    "softcap_sinks_window": {"softcap": 6.0, "sinks": True, "window": 19},
    "window": {"window": 19},
    "fresh": {"fresh": True},
    "fresh_softcap": {"fresh": True, "softcap": 6.0},
    "scale": {"scale": -0.2, "sinks": True},
    "not_causal": {"causal": False, "sinks": True},
    "padding": {"padding": 3, "sinks": True, "strided": True},
    "empty": {"lens": (60, 0), "queries": (34, 1), "sinks": True},
}


WITHOUT_TRITON = ["reference", "cpu", pytest.param("triton", marks=pytest.mark.tail)]  # its interpreter is slow


@pytest.fixture(params=["reference", "cpu", "triton"])
def backend(request, device) -> str:
    if request.param == "cpu" and device.type != "cpu":
        pytest.skip("its tensors are on the CPU")
    return request.param


def bound_of(backend: str, case: Case) -> float | None:
    """The bound on a row's relative error. Reference and CPU compute in float32. None (Triton): ``Case.bound``."""
    return None if backend == "triton" else 2e-5


@pytest.mark.parametrize("base", [DECODE, PREFILL], ids=["decode", "prefill"])
@pytest.mark.parametrize("options", sample(OPTIONS.values(), 3), ids=list(OPTIONS))
def test_against_true_keys(backend, base, options, device):
    case = replace(base, **options)
    check(case, device, backend, bound_of(backend, case))


@pytest.mark.parametrize("num_splits", sample([2, 5], 2))
def test_triton_with_split_keys(num_splits, device):
    check(replace(DECODE, num_splits=num_splits, sinks=True), device)
    check(replace(DECODE, num_splits=num_splits, softcap=6.0, sinks=True), device)


@pytest.mark.parametrize("backend", WITHOUT_TRITON, indirect=True)
@pytest.mark.parametrize("format", ["k8v8", "k3v3", "fp8"])
def test_formats(backend, format, device):
    case = replace(DECODE, format=format, softcap=6.0, sinks=True)
    check(case, device, backend, bound_of(backend, case))


@pytest.mark.parametrize("base", [DECODE, PREFILL], ids=["decode", "prefill"])
@pytest.mark.parametrize("window", sample([None, 19], 2))
def test_outputs_have_the_bits_of_centred_keys(backend, base, window, device):
    """Softmax ignores the vector, and the log-sum-exp is exact up to float32 rounding of the shift."""
    built = build(replace(base, window=window), device)
    true_keys, centred = exact(built), exact(replace(built, key_offset=None))
    out, lse = built.attend_lse(backend)
    same, centred_lse = built.attend_lse(backend, key_offset=None)
    assert torch.equal(out, same)
    assert torch.equal(out, ops.attend(**built.arguments(), backend=backend))
    sums = score_shift(built.query.abs(), built.key_offset.abs(), 1 / base.dim**0.5).double()
    error = (lse - true_keys[1]).abs()
    assert (error <= (centred_lse - centred[1]).abs() + 1e-6 * sums).all()
    assert (true_keys[1] - centred[1]).abs().max() > 5, "the vector moves no score"


def test_parts_merge_by_true_log_sum_exps(backend, device):
    """One half of the keys is packed and centred; the other is attended exactly, with its true scores."""
    case = replace(CENTRED, lens=(64,), queries=(1,), causal=False)
    built = build(case, device)
    want, _ = exact(built)
    packed = build(replace(case, lens=(32,)), device)
    table = built.batch.block_table[:, :2].contiguous()
    first = packed.attend_lse(backend, pages=built.pages, block_table=table, query=built.query)
    rest = replace(built, case=replace(case, lens=(32,)), batch=replace(
        built.batch, block_table=built.batch.block_table[:, 2:].contiguous()
    ))  # fmt: skip
    second = tuple(x.float() for x in exact(rest))
    merged = merge_attention_states(first, second)
    assert row_errors(merged, want).max() <= (bound_of(backend, case) or case.bound)


@pytest.mark.parametrize("backend", WITHOUT_TRITON, indirect=True)
@pytest.mark.parametrize("options", [{}, {"sinks": True, "softcap": 6.0}], ids=["plain", "sinks_softcap"])
def test_a_vector_of_zeros_changes_no_bit(backend, options, device):
    built = build(replace(DECODE, offset_norm=0.0, **options), device)
    zeros = torch.zeros(2, 64, device=device, dtype=torch.bfloat16)
    want = built.attend_lse(backend)
    got = built.attend_lse(backend, key_offset=zeros)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_raw_keys_are_refused(device):
    built = build(replace(DECODE, offset_norm=0.0, format="krawfp32v4"), device)
    with pytest.raises(InputError, match="leave key_offset at None"):
        ops.attend(**built.arguments(key_offset=torch.zeros(2, 64, device=device, dtype=torch.bfloat16)))
