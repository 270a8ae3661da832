"""``attend`` in Triton, compared with exact attention in float64 on the same codes.

Before the call, outputs are NaN, and workspaces and unused pages hold 0xA5. The few cases of every run cover each
width, head size, group size and option; the full matrix runs on a GPU (or with --full).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from attention_cases import DTYPES, Built, Case, build, exact, variants

from slimkv import Codec, ops
from slimkv.errors import InputError, UnsupportedError
from slimkv.ops import PackedKV
from slimkv.ops.attention.api import AttendRequest, checked_request, split_workspace_bytes
from slimkv.ops.attention.triton import launch as attend_triton
from slimkv.ops.attention.workspace import workspace_bytes
from tail import sample

DECODE = Case()
VERIFY = Case(lens=(40, 5, 17), queries=(5, 2, 3))
PREFILL = Case(num_kv_heads=1, group=2, lens=(90, 35), queries=(40, 35))
MIXED = Case(num_kv_heads=1, lens=(70, 20, 33, 0, 41), queries=(36, 1, 4, 1, 41))

LLOYD = [*(f"k{b}v{b}" for b in range(1, 8)), "k8v8"]
UNIFORM = [f"ku{b}vu{b}" for b in range(2, 9)]
OTHERS = ["kur4vur4", "kur3vur5", "fp8", "krawbf16vrawbf16", "krawfp16vrawfp16", "krawfp32vrawfp32"]
PAIRS = [
    "turboquant_k8v4",
    "turboquant_4bit_nc",
    "turboquant_k3v4_nc",
    "turboquant_3bit_nc",
    "k8v2",
    "k2v5",
    "kfp8v3",
    "krawbf16v4",
    "k4vrawbf16",
    "k6vfp8",
    "kfp8vrawfp32",
]
DIMS = [32, 64, 80, 96, 112, 128, 192, 256]
GROUPS = [1, 3, 4, 6, 7, 8, 16]
OPTIONS = {
    "window": [1, 5, 19],
    "softcap": [2.5],
    "sinks": [True],
    "scale": [0.3],
    "causal": [False],
    "fresh": [True],
    "padding": [3],
    "strided": [True],
}
EVERYTHING = {"window": 19, "softcap": 5.0, "sinks": True, "scale": 0.2, "padding": 2, "strided": True}


def full(cases: list[Case]) -> list:
    return [pytest.param(case, marks=pytest.mark.full, id=str(case)) for case in cases]


def always(cases: list[Case]) -> list:
    return [pytest.param(case, id=str(case)) for case in cases]


# The interpreter's time grows with the number of programs times their KV blocks, so the cases of every run are tiny.
TINY = replace(DECODE, num_kv_heads=1, lens=(37, 9), queries=(1, 1))
WIDTHS = [
    *LLOYD,
    "ku2vu3",
    "ku5vu8",
    "kur4vur6",
    "fp8",
    "krawbf16vrawfp16",
    "krawfp32vrawfp32",
    "turboquant_k8v4",
    "krawbf16v4",
]
ODD_DIMS = [(80, "k3v5"), (96, "k1v2"), (112, "k7v3"), (128, "k4v4"), (256, "k4v4")]
COVERING = [
    *variants(TINY, format=WIDTHS),
    *(replace(TINY, dim=dim, format=format) for dim, format in ODD_DIMS),
    replace(TINY, dim=96, value_dim=64),
    *(replace(TINY, group=group, lens=(20,), queries=(1,)) for group in GROUPS),
    *(replace(TINY, page=page, lens=(2 * page + 3, page), num_splits=2) for page in (32, 128)),
    VERIFY,
    *(replace(TINY, **{name: values[-1]}, lens=(40, 9), queries=(3, 1)) for name, values in OPTIONS.items()),
    replace(VERIFY, **EVERYTHING, num_splits=3, given_workspace=True),
    replace(TINY, num_splits=5, sinks=True),
    PREFILL,
    replace(PREFILL, lens=(60,), queries=(34,), scale=-0.3),
    replace(PREFILL, lens=(60,), queries=(34,), scale=0.0),
    replace(PREFILL, lens=(60,), queries=(34,), query_norm=0.0),
    replace(TINY, scale=-0.3),
    replace(TINY, scale=0.0),
    replace(TINY, query_norm=0.0),
    replace(PREFILL, format="k3v6", dim=80, value_dim=48, lens=(50,), queries=(33,), sinks=True, softcap=5.0),
    replace(PREFILL, format="turboquant_4bit_nc", lens=(60,), queries=(34,), window=19, fresh=True),
    replace(PREFILL, lens=(60,), queries=(34,), fresh=True, padding=2, value_norm=1e5, dtype="fp32"),
    MIXED,
    replace(MIXED, lens=(40, 9), queries=(35, 2), slack=True),
    replace(TINY, lens=(40,), queries=(10,), padding=30, slack=True),
    *(replace(TINY, dtype=dtype, out_dtype=dtype) for dtype in DTYPES),
    replace(TINY, format="krawfp32vrawfp32", dtype="fp32"),
    replace(TINY, value_norm=1e-6),
    replace(TINY, value_norm=1e5, dtype="fp32"),
    replace(TINY, key_norm=1e3, query_norm=0.5, peaked=True),
    replace(TINY, lens=(0, 16, 0), queries=(1, 1, 0), num_splits=2),
]
EVERY_FORMAT = [*LLOYD, *UNIFORM, *OTHERS, *PAIRS]
EXTREMES = [
    (1e-6, "k4v4"),
    (1e-6, "turboquant_k8v4"),
    (1e-6, "fp8"),
    (1e5, "k4v4"),
    (1e5, "turboquant_k8v4"),
    (1e5, "fp8"),
    (1e5, "k6v6"),
]
MATRIX = [
    *(replace(DECODE, format=format) for format in EVERY_FORMAT),
    *(
        replace(PREFILL, format=format)
        for format in [*LLOYD, "ku3vu7", "ku2vu5", *OTHERS, "turboquant_k8v4", "krawbf16v4"]
    ),
    *(replace(DECODE, dim=dim, format=format) for dim in DIMS for format in ("k4v4", "k3v5")),
    *(replace(PREFILL, dim=dim, format="k3v5") for dim in DIMS),
    *(
        replace(base, dim=kd, value_dim=vd)
        for base in (DECODE, PREFILL)
        for kd, vd in [(192, 128), (64, 80), (512, 512)]
    ),
    *(replace(base, group=group) for base in (DECODE, VERIFY) for group in GROUPS),
    *(replace(PREFILL, group=group) for group in (1, 6, 16)),
    *(replace(b, page=page, lens=(2 * page + 3, page, 60)) for b in (DECODE, VERIFY) for page in (16, 32, 64, 128)),
    *(replace(PREFILL, page=page, lens=(2 * page + 40, 35)) for page in (32, 64, 128)),
    *(replace(DECODE, lens=(60, 33), queries=(n, n - 1)) for n in (2, 3, 4, 6, 7, 8, 16, 32)),
    *(case for base in (VERIFY, MIXED) for case in variants(base, **OPTIONS)),
    *variants(DECODE, window=[1, 19], sinks=[True], fresh=[True]),
    *(replace(base, **EVERYTHING) for base in (DECODE, VERIFY, PREFILL, MIXED)),
    *(replace(base, **EVERYTHING, fresh=True) for base in (DECODE, VERIFY, PREFILL, MIXED)),
    *(
        replace(VERIFY, **EVERYTHING, num_splits=num_splits, format=format)
        for num_splits in (2, 7)
        for format in ("k4v4", "turboquant_k8v4")
    ),
    *(replace(DECODE, lens=(1000, 3, 517), num_splits=num_splits) for num_splits in (1, 2, 3, 8, 33, None)),
    *(replace(DECODE, dtype=d, out_dtype=o) for d in DTYPES for o in DTYPES),
    *(replace(DECODE, dtype=d, out_dtype=d, num_splits=2) for d in DTYPES),
    *(replace(PREFILL, dtype=d, out_dtype=d) for d in DTYPES),
    *(replace(DECODE, value_norm=norm, dtype="fp32", format=format) for norm, format in EXTREMES),
    *(replace(PREFILL, value_norm=norm, dtype="fp32", format=format) for norm, format in EXTREMES[:4]),
    replace(DECODE, key_norm=1e3, query_norm=0.5, peaked=True),
    replace(PREFILL, key_norm=1000.0, query_norm=0.5, peaked=True),
    *(replace(base, slack=True) for base in (DECODE, VERIFY, PREFILL, MIXED)),
    replace(DECODE, num_splits=9, given_workspace=True),
    replace(DECODE, lens=(0, 0), queries=(1, 1)),
    replace(DECODE, lens=(0, 16, 0), queries=(1, 1, 0), num_splits=3),
    replace(DECODE, lens=(4099, 2050), queries=(1, 1), num_splits=None, num_kv_heads=8),
    replace(PREFILL, lens=(700, 300), queries=(300, 290), num_kv_heads=4, group=4, dim=128),
    replace(DECODE, lens=(1, 1, 1)),
]


def poisoned_out(case: Case, built: Built) -> tuple[torch.Tensor, torch.Tensor]:
    rows, heads = built.query.shape[:2]
    dtype, device = DTYPES[case.out_dtype], built.query.device
    extra = 16 if case.strided else 0
    out = torch.full((rows, heads + extra, case.spec.value_dim + extra), torch.nan, dtype=dtype, device=device)
    return out[:, extra:, extra:], torch.full((rows, heads), torch.nan, device=device)


def row_errors(got: torch.Tensor, want: torch.Tensor) -> torch.Tensor:
    """Relative error of each row [..., dim]; absolute where the row should be zero."""
    norm = want.norm(dim=-1)
    return (got.double() - want).norm(dim=-1) / torch.where(norm == 0, 1, norm)


def request_of(
    built: Built, out: torch.Tensor, lse: torch.Tensor, workspace: torch.Tensor | None = None
) -> AttendRequest:
    return checked_request(**built.arguments(min_query_len=0), out=out, lse=lse, workspace=workspace)


def check_rows(built: Built, out: torch.Tensor, lse: torch.Tensor, ours: Callable[[int], bool]) -> None:
    """Compares the rows of sequences for whose number of queries ``ours`` is true. All other rows must still be NaN."""
    case = built.case
    want, want_lse = exact(built)
    first = 0
    for count in case.queries:
        rows = slice(first, first + count)
        first += count
        if not ours(count):
            assert out[rows].isnan().all(), "rows of another kernel were written"
        elif count:
            assert row_errors(out[rows], want[rows]).max() <= case.bound
            empty = want_lse[rows] == -torch.inf
            assert torch.equal(lse[rows] == -torch.inf, empty)
            off = (lse[rows] - want_lse[rows])[~empty].abs() / (1 + want_lse[rows][~empty].abs())
            assert not len(off) or off.max() <= case.lse_bound
    assert out[first:].isnan().all(), "padding rows were written"
    assert lse[first:].isnan().all()


def check(case: Case, device: torch.device, backend: str = "triton", bound: float | None = None) -> None:
    built = build(case, device)
    want, want_lse = exact(built)
    out, lse = poisoned_out(case, built)
    workspace = None
    if case.given_workspace:
        heads = built.query.shape[1]
        size = workspace_bytes(
            built.layout, total_queries=built.query.shape[0], sequences=len(case.lens), num_heads=heads,
            num_kv_heads=case.num_kv_heads, max_query_len=built.batch.max_query_len, num_splits=case.num_splits or 1,
            device=device,
        )  # fmt: skip
        workspace = torch.full((size,), 0xA5, dtype=torch.uint8, device=device)
    before = built.pages.clone()
    num_splits = case.num_splits if backend == "triton" else None
    ops.attend(**built.arguments(), out=out, lse=lse, workspace=workspace, num_splits=num_splits, backend=backend)
    real = sum(case.queries)
    assert torch.equal(built.pages, before)
    assert out[real:].isnan().all(), "padding rows were written"
    assert lse[real:].isnan().all()
    out, lse, want, want_lse = out[:real], lse[:real].double(), want[:real], want_lse[:real]
    assert out.isfinite().all()
    worst, bound = float(row_errors(out, want).max()), bound or case.bound
    assert worst <= bound, f"relative error {worst:.2e}, bound {bound:.0e}"
    empty = want_lse == -torch.inf
    assert torch.equal(lse == -torch.inf, empty)
    off = (lse - want_lse)[~empty].abs() / (1 + want_lse[~empty].abs())
    assert not len(off) or off.max() <= case.lse_bound, f"log-sum-exp off by {off.max():.1e} of 1 + itself"


@pytest.mark.parametrize("case", [*sample(always(COVERING), 4), *full([c for c in MATRIX if c not in COVERING])])
def test_attend(case, device):
    check(case, device)


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize(
    "base", [VERIFY, MIXED, replace(MIXED, **EVERYTHING, fresh=True, format="turboquant_4bit_nc")], ids=str
)
def test_the_other_implementations_are_exact(backend, base, device):
    """They compute in float32 throughout, so kernels can be compared with them as well."""
    if backend == "cpu" and device.type != "cpu":
        pytest.skip("for CPUs")
    check(replace(base, dtype="fp32"), device, backend, bound=2e-5)


@pytest.mark.parametrize("base", sample([replace(MIXED, **EVERYTHING, fresh=True), PREFILL], 2), ids=str)
def test_prefill_in_several_passes(base, device, monkeypatch):
    """As if the unpacked keys of a long context did not fit the workspace at once."""
    monkeypatch.setattr(attend_triton, "prefill_chunk", lambda *_: 128)
    longer = tuple(n + 130 if q > 32 else n for n, q in zip(base.lens, base.queries, strict=True))
    check(replace(base, lens=longer, group=1), device)


def test_results_do_not_depend_on_the_other_sequences(device):
    """With the same ``num_splits``, a sequence gives the same bits alone and in a batch."""
    case = replace(DECODE, lens=(37, 9, 50), num_splits=2, num_kv_heads=1)
    built = build(case, device)
    together = ops.attend(**built.arguments(), num_splits=2, backend="triton")
    for i in range(3):
        batch = replace(
            built.batch,
            block_table=built.batch.block_table[i : i + 1],
            seq_lens=built.batch.seq_lens[i : i + 1],
            cu_seqlens_q=torch.tensor([0, 1], dtype=torch.int32, device=device),
        )
        alone = replace(built, batch=batch, query=built.query[i : i + 1])
        assert torch.equal(ops.attend(**alone.arguments(), num_splits=2, backend="triton"), together[i : i + 1])


def test_a_marked_token_gives_nan_to_its_own_sequence_only(device):
    """A token that cannot be encoded must be noticed, but must not affect other sequences."""
    case = replace(DECODE, num_kv_heads=1, lens=(20, 20), queries=(1, 1))
    built = build(case, device)
    bad = torch.full((1, 1, 64), torch.nan, device=device)
    ops.store_kv(bad, bad, PackedKV(built.pages, built.codec, built.layout), built.positions(0)[5:6], backend="triton")
    out = ops.attend(**built.arguments(), backend="triton")
    assert out[0].isnan().any(-1).all()
    assert out[1].isfinite().all()


def test_without_a_given_output(device):
    built = build(replace(TINY, dtype="fp16"), device)
    want, want_lse = exact(built)
    alone = ops.attend(**built.arguments(), backend="triton")
    out, lse = built.attend_lse("triton")
    assert torch.equal(alone, out)
    assert (out.dtype, lse.dtype) == (torch.float16, torch.float32)
    assert row_errors(out, want).max() <= built.case.bound
    assert (lse - want_lse).abs().max() <= built.case.lse_bound * (1 + want_lse.abs().max())


def test_no_queries_at_all(device):
    built = build(replace(TINY, queries=(0, 0)), device)
    assert ops.attend(**built.arguments(), backend="triton").shape == (0, 4, 64)


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("given", [{"num_splits": 1}, {"workspace": torch.zeros(64, dtype=torch.uint8)}])
def test_what_a_backend_does_not_use_it_refuses(backend, given):
    built = build(TINY, torch.device("cpu"))
    with pytest.raises(UnsupportedError, match=next(iter(given))):
        ops.attend(**built.arguments(), **given, backend=backend)


def test_a_workspace_that_is_too_small_is_refused(device):
    built = build(replace(TINY, num_splits=4), device)
    need = split_workspace_bytes(2, 4, 64, 4)
    small = torch.empty(need - 1, dtype=torch.uint8, device=device)
    with pytest.raises(InputError, match=f"at least {need} bytes"):
        ops.attend(**built.arguments(), workspace=small, num_splits=4, backend="triton")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"query": torch.zeros(2, 4, 80)}, r"query must be \[queries, heads, 64\]"),
        ({"query": torch.zeros(2, 4, 64, dtype=torch.float64)}, "query dtype torch.float64 is not supported"),
        ({"query": torch.zeros(2, 3, 64)}, "3 query heads are not a multiple of 2 KV heads"),
        ({"seq_lens": torch.zeros(2, dtype=torch.int64)}, "seq_lens must be int32"),
        ({"cu_seqlens_q": torch.zeros(2, dtype=torch.int32)}, "do not describe the same sequences"),
        ({"max_seq_len": 1000}, "max_seq_len 1000 must fit the block table's"),
        ({"max_query_len": 3}, "max_query_len 3 must lie in 0..2"),
        ({"min_query_len": 2}, "min_query_len 2 must lie in 0..1"),
        ({"max_query_len": 2, "min_query_len": 2}, "min_query_len is 2, but a sequence of cu_seqlens_q has 1 queries"),
        ({"out": torch.zeros(2, 4, 32)}, r"out must be \[2, 4, 64\]"),
        ({"lse": torch.zeros(2, 5)}, r"lse must be contiguous float32 \[2, 4\]"),
        ({"lse": torch.zeros(2, 4, device="meta")}, r"lse must be .* on cpu, not torch.float32 \[2, 4\] on meta"),
        ({"fresh": (torch.zeros(2, 2, 64), torch.zeros(2, 1, 64))}, "fresh value must be"),
        ({"options": ops.AttendOptions(sinks=torch.zeros(3))}, "sinks must be one number per query head"),
    ],
)
def test_wrong_arguments_are_named(changes, message):
    built = build(replace(TINY, num_kv_heads=2, group=2), torch.device("cpu"))
    with pytest.raises(InputError, match=message):
        ops.attend(**built.arguments(**changes))


def test_a_codec_of_another_spec_is_refused():
    """Another seed means another rotation, which shapes do not reveal."""
    kv = build(TINY, torch.device("cpu")).arguments()["kv"]
    other = ops.PackedKV(kv.pages, Codec(replace(kv.codec.spec, seed=7)), kv.layout)
    slots, vectors = torch.arange(1), torch.zeros(1, kv.pages.shape[1], 64)
    for call in (
        lambda: ops.attend(**{**build(TINY, torch.device("cpu")).arguments(), "kv": other}),
        lambda: ops.store_kv(vectors, vectors, other, slots),
        lambda: ops.gather_kv(other, slots),
    ):
        with pytest.raises(InputError, match=r"the layout is of .* and the codec of .*seed=7\): use the same spec"):
            call()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sliding_window": 0}, "sliding_window must be a positive number of keys"),
        ({"sliding_window": 4, "causal": False}, "causal=False"),
        ({"softcap": -1.0}, "softcap must be 0"),
        ({"softmax_scale": float("inf")}, "softmax_scale must be finite"),
    ],
)
def test_options_that_make_no_sense_are_refused(options, message):
    with pytest.raises(InputError, match=message):
        ops.AttendOptions(**options)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"page": 1, "lens": (3,), "queries": (1,)}, "blocks of 1 token"),
        ({"dim": 528, "lens": (3,), "queries": (1,)}, "head sizes 528/528 exceed the 512"),
        ({"dim": 16, "lens": (3,), "queries": (1,)}, "head sizes 16/16 are below 32"),
        ({"group": 130, "lens": (3,), "queries": (1,)}, "130 query heads per KV head are more than"),
    ],
)
def test_what_the_kernels_do_not_do_is_refused_by_name_and_the_reference_does_it(changes, message, device):
    case = replace(TINY, **changes, dtype="fp32")
    built = build(case, device)
    with pytest.raises(UnsupportedError, match=message):
        ops.attend(**built.arguments(), backend="triton")
    check(case, device, "reference", bound=2e-5)
