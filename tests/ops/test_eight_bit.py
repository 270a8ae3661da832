"""The arithmetic of 8-bit prefill: its error against exact attention on the same codes, and calls that refuse it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from attention_cases import Case, build, exact
from test_attention import row_errors

from slimkv import ops
from slimkv.errors import InputError, UnsupportedError

CPU = torch.device("cpu")
PREFILL = Case(num_kv_heads=2, group=2, lens=(300, 20, 140), queries=(60, 3, 33), query_norm=0.5)


def attend(case: Case, backend: str | None = "reference", prefill: str = "8bit"):
    built = build(case, CPU)
    return built, *built.attend_lse(backend, options=replace(built.options, prefill=prefill))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"dim": 128, "format": "k3v4"},
        {"dim": 96, "value_dim": 64},
        {"window": 50, "sinks": True},
        {"softcap": 2.0, "causal": False},
        {"value_norm": 1e-6, "dtype": "fp32", "out_dtype": "fp32"},
        {"lens": (0, 20, 140), "sinks": True},
    ],
    ids=str,
)
def test_the_loss_on_the_same_codes(options):
    """Compares with float64. docs/design/eight-bit-prefill.md states what it adds to the error of the codes."""
    built, out, lse = attend(replace(PREFILL, **options))
    want, want_lse = exact(built)
    rows = torch.cat([torch.arange(60), torch.arange(63, 96)])
    assert (out[rows].double() - want[rows]).norm() <= 0.045 * want[rows].norm()
    assert row_errors(out[60:63], want[60:63]).max() <= built.case.bound, "few queries are not attended in 8 bits"
    seen = want_lse.isfinite()
    assert torch.equal(lse.isfinite(), seen)
    assert (lse[seen] - want_lse[seen]).abs().max() <= 0.1


def test_a_single_visible_token_is_read_as_it_is():
    """The denominator sums the rounded weights, so a single probability is 1."""
    built, out, _ = attend(replace(PREFILL, lens=(40,), queries=(40,)))
    want, _ = exact(built)
    assert row_errors(out[:1], want[:1]).max() <= 0.02  # from values as e4m3 and a bf16 output


def test_zero_and_tiny_values():
    case = replace(PREFILL, lens=(140,), queries=(33,), dtype="fp32", out_dtype="fp32")
    built = build(case, CPU)
    slots = built.positions(0)
    key = torch.randn(3, 2, 64)
    value = torch.randn(3, 2, 64) * torch.tensor([0.0, 1e-9, 1.0])[:, None, None]
    ops.store_kv(key, value, built.kv, slots[:3], backend="reference")
    out = ops.attend(**built.arguments(options=replace(built.options, prefill="8bit")), backend="reference")
    want, _ = exact(built)
    assert (out.double() - want).norm() <= 0.045 * want.norm()


@pytest.mark.parametrize("backend", ["cpu", "triton", "cuda"])
def test_backends_without_it_refuse_by_name(backend):
    with pytest.raises(UnsupportedError, match=r"8-bit prefill|not run on cpu|not installed|Triton has no compiler"):
        attend(PREFILL, backend)


def test_the_reference_is_what_a_cpu_uses():
    assert torch.equal(attend(PREFILL, None)[1], attend(PREFILL)[1])
    few = replace(PREFILL, lens=(300, 20), queries=(30, 3))
    assert torch.equal(attend(few, "cpu")[1], attend(few, "cpu", "16bit")[1])


@pytest.mark.parametrize("prefill", ["16bit", "auto"])
def test_nothing_else_changes_on_a_cpu(prefill):
    assert torch.equal(attend(PREFILL, "cpu", prefill)[1], attend(PREFILL, "cpu", "16bit")[1])


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"format": "k5v4"}, "8-bit attention does not support key format 5"),
        ({"format": "k4vfp8"}, "8-bit attention does not support value format fp8"),
        ({"fresh": True}, "8-bit attention does not support fresh K and V"),
    ],
)
def test_what_it_does_not_do_is_named(options, reason):
    with pytest.raises(UnsupportedError, match=reason):
        attend(replace(PREFILL, **options))


def test_an_unknown_prefill_is_refused():
    with pytest.raises(InputError, match="prefill must be one of auto, 8bit, 16bit, not '4bit'"):
        ops.AttendOptions(prefill="4bit")
