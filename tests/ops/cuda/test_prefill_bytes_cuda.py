"""Prefill on 8-bit tensor cores compared with the same arithmetic in torch: emulated on a CPU, and on a GPU."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from types import SimpleNamespace

import host
import pytest
import torch
from attention_cases import Built, Case, build
from test_attention import poisoned_out, request_of, row_errors
from test_prefill_cuda import BIG, CENTRED, CPU, LONG, SOFT_CAP, launch

from slimkv import ops
from slimkv.ops.attention import eight_bit, reference
from slimkv.ops.attention.api import MAX_DECODE_QUERIES, AttendRequest
from slimkv.ops.attention.cuda import prefill as prefill_cuda
from slimkv.ops.attention.cuda import prefill_config, prefill_defines
from slimkv.ops.cuda.compiler import compile_kernels
from slimkv.ops.cuda.device import record_of
from slimkv.spec import CodecSpec, PageLayout
from tail import sample

emulated = pytest.mark.skipif(not host.has_compiler, reason="needs g++")
CONFIGS = {
    dim: prefill_config.configs(CodecSpec.parse("k4v4", dim), prefill_config.FIRST, eight_bit=True)
    for dim in prefill_config.eight_bit_head_dims(single_warps=False)
}
MOST_ROWS = {dim: configs[-1] for dim, configs in CONFIGS.items()}
BOUND = 5e-3  # of a row's relative error, against the reference
# Two implementations may round ties differently: a coordinate of the rotated query, which changes all probabilities of
# a row slightly, or a single probability. Such rows must meet the bound with either rounding.
QUERY_TIE, WEIGHT_TIE, MOST_TIES = 1e-4, 2e-5, 5


def request_in_bytes(built: Built, out: torch.Tensor, lse: torch.Tensor) -> AttendRequest:
    request = request_of(built, out, lse)
    return replace(request, options=replace(request.options, prefill="8bit"))


def _e4m3(x: torch.Tensor) -> torch.Tensor:
    return x.clamp(max=eight_bit.E4M3_LARGEST).float().to(torch.float8_e4m3fn).double()


def _error_with_ties(request: AttendRequest, kv: eight_bit.Operands, seen: torch.Tensor, row: int, head: int) -> float:
    """A row's relative error with the best rounding of near-ties."""
    kv_head, log2e = head // request.group, eight_bit.LOG2E
    key, key_scale, value, scale = (
        x[:, kv_head][seen].double() for x in (kv.key, kv.key_scale, kv.value, kv.value_scale)
    )
    rotated = request.codec.rotate_query(request.query[row : row + 1])[0, head].double()
    got = request.codec.rotate_value(request.out[row : row + 1].float())[0, head].double()
    scaled = rotated * (127 / rotated.abs().max())
    ties = ((scaled - scaled.floor() - 0.5).abs() < QUERY_TIE).nonzero().flatten()[:MOST_TIES]
    sink = None if request.options.sinks is None else float(request.options.sinks[head]) * log2e
    left = []
    for ups in product((0, 1), repeat=len(ties)):
        integers = scaled.round()
        integers[ties] = scaled[ties].floor() + torch.tensor(ups, dtype=torch.double, device=scaled.device)
        x = (key @ integers) * key_scale * float(rotated.abs().max() / 127 * request.softmax_scale * log2e)
        if cap := request.options.softcap * log2e:
            x = cap * torch.tanh(x / cap)
        x = x + scale.log2()
        reference = torch.ceil(x.max()) - eight_bit.TOP
        exact = torch.exp2(x - reference)
        weights, apart = _e4m3(exact), _e4m3(exact * (1 + WEIGHT_TIE)) - _e4m3(exact * (1 - WEIGHT_TIE))
        total = (weights / scale).sum() + (0 if sink is None else torch.exp2(sink - reference))
        out = weights @ value / total
        slack = (apart * (value - out / scale[:, None]).norm(dim=-1)).sum() / total
        left.append(float((got - out).norm() - slack) / float(out.norm()))
    return min(left)


def attended(case: Case, device, launch, budget, config) -> tuple[Built, AttendRequest, torch.Tensor, torch.Tensor]:
    """A request that has run, and the reference's output and log-sum-exps."""
    built = build(case, device)
    request = request_in_bytes(built, *poisoned_out(case, built))
    assert prefill_config.eight_bit_refusal(request) is None
    request.run(SimpleNamespace(run=lambda r: prefill_cuda.attend_prefill(r, launch, budget, config)))
    want, want_lse = poisoned_out(replace(case, out_dtype="fp32"), built)
    ops.attend(**built.arguments(options=request.options), out=want, lse=want_lse, backend="reference")
    return built, request, want, want_lse


def rows_of_many_queries(case: Case, out: torch.Tensor):
    """The index and the rows of each prefilled sequence. Checks that rows of other sequences are unchanged."""
    first = 0
    for sequence, count in enumerate(case.queries):
        rows = slice(first, first + count)
        first += count
        if count > MAX_DECODE_QUERIES:
            yield sequence, rows
        else:
            assert out[rows].isnan().all(), "rows of another kernel were written"
    assert out[first:].isnan().all(), "padding rows were written"


def attend_and_check(case: Case, device=CPU, launch=launch, budget=prefill_cuda.WORKSPACE_BYTES, config=None):
    """Compares the prefilled sequences with the reference."""
    built, request, want, want_lse = attended(case, device, launch, budget, config or MOST_ROWS[case.dim])
    out, lse = request.out, request.lse
    for sequence, rows in rows_of_many_queries(case, out):
        errors = row_errors(out[rows], want[rows].double())
        assert errors.isfinite().all()
        odd = (errors > BOUND).nonzero().tolist()
        assert len(odd) <= 0.1 * errors.numel() + 1, f"{len(odd)} of {errors.numel()} rows, worst {errors.max():.1e}"
        if odd:
            kv = eight_bit.operands(built.codec, built.layout, built.pages, built.positions(sequence))
            seen = reference.visible(request, case.lens[sequence], case.queries[sequence])
        for row, head in odd:
            left = _error_with_ties(request, kv, seen[row], rows.start + row, head)
            assert left <= BOUND, f"query {row}, head {head}: {errors[row, head]:.1e}, {left:.1e} apart from ties"
        empty = want_lse[rows] == -torch.inf
        assert torch.equal(lse[rows] == -torch.inf, empty)
        off = (lse[rows] - want_lse[rows])[~empty].abs() / (1 + want_lse[rows][~empty].abs())
        assert not len(off) or off.quantile(0.998) <= 2e-3
    return out


SHORT = replace(LONG, lens=(150,), queries=(33,))
EMULATED = [
    replace(LONG, lens=(170, 7, 40), queries=(34, 1, 40), format="k3v2", sinks=True),
    replace(SHORT, dim=128, window=60, softcap=2.0),
    *(replace(CENTRED, dim=dim, **SOFT_CAP) for dim in (64, 128)),
    replace(CENTRED, dim=128, sinks=True),
    replace(SHORT, dim=128, group=3, lens=(140,), causal=False, dtype="fp16", format="k4v1"),
]
MORE = [
    LONG,
    *(replace(SHORT, format=f) for f in ("k1v1", "k2v4", "k4v3", "k1v2")),
    replace(SHORT, dim=128),
    *(replace(SHORT, group=group) for group in (1, 6, 64)),
    *(replace(SHORT, page=page) for page in (32, 128)),
    *(replace(SHORT, **{k: v}) for k, v in (("window", 5), ("scale", -0.3), ("scale", 0.0), ("query_norm", 0.0))),
    *(replace(SHORT, dtype=d, out_dtype=o) for d, o in (("fp32", "bf16"), ("bf16", "fp16"))),
    replace(SHORT, strided=True, out_dtype="bf16", padding=5, slack=True),
    replace(LONG, lens=(33, 200, 0, 128), queries=(33, 33, 40, 100), num_kv_heads=2),
    replace(LONG, lens=(0, 0), queries=(40, 40), sinks=True),
    replace(SHORT, value_norm=1e-6, dtype="fp32"),
    replace(SHORT, value_norm=1e5, dtype="fp32"),
    replace(SHORT, key_norm=1e3, peaked=True),
]


@emulated
@pytest.mark.parametrize(
    "case",
    [*sample(EMULATED, 2), *(pytest.param(case, marks=pytest.mark.slow, id=str(case)) for case in MORE)],
    ids=str,
)
def test_attend(case):
    attend_and_check(case)


@emulated
def test_a_token_that_draws_nearly_all_attention_leaves_small_ones_their_share():
    """The other probabilities are so small that sums of e4m3 products drop them and e4m3 has few bits for them."""
    case, token = replace(SHORT, group=1, lens=(600,)), 300
    built = build(case, CPU)
    kv = eight_bit.operands(built.codec, built.layout, built.pages, built.positions(0))
    key = kv.key[token, 0] * kv.key_scale[token, 0]
    towering = key @ built.codec.rotate_query(torch.eye(case.dim)[:, None])[:, 0].T
    nats = torch.linspace(6.5, 7.5, case.queries[0])[:, None]
    built.query[:, 0] = (nats * towering * case.dim**0.5 / towering.square().sum()).to(built.query.dtype)
    (out, lse), (want, want_lse) = poisoned_out(case, built), poisoned_out(case, built)
    request = request_in_bytes(built, out, lse)
    prefill_cuda.attend_prefill(request, launch)
    ops.attend(**built.arguments(options=request.options), out=want, lse=want_lse, backend="reference")
    assert row_errors(out, want.double()).max() < 2e-3
    assert (lse - want_lse).abs().max() < 1.5e-3


@emulated
@pytest.mark.parametrize("dim", [64, pytest.param(128, marks=pytest.mark.slow)])
@pytest.mark.parametrize("promote", [16, pytest.param(1, marks=pytest.mark.slow)])
def test_tokens_that_tower_over_all_before_them(dim, promote):
    """Scores that exceed all earlier ones, by a little and by much, after tiles without masks."""
    case = replace(SHORT, dim=dim, group=1, lens=(700,))
    built = build(case, CPU)
    kv = eight_bit.operands(built.codec, built.layout, built.pages, built.positions(0))
    rotation = built.codec.rotate_query(torch.eye(case.dim)[:, None])[:, 0]
    nats = [2, 2.5, 3, 3.5, 4, 5, 6, 8, 12, 30, 60, 90, 150, 400]
    for query in range(case.queries[0]):
        token = (0, 5, 70, 131, 200, 260, 390)[query % 7]
        towering = (kv.key[token, 0] * kv.key_scale[token, 0]) @ rotation.T
        built.query[query, 0] = nats[query % len(nats)] * towering * case.dim**0.5 / towering.square().sum()
    (out, lse), (want, want_lse) = poisoned_out(case, built), poisoned_out(case, built)
    request = request_in_bytes(built, out, lse)
    prefill_cuda.attend_prefill(request, launch, config=replace(MOST_ROWS[dim], promote=promote))
    ops.attend(**built.arguments(options=request.options), out=want, lse=want_lse, backend="reference")
    assert row_errors(out, want.double()).max() < BOUND
    assert ((lse - want_lse).abs() / (1 + want_lse.abs())).max() < 1e-3


@emulated
@pytest.mark.slow
@pytest.mark.parametrize("promote", [1, 2])
def test_configs(promote):
    """Two and more warpgroups, few stages, and frequent promotion."""
    for dim, configs in CONFIGS.items():
        for config in configs:
            attend_and_check(replace(SHORT, dim=dim, lens=(600,)), config=replace(config, stages=2, promote=promote))


@emulated
@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"window": 150}, {"causal": False, "sinks": True}], ids=str)
def test_passes(options):
    """A workspace of one tile, and of two."""
    case, config = replace(LONG, **options, lens=(300, 7, 260), num_kv_heads=2), MOST_ROWS[64]
    for tiles in (1, 2):
        each = 2 * config.tile_bytes(case.dim)
        attend_and_check(case, budget=tiles * each * 2 * case.num_kv_heads)


@emulated
@pytest.mark.slow
@pytest.mark.parametrize("side", ["key", "value"])
def test_a_marked_token_gives_nan_to_who_sees_it_only(side):
    built = build(replace(SHORT, lens=(160,), queries=(40,)), CPU)
    block, place = divmod(int(built.positions(0)[140]), built.layout.block_size)  # the token of query 20 of 40
    field = getattr(built.layout, side).field_offset(0) + 2 * place
    built.pages[block, :, field : field + 2] = 0xFF
    out, lse = poisoned_out(built.case, built)
    prefill_cuda.attend_prefill(request_in_bytes(built, out, lse), launch)
    assert out[20:40].isnan().all()
    assert out[:20].isfinite().all()


@emulated
@pytest.mark.slow
def test_a_query_that_is_not_a_number_gives_nan_to_its_row_only():
    built = build(SHORT, CPU)
    built.query[3, 1, 7] = torch.nan
    out, lse = poisoned_out(built.case, built)
    prefill_cuda.attend_prefill(request_in_bytes(built, out, lse), launch)
    bad = torch.zeros(out.shape[:2], dtype=torch.bool)
    bad[3, 1] = True
    assert torch.equal(out.isnan().all(-1), bad)
    assert torch.equal(out.isnan().any(-1), bad)


@pytest.mark.parametrize(
    ("case", "reason"),
    [
        (replace(SHORT, format="k5v4"), "8-bit attention does not support key format 5"),
        (replace(SHORT, format="k4vu4"), "8-bit attention does not support value format u4"),
        (replace(SHORT, dim=256), "head size 256 is not prefilled in 8 bits; 64, 128 are"),
        (replace(SHORT, fresh=True), "8-bit attention does not support fresh K and V"),
    ],
    ids=str,
)
def test_what_it_does_not_do_is_named(case, reason):
    built = build(case, CPU)
    assert reason in prefill_config.eight_bit_refusal(request_in_bytes(built, *poisoned_out(case, built)))


@pytest.mark.parametrize("dim", [pytest.param(64, marks=pytest.mark.slow), 128])
def test_it_compiles(dim):
    pytest.importorskip("cuda.bindings.nvrtc")
    layout, config = PageLayout(CodecSpec.parse("k4v4", dim), 16), MOST_ROWS[dim]
    to_attend = prefill_defines.attend_defines(layout, config, 1, 1, False, False)
    code = compile_kernels(prefill_cuda.ATTEND, to_attend, "sm_90a")
    assert code[:4] == b"\x7fELF"
    to_unpack = prefill_defines.unpack_defines(layout, config)
    assert compile_kernels(prefill_cuda.UNPACK, to_unpack, "sm_90")[:4] == b"\x7fELF"


def test_shared_memory_fits_hopper():
    for dim, configs in CONFIGS.items():
        layout = PageLayout(CodecSpec.parse("k4v4", dim), 16)
        for config in configs:
            shared = prefill_defines.attend_defines(layout, config, 1, 1, False, False)["SHARED"]
            assert shared <= prefill_defines.SHARED_OF_BLOCK


@pytest.mark.parametrize(("prefill", "taken"), [("8bit", True), ("16bit", False), ("auto", False)])
def test_eight_bits_are_taken_where_they_must_be(prefill, taken):
    built = build(SHORT, CPU)
    request = request_of(built, *poisoned_out(SHORT, built))
    request = replace(request, options=replace(request.options, prefill=prefill))
    assert prefill_config.config_for(request).eight_bit == taken


@pytest.mark.parametrize(("queries", "consumers"), [(33, 2), (190, 3)])
def test_rows_of_a_block(queries, consumers):
    """On two multiprocessors, with 64 or 96 queries per block."""
    case = replace(SHORT, lens=(queries,), queries=(queries,))
    built = build(case, CPU)
    request = request_in_bytes(built, *poisoned_out(case, built))
    assert prefill_config.config_for(request).consumers == consumers


@pytest.mark.parametrize(
    ("queries", "length", "consumers"), [(2048, 32768, 2), (1024, 32768, 2), (3072, 32768, 3), (8192, 8192, 3)]
)
def test_rows_of_a_block_on_an_h200(queries, length, consumers, monkeypatch):
    monkeypatch.setattr(prefill_config, "device_of", lambda device: record_of((9, 0), 132))
    case = replace(SHORT, dim=128)
    built = build(case, CPU)
    request = request_in_bytes(built, *poisoned_out(case, built))
    one, many = (torch.empty(n, 8, 1) for n in (1, queries))
    request = replace(request, query=many.repeat(1, 4, 1), pages=one, max_query_len=queries, max_seq_len=length)
    assert prefill_config.config_for(request).consumers == consumers


ON_A_GPU = [
    BIG,
    replace(BIG, dim=64),
    *(replace(BIG, group=group) for group in (1, 3, 8, 64)),
    *(replace(BIG, **{k: v}) for k, v in (("window", 300), ("causal", False), ("scale", -0.05), ("page", 128))),
    *(replace(BIG, softcap=2.0, dim=dim) for dim in (64, 128)),
    *(replace(BIG, format=f) for f in ("k1v1", "k2v3", "k3v4", "k4v2")),
    replace(BIG, dtype="fp32", strided=True, padding=9, slack=True),
    replace(BIG, lens=(0, 300, 33), queries=(40, 300, 33), sinks=True),
    replace(BIG, lens=(9000, 2100), queries=(600, 2100)),
]


@pytest.mark.gpu
@pytest.mark.parametrize("case", ON_A_GPU, ids=str)
def test_attend_on_a_gpu(case, hopper):
    on_device = prefill_cuda.launcher(hopper)
    got = attend_and_check(case, hopper, on_device)
    again = attend_and_check(case, hopper, on_device)
    assert torch.equal(got.nan_to_num(), again.nan_to_num()), "not the same bits again"


@pytest.mark.gpu
def test_passes_on_a_gpu(hopper):
    each = 2 * MOST_ROWS[128].tile_bytes(128)
    for tiles in (1, 3):
        attend_and_check(BIG, hopper, prefill_cuda.launcher(hopper), tiles * each * 4 * BIG.num_kv_heads)
