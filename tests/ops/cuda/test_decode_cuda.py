"""CUDA decode, compared with exact attention in float64: emulated lane by lane on a CPU, and on a GPU if available."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import host
import pytest
import torch
from attention_cases import Built, Case, build
from test_attention import DECODE, EVERYTHING, MATRIX, check, check_rows, poisoned_out, request_of

from slimkv.errors import InputError, UnsupportedError
from slimkv.ops.attention import reference
from slimkv.ops.attention.api import MAX_DECODE_QUERIES, AttendRequest, checked_request
from slimkv.ops.attention.cuda import decode as attend_cuda
from slimkv.ops.attention.cuda.decode import KernelCall
from slimkv.ops.cuda.device import Device, record_of
from slimkv.spec import Kind
from tail import sample

emulated = pytest.mark.skipif(not host.has_compiler, reason="needs g++")
CPU = torch.device("cpu")
SMALL_GPU = Device(multiprocessors=3, shared_of_multiprocessor=233472, shared_of_block=232448, copy_engine=True)
OLD_GPU = Device(multiprocessors=2, shared_of_multiprocessor=102400, shared_of_block=101376)
HOPPER_GPU = replace(SMALL_GPU, warpgroups=True)
H200 = replace(HOPPER_GPU, multiprocessors=132)
# A device whose int8 products are slower than fp16 ones.
B300 = record_of((10, 3), 3)


def launch(call: KernelCall) -> None:
    library = host.compile(Path(call.source), call.defines)
    host.launch(library, call.name, grid=call.grid, threads=call.threads, shared=call.shared, args=call.args)


def captured(request: AttendRequest) -> AttendRequest:
    """Splits keys, as a captured graph does, because its bound on lengths is that of the model."""
    return replace(request, max_seq_len=1 << 20)


def run_emulated(case: Case, device=SMALL_GPU) -> tuple[Built, torch.Tensor, torch.Tensor]:
    built = build(case, CPU)
    out, lse = poisoned_out(case, built)
    request = captured(request_of(built, out, lse))
    assert attend_cuda.supports(request) is None
    attend_cuda.attend_packed(request, device, launch)
    return built, out, lse


def check_emulated(case: Case, device=SMALL_GPU) -> None:
    built, out, lse = run_emulated(case, device)
    check_rows(built, out, lse, lambda count: count <= MAX_DECODE_QUERIES)  # longer ones are prefilled


TINY = replace(DECODE, num_kv_heads=1, lens=(137, 9), queries=(1, 1))
VERIFY = replace(TINY, lens=(70, 5, 0, 17), queries=(5, 2, 1, 3))
EMULATED = [
    *(replace(TINY, format=f) for f in ("k1v1", "k2v3", "k4v4", "k5v6", "k7v2", "k8v8", "fp8", "ku2vu3", "kur4vu7")),
    *(
        replace(VERIFY, format=f)
        for f in ("k4v4", "k3v2", "turboquant_4bit_nc", "turboquant_k8v4", "k6vfp8", "ku8vur3")
    ),
    *(replace(TINY, dim=dim, format=f) for dim, f in ((16, "k4v4"), (80, "k3v5"), (96, "k1v2"), (128, "k4v4"))),
    replace(TINY, dim=112, format="k1v7"),
    replace(TINY, dim=256, format="k4v3", lens=(40,), queries=(1,)),
    replace(VERIFY, dim=192, value_dim=128),
    replace(TINY, dim=256, group=16, lens=(40,), queries=(1,)),
    *(replace(TINY, group=group) for group in (1, 3, 6, 8, 16)),
    *(replace(TINY, page=page, lens=(2 * page + 3, page, 60), queries=(1, 1, 1)) for page in (32, 128)),
    *(replace(VERIFY, **{k: v}) for k, v in (("window", 5), ("softcap", 2.5), ("causal", False), ("scale", -0.3))),
    replace(VERIFY, **EVERYTHING),
    replace(TINY, **EVERYTHING, lens=(700, 60)),
    replace(TINY, lens=(70, 20, 33, 0, 41), queries=(36, 1, 4, 1, 41)),
    replace(TINY, lens=(30, 400, 0, 200, 7), queries=(5, 300, 1, 200, 7), padding=40),  # of many rows, few are merged
    replace(TINY, lens=tuple(range(70)), queries=(1,) * 70),
    replace(TINY, lens=(0, 0), sinks=True),
    *(replace(case, query_norm=0.0) for case in (TINY, VERIFY)),  # a zero query gives all keys the same score
    *(replace(case, scale=0.0) for case in (TINY, VERIFY)),
    replace(TINY, value_norm=1e-6, dtype="fp32"),
    replace(VERIFY, value_norm=1e5, dtype="fp32", out_dtype="bf16"),
    replace(TINY, key_norm=1e3, query_norm=0.5, peaked=True, dtype="fp16", out_dtype="fp16"),
]


@emulated
@pytest.mark.parametrize("case", sample(EMULATED, 3), ids=str)
def test_attend(case):
    check_emulated(case)


LONG = replace(TINY, lens=(700, 90, 1), queries=(1, 1, 1))
DRAFTS = replace(LONG, dim=128, lens=(700, 290, 33), queries=(8, 6, 8))
MANY = replace(DRAFTS, page=64, lens=(300, 150), queries=(16, 9))
LONG_CASES = [
    *(replace(LONG, format=f) for f in ("k4v4", "k2v2", "k1v3", "ku4vu4", "turboquant_k8v4")),
    *(replace(LONG, format=f) for f in ("k5v5", "k6v6", "k6v5", "k8v7")),
    *(replace(LONG, dim=128, format=f) for f in ("k4v4", "k2v2")),
    replace(LONG, page=32, format="k2v2"),
    *(
        replace(LONG, page=64, format=f, queries=q)
        for f in ("k4v4", "ku4vu8")
        for q in ((1, 1, 1), (4, 2, 1), (8, 6, 1))
    ),
    *(replace(LONG, page=page, format=f) for page, f in ((16, "k5v5"), (32, "k6v4"), (64, "k5v5"), (64, "k6v6"))),
    replace(LONG, **EVERYTHING, format="k2v2"),
    replace(LONG, queries=(4, 2, 1)),
    *(replace(LONG, group=8, format=f) for f in ("k4v4", "k5v3")),
    *(replace(LONG, format=f, queries=(8, 6, 1)) for f in ("k4v4", "k5v6", "k5v5", "k2vur8")),
    replace(LONG, dim=96, queries=(8, 6, 1), **EVERYTHING),
    replace(LONG, dim=128, format="k6v6"),
    replace(LONG, format="k6v6", dim=80),
    # Slices that do not fill words of a plane, and queries rotated without a free slot of the ring.
    *(replace(LONG, page=64, format=f, dim=dim) for dim in (80, 112) for f in ("k3v3", "k5v5", "k2v2")),
    *(replace(LONG, page=64, format=f, dim=96) for f in ("k3v5", "k7v1")),
    *(replace(LONG, page=64, format="k5v5", dim=dim) for dim in (16, 192)),
    *(replace(LONG, page=64, format="k1v1", dim=dim) for dim in (64, 80, 112, 128, 192)),
    replace(LONG, format="k3v5", dim=112, queries=(8, 6, 1)),
]


@emulated
@pytest.mark.parametrize("case", sample(LONG_CASES, 5), ids=str)
def test_long_sequences(case):
    check_emulated(case)


@emulated
@pytest.mark.parametrize(
    ("change", "launches"),
    [
        ({"window": 19}, 1),
        ({"window": 19, "group": 8, "sinks": True}, 1),
        ({"window": 19, "queries": (2, 1, 1, 1, 2, 1)}, 1),
        ({"window": 19, "queries": (5, 1, 1, 1, 1, 1)}, 2),  # several chunks per sequence
        ({"lens": (300, 7, 0, 120, 33, 250)}, 1),
        ({"lens": (4000, 7, 0, 120, 33, 250)}, 2),
        ({"lens": (40, 7, 0, 120, 33, 250), "queries": (40, 1, 1, 1, 1, 1)}, 2),  # in a batch with a prefill
    ],
    ids=str,
)
def test_a_block_with_all_keys_of_its_tile_leaves_nothing_to_merge(change, launches):
    """A window bounds the visible tokens whatever the lengths, also in a graph captured for the longest sequences."""
    case = replace(TINY, **{"lens": (1300, 700, 0, 120, 33, 250), "queries": (1,) * 6, **change})
    built, found = build(case, CPU), []
    out, lse = poisoned_out(case, built)

    def named(call):
        found.append(call.name)
        launch(call)

    attend_cuda.attend_packed(request_of(built, out, lse), SMALL_GPU, named)
    assert len(found) == launches
    check_rows(built, out, lse, lambda count: count <= MAX_DECODE_QUERIES)


@emulated
@pytest.mark.parametrize(
    "case", sample([TINY, replace(VERIFY, format="k2v3"), replace(LONG, format="ku4vu4")], 3), ids=str
)
def test_codes_as_fp16_where_int8_is_slow(case):
    check_emulated(case, B300)


@emulated
@pytest.mark.parametrize(
    ("dim", "value_dim", "name"), [(64, None, "merge_cuts"), (80, None, "merge_cuts"), (32, 80, "merge")]
)
def test_of_many_items_only_what_is_cut_is_merged(dim, value_dim, name):
    """Thread blocks write whole work tiles themselves: head size 80 uses the queries' memory for that."""
    names: list[str] = []
    case = replace(TINY, dim=dim, value_dim=value_dim, lens=(9, 0, 70) * 5, queries=(1,) * 15)

    def named(call):
        names.append(call.name)
        launch(call)

    built = build(case, CPU)
    out, lse = poisoned_out(case, built)
    attend_cuda.attend_packed(captured(request_of(built, out, lse)), SMALL_GPU, named)
    assert names == ["attend", name]
    check_rows(built, out, lse, lambda count: True)


# The partition of work: nine thread blocks on the small device, 96 on the large one.
LARGE_GPU = replace(SMALL_GPU, multiprocessors=32)
CUTS = [
    (replace(TINY, lens=(1300, 9, 30, 64, 5), queries=(1,) * 5), SMALL_GPU),  # blocks get several tiles
    (replace(TINY, num_kv_heads=2, lens=(600, 640), queries=(1, 1)), SMALL_GPU),  # equal lengths: two blocks per tile
    (replace(TINY, lens=(*range(100, 138), 0, 1), queries=(1,) * 40), LARGE_GPU),  # more sequences than lanes
    (replace(TINY, lens=(3000, *range(40)), queries=(1,) * 41), LARGE_GPU),
    (replace(VERIFY, lens=(300, 280, 310), queries=(5, 2, 4)), LARGE_GPU),
    (replace(VERIFY, lens=(0, 30, 2, 700, 64) * 5, queries=(2, 3, 2, 36, 1) * 5), SMALL_GPU),  # more tiles than blocks
]


@emulated
@pytest.mark.parametrize(("case", "device"), CUTS, ids=lambda x: str(x) if isinstance(x, Case) else "")
def test_how_work_is_cut(case, device):
    check_emulated(case, device)


@emulated
def test_a_gpu_with_less_shared_memory():
    check_emulated(replace(TINY, dim=256, format="k6v6", lens=(40,), queries=(1,)), OLD_GPU)


@emulated
@pytest.mark.parametrize(("queries", "format"), [(1, "k4v4"), (3, "k4v4"), (1, "k5v6")])
def test_a_marked_token_gives_nan_to_who_sees_it_only(queries, format):
    built = build(replace(TINY, format=format, lens=(200, 20), queries=(queries, 1)), CPU)
    at = 5 if queries == 1 else 198  # far from any mask, or seen by the last two queries only
    block, place = divmod(int(built.positions(0)[at]), built.layout.block_size)
    field = built.layout.key.field_offset(0) + 2 * place
    built.pages[block, :, field : field + 2] = 0xFF  # the mark that kernels write for a NaN key
    out, lse = poisoned_out(built.case, built)
    attend_cuda.attend_packed(request_of(built, out, lse), SMALL_GPU, launch)
    seen = 0 if queries == 1 else 1
    assert out[seen:queries].isnan().any(-1).all()
    assert out[:seen].isfinite().all()
    assert out[queries:].isfinite().all()


class Emulated:
    """The backend passed to ``AttendRequest.run``."""

    def __init__(self, device: Device) -> None:
        self.device = device

    def run(self, request) -> None:
        attend_cuda.attend_packed(request, self.device, launch)


# Kernels that need the scores of uncentred keys: 4 rows with int8 and fp16 products, 16 rows, pairs of warpgroups.
CENTRED = [
    *(replace(TINY, format=f, group=2, num_kv_heads=2, queries=(1, 2)) for f in ("k4v4", "k5v5")),
    replace(VERIFY, group=3, num_kv_heads=2),
    replace(DRAFTS, dim=64, num_kv_heads=2, queries=(8, 6, 8)),
    replace(MANY, dim=64, queries=(16, 9)),
]


@emulated
@pytest.mark.parametrize("change", [{"softcap": 3.0}, {"sinks": True}, {}, {"softcap": 3.0, "sinks": True}], ids=str)
@pytest.mark.parametrize("case", sample(CENTRED, 2), ids=str)
def test_centred_keys(case, change):
    """As in the reference, soft caps, sinks and log-sum-exps use the scores of uncentred keys."""
    built = build(replace(case, **change), CPU)
    offset = torch.randn(case.num_kv_heads, case.dim, generator=torch.Generator().manual_seed(3)).bfloat16()
    results = []
    for backend in (Emulated(HOPPER_GPU), reference):
        out, lse = poisoned_out(case, built)
        request = checked_request(**built.arguments(key_offset=offset), out=out, lse=lse)
        assert request.sees_offset
        request.run(backend)
        results.append((out, lse))
    (out, lse), (want, want_lse) = results
    rows = sum(case.queries)
    errors = (out[:rows] - want[:rows]).norm(dim=-1) / want[:rows].norm(dim=-1).clamp_min(1e-6)
    assert errors.max() <= case.bound
    empty = want_lse[:rows] == -torch.inf
    assert torch.equal(lse[:rows] == -torch.inf, empty)
    assert torch.allclose(lse[:rows][~empty], want_lse[:rows][~empty], atol=2e-3, rtol=2e-3)


@emulated
def test_results_do_not_depend_on_the_other_sequences():
    """KV blocks begin at fixed tokens, so only the order of a few additions may differ."""
    built, together, _ = run_emulated(replace(TINY, lens=(300, 9, 150), queries=(1, 1, 1)))
    batch = built.batch
    for i in range(3):
        one = replace(
            batch,
            block_table=batch.block_table[i : i + 1],
            seq_lens=batch.seq_lens[i : i + 1],
            cu_seqlens_q=torch.tensor([0, 1], dtype=torch.int32),
        )
        alone = replace(built, batch=one, query=built.query[i : i + 1])
        out = torch.full_like(together[i : i + 1], torch.nan)
        attend_cuda.attend_packed(captured(request_of(alone, out, torch.empty(1, 4))), SMALL_GPU, launch)
        assert torch.allclose(out, together[i : i + 1], rtol=1e-5, atol=1e-6)


def test_a_workspace_that_is_too_small_is_refused():
    built = build(TINY, CPU)
    out, lse = poisoned_out(TINY, built)
    request = captured(request_of(built, out, lse, torch.empty(1000, dtype=torch.uint8)))
    with pytest.raises(InputError, match="workspace must be contiguous uint8 of at least"):
        attend_cuda.attend_packed(request, SMALL_GPU, launch)


@pytest.mark.parametrize(
    ("case", "reason"),
    [
        (replace(TINY, format="krawbf16v4"), "key format rawbf16 is not one of its formats"),
        (replace(TINY, dim=272), "key head size 272 is beyond 256"),
        (replace(TINY, group=65), "65 query heads per KV head with"),
        (replace(TINY, dim=256, group=49), "49 query heads per KV head with"),
        (replace(TINY, fresh=True), "codes only, not to fresh K and V"),
        (replace(TINY, dim=16, lens=(40,), queries=(33,)), "prefill at head sizes 16/16 is beyond the Triton kernels"),
    ],
    ids=str,
)
def test_what_it_does_not_do_is_named(case, reason):
    built = build(case, CPU)
    request = request_of(built, *poisoned_out(case, built))
    assert reason in attend_cuda.supports(request)


def taken(case: Case) -> bool:
    spec = case.spec
    wide = max(spec.key_dim, spec.value_dim) > 128
    return (
        Kind.RAW not in (spec.key.kind, spec.value.kind)
        and max(spec.key_dim, spec.value_dim) <= 256
        and case.group <= (48 if wide else 64)
        and not case.fresh
    )


@pytest.mark.gpu
@pytest.mark.parametrize("case", [*LONG_CASES, *filter(taken, MATRIX[::5])], ids=str)
def test_long_sequences_on_a_gpu(case, device):
    check(case, device, "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("case", [*MATRIX, *EMULATED], ids=str)
def test_attend_on_a_gpu(case, device):
    if taken(case):
        check(case, device, "cuda")
    else:
        with pytest.raises(UnsupportedError, match="with 'cuda'"):
            check(case, device, "cuda")
