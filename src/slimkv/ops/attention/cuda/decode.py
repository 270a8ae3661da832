"""attend with CUDA C++: decode and verification on packed pages (source/decode).

Sequences with too many queries for these kernels are prefilled in the same call: by ``prefill`` if it supports the
request, otherwise by the Triton kernels.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from slimkv.codec.rotation import core_words, sign_words
from slimkv.errors import InputError
from slimkv.ops.attention.api import (
    MAX_DECODE_QUERIES,
    MIN_TRITON_HEAD_DIM,
    AttendOptions,
    AttendRequest,
)
from slimkv.ops.attention.cuda import prefill, prefill_config
from slimkv.ops.attention.cuda.decode_config import (
    FEW_VERIFIED_ROWS,
    SPLIT_TOKENS,
    VERIFY,
    DecodeConfig,
    bound_of,
    config_for,
    deterministic_config,
    reachable,
    shared_bytes,
    split_steps,
    takes_whole_tiles,
    writes_whole_tiles,
)
from slimkv.ops.attention.cuda.decode_defines import kernel_defines
from slimkv.ops.attention.cuda.level_bytes import level_bytes
from slimkv.ops.checks import workspace_of
from slimkv.ops.cuda.arguments import arguments
from slimkv.ops.cuda.constants import DTYPE_NUMBERS, KIND_NUMBERS, LOG2E
from slimkv.ops.cuda.device import Device, device_of
from slimkv.ops.cuda.module import Defines, Module, load, start_loading
from slimkv.spec import PageLayout

LARGEST_DIM = 256
_MERGE_WARPS, _PARTS_OF_WARP = 2, 4  # as in merge.cuh; with more partial results, two warps share a row


(Args,) = arguments("decode/shape.cuh", "DecodeArgs")


class KernelCall(NamedTuple):
    """One kernel launch."""

    source: str
    name: str
    defines: Defines
    grid: tuple[int, int]
    threads: int
    shared: int
    args: ctypes.Structure


Launcher = Callable[[KernelCall], None]
Binder = Callable[[KernelCall], Callable[[], None]]


@dataclass(frozen=True)
class Plan:
    """How requests of one kind are compiled and launched, and their constant arguments."""

    config: DecodeConfig
    defines: Defines
    shared: int
    args: ctypes.Structure


def supports(request: AttendRequest) -> str | None:
    """None for Lloyd-Max, uniform and fp8 codes, head sizes up to 256 and GQA groups that fit; else the reason."""
    if request.fresh is not None:
        return "it attends to codes only, not to fresh K and V; use backend='triton'"
    if request.num_splits is not None:
        return f"it chooses splits itself; leave num_splits at None instead of {request.num_splits}"
    spec = request.layout.spec
    if request.max_query_len > MAX_DECODE_QUERIES and min(spec.key_dim, spec.value_dim) < MIN_TRITON_HEAD_DIM:
        return (
            f"prefill at head sizes {spec.key_dim}/{spec.value_dim} is beyond the Triton kernels; "
            "use backend='reference'"
        )
    refusal = _refusal(request.layout)
    if refusal is None and request.must_be_eight_bit:
        refusal = prefill_config.eight_bit_refusal(request)
    if refusal is None and request.options.deterministic:
        return _deterministic_refusal(request)
    if refusal is None and _config(request) is None:
        return f"{_lacking(request.layout, request.group)}; use backend='triton'"
    return refusal


def _deterministic_refusal(request: AttendRequest) -> str | None:
    """Why these kernels cannot make the request's results deterministic, or None."""
    most, device = prefill_config.most_packed_queries(request), request.pages.device
    if request.max_query_len > most:
        if (reason := prefill_config.refusal(request)) is not None:
            return f"it does not attend to these prompts deterministically: {reason}; use backend='reference'"
    bound = bound_of(request.layout, request.options.sliding_window)
    if most and deterministic_config(device_of(device), request.layout, request.group, 1, bound) is None:
        return f"deterministic decoding: {_lacking(request.layout, request.group)}; use backend='reference'"
    return None


def _lacking(layout: PageLayout, group: int) -> str:
    """The error message if no configuration fits."""
    spec = layout.spec
    return (
        f"no configuration fits this device for {group} query heads per KV head with {spec.format} at head sizes "
        f"{spec.key_dim}/{spec.value_dim}"
    )


@lru_cache(maxsize=1024)
def _refusal(layout: PageLayout) -> str | None:
    spec = layout.spec
    for name, side, dim in (("key", spec.key, spec.key_dim), ("value", spec.value, spec.value_dim)):
        if side.kind not in KIND_NUMBERS:
            return (
                f"{name} format {side.name} is not one of its formats (1-8, u2-u8, ur2-ur8, fp8); use backend='triton'"
            )
        if dim > LARGEST_DIM:
            return f"{name} head size {dim} is beyond {LARGEST_DIM}; use backend='triton'"
    if layout.block_size < 16:
        return "it needs blocks of at least 16 tokens; use backend='reference'"
    return None


def run(request: AttendRequest) -> None:
    """See ``slimkv.ops.attend``."""
    if request.query.shape[0] == 0 or request.max_query_len == 0:
        return
    most_queries = prefill_config.most_packed_queries(request)
    if 0 < most_queries >= request.min_query_len:
        attend_packed(request, device_of(request.query.device), _launcher(request.query.device), most_queries)
    if request.max_query_len > most_queries:
        if prefill_config.refusal(request) is None:
            prefill.attend_prefill(request, prefill.launcher(request.query.device), most_queries=most_queries)
            return
        from slimkv.ops.attention.triton.launch import attend_prefill

        attend_prefill(request)


def plan(request: AttendRequest) -> Callable[[Tensor, Tensor, Tensor], None] | None:
    """A function (query, out, seq_lens) that repeats the request with other tensors; None if empty or prefill."""
    if request.query.shape[0] == 0 or not 0 < request.max_query_len <= prefill_config.most_packed_queries(request):
        return None
    device = request.query.device
    call = _prepare(request, device_of(device), max(MAX_DECODE_QUERIES, request.max_query_len))
    args, kernels, needed = call.args, call.bound(_binder(device)), call.workspace_bytes

    def run(query: Tensor, out: Tensor, seq_lens: Tensor) -> None:
        args.query, args.out, args.seq_lens = query.data_ptr(), out.data_ptr(), seq_lens.data_ptr()
        workspace = torch.empty(needed, dtype=torch.uint8, device=device)
        call.use(workspace)
        for start in kernels:
            start()

    return run


def attend_packed(
    request: AttendRequest, device: Device, launch: Launcher, most_queries: int = MAX_DECODE_QUERIES
) -> None:
    """Attention of up to ``most_queries`` queries per sequence: one launch, and with split-KV another one to merge."""
    call = _prepare(request, device, most_queries)
    call.launch(workspace_of(request.workspace, call.workspace_bytes, request.query.device), launch)


@dataclass(frozen=True)
class _Call:
    """A prepared call without its workspace."""

    plan: Plan
    args: ctypes.Structure
    grids: tuple[tuple[int, int], tuple[int, int]]  # for attend and for merge
    merge_shared: int
    cuts: bool  # merge visits only the work tiles split between blocks, not all rows
    part_bytes: int  # size of the partial outputs, which precede their softmax states in the workspace
    workspace_bytes: int
    kept: tuple[Tensor, ...]  # keeps tensors alive that only args points to

    def use(self, workspace: Tensor) -> None:
        """Points the arguments into ``workspace``."""
        args = self.args
        args.parts = parts = workspace.data_ptr()
        args.part_states = parts + self.part_bytes

    def launch(self, workspace: Tensor, launch: Launcher) -> None:
        """Launches the kernels once."""
        self.use(workspace)
        for kernel in self._kernels():
            launch(kernel)

    def bound(self, bind: Binder) -> list[Callable[[], None]]:
        """The kernels as functions that can be called repeatedly."""
        return [bind(kernel) for kernel in self._kernels()]

    def _kernels(self) -> tuple[KernelCall, ...]:
        plan, config = self.plan, self.plan.config
        attend = KernelCall(
            config.source, "attend", plan.defines, self.grids[0], 32 * config.warps, plan.shared, self.args
        )
        if not self.args.blocks:
            return (attend,)
        merge = "merge_cuts" if self.cuts else "merge"
        return attend, KernelCall(
            config.source, merge, plan.defines, self.grids[1], 32 * _MERGE_WARPS, self.merge_shared, self.args
        )


def _prepare(request: AttendRequest, device: Device, most_queries: int) -> _Call:
    query, out, layout, options, pages = request.query, request.out, request.layout, request.options, request.pages
    (total, heads, _), num_kv_heads, sequences = query.shape, pages.shape[1], request.seq_lens.shape[0]
    group, value_dim = heads // num_kv_heads, layout.spec.value_dim
    # If the batch also has prefill rows, `merge` visits `most_queries` rows per sequence instead of every row.
    rows, tiles = min(total, sequences * most_queries), sequences * num_kv_heads
    exact, window = options.deterministic, options.sliding_window
    seen = request.max_seq_len if window is None else min(request.max_seq_len, window + request.max_query_len)
    # Deterministic results must not depend on other sequences: only the layer's window bounds the visible tokens.
    bound = bound_of(layout, window if exact else seen, not exact and 2 * tiles <= device.multiprocessors)
    plan = _plan(
        device, layout, group, _typical_queries(request, most_queries), bound, exact,
        query.dtype, out.dtype, window is not None, options.softcap > 0,
    )  # fmt: skip
    if plan is None:
        raise InputError(_lacking(layout, group))
    config = plan.config
    steps = split_steps(config, window) if exact else 0
    splits = -(-seen // SPLIT_TOKENS) + (window is not None) if 0 < steps <= SPLIT_TOKENS else 1
    # One block per work tile needs one chunk of queries per sequence, and no sequence that is prefilled.
    whole = request.max_query_len <= min(most_queries, config.rows // group) and (
        splits == 1 and writes_whole_tiles(layout) if exact else takes_whole_tiles(device, layout, config, tiles, seen)
    )
    work_tiles = max_work_tiles(rows, sequences, num_kv_heads, group, config)
    blocks = device.multiprocessors * config.blocks_per_sm
    # One partial result per work tile and one per block that starts inside a tile; deterministic: one per split.
    slots = 0 if whole else work_tiles * splits if exact else work_tiles + blocks
    # With few rows, each has many partial results.
    split = not whole and total * heads <= 32 * device.multiprocessors and blocks // work_tiles > _PARTS_OF_WARP
    merge_split = 2 if split or exact else 1
    cuts = not exact and work_tiles > blocks and writes_whole_tiles(layout)  # most work tiles are not split
    merge_grid = (rows, -(-heads * merge_split // _MERGE_WARPS))
    if cuts:
        merge_grid = (max(1, blocks - 1), -(-config.rows // _MERGE_WARPS))
    sinks = request.sinks
    shift = None if request.score_shift is None else request.score_shift.contiguous()
    key, value = request.codec.key_tables, request.codec.value_tables
    args = Args.from_buffer_copy(plan.args)
    args.query, args.query_stride, args.query_head_stride = query.data_ptr(), query.stride(0), query.stride(1)
    args.pages, args.page_stride, args.page_head_stride = pages.data_ptr(), pages.stride(0), pages.stride(1)
    args.block_table, args.table_stride = request.block_table.data_ptr(), request.block_table.stride(0)
    args.seq_lens, args.cu_seqlens_q = request.seq_lens.data_ptr(), request.cu_seqlens_q.data_ptr()
    args.key_signs, args.key_levels, args.key_norm = key.signs.data_ptr(), key.levels.data_ptr(), key.orthonormal
    args.value_signs, args.value_levels = value.signs.data_ptr(), value.levels.data_ptr()
    args.value_norm = value.orthonormal
    args.out, args.out_stride, args.out_head_stride = out.data_ptr(), out.stride(0), out.stride(1)
    args.sinks = None if sinks is None else sinks.data_ptr()
    args.sink_stride = request.sink_stride
    args.score_shift = None if shift is None else shift.data_ptr()
    args.lse = None if request.lse is None else request.lse.data_ptr()
    args.scale, args.softcap = request.softmax_scale * LOG2E, options.softcap * LOG2E
    args.num_seqs, args.num_kv_heads, args.group_size = sequences, num_kv_heads, group
    args.blocks, args.merge_split = 0 if whole else blocks, merge_split
    args.split_steps, args.max_splits = steps, splits
    args.max_decode_queries, args.merge_places = most_queries, most_queries if rows < total else 0
    args.causal, args.sliding_window = options.causal, options.sliding_window or 0
    args.queries_of_chunk, args.group_inverse = config.rows // group, -(-(1 << 16) // group)
    part_bytes = 4 * slots * config.rows * value_dim
    return _Call(
        plan, args, ((tiles if whole else blocks, 1), merge_grid), 4 * _MERGE_WARPS * (value_dim + 4), cuts,
        part_bytes, 4 * slots * config.rows * (value_dim + 2), tuple(x for x in (sinks, shift) if x is not None),
    )  # fmt: skip


def _typical_queries(request: AttendRequest, most_queries: int) -> int:
    """The number of queries per sequence for which the configuration is chosen, unaffected by a few long sequences."""
    longest, sequences = request.max_query_len, request.seq_lens.shape[0]
    alike = longest <= most_queries and 2 * request.query.shape[0] > sequences * longest
    return longest if alike else min(longest, most_queries, max(1, FEW_VERIFIED_ROWS // request.group))


@lru_cache(maxsize=1024)
def _plan(
    device: Device, layout: PageLayout, group: int, queries: int, bound: int, deterministic: bool,
    q_dtype: torch.dtype, out_dtype: torch.dtype, window: bool, softcap: bool,
) -> Plan | None:  # fmt: skip
    """The plan for ``queries`` queries per sequence."""
    config = (deterministic_config if deterministic else config_for)(device, layout, group, queries, bound)
    if config is None:
        return None
    spec = layout.spec
    args = Args(
        key_table=level_bytes(spec.key, spec.key_dim),
        value_table=level_bytes(spec.value, spec.value_dim),
        key_sign_bits=sign_words(spec.key_dim, spec.seed),
        value_sign_bits=sign_words(spec.value_dim, spec.seed),
        key_core=core_words(spec.key_dim, True),
        value_core=core_words(spec.value_dim, False),
    )  # fmt: skip
    defines = kernel_defines(layout, config, DTYPE_NUMBERS[q_dtype], DTYPE_NUMBERS[out_dtype], window, softcap)
    return Plan(config, defines, shared_bytes(layout, config), args)


def max_work_tiles(total: int, sequences: int, num_kv_heads: int, group: int, config: DecodeConfig) -> int:
    """The maximum number of work tiles (sequence, chunk of queries, KV head) of one call."""
    return min(total, total // (config.rows // group) + sequences) * num_kv_heads


def workspace_bytes(
    layout: PageLayout, total_queries: int, sequences: int, num_kv_heads: int, group: int, max_query_len: int,
    device: torch.device,
) -> int:  # fmt: skip
    """The bytes of ``workspace`` that ``attend`` needs within these bounds."""
    about, need = device_of(device), 0
    for config in reachable(about, layout, group, min(max_query_len, MAX_DECODE_QUERIES)):
        work_tiles = max_work_tiles(total_queries, sequences, num_kv_heads, group, config)
        slots = work_tiles + about.multiprocessors * config.blocks_per_sm
        need = max(need, 4 * slots * config.rows * (layout.spec.value_dim + 2))
    return need


def _config(request: AttendRequest) -> DecodeConfig | None:
    queries = min(request.max_query_len, MAX_DECODE_QUERIES)
    return config_for(device_of(request.query.device), request.layout, request.group, queries)


@lru_cache(maxsize=64)
def _launcher(device: torch.device) -> Launcher:
    def launch(call: KernelCall) -> None:
        kernel = _load(call, device).kernel(call.name)
        kernel.launch(call.grid, call.threads, call.shared, call.args, device, overlap=True)

    return launch


def _binder(device: torch.device) -> Binder:
    def bind(call: KernelCall) -> Callable[[], None]:
        kernel = _load(call, device).kernel(call.name)
        return kernel.bound(call.grid, call.threads, call.shared, call.args, device, overlap=True)

    return bind


def _load(call: KernelCall, device: torch.device) -> Module:
    return load(call.source, call.defines, device, exactly=call.source == VERIFY)


def reachable_kernels(
    device: Device, layout: PageLayout, group: int, dtype: torch.dtype, options: AttendOptions
) -> list[tuple[str, Defines]]:
    """Source and defines of every kernel that a layer's requests can launch, for queries and outputs of ``dtype``."""
    number, window, softcap = DTYPE_NUMBERS[dtype], options.sliding_window is not None, options.softcap > 0
    return [
        (config.source, kernel_defines(layout, config, number, number, window, softcap))
        for config in reachable(
            device, layout, group, MAX_DECODE_QUERIES, options.sliding_window, options.deterministic
        )
    ]


def start_loading_reachable(
    layout: PageLayout, group: int, dtype: torch.dtype, options: AttendOptions, device: torch.device
) -> list[Future[Module]]:
    """Compiles and loads, in threads, every decode and prefill kernel that a layer's requests can launch."""
    if _refusal(layout) is not None:
        return []
    kernels = reachable_kernels(device_of(device), layout, group, dtype, options)
    kernels += prefill.reachable_kernels(device_of(device), layout, dtype, options)
    exactly = (VERIFY, prefill.ATTEND)
    return [start_loading(source, defines, device, exactly=source in exactly) for source, defines in kernels]
