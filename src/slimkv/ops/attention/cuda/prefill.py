"""Prefill with CUDA C++ on Hopper: pages are unpacked into tiles in the order of the tensor cores, and attended there.

Many queries a sequence: two launches a pass (source/prefill/unpack.cu, source/prefill/attend.cu). More than the
workspace holds takes several passes: over the sequences, or over a part of all contexts at a time, which hand on the
state of the softmax. If sequences are alike, blocks of ``attend`` unpack what later ones attend instead, all in one
pass (source/prefill/ahead.cuh). Few queries: one launch of ``attend``, whose blocks unpack for themselves
(source/prefill/producer.cuh).
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import combinations

import torch
from torch import Tensor

from slimkv.codec.byte_levels import MOST_BITS, byte_levels
from slimkv.codec.rotation import sign_words
from slimkv.ops.attention import eight_bit
from slimkv.ops.attention.api import EIGHT_BIT, MAX_DECODE_QUERIES, NO_WINDOW, AttendRequest
from slimkv.ops.attention.cuda.level_bytes import level_bytes
from slimkv.ops.attention.cuda.prefill_args import AttendArgs, SignBits, Table, UnpackArgs
from slimkv.ops.attention.cuda.prefill_shape import (
    AHEAD_SHAPES,
    EIGHT_BIT_SHAPES,
    FUSED_SHAPES,
    SHAPES,
    WIDE_SHAPES,
    Shape,
    attend_defines,
    packed_stages,
    tables_bytes,
    unpack_defines,
)
from slimkv.ops.attention.cuda.prefill_workspace import (
    WORKSPACE_BYTES,
    AheadCut,
    Batch,
    cut_ahead,
    cut_passes,
    lay_out,
)
from slimkv.ops.cuda.constants import DTYPE_NUMBERS, KIND_NUMBERS, LOG2E
from slimkv.ops.cuda.module import Defines, load
from slimkv.spec import CodecSpec, Kind, PageLayout, TensorFormat

ATTEND, UNPACK = "prefill/attend.cu", "prefill/unpack.cu"
EVERY_QUERY = 1 << 30
SECOND_LAUNCH = 0.05  # what it costs, in rounds of blocks of two warpgroups
MOST_GROUP = 64
_CACHED_BYTES = 32 << 20  # of unpacked K and V that blocks running at the same time may share in the L2 cache


# Head sizes at which the kernel of bytes was measured to be faster than that of halves, on a GPU.
FASTER_IN_EIGHT_BITS: frozenset[int] = frozenset()

# Rows (queries x heads of a group) of a sequence up to which unpacking for every block of them may take less time than
# unpacking once for all, with Lloyd-Max codes of up to 4 bits; at head sizes 64, 192 and 256 and with other codes; with
# uniform codes at 192 and 256; and from which it is faster than the decode kernel, if there are enough queries as well.
FUSED_UP_TO, LESS_FUSED_UP_TO, LEAST_FUSED_UP_TO = 768, 512, 256
FUSED_FROM_ROWS, FUSED_FROM_QUERIES = 65, 17
# Times of a round of blocks over that of blocks which unpack for 128 rows: of those which do for 256, or for the 128 of
# them that there are; of 128 rows on what was unpacked first; of unpacking that, a sequence's head a multiprocessor;
# and what passes before the first blocks that unpack for themselves have something to multiply. What unpacking
# a sequence's head for later blocks adds to a round of one block, and how long it takes at least.
WIDE_ROUND, PART_ROUND, UNPACKED_ROUND, UNPACKING, FUSED_START = 1.69, 1.35, 0.68, 1.79, 0.15
BESIDE_ATTENDING, UNPACKING_AHEAD = 0.5, 3.6

# source, kernel, defines, grid, threads, shared memory, argument
Launcher = Callable[[str, str, Defines, tuple[int, int], int, int, ctypes.Structure], None]


def refusal(request: AttendRequest) -> str | None:
    """None for what these kernels attend, else the reason."""
    spec = request.layout.spec
    for name, side in (("key", spec.key), ("value", spec.value)):
        if side.kind not in KIND_NUMBERS:
            return f"{name} format {side.name} is not unpacked by the CUDA prefill (Lloyd-Max, uniform and fp8 are)"
    if spec.key_dim != spec.value_dim or spec.key_dim not in FUSED_SHAPES:
        sizes = ", ".join(map(str, FUSED_SHAPES))
        return f"head sizes {spec.key_dim}/{spec.value_dim} are not alike and one of {sizes}"
    if request.layout.block_size < 16:
        return "blocks of less than 16 tokens"
    if request.group > MOST_GROUP:
        return f"{request.group} query heads per KV head are more than {MOST_GROUP}"
    if request.fresh is not None:
        return "fresh K and V"
    return None


def eight_bit_refusal(request: AttendRequest) -> str | None:
    """None for what is attended on 8-bit tensor cores, else the reason."""
    reason = eight_bit.refusal(request) or refusal(request)
    if reason is None and request.layout.spec.key_dim not in EIGHT_BIT_SHAPES:
        sizes = " and ".join(map(str, EIGHT_BIT_SHAPES))
        reason = f"head size {request.layout.spec.key_dim} is not prefilled in 8 bits; {sizes} are"
    return reason


def shape_of(request: AttendRequest) -> Shape:
    """How a request that is not refused is cut: in 8 bits where it must be, or may be and gains."""
    dim, wanted = request.layout.spec.key_dim, request.options.prefill
    gains = wanted == "auto" and dim in FASTER_IN_EIGHT_BITS and eight_bit_refusal(request) is None
    if wanted == EIGHT_BIT or gains:
        return eight_bit_shape(request)
    unpacked, time = unpacked_shape(request)
    if request.max_query_len * request.group > _fused_up_to(request.layout.spec):
        return unpacked
    shape = min(fused_shapes(request.layout.spec), key=lambda shape: _fused_time(request, shape))
    return unpacked if dim <= 128 and time < _fused_time(request, shape) else shape


def unpacked_shape(request: AttendRequest) -> tuple[Shape, float]:
    """Of blocks that find their tiles unpacked, and their time: by earlier ones, if sequences are alike and that gains.

    What a block unpacks for a sequence that is much longer than its own would take longer than what it attends.
    """
    dim, sequences = request.layout.spec.key_dim, request.seq_lens.shape[0]
    total, longest, first = request.query.shape[0], request.max_query_len, (SHAPES[dim], _unpacked_time(request))
    alike = total == sequences * longest or total - longest < sequences  # or all but one decode
    if not alike or dim not in AHEAD_SHAPES:
        return first
    ahead = AHEAD_SHAPES[dim]
    cut = cut_ahead(request, ahead, sequences, _multiprocessors(request.query.device), WORKSPACE_BYTES)
    return min(first, (ahead, _ahead_time(request, cut)), key=lambda x: x[1]) if cut.flows else first


def _fused_time(request: AttendRequest, shape: Shape) -> float:
    """Of all blocks, if sequences are alike."""
    items, multiprocessors = request.seq_lens.shape[0] * request.pages.shape[1], _multiprocessors(request.query.device)
    blocks, rest = divmod(request.max_query_len * request.group, shape.rows)
    part = 0 < rest <= shape.rows - shape.rows // shape.row_blocks
    whole = -(-items * (blocks + (rest > 0 and not part)) // multiprocessors)
    rounds = whole * (WIDE_ROUND if shape.row_blocks > 1 else 1) + part * -(-items // multiprocessors) * PART_ROUND
    return FUSED_START + rounds


def _unpacked_time(request: AttendRequest) -> float:
    """Likewise, if pages are unpacked first."""
    items, multiprocessors = request.seq_lens.shape[0] * request.pages.shape[1], _multiprocessors(request.query.device)
    blocks = items * -(-request.max_query_len * request.group // SHAPES[request.layout.spec.key_dim].rows)
    return -(-blocks // multiprocessors) * UNPACKED_ROUND + items / multiprocessors * UNPACKING


def _ahead_time(request: AttendRequest, cut: AheadCut) -> float:
    """Likewise, if blocks unpack for later ones."""
    multiprocessors = _multiprocessors(request.query.device)
    rounds = -(-cut.items * cut.blocks // multiprocessors)
    round_time = max(UNPACKED_ROUND + BESIDE_ATTENDING / cut.blocks, UNPACKING_AHEAD / cut.blocks)
    return rounds * round_time + cut.lead / multiprocessors * UNPACKING


def eight_bit_shape(request: AttendRequest) -> Shape:
    """The one whose blocks are done first: more rows a block take less each, but may leave multiprocessors idle."""
    shapes = EIGHT_BIT_SHAPES[request.layout.spec.key_dim]

    def time(shape: Shape) -> float:
        blocks = -(-request.query.shape[0] // (shape.rows // request.group)) * request.pages.shape[1]
        return -(-blocks // _multiprocessors(request.query.device)) * shapes[shape]

    return min(shapes, key=time)


def _fused_up_to(spec: CodecSpec) -> int:
    """Rows of a sequence up to which unpacking for every block of them is known to gain."""
    if spec.key_dim > 128:
        return 0 if _long_codes(spec) else LEAST_FUSED_UP_TO if _uniform(spec) else LESS_FUSED_UP_TO
    return LESS_FUSED_UP_TO if spec.key_dim == 64 or _uniform(spec) or _long_codes(spec) else FUSED_UP_TO


def _long_codes(spec: CodecSpec) -> bool:
    """Whether some are of more than 4 bits."""
    return max(spec.key.bits, spec.value.bits) > MOST_BITS


def _uniform(spec: CodecSpec) -> bool:
    return Kind.UNIFORM in (spec.key.kind, spec.value.kind)


def fused_shapes(spec: CodecSpec) -> list[Shape]:
    """How blocks that unpack for themselves may be cut: of few rows, unless codes take long to unpack, and of many.

    One warpgroup unpacks uniform codes, whose zeros take registers; two that have 48 a thread spill them.
    """
    shapes = [FUSED_SHAPES[spec.key_dim]]
    if _uniform(spec) and shapes[0].producers == 2:
        shapes = [replace(shapes[0], producers=1, producer_registers=88)]
    if spec.key_dim in WIDE_SHAPES:
        wide, more = WIDE_SHAPES[spec.key_dim], _uniform(spec) or _long_codes(spec)
        wide = replace(wide, producer_registers=56) if more else wide
        shapes = [wide] if _long_codes(spec) else [*shapes, wide]
    return [shape for shape in shapes if packed_stages(spec, shape) > 0]


def most_packed_queries(request: AttendRequest) -> int:
    """Queries of a sequence up to which its pages are attended as decode attends them.

    Decode reads pages again for every few rows, but splits contexts: it keeps what would not keep the device busy.
    """
    group, device, rows = request.group, request.query.device, request.max_query_len * request.group
    few = max(FUSED_FROM_QUERIES, -(-FUSED_FROM_ROWS // group)) - 1
    if few >= MAX_DECODE_QUERIES or request.max_query_len <= few or not runs_on(device):
        return MAX_DECODE_QUERIES
    if refusal(request) is not None or rows > _fused_up_to(request.layout.spec) or not shape_of(request).fused:
        return MAX_DECODE_QUERIES
    most_long = min(request.seq_lens.shape[0], request.query.shape[0] // (few + 1))
    busy = most_long * request.pages.shape[1] >= 0.9 * _multiprocessors(device)
    return few if busy else MAX_DECODE_QUERIES


@lru_cache(maxsize=64)
def runs_on(device: torch.device) -> bool:
    """Whether the device has the instructions, which are those of compute capability 9.0 alone."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0)


@lru_cache(maxsize=64)
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2


@dataclass(frozen=True)
class Part:
    """Queries of each sequence that a launch attends, and how it is cut."""

    shape: Shape
    first: int = 0
    end: int = EVERY_QUERY
    beside: bool = False  # it follows another launch on the same tiles, whose end it need not wait for


def parts_of(request: AttendRequest) -> list[Part]:
    """One launch, or for a single sequence in 8 bits two: rounds of large blocks, and small ones for the rest.

    In a fresh prompt the last blocks are short ones, and there is nothing to gain.
    """
    shape, alike = shape_of(request), request.max_seq_len >= 4 * request.query.shape[0]
    if not shape.eight_bit or request.seq_lens.shape[0] > 1 or not alike:
        return [Part(shape)]
    times, multiprocessors = EIGHT_BIT_SHAPES[request.layout.spec.key_dim], _multiprocessors(request.query.device)
    queries, heads, group = request.query.shape[0], request.pages.shape[1], request.group

    def rounds(count: int, shape: Shape) -> int:
        blocks = -(-count // (shape.rows // group)) * heads
        return -(-blocks // multiprocessors)

    best, least = [Part(shape)], rounds(queries, shape) * times[shape]
    for small, large in combinations(times, 2):  # in the order of their rows
        for full in range(1, rounds(queries, large)):
            rest = queries - full * multiprocessors // heads * (large.rows // group)
            time = full * times[large] + rounds(rest, small) * times[small]
            if rest > 0 and time < least - SECOND_LAUNCH:
                best, least = [Part(large, first=rest), Part(small, end=rest, beside=True)], time
    return best


def attend_prefill(
    request: AttendRequest, launch: Launcher, budget: int = WORKSPACE_BYTES, shape: Shape | None = None,
    most_queries: int = MAX_DECODE_QUERIES, parts: list[Part] | None = None,
) -> None:  # fmt: skip
    """The sequences of more than ``most_queries`` queries: one launch if fused, else two or three a pass."""
    total, sequences = request.query.shape[0], request.seq_lens.shape[0]
    most_long = min(sequences, total // (most_queries + 1))
    if most_long == 0:
        return
    parts = parts or ([Part(shape)] if shape else parts_of(request))
    launches = [_Attend(request, part, _attend_args(request, part, most_queries), launch) for part in parts]
    if parts[0].shape.fused:
        args = launches[0].args
        args.tiles, args.ranks = -(-max(1, request.max_seq_len) // parts[0].shape.step), most_long
        args.section, args.first_pass, args.last_pass = args.heads, 1, 1
        launches[0].start()
    elif parts[0].shape.ahead:
        cut = cut_ahead(request, parts[0].shape, most_long, _multiprocessors(request.query.device), budget)
        space = lay_out(launches[0].args, cut, parts[0].shape, request.layout.spec.key_dim, request.query.device)
        launches[0].unpack_first()
        launches[0].start()
        del space
    else:
        _attend_in_passes(request, launches, most_long, budget, launch)


@dataclass(frozen=True)
class _Attend:
    """A launch of ``attend``."""

    request: AttendRequest
    part: Part
    args: AttendArgs
    launch: Launcher

    @property
    def state_floats(self) -> int:
        """That it hands on from pass to pass."""
        args, shape, dim = self.args, self.part.shape, self.request.layout.spec.key_dim
        return args.query_blocks * args.heads * 2 * shape.rows * (-(-dim // 32) * 16 + 4)

    def defines(self, hands_on: bool = False) -> Defines:
        request = self.request
        return attend_defines(
            request.layout, self.part.shape, DTYPE_NUMBERS[request.query.dtype], DTYPE_NUMBERS[request.out.dtype],
            request.options.sliding_window is not None, request.options.softcap > 0,
            request.score_shift is not None, self.part.beside, hands_on,
        )  # fmt: skip

    def unpack_first(self) -> None:
        """What the first blocks attend, if later ones find theirs unpacked by earlier ones."""
        step, args, spec = self.part.shape.step, self.args, self.request.layout.spec
        self.launch(ATTEND, "unpack_first", self.defines(), (args.tiles, args.lead), 2 * step, tables_bytes(spec), args)

    def start(self, hands_on: bool = False) -> None:
        """With ``hands_on`` it may find a state, or leave one."""
        shape, args, defines = self.part.shape, self.args, self.defines(hands_on)
        self.launch(
            ATTEND, "attend", defines, (args.query_blocks * args.heads, 1), shape.threads, defines["SHARED"], args
        )


def _attend_in_passes(
    request: AttendRequest, launches: list[_Attend], most_long: int, budget: int, launch: Launcher
) -> None:
    """Unpacks what the workspace holds and attends it, time after time."""
    layout, device, num_kv_heads = request.layout, request.query.device, request.pages.shape[1]
    args, shape, dim = launches[0].args, launches[0].part.shape, layout.spec.key_dim
    longest = max(1, request.max_seq_len)
    batch = Batch(most_long, num_kv_heads, request.query.shape[0] // (shape.rows // request.group), longest)
    ranks, tiles = cut_passes(layout, shape, batch, _multiprocessors(device), budget)
    rows, passes = ranks * num_kv_heads, -(-longest // (tiles * shape.step))
    key_bytes, value_bytes = (rows * tiles * n for n in (shape.keys_bytes(dim), shape.values_bytes(dim)))
    tile_bytes = key_bytes + value_bytes + 16 * rows * tiles
    state_bytes = [4 * part.state_floats if passes > 1 else 0 for part in launches]
    space = torch.empty(tile_bytes + sum(state_bytes), dtype=torch.uint8, device=device)
    for i, part in enumerate(launches):
        own = part.args
        own.keys, own.values = space.data_ptr(), space.data_ptr() + key_bytes
        own.units = own.values + value_bytes
        own.state = space.data_ptr() + tile_bytes + sum(state_bytes[:i])
        own.section = max(1, min(num_kv_heads, _CACHED_BYTES // ((key_bytes + value_bytes) // num_kv_heads)))
        own.tiles, own.ranks = tiles, ranks
    unpack = UnpackArgs(
        pages=args.pages, table=args.table, lengths=args.lengths, starts=args.starts, key_levels=args.key_levels,
        value_levels=args.value_levels, keys=args.keys, values=args.values, units=args.units,
        page_stride=args.page_stride, page_head_stride=args.page_head_stride, table_stride=args.table_stride,
        sequences=args.sequences, heads=num_kv_heads, most_queries=args.most_queries, tiles=tiles,
        window=request.options.sliding_window or NO_WINDOW, **_byte_tables(layout, shape),
    )  # fmt: skip
    to_unpack = unpack_defines(layout, shape)
    for first_rank in range(0, most_long, ranks):
        for step in range(passes):
            unpack.first_rank, unpack.first_tile = first_rank, step * tiles
            grid, threads = (tiles * num_kv_heads, min(ranks, most_long - first_rank)), 2 * shape.step
            launch(UNPACK, "unpack", to_unpack, grid, threads, to_unpack["SHARED"], unpack)
            for part in launches:
                part.args.first_rank, part.args.first_tile = first_rank, step * tiles
                part.args.first_pass, part.args.last_pass = step == 0, step == passes - 1
                part.start(hands_on=passes > 1)


def _attend_args(request: AttendRequest, part: Part, most_queries: int) -> AttendArgs:
    """All but what depends on where unpacked tiles are, and which."""
    query, out, pages, options, spec = (
        request.query, request.out, request.pages, request.options, request.layout.spec,
    )  # fmt: skip
    key, value, sequences = request.codec.key_tables, request.codec.value_tables, request.seq_lens.shape[0]
    sinks, queries = request.sinks, max(0, min(part.end, query.shape[0]) - part.first)
    return AttendArgs(
        query=query.data_ptr(), lengths=request.seq_lens.data_ptr(), starts=request.cu_seqlens_q.data_ptr(),
        sinks=None if sinks is None else sinks.data_ptr(),
        sink_stride=0 if sinks is None or sinks.ndim == 1 else sinks.stride(0),
        score_shift=None if request.score_shift is None else request.score_shift.data_ptr(), out=out.data_ptr(),
        lse=None if request.lse is None else request.lse.data_ptr(), query_stride=query.stride(0),
        query_head_stride=query.stride(1), out_stride=out.stride(0), out_head_stride=out.stride(1),
        scale=request.softmax_scale * LOG2E, softcap=options.softcap * LOG2E, key_norm=key.orthonormal,
        value_norm=value.orthonormal, key_sign_bits=_signs(spec.key_dim, spec.seed),
        value_sign_bits=_signs(spec.value_dim, spec.seed), sequences=sequences, heads=pages.shape[1],
        group=request.group, most_queries=most_queries, causal=options.causal,
        window=options.sliding_window or 0, query_blocks=queries // (part.shape.rows // request.group) + sequences,
        first_query=part.first, end_query=part.end,
        aligned=_by_16_bytes(out) | _by_16_bytes(query) << 1,
        pages=pages.data_ptr(), table=request.block_table.data_ptr(), key_levels=key.levels.data_ptr(),
        value_levels=value.levels.data_ptr(), page_stride=pages.stride(0), page_head_stride=pages.stride(1),
        table_stride=request.block_table.stride(0), key_table=_magnitudes(spec.key, spec.key_dim),
        value_table=_magnitudes(spec.value, spec.value_dim), key_signs=key.signs.data_ptr(),
        value_signs=value.signs.data_ptr(),
    )  # fmt: skip


def _by_16_bytes(rows: Tensor) -> bool:
    """Whether every row and head begins on a boundary of 16 bytes."""
    return rows.data_ptr() % 16 == 0 and all(x * rows.element_size() % 16 == 0 for x in rows.stride()[:2])


@lru_cache(maxsize=64)
def _magnitudes(fmt: TensorFormat, dim: int) -> ctypes.Array[ctypes.c_uint32]:
    """Twice the magnitudes of levels of up to 4 bits, as bytes."""
    if fmt.kind != Kind.LLOYD or fmt.bits > MOST_BITS:
        return Table()
    key = byte_levels(fmt.bits, dim).key
    low, high = _words(key[len(key) // 2 :].tolist())
    return Table(low, high, 0)


def _words(entries: list[int]) -> tuple[int, int]:
    """Up to 8 bytes, as two words."""
    low, high = (int.from_bytes(bytes(entries + [0] * 8)[at : at + 4], "little") for at in (0, 4))
    return low, high


def _byte_tables(layout: PageLayout, shape: Shape) -> dict[str, object]:
    """What ``unpack`` looks bytes up in."""
    if not shape.eight_bit:
        return {}
    spec = layout.spec
    levels = byte_levels(spec.value.bits, spec.value_dim)
    magnitudes = torch.tensor(levels.value[len(levels.value) // 2 :], dtype=torch.float32).to(torch.float8_e4m3fn)
    low, high = _words(magnitudes.view(torch.uint8).tolist())
    return {
        "key_table": Table(*level_bytes(spec.key, spec.key_dim), 0x80808080),
        "value_table": Table(low, high, 0),
        "value_factor": levels.value_factor,
    }


@lru_cache(maxsize=64)
def _signs(dim: int, seed: int) -> ctypes.Array[ctypes.c_uint32]:
    return SignBits(*sign_words(dim, seed))


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
