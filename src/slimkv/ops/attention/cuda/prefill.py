"""Prefill with CUDA C++: pages are unpacked into tiles in the order of the tensor cores, and attended there.

Many queries a sequence: two launches a pass (source/prefill/unpack.cu and attend.cu or, where there are no products of
warpgroups, attend_warps.cu). More than the workspace holds takes several passes: over the sequences, or over a part of
all contexts at a time, which pass on the softmax state. Hopper has two other ways. If sequences are alike, the first
launch unpacks for the first blocks, and these for later ones, in one pass (source/prefill/ahead.cuh). Few queries: one
launch of ``attend``, whose blocks unpack for themselves (source/prefill/producer.cuh). ``prefill_config`` says which.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from slimkv.codec.byte_levels import MOST_BITS, byte_levels
from slimkv.codec.rotation import sign_words
from slimkv.ops.attention.api import MAX_DECODE_QUERIES, NO_WINDOW, AttendRequest
from slimkv.ops.attention.cuda.level_bytes import level_bytes
from slimkv.ops.attention.cuda.prefill_config import (
    ATTEND,
    UNPACK,
    Part,
    PrefillConfig,
    eight_bit_refusal,
    has_warpgroups,
    most_packed_queries,
    multiprocessors,
    parts_of,
    refusal,
)
from slimkv.ops.attention.cuda.prefill_defines import attend_defines, unpack_defines
from slimkv.ops.attention.cuda.prefill_workspace import (
    WORKSPACE_BYTES,
    Batch,
    cut_ahead,
    cut_passes,
    lay_out,
    seen_tiles,
)
from slimkv.ops.cuda.arguments import arguments
from slimkv.ops.cuda.constants import DTYPE_NUMBERS, LOG2E
from slimkv.ops.cuda.module import Defines, load
from slimkv.spec import CodecSpec, Kind, TensorFormat

__all__ = [
    "attend_prefill",
    "eight_bit_refusal",
    "has_warpgroups",
    "launcher",
    "most_packed_queries",
    "refusal",
]

_CACHED_BYTES = 32 << 20  # of unpacked K and V that blocks running at the same time may share in the L2 cache

# source, kernel, defines, grid, threads, shared memory, argument
(PrefillArgs,) = arguments("prefill/args.cuh", "PrefillArgs")
Launcher = Callable[[str, str, Defines, tuple[int, int], int, int, ctypes.Structure], None]


def attend_prefill(
    request: AttendRequest, launch: Launcher, budget: int = WORKSPACE_BYTES, config: PrefillConfig | None = None,
    most_queries: int = MAX_DECODE_QUERIES, parts: list[Part] | None = None,
) -> None:  # fmt: skip
    """The sequences of more than ``most_queries`` queries: one launch if fused, else two or three a pass."""
    total, sequences = request.query.shape[0], request.seq_lens.shape[0]
    most_long = min(sequences, total // (most_queries + 1))
    if most_long == 0:
        return
    parts = parts or ([Part(config)] if config else parts_of(request))
    first = parts[0].config
    launches = [_Attend(request, part, _attend_args(request, part, most_queries), launch) for part in parts]
    if first.fused:
        args = launches[0].args
        args.tiles, args.ranks = -(-max(1, request.max_seq_len) // first.tile_tokens), most_long
        args.section, args.first_pass, args.last_pass = args.num_kv_heads, 1, 1
        launches[0].start()
    elif first.ahead:
        cut = cut_ahead(request, first, most_long, multiprocessors(request.query.device), budget)
        space = lay_out(launches[0].args, cut, first, request.layout.spec.key_dim, request.query.device)
        launches[0].unpack(cut.lead)
        launches[0].start()
        del space
    else:
        _attend_in_passes(request, launches, most_long, budget)


@dataclass(frozen=True)
class _Attend:
    """A launch of ``attend``."""

    request: AttendRequest
    part: Part
    args: ctypes.Structure
    launch: Launcher

    @property
    def state_floats(self) -> int:
        """That it hands on from pass to pass."""
        args, config, dim = self.args, self.part.config, self.request.layout.spec.key_dim
        return args.query_blocks * args.num_kv_heads * 2 * config.rows * (-(-dim // 32) * 16 + 4)

    def defines(self, hands_on: bool = False) -> Defines:
        request = self.request
        return attend_defines(
            request.layout, self.part.config, DTYPE_NUMBERS[request.query.dtype],
            DTYPE_NUMBERS[request.out.dtype],
            request.options.sliding_window is not None, request.options.softcap > 0,
            request.score_shift is not None, self.part.beside, hands_on,
        )  # fmt: skip

    def unpack(self, items: int) -> None:
        """The first ``items``: KV heads of sequences."""
        config, defines = self.part.config, unpack_defines(self.request.layout, self.part.config)
        grid, threads = (items, self.args.tiles), 2 * config.tile_tokens
        self.launch(UNPACK, "unpack", defines, grid, threads, defines["SHARED"], self.args)

    def start(self, hands_on: bool = False) -> None:
        """With ``hands_on`` it may find a state, or leave one."""
        args, defines = self.args, self.defines(hands_on)
        grid, threads = (args.query_blocks * args.num_kv_heads, 1), self.part.config.threads
        self.launch(self.part.config.source, "attend", defines, grid, threads, defines["SHARED"], args)


def _attend_in_passes(request: AttendRequest, launches: list[_Attend], most_long: int, budget: int) -> None:
    """Unpacks what the workspace holds and attends it, time after time."""
    layout, device, num_kv_heads = request.layout, request.query.device, request.pages.shape[1]
    config = launches[0].part.config
    longest = seen_tiles(request, config.tile_tokens)
    batch = Batch(most_long, num_kv_heads, request.query.shape[0] // (config.rows // request.group), longest)
    ranks, tiles = cut_passes(layout, config, batch, multiprocessors(device), budget)
    rows, passes = ranks * num_kv_heads, -(-longest // tiles)
    side_bytes = rows * tiles * config.tile_bytes(layout.spec.key_dim)  # of keys, and of values
    tile_bytes = 2 * side_bytes + 16 * rows * tiles
    state_bytes = [4 * part.state_floats if passes > 1 else 0 for part in launches]
    space = torch.empty(tile_bytes + sum(state_bytes), dtype=torch.uint8, device=device)
    for i, part in enumerate(launches):
        own = part.args
        own.keys, own.values = space.data_ptr(), space.data_ptr() + side_bytes
        own.tile_scales = own.values + side_bytes
        own.state = space.data_ptr() + tile_bytes + sum(state_bytes[:i])
        own.section = max(1, min(num_kv_heads, _CACHED_BYTES // (2 * side_bytes // num_kv_heads)))
        own.tiles, own.ranks, own.slots = tiles, ranks, rows
    for first_rank in range(0, most_long, ranks):
        for step in range(passes):
            for part in launches:
                part.args.first_rank, part.args.first_tile = first_rank, step * tiles
                part.args.first_pass, part.args.last_pass = step == 0, step == passes - 1
            launches[0].unpack(min(ranks, most_long - first_rank) * num_kv_heads)
            for part in launches:
                part.start(hands_on=passes > 1)


def _attend_args(request: AttendRequest, part: Part, most_queries: int) -> ctypes.Structure:
    """All but what depends on where unpacked tiles are, and which."""
    query, out, pages, options, spec = (
        request.query, request.out, request.pages, request.options, request.layout.spec,
    )  # fmt: skip
    key, value, sequences = request.codec.key_tables, request.codec.value_tables, request.seq_lens.shape[0]
    sinks, queries = request.sinks, max(0, min(part.end, query.shape[0]) - part.first)
    return PrefillArgs(
        query=query.data_ptr(), seq_lens=request.seq_lens.data_ptr(), cu_seqlens_q=request.cu_seqlens_q.data_ptr(),
        sinks=None if sinks is None else sinks.data_ptr(),
        sink_stride=0 if sinks is None or sinks.ndim == 1 else sinks.stride(0),
        score_shift=None if request.score_shift is None else request.score_shift.data_ptr(), out=out.data_ptr(),
        lse=None if request.lse is None else request.lse.data_ptr(), query_stride=query.stride(0),
        query_head_stride=query.stride(1), out_stride=out.stride(0), out_head_stride=out.stride(1),
        scale=request.softmax_scale * LOG2E, softcap=options.softcap * LOG2E, key_norm=key.orthonormal,
        value_norm=value.orthonormal, key_sign_bits=_signs(spec.key_dim, spec.seed),
        value_sign_bits=_signs(spec.value_dim, spec.seed), num_seqs=sequences, num_kv_heads=pages.shape[1],
        group_size=request.group, max_decode_queries=most_queries, causal=options.causal,
        sliding_window=options.sliding_window or NO_WINDOW,
        query_blocks=queries // (part.config.rows // request.group) + sequences,
        first_query=part.first, end_query=part.end,
        aligned=_by_16_bytes(out) | _by_16_bytes(query) << 1,
        pages=pages.data_ptr(), block_table=request.block_table.data_ptr(), key_levels=key.levels.data_ptr(),
        value_levels=value.levels.data_ptr(), page_stride=pages.stride(0), page_head_stride=pages.stride(1),
        table_stride=request.block_table.stride(0), key_signs=key.signs.data_ptr(),
        value_signs=value.signs.data_ptr(), **_tables(spec, part.config.eight_bit),
    )  # fmt: skip


def _by_16_bytes(rows: Tensor) -> bool:
    """Whether every row and head begins on a boundary of 16 bytes."""
    return rows.data_ptr() % 16 == 0 and all(x * rows.element_size() % 16 == 0 for x in rows.stride()[:2])


def _magnitudes(fmt: TensorFormat, dim: int) -> tuple[int, ...]:
    """Twice the magnitudes of levels of up to 4 bits, as bytes."""
    if fmt.kind != Kind.LLOYD or fmt.bits > MOST_BITS:
        return ()
    key = byte_levels(fmt.bits, dim).key
    return _words(key[len(key) // 2 :].tolist())


def _words(entries: list[int]) -> tuple[int, int]:
    """Up to 8 bytes, as two words."""
    low, high = (int.from_bytes(bytes(entries + [0] * 8)[at : at + 4], "little") for at in (0, 4))
    return low, high


@lru_cache(maxsize=64)
def _tables(spec: CodecSpec, eight_bit: bool) -> dict[str, object]:
    """What kernels look up codes of up to 4 bits in."""
    if not eight_bit:
        return {
            "key_table": _magnitudes(spec.key, spec.key_dim), "value_table": _magnitudes(spec.value, spec.value_dim),
        }  # fmt: skip
    levels = byte_levels(spec.value.bits, spec.value_dim)
    magnitudes = torch.tensor(levels.value[len(levels.value) // 2 :], dtype=torch.float32).to(torch.float8_e4m3fn)
    return {
        "key_table": (*level_bytes(spec.key, spec.key_dim), 0x80808080),
        "value_table": _words(magnitudes.view(torch.uint8).tolist()),
        "value_factor": levels.value_factor,
    }


@lru_cache(maxsize=64)
def _signs(dim: int, seed: int) -> tuple[int, ...]:
    return tuple(sign_words(dim, seed))


@lru_cache(maxsize=64)
def launcher(device: torch.device) -> Launcher:
    """Launches on the device's current stream."""

    def launch(
        source: str, name: str, defines: Defines, grid: tuple[int, int], threads: int, shared: int,
        args: ctypes.Structure,
    ) -> None:  # fmt: skip
        module = load(source, defines, device, exactly=source == ATTEND)
        module.kernel(name).launch(grid, threads, shared, args, device, True)

    return launch
