"""Prefill with CUDA C++: pages are unpacked into tiles in tensor-core operand order, then attended.

With many queries per sequence, a pass is two launches: source/prefill/unpack.cu, then attend.cu (without wgmma:
attend_warps.cu). If the workspace is too small for one pass, each pass covers some of the sequences, or a section of
every context and hands on its softmax state. Hopper has two alternatives. For equal query lengths, the first launch
unpacks only for the first blocks, which unpack for later ones (source/prefill/ahead.cuh). For few queries, the blocks
of ``attend`` unpack for themselves (source/prefill/producer.cuh). ``prefill_config`` chooses.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from slimkv.codec.byte_levels import MOST_BITS, byte_levels, byte_words
from slimkv.codec.rotation import sign_words
from slimkv.ops.attention.api import MAX_DECODE_QUERIES, NO_WINDOW, AttendOptions, AttendRequest
from slimkv.ops.attention.cuda.level_bytes import level_bytes
from slimkv.ops.attention.cuda.prefill_config import config_for, reachable, splits
from slimkv.ops.attention.cuda.prefill_defines import ATTEND, UNPACK, PrefillConfig, attend_defines, unpack_defines
from slimkv.ops.attention.cuda.prefill_workspace import (
    WORKSPACE_BYTES,
    Batch,
    lay_out,
    plan_ahead,
    plan_passes,
    seen_tiles,
)
from slimkv.ops.cuda.arguments import arguments
from slimkv.ops.cuda.constants import DTYPE_NUMBERS, LOG2E
from slimkv.ops.cuda.device import Device, device_of
from slimkv.ops.cuda.module import Defines, load
from slimkv.spec import CodecSpec, Kind, PageLayout, TensorFormat

_CACHED_BYTES = 32 << 20  # unpacked K and V that concurrent blocks may share in the L2 cache
_MERGED_WORDS = 5  # 32-bit words of struct MergedSplits

(PrefillArgs,) = arguments("prefill/args.cuh", "PrefillArgs")
# source, kernel, defines, grid, threads, shared memory, argument
Launcher = Callable[[str, str, Defines, tuple[int, int], int, int, ctypes.Structure], None]


def attend_prefill(
    request: AttendRequest, launch: Launcher, budget: int = WORKSPACE_BYTES, config: PrefillConfig | None = None,
    most_queries: int = MAX_DECODE_QUERIES,
) -> None:  # fmt: skip
    """Attention for sequences of more than ``most_queries`` queries."""
    total, sequences = request.query.shape[0], request.seq_lens.shape[0]
    most_long = min(sequences, total // (most_queries + 1))
    if most_long == 0:
        return
    config = config or config_for(request)
    attend = _Attend(request, config, _attend_args(request, config, most_queries), launch)
    if config.fused:
        attend.start_split() if splits(request, config, most_queries) > 1 else attend.start()
    elif config.ahead:
        plan = plan_ahead(request, config, most_long, device_of(request.query.device).multiprocessors, budget)
        space = lay_out(attend.args, plan, config, request.layout.spec.key_dim, request.query.device)
        attend.unpack(plan.lead)
        attend.start()
        del space
    else:
        _attend_in_passes(attend, most_long, budget)


@dataclass(frozen=True)
class _Attend:
    """The launches of a request."""

    request: AttendRequest
    config: PrefillConfig
    args: ctypes.Structure
    launch: Launcher

    @property
    def state_floats(self) -> int:
        """The number of floats in the softmax state that one pass hands to the next."""
        args, dim = self.args, self.request.layout.spec.key_dim
        return args.query_blocks * args.num_kv_heads * _state_floats(self.config.rows, dim)

    def defines(self, hands_on: bool = False) -> Defines:
        request = self.request
        return attend_defines(
            request.layout, self.config, DTYPE_NUMBERS[request.query.dtype], DTYPE_NUMBERS[request.out.dtype],
            request.options.sliding_window is not None, request.options.softcap > 0,
            request.score_shift is not None, hands_on,
        )  # fmt: skip

    def unpack(self, items: int) -> None:
        """Unpacks the first ``items`` items; an item is a KV head of a sequence."""
        config, defines = self.config, unpack_defines(self.request.layout, self.config)
        grid, threads = (items, self.args.tiles), 2 * config.tile_tokens
        self.launch(UNPACK, "unpack", defines, grid, threads, defines["SHARED"], self.args)

    def start(self, hands_on: bool = False) -> None:
        """Launches ``attend``. With ``hands_on``, it can read the state of the previous pass and write its own."""
        args, defines = self.args, self.defines(hands_on)
        grid, threads = (args.query_blocks * args.num_kv_heads, 1), self.config.threads
        self.launch(self.config.source, "attend", defines, grid, threads, defines["SHARED"], args)

    def start_split(self) -> None:
        """Launches one split-KV block per multiprocessor, then the merge."""
        args, defines, rows = self.args, self.defines(), self.config.rows
        device, dim = self.request.query.device, self.request.layout.spec.key_dim
        args.blocks = device_of(device).multiprocessors
        floats = args.blocks * _state_floats(rows, dim)
        space = torch.empty(floats + args.blocks * _MERGED_WORDS, dtype=torch.float32, device=device)
        args.state, args.merged = space.data_ptr(), space.data_ptr() + 4 * floats
        grid, merged = (args.blocks, 1), (args.blocks, rows // 64)
        self.launch(self.config.source, "attend", defines, grid, self.config.threads, defines["SHARED"], args)
        self.launch(self.config.source, "merge", defines, merged, 256, 2 * defines["QUERY_BYTES"], args)


def _state_floats(rows: int, dim: int) -> int:
    """The number of floats in the softmax state of a block of query rows."""
    return 2 * rows * (-(-dim // 32) * 16 + 4)


def _attend_in_passes(attend: _Attend, most_long: int, budget: int) -> None:
    """Fills the workspace with unpacked tiles and attends to them, pass by pass."""
    request, config, args = attend.request, attend.config, attend.args
    layout, device, num_kv_heads = request.layout, request.query.device, request.pages.shape[1]
    longest = seen_tiles(request, config.tile_tokens)
    batch = Batch(most_long, num_kv_heads, request.query.shape[0] // (config.rows // request.group), longest)
    ranks, tiles = plan_passes(layout, config, batch, device_of(device).multiprocessors, budget)
    rows, passes = ranks * num_kv_heads, -(-longest // tiles)
    side_bytes = rows * tiles * config.tile_bytes(layout.spec.key_dim)  # for keys; values take as many
    tile_bytes = 2 * side_bytes + 16 * rows * tiles
    state_bytes = 4 * attend.state_floats if passes > 1 else 0
    space = torch.empty(tile_bytes + state_bytes, dtype=torch.uint8, device=device)
    args.keys, args.values = space.data_ptr(), space.data_ptr() + side_bytes
    args.tile_scales, args.state = args.values + side_bytes, space.data_ptr() + tile_bytes
    args.section = max(1, min(num_kv_heads, _CACHED_BYTES // (2 * side_bytes // num_kv_heads)))
    args.tiles, args.ranks, args.slots = tiles, ranks, rows
    for first_rank in range(0, most_long, ranks):
        for step in range(passes):
            args.first_rank, args.first_tile = first_rank, step * tiles
            args.first_pass, args.last_pass = step == 0, step == passes - 1
            attend.unpack(min(ranks, most_long - first_rank) * num_kv_heads)
            attend.start(hands_on=passes > 1)


def _attend_args(request: AttendRequest, config: PrefillConfig, most_queries: int) -> ctypes.Structure:
    """The arguments that depend on neither the workspace nor the pass."""
    query, out, pages, options, spec = (
        request.query, request.out, request.pages, request.options, request.layout.spec,
    )  # fmt: skip
    key, value, sinks = request.codec.key_tables, request.codec.value_tables, request.sinks
    sequences = request.seq_lens.shape[0]
    return PrefillArgs(
        query=query.data_ptr(), seq_lens=request.seq_lens.data_ptr(), cu_seqlens_q=request.cu_seqlens_q.data_ptr(),
        sinks=None if sinks is None else sinks.data_ptr(),
        sink_stride=request.sink_stride,
        score_shift=None if request.score_shift is None else request.score_shift.data_ptr(), out=out.data_ptr(),
        lse=None if request.lse is None else request.lse.data_ptr(), query_stride=query.stride(0),
        query_head_stride=query.stride(1), out_stride=out.stride(0), out_head_stride=out.stride(1),
        scale=request.softmax_scale * LOG2E, softcap=options.softcap * LOG2E, key_norm=key.orthonormal,
        value_norm=value.orthonormal, key_sign_bits=sign_words(spec.key_dim, spec.seed),
        value_sign_bits=sign_words(spec.value_dim, spec.seed), num_seqs=sequences, num_kv_heads=pages.shape[1],
        group_size=request.group, max_decode_queries=most_queries, causal=options.causal,
        sliding_window=options.sliding_window or NO_WINDOW,
        query_blocks=query.shape[0] // (config.rows // request.group) + sequences,
        aligned=_by_16_bytes(out) | _by_16_bytes(query) << 1,
        pages=pages.data_ptr(), block_table=request.block_table.data_ptr(), key_levels=key.levels.data_ptr(),
        value_levels=value.levels.data_ptr(), page_stride=pages.stride(0), page_head_stride=pages.stride(1),
        table_stride=request.block_table.stride(0), key_signs=key.signs.data_ptr(),
        value_signs=value.signs.data_ptr(), **_tables(spec, config),
    )  # fmt: skip


def _by_16_bytes(rows: Tensor) -> bool:
    """Whether every row and head is 16-byte aligned."""
    return rows.data_ptr() % 16 == 0 and all(x * rows.element_size() % 16 == 0 for x in rows.stride()[:2])


def _magnitudes(fmt: TensorFormat, dim: int) -> tuple[int, ...]:
    """Twice the magnitudes of the levels, as bytes, for codes of up to 4 bits."""
    if fmt.kind != Kind.LLOYD or fmt.bits > MOST_BITS:
        return ()
    key = byte_levels(fmt.bits, dim).key
    return byte_words(key[len(key) // 2 :].tolist())


@lru_cache(maxsize=64)
def _tables(spec: CodecSpec, config: PrefillConfig) -> dict[str, object]:
    """The lookup tables of codes of up to 4 bits, which the kernels keep in registers."""
    value_magnitudes = _magnitudes(spec.value, spec.value_dim)
    if not config.eight_bit:
        return {"key_table": _magnitudes(spec.key, spec.key_dim), "value_table": value_magnitudes}
    key_table = (*level_bytes(spec.key, spec.key_dim), 0x80808080)
    if config.integers:
        return {"key_table": key_table, "value_table": value_magnitudes}
    levels = byte_levels(spec.value.bits, spec.value_dim)
    magnitudes = torch.tensor(levels.value[len(levels.value) // 2 :], dtype=torch.float32).to(torch.float8_e4m3fn)
    return {
        "key_table": key_table,
        "value_table": byte_words(magnitudes.view(torch.uint8).tolist()),
        "value_factor": levels.value_factor,
    }


def reachable_kernels(
    device: Device, layout: PageLayout, dtype: torch.dtype, options: AttendOptions
) -> list[tuple[str, Defines]]:
    """Source and defines of every kernel that a layer's requests can launch, for queries and outputs of ``dtype``."""
    number, window, softcap = DTYPE_NUMBERS[dtype], options.sliding_window is not None, options.softcap > 0
    found: list[tuple[str, Defines]] = []
    for config in reachable(device, layout.spec, options):
        for shifted in {False, softcap}:  # a soft cap needs the scores of uncentred keys
            for hands_on in {False, config.eight_bit}:  # fp16 kernels always support several passes
                defines = attend_defines(layout, config, number, number, window, softcap, shifted, hands_on)
                found.append((config.source, defines))
        if not config.fused:
            found.append((UNPACK, unpack_defines(layout, config)))
    return found


@lru_cache(maxsize=64)
def launcher(device: torch.device) -> Launcher:
    """A function that launches kernels on the device's current stream."""

    def launch(
        source: str, name: str, defines: Defines, grid: tuple[int, int], threads: int, shared: int,
        args: ctypes.Structure,
    ) -> None:  # fmt: skip
        module = load(source, defines, device, exactly=source == ATTEND)
        module.kernel(name).launch(grid, threads, shared, args, device, True)

    return launch
