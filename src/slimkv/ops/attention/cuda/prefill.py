"""Prefill with CUDA C++ on Hopper: pages are unpacked into tiles in the order of the tensor cores, and attended there.

Many queries a sequence: two launches a pass (source/prefill/unpack.cu, source/prefill/attend.cu). More than the
workspace holds takes several passes: over the sequences, or over a part of all contexts at a time, which hand on the
state of the softmax. Few queries: one launch of ``attend``, whose blocks unpack for themselves
(source/prefill/producer.cuh).
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import Tensor

from slimkv.codec.byte_levels import MOST_BITS, byte_levels
from slimkv.codec.rotation import core_size, sign_words
from slimkv.ops.attention import eight_bit
from slimkv.ops.attention.api import EIGHT_BIT, MAX_DECODE_QUERIES, NO_WINDOW, AttendRequest
from slimkv.ops.attention.cuda.prefill_args import AttendArgs, SignBits, Table, UnpackArgs
from slimkv.ops.attention.cuda.shape import level_bytes
from slimkv.ops.cuda.constants import DTYPE_NUMBERS, KIND_NUMBERS, LOG2E
from slimkv.ops.cuda.module import Defines, load
from slimkv.spec import CodecSpec, Kind, PageLayout, SideLayout, TensorFormat

ATTEND, UNPACK = "prefill/attend.cu", "prefill/unpack.cu"
WORKSPACE_BYTES = 256 << 20  # what unpacked K and V may take
MOST_GROUP = 64
_CACHED_BYTES = 32 << 20  # of unpacked K and V that blocks running at the same time may share in the L2 cache


def _halves(dim: int) -> int:
    """Rows of 128 bytes of a token's numbers."""
    return -(-dim // 64)


@dataclass(frozen=True)
class Shape:
    """How the kernels are cut."""

    step: int  # tokens of a tile
    stages: int  # tiles of K, and of V, in shared memory at a time
    eight_bit: bool = False  # queries and keys as int8, weights and values as e4m3; else halves
    promote: int = 16  # tiles whose e4m3 products the tensor cores, which keep 14 bits, add up on their own
    fused: bool = False  # a warpgroup of ``attend`` unpacks tiles; else ``unpack`` does, into the workspace
    consumers: int = 2  # warpgroups that multiply
    producers: int = 1  # warpgroups that fetch tiles
    producer_registers: int = 24  # of each of their threads

    @property
    def rows(self) -> int:
        """Of queries, times heads of a group, in a block."""
        return 64 * self.consumers

    @property
    def threads(self) -> int:
        """Of a block."""
        return 128 * (self.consumers + self.producers)

    def keys_bytes(self, dim: int) -> int:
        """Of a tile of keys; as prefill/tiles.cuh counts."""
        return self.step * (dim + 8) if self.eight_bit else 128 * self.step * _halves(dim)

    def values_bytes(self, dim: int) -> int:
        """Of a tile of values."""
        return self.keys_bytes(dim)


SHAPES = {dim: Shape(128 if dim <= 128 else 64, 2) for dim in (64, 80, 96, 112, 128, 192, 256)}
FUSED_SHAPES = {
    **{dim: Shape(128, 2, fused=True, producers=2, producer_registers=48) for dim in (64, 80, 96, 112, 128)},
    **{dim: Shape(64, 2, fused=True, producer_registers=72) for dim in (192, 256)},
}
# Each with the time that a tile takes, over that of two warpgroups.
EIGHT_BIT_SHAPES = {
    64: {Shape(128, 4, True): 1.0, Shape(128, 4, True, consumers=3): 1.26, Shape(128, 4, True, consumers=4): 1.72},
    128: {Shape(128, 4, True): 1.0, Shape(128, 3, True, consumers=3): 1.41},
}
# Head sizes at which the kernel of bytes was measured to be faster than that of halves, on a GPU.
FASTER_IN_EIGHT_BITS: frozenset[int] = frozenset()

# Rows (queries x heads of a group) of a sequence up to which unpacking for every block of them takes less time than
# unpacking once for all, with Lloyd-Max codes of up to 4 bits; at head size 64 and with uniform codes; and from which
# it is faster than the decode kernel, if there are enough queries as well.
FUSED_UP_TO, LESS_FUSED_UP_TO = 512, 256
FUSED_FROM_ROWS, FUSED_FROM_QUERIES = 65, 17

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
    fused = request.max_query_len * request.group <= _fused_up_to(request.layout.spec)
    return fused_shape(request.layout.spec) if fused else SHAPES[dim]


def eight_bit_shape(request: AttendRequest) -> Shape:
    """The one whose blocks are done first: more rows a block take less each, but may leave multiprocessors idle."""
    shapes = EIGHT_BIT_SHAPES[request.layout.spec.key_dim]

    def time(shape: Shape) -> float:
        blocks = -(-request.query.shape[0] // (shape.rows // request.group)) * request.pages.shape[1]
        return -(-blocks // _multiprocessors(request.query.device)) * shapes[shape]

    return min(shapes, key=time)


def _fused_up_to(spec: CodecSpec) -> int:
    """Rows of a sequence up to which unpacking for every block of them is known to gain."""
    sides = (spec.key, spec.value)
    if any(side.kind not in (Kind.LLOYD, Kind.UNIFORM) or side.bits > MOST_BITS for side in sides):
        return 0
    return LESS_FUSED_UP_TO if spec.key_dim == 64 or _uniform(spec) else FUSED_UP_TO


def _uniform(spec: CodecSpec) -> bool:
    return Kind.UNIFORM in (spec.key.kind, spec.value.kind)


def fused_shape(spec: CodecSpec) -> Shape:
    """One warpgroup unpacks uniform codes, whose zeros take registers; two that have 48 a thread spill them."""
    shape = FUSED_SHAPES[spec.key_dim]
    return replace(shape, producers=1, producer_registers=88) if shape.producers == 2 and _uniform(spec) else shape


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
class Batch:
    """What of a request its passes depend on."""

    sequences: int  # that are prefilled, at most
    num_kv_heads: int
    blocks: int  # of queries of a KV head, over all sequences
    max_seq_len: int


def cut_passes(
    layout: PageLayout, shape: Shape, batch: Batch, multiprocessors: int, budget: int = WORKSPACE_BYTES
) -> tuple[int, int]:
    """How many sequences, and how many tiles of each, the workspace holds at a time.

    Whole sequences have nothing to hand on. They are taken if there are enough of them to keep the device busy.
    """
    dim, longest = layout.spec.key_dim, -(-batch.max_seq_len // shape.step)
    tile = (shape.keys_bytes(dim) + shape.values_bytes(dim)) * batch.num_kv_heads
    whole = min(batch.sequences, budget // (tile * longest))
    if whole and whole * batch.num_kv_heads * batch.blocks >= 0.9 * multiprocessors * batch.sequences:
        return _sequences_of_a_pass(batch, whole, multiprocessors), longest
    if whole == batch.sequences:
        return whole, longest
    return batch.sequences, max(1, min(budget // (tile * batch.sequences), longest))


def _sequences_of_a_pass(batch: Batch, most: int, multiprocessors: int) -> int:
    """As many as leave the fewest multiprocessors idle when the last blocks of passes run; a pass costs a little."""

    def rounds(sequences: int) -> int:
        return -(-sequences * batch.num_kv_heads * batch.blocks // (batch.sequences * multiprocessors))

    def cost(sequences: int) -> float:
        whole, rest = divmod(batch.sequences, sequences)
        return whole * rounds(sequences) + rounds(rest) + 0.1 * (whole + (rest > 0))

    return min(range(max(1, most // 2, most - 15), most + 1), key=cost)


def attend_prefill(
    request: AttendRequest, launch: Launcher, budget: int = WORKSPACE_BYTES, shape: Shape | None = None,
    most_queries: int = MAX_DECODE_QUERIES,
) -> None:  # fmt: skip
    """The sequences of more than ``most_queries`` queries: one launch if fused, else two a pass."""
    total, sequences = request.query.shape[0], request.seq_lens.shape[0]
    most_long = min(sequences, total // (most_queries + 1))
    if most_long == 0:
        return
    shape, options = shape or shape_of(request), request.options
    sinks = None if options.sinks is None else options.sinks.float().contiguous()
    args = _attend_args(request, shape, sinks, most_queries)
    to_attend = attend_defines(
        request.layout, shape, DTYPE_NUMBERS[request.query.dtype], DTYPE_NUMBERS[request.out.dtype],
        options.sliding_window is not None, options.softcap > 0,
    )  # fmt: skip

    def attend() -> None:
        blocks = args.query_blocks * args.heads
        launch(ATTEND, "attend", to_attend, (blocks, 1), shape.threads, to_attend["SHARED"], args)

    if shape.fused:
        args.tiles, args.ranks, args.section = -(-max(1, request.max_seq_len) // shape.step), most_long, args.heads
        args.first_pass = args.last_pass = 1
        attend()
    else:
        _attend_in_passes(request, args, shape, most_long, budget, launch, attend)


def _attend_in_passes(
    request: AttendRequest, args: AttendArgs, shape: Shape, most_long: int, budget: int, launch: Launcher,
    attend: Callable[[], None],
) -> None:  # fmt: skip
    """Unpacks what the workspace holds and attends it, time after time."""
    layout, device, num_kv_heads = request.layout, request.query.device, request.pages.shape[1]
    longest, sequences, dim = max(1, request.max_seq_len), args.sequences, layout.spec.key_dim
    batch = Batch(most_long, num_kv_heads, args.query_blocks - sequences, longest)
    ranks, tiles = cut_passes(layout, shape, batch, _multiprocessors(device), budget)
    rows, passes = ranks * num_kv_heads, -(-longest // (tiles * shape.step))
    key_bytes, value_bytes = (rows * tiles * n for n in (shape.keys_bytes(dim), shape.values_bytes(dim)))
    state_floats = args.query_blocks * num_kv_heads * 2 * shape.rows * (-(-dim // 32) * 16 + 4) if passes > 1 else 0
    space = torch.empty(
        key_bytes + value_bytes + 16 * rows * tiles + 4 * state_floats, dtype=torch.uint8, device=device
    )
    args.keys, args.values = space.data_ptr(), space.data_ptr() + key_bytes
    args.units = args.values + value_bytes
    args.state = args.units + 16 * rows * tiles
    args.section = max(1, min(num_kv_heads, _CACHED_BYTES // ((key_bytes + value_bytes) // num_kv_heads)))
    args.tiles, args.ranks = tiles, ranks
    unpack = UnpackArgs(
        pages=args.pages, table=args.table, lengths=args.lengths, starts=args.starts, key_levels=args.key_levels,
        value_levels=args.value_levels, keys=args.keys, values=args.values, units=args.units,
        page_stride=args.page_stride, page_head_stride=args.page_head_stride, table_stride=args.table_stride,
        heads=num_kv_heads, most_queries=args.most_queries, tiles=tiles, ranks=ranks,
        window=request.options.sliding_window or NO_WINDOW, **_byte_tables(layout, shape),
    )  # fmt: skip
    to_unpack = unpack_defines(layout, shape)
    for first_rank in range(0, most_long, ranks):
        unpack.first_rank = args.first_rank = first_rank
        for step in range(passes):
            unpack.first_tile = args.first_tile = step * tiles
            args.first_pass, args.last_pass = step == 0, step == passes - 1
            grid, threads = (tiles * num_kv_heads, sequences), 2 * shape.step
            launch(UNPACK, "unpack", to_unpack, grid, threads, to_unpack["SHARED"], unpack)
            attend()


def _attend_args(request: AttendRequest, shape: Shape, sinks: Tensor | None, most_queries: int) -> AttendArgs:
    """All but what depends on where unpacked tiles are, and which."""
    query, out, pages, options, spec = (
        request.query, request.out, request.pages, request.options, request.layout.spec,
    )  # fmt: skip
    key, value, sequences = request.codec.key_tables, request.codec.value_tables, request.seq_lens.shape[0]
    return AttendArgs(
        query=query.data_ptr(), lengths=request.seq_lens.data_ptr(), starts=request.cu_seqlens_q.data_ptr(),
        sinks=None if sinks is None else sinks.data_ptr(), out=out.data_ptr(),
        lse=None if request.lse is None else request.lse.data_ptr(), query_stride=query.stride(0),
        query_head_stride=query.stride(1), out_stride=out.stride(0), out_head_stride=out.stride(1),
        scale=request.softmax_scale * LOG2E, softcap=options.softcap * LOG2E, key_norm=key.orthonormal,
        value_norm=value.orthonormal, key_sign_bits=_signs(spec.key_dim, spec.seed),
        value_sign_bits=_signs(spec.value_dim, spec.seed), sequences=sequences, heads=pages.shape[1],
        group=request.group, most_queries=most_queries, causal=options.causal,
        window=options.sliding_window or 0, query_blocks=query.shape[0] // (shape.rows // request.group) + sequences,
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


def shared_bytes(dim: int, shape: Shape) -> int:
    """Shared memory of a block of ``attend``: queries, rings of tiles, totals, barriers; as prefill/work.cuh counts.

    Beside the levels of formats that are looked up.
    """
    queries = shape.rows * 128 * (1 if shape.eight_bit else _halves(dim))
    tiles = shape.stages * (shape.keys_bytes(dim) + shape.values_bytes(dim))
    totals = 4 * shape.rows * dim if shape.eight_bit else 0
    return queries + tiles + totals + 48 * shape.stages + 1024


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


@lru_cache(maxsize=256)
def unpack_defines(layout: PageLayout, shape: Shape) -> Defines:
    """What prefill/unpack.cu is compiled with."""
    return Defines({
        "D": layout.spec.key_dim, "STEP": shape.step, "EIGHT_BIT": int(shape.eight_bit), **_page_defines(layout),
        "SHARED": _unpack_shared_bytes(layout, shape),
    })  # fmt: skip


def _page_defines(layout: PageLayout) -> dict[str, int]:
    def side(prefix: str, s: SideLayout) -> dict[str, int]:
        return {
            f"{prefix}_KIND": KIND_NUMBERS[s.format.kind],
            f"{prefix}_BITS": s.format.bits,
            f"{prefix}_FIELDS": s.fields_offset,
        }

    pages = {"BLOCK_SIZE": layout.block_size, "V_CODES": layout.value.codes_offset}
    return pages | side("K", layout.key) | side("V", layout.value)


def _unpack_shared_bytes(layout: PageLayout, shape: Shape) -> int:
    """Shared memory of a block of ``unpack``: exponents, levels and a tile of values as bytes."""
    levels = shape.step // 2 + _levels_bytes(layout.spec.key) + _levels_bytes(layout.spec.value)
    return -(-levels // 16) * 16 + shape.values_bytes(layout.spec.value_dim) if shape.eight_bit else levels


def _levels_bytes(fmt: TensorFormat) -> int:
    return 4 << fmt.bits if fmt.kind == Kind.LLOYD else 0


def _level_entries(fmt: TensorFormat) -> int:
    """Of the table that ``attend`` looks levels up in, if it does."""
    return 1 << fmt.bits if fmt.kind == Kind.LLOYD and fmt.bits > MOST_BITS else 0


@lru_cache(maxsize=256)
def attend_defines(
    layout: PageLayout, shape: Shape, q_type: int, out_type: int, window: bool, softcap: bool
) -> Defines:
    """What prefill/attend.cu is compiled with."""
    spec, shared, pages = layout.spec, shared_bytes(layout.spec.key_dim, shape), {}
    if shape.fused:
        keys, values, alike = _level_entries(spec.key), _level_entries(spec.value), spec.key == spec.value
        tables = {"K_LEVELS": keys, "V_LEVELS": values, "ONE_TABLE": int(alike)}
        pages = _page_defines(layout) | tables
        shared += 128 * (keys if alike else keys + values)
    return Defines({
        "D": spec.key_dim, "STEP": shape.step, "EIGHT_BIT": int(shape.eight_bit), "PROMOTE": shape.promote,
        "FUSED": int(shape.fused), "CONSUMERS": shape.consumers, "PRODUCERS": shape.producers,
        "PRODUCER_REGISTERS": shape.producer_registers, "STAGES": shape.stages, "SHARED": shared,
        "WINDOW": int(window), "SOFTCAP": int(softcap), "Q_TYPE": q_type, "OUT_TYPE": out_type,
        "ROTATION_CORE": core_size(spec.key_dim), "K_ROTATED": int(spec.key.rotated),
        "V_ROTATED": int(spec.value.rotated), **pages,
    })  # fmt: skip


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
