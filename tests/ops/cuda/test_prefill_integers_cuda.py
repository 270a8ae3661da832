"""Prefill in 8-bit integers, for GPUs without wgmma, against the same arithmetic in torch."""

from __future__ import annotations

from dataclasses import replace

import host
import pytest
import torch
from attention_cases import Case, build
from integer_weights import group_tokens, integer_operands
from test_attention import poisoned_out, row_errors
from test_prefill_bytes_cuda import attended, request_in_bytes, rows_of_many_queries
from test_prefill_cuda import CENTRED, CPU, LONG, SOFT_CAP, launch

from slimkv import ops
from slimkv.ops.attention import eight_bit
from slimkv.ops.attention.cuda import prefill as prefill_cuda
from slimkv.ops.attention.cuda import prefill_config, prefill_defines
from slimkv.ops.cuda.device import NAMED, record_of
from slimkv.spec import CodecSpec
from tail import sample

emulated = pytest.mark.skipif(not host.has_compiler, reason="needs g++")
BOUND = 5e-3  # of a row's relative error, against the reference
SMALL_GPU = record_of(NAMED["rtx4090"], 2)


def config_of(format: str, dim: int) -> prefill_defines.PrefillConfig:
    return prefill_config.warp_config(CodecSpec.parse(format, dim), SMALL_GPU, eight_bit=True)


def hold_to_a_small_gpu(patch: pytest.MonkeyPatch) -> None:
    """Makes the choice of kernels and the reference behave as on a GPU without wgmma."""
    patch.setattr(prefill_config, "device_of", lambda device: SMALL_GPU)
    patch.setattr(eight_bit, "operands", integer_operands)


@pytest.fixture(autouse=True)
def small_gpu(monkeypatch):
    hold_to_a_small_gpu(monkeypatch)


def attend_and_check(
    case: Case, device=CPU, launch=launch, budget=prefill_cuda.WORKSPACE_BYTES, config=None
) -> torch.Tensor:
    """Compares the prefilled sequences with the reference."""
    _, request, want, want_lse = attended(case, device, launch, budget, config)
    assert prefill_config.config_for(request) == config_of(case.format, case.dim)
    out, lse = request.out, request.lse
    for _, rows in rows_of_many_queries(case, out):
        errors = row_errors(out[rows], want[rows].double())
        assert errors.isfinite().all()
        # Ties may be rounded either way: those of a query's coordinate, which changes all probabilities of the row, or
        # those of a probability, on which the whole output depends if only one token is visible.
        bound = 3 * BOUND if case.peaked else BOUND
        assert (errors > bound).sum() <= 0.1 * errors.numel() + 1, f"worst {errors.max():.1e}"
        assert errors.max() < 6 * BOUND
        if lse is not None:
            assert (lse[rows] - want_lse[rows]).abs().max() < 2e-2
    return out


SHORT = replace(LONG, lens=(200,), queries=(40,))
CASES = [
    replace(SHORT, dim=128, lens=(300, 7, 140), queries=(70, 1, 33)),
    replace(SHORT, dim=64, format="k3v2"),
    replace(SHORT, dim=256, format="k4v4", num_kv_heads=2),
    replace(SHORT, dim=128, format="k2v3", window=60, sinks=True, lens=(300,)),
    replace(SHORT, dim=64, format="k1v1", causal=False, group=3, dtype="fp32", strided=True),
    replace(SHORT, dim=128, scale=-0.05, out_dtype="fp32", padding=5, slack=True),
    replace(SHORT, dim=64, lens=(200, 0), queries=(150, 40), key_norm=1e3, query_norm=0.5, peaked=True, sinks=True),
    replace(SHORT, dim=256, softcap=2.0, window=100),
    replace(CENTRED, **SOFT_CAP, dim=64),
]


@emulated
@pytest.mark.parametrize("case", sample(CASES, 4), ids=str)
def test_attend(case):
    attend_and_check(case)
    tile = 2 * config_of(case.format, case.dim).tile_bytes(case.dim) * case.num_kv_heads
    attend_and_check(case, budget=tile * len(case.lens))  # several passes


@emulated
def test_close_to_exact_arithmetic():
    """The error relative to attention without 8-bit arithmetic, on the same codes."""
    case = replace(SHORT, dim=128, lens=(400,), queries=(100,), query_norm=1.0)
    out = attend_and_check(case)
    built = build(case, CPU)
    want, lse = poisoned_out(replace(case, out_dtype="fp32"), built)
    ops.attend(**built.arguments(), out=want, lse=lse, backend="reference")  # not in 8 bits
    assert float((out.float() - want).norm() / want.norm()) < 0.03


@emulated
@pytest.mark.parametrize("small", [0, 6])
@pytest.mark.parametrize("dim", [64, pytest.param(128, marks=pytest.mark.slow)])
def test_tokens_that_tower_over_all_before_them(dim, small):
    """Scores exceed all earlier ones by a little and by much; values are 2^``small`` smaller, as in attention sinks."""
    case = replace(SHORT, dim=dim, group=1, lens=(700,))
    built, towers = build(case, CPU), (0, 5, 70, 131, 200, 260, 390)
    slots = built.positions(0)
    for token in towers:
        block, place = divmod(int(slots[token]), built.layout.block_size)
        at = built.layout.value.fields_offset + 2 * place
        field = built.pages[block, 0, at : at + 2].view(torch.int16)
        field -= small << 10  # the exponent of the scale
    kv = integer_operands(built.codec, built.layout, built.pages, slots)
    assert small == 0 or kv.log.min() < -small
    rotation = built.codec.rotate_query(torch.eye(case.dim)[:, None])[:, 0]
    nats = [2, 2.5, 3, 3.5, 4, 5, 6, 8, 12, 30, 60, 90, 150, 400]
    for query in range(case.queries[0]):
        token = towers[query % len(towers)]
        towering = (kv.key[token, 0] * kv.key_scale[token, 0]) @ rotation.T
        built.query[query, 0] = nats[query % len(nats)] * towering * case.dim**0.5 / towering.square().sum()
    (out, lse), (want, want_lse) = poisoned_out(case, built), poisoned_out(case, built)
    request = request_in_bytes(built, out, lse)
    prefill_cuda.attend_prefill(request, launch)
    ops.attend(**built.arguments(options=request.options), out=want, lse=want_lse, backend="reference")
    assert row_errors(out, want.double()).max() < BOUND
    assert ((lse - want_lse).abs() / (1 + want_lse.abs())).max() < 1e-3


@emulated
def test_a_query_that_is_not_a_number():
    built = build(replace(SHORT, dim=64), CPU)
    built.query[3, 1, 7] = torch.nan
    out, lse = poisoned_out(built.case, built)
    prefill_cuda.attend_prefill(request_in_bytes(built, out, lse), launch)
    bad = torch.zeros(out.shape[:2], dtype=torch.bool)
    bad[3, 1] = True
    assert torch.equal(out.isnan().all(-1), bad)
    assert torch.equal(out.isnan().any(-1), bad)


def test_blocks_fit_every_device():
    for dim in prefill_config.eight_bit_head_dims(single_warps=True):
        spec = CodecSpec.parse("k4v4", dim)
        for name, capability in NAMED.items():
            record = record_of(capability, 100)
            config = prefill_config.warp_config(spec, record, eight_bit=True)
            assert prefill_defines.shared_bytes(spec, config) <= record.shared_of_block, (name, dim)
            assert config.tile_tokens == 2 * group_tokens(dim)


def test_a_gpu_without_fast_integers_is_refused(monkeypatch):
    monkeypatch.setattr(prefill_config, "device_of", lambda device: record_of(NAMED["b300"], 2))
    built = build(SHORT, CPU)
    request = request_in_bytes(built, *poisoned_out(SHORT, built))
    assert "integers" in prefill_config.eight_bit_refusal(request)


BIG = replace(SHORT, dim=128, lens=(700, 33, 1500), queries=(300, 33, 70), num_kv_heads=2, group=4)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "case",
    [
        BIG,
        *(replace(BIG, dim=dim) for dim in (64, 256)),
        replace(BIG, window=300, sinks=True),
        replace(BIG, softcap=2.0, causal=False),
        replace(BIG, dim=64, format="k2v3", lens=(9000, 2100), queries=(600, 2100)),
    ],
    ids=str,
)
def test_attend_on_a_gpu(case, device):
    tile = 2 * config_of(case.format, case.dim).tile_bytes(case.dim) * case.num_kv_heads
    for budget in (prefill_cuda.WORKSPACE_BYTES, 3 * len(case.lens) * tile):
        first, again = (attend_and_check(case, device, prefill_cuda.launcher(device), budget) for _ in range(2))
        assert torch.equal(first.nan_to_num(), again.nan_to_num()), "not the same bits again"
