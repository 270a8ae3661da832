"""Prefill with CUDA C++ on Hopper: pages are unpacked into tiles in the order of the tensor cores, and attended there.

Two launches a pass (source/prefill/unpack.cu, source/prefill/attend.cu). More than the workspace holds takes several
passes: over the sequences, or over a part of all contexts at a time, which hand on the state of the softmax.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import torch

from slimkv.codec.byte_levels import byte_levels
from slimkv.codec.rotation import sign_words
from slimkv.ops.attention import eight_bit
from slimkv.ops.attention.api import EIGHT_BIT, MAX_DECODE_QUERIES, NO_WINDOW, AttendRequest
from slimkv.ops.attention.cuda.shape import level_bytes
from slimkv.ops.cuda.constants import DTYPE_NUMBERS, KIND_NUMBERS, LOG2E
from slimkv.ops.cuda.module import Defines, load
from slimkv.spec import Kind, PageLayout, SideLayout, TensorFormat

ATTEND, UNPACK = "prefill/attend.cu", "prefill/unpack.cu"
ROWS = 128  # of queries, times heads of a group, in a block
WORKSPACE_BYTES = 256 << 20  # what unpacked K and V may take
MOST_GROUP = 64
_THREADS = 384
_CACHED_BYTES = 32 << 20  # of unpacked K and V that blocks running at the same time may share in the L2 cache
_SignBits = ctypes.c_uint32 * 8
_Table = ctypes.c_uint32 * 3


class UnpackArgs(ctypes.Structure):
    """The argument of ``unpack``; prefill/unpack.cu says what each is."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in (
            "pages", "table", "lengths", "starts", "key_levels", "value_levels", "keys", "values", "units",
        )),
        *((name, ctypes.c_int64) for name in ("page_stride", "page_head_stride", "table_stride")),
        *((name, ctypes.c_int32) for name in (
            "heads", "most_queries", "first_tile", "tiles", "first_rank", "ranks", "window",
        )),
        ("key_table", _Table),
        ("value_table", _Table),
        ("value_factor", ctypes.c_float),
    )  # fmt: skip


class AttendArgs(ctypes.Structure):
    """The argument of ``attend``; prefill/work.cuh says what each is."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in (
            "query", "keys", "values", "units", "lengths", "starts", "sinks", "out", "lse", "state",
        )),
        *((name, ctypes.c_int64) for name in ("query_stride", "query_head_stride", "out_stride", "out_head_stride")),
        *((name, ctypes.c_float) for name in ("scale", "softcap", "key_norm", "value_norm")),
        ("key_sign_bits", _SignBits),
        ("value_sign_bits", _SignBits),
        *((name, ctypes.c_int32) for name in (
            "sequences", "heads", "group", "most_queries", "causal", "window", "query_blocks", "section",
            "first_tile", "tiles", "first_rank", "ranks", "first_pass", "last_pass", "aligned",
        )),
    )  # fmt: skip


@dataclass(frozen=True)
class Shape:
    """How the kernels are cut."""

    step: int  # tokens of a tile
    stages: int  # tiles of K, and of V, in shared memory at a time
    eight_bit: bool = False  # queries and keys as int8, weights and values as e4m3; else halves
    promote: int = 16  # tiles whose e4m3 products the tensor cores, which keep 14 bits, add up on their own

    def keys_bytes(self, dim: int) -> int:
        """Of a tile of keys; as prefill/tiles.cuh counts."""
        return self.step * (dim + 8) if self.eight_bit else 2 * self.step * dim

    def values_bytes(self, dim: int) -> int:
        """Of a tile of values."""
        return self.step * (dim + 8) if self.eight_bit else 2 * self.step * dim


SHAPES = {64: Shape(128, 2), 128: Shape(128, 2), 256: Shape(64, 2)}
EIGHT_BIT_SHAPES = {64: Shape(128, 4, True), 128: Shape(128, 4, True)}
# Head sizes at which the kernel of bytes was measured to be faster than that of halves, on a GPU.
FASTER_IN_EIGHT_BITS: frozenset[int] = frozenset()

# source, kernel, defines, grid, threads, shared memory, argument
Launcher = Callable[[str, str, Defines, tuple[int, int], int, int, ctypes.Structure], None]


def refusal(request: AttendRequest) -> str | None:
    """None for what these kernels attend, else the reason."""
    spec = request.layout.spec
    for name, side in (("key", spec.key), ("value", spec.value)):
        if side.kind not in KIND_NUMBERS:
            return f"{name} format {side.name} is not unpacked by the CUDA prefill (Lloyd-Max, uniform and fp8 are)"
    if spec.key_dim != spec.value_dim or spec.key_dim not in SHAPES:
        return f"head sizes {spec.key_dim}/{spec.value_dim} are not 64/64, 128/128 or 256/256"
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
    return EIGHT_BIT_SHAPES[dim] if wanted == EIGHT_BIT or gains else SHAPES[dim]


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
        return -(-batch.sequences // -(-batch.sequences // whole)), longest
    if whole == batch.sequences:
        return whole, longest
    return batch.sequences, max(1, min(budget // (tile * batch.sequences), longest))


def attend_prefill(
    request: AttendRequest, launch: Launcher, budget: int = WORKSPACE_BYTES, shape: Shape | None = None
) -> None:
    """The sequences of more than MAX_DECODE_QUERIES queries: two launches a pass."""
    query, out, layout, options, pages = request.query, request.out, request.layout, request.options, request.pages
    (total, _, dim), num_kv_heads, sequences = query.shape, pages.shape[1], request.seq_lens.shape[0]
    most_long = min(sequences, total // (MAX_DECODE_QUERIES + 1))
    if most_long == 0:
        return
    shape, group, device, longest = shape or shape_of(request), request.group, query.device, max(1, request.max_seq_len)
    query_blocks = total // (ROWS // group) + sequences
    batch = Batch(most_long, num_kv_heads, query_blocks - sequences, longest)
    ranks, tiles = cut_passes(layout, shape, batch, _multiprocessors(device), budget)
    rows, passes = ranks * num_kv_heads, -(-longest // (tiles * shape.step))
    key_bytes, value_bytes = (rows * tiles * n for n in (shape.keys_bytes(dim), shape.values_bytes(dim)))
    blocks = query_blocks * num_kv_heads
    state_floats = blocks * 256 * (dim // 2 + 4) if passes > 1 else 0
    space = torch.empty(
        key_bytes + value_bytes + 16 * rows * tiles + 4 * state_floats, dtype=torch.uint8, device=device
    )
    keys = space.data_ptr()
    units = keys + key_bytes + value_bytes
    key, value, spec = request.codec.key_tables, request.codec.value_tables, layout.spec
    sinks = None if options.sinks is None else options.sinks.float().contiguous()
    unpack = UnpackArgs(
        pages=pages.data_ptr(), table=request.block_table.data_ptr(), lengths=request.seq_lens.data_ptr(),
        starts=request.cu_seqlens_q.data_ptr(), key_levels=key.levels.data_ptr(), value_levels=value.levels.data_ptr(),
        keys=keys, values=keys + key_bytes, units=units, page_stride=pages.stride(0),
        page_head_stride=pages.stride(1), table_stride=request.block_table.stride(0), heads=num_kv_heads,
        most_queries=MAX_DECODE_QUERIES, tiles=tiles, ranks=ranks, window=options.sliding_window or NO_WINDOW,
        **_byte_tables(layout, shape),
    )  # fmt: skip
    args = AttendArgs(
        query=query.data_ptr(), keys=keys, values=keys + key_bytes, units=units, lengths=unpack.lengths,
        starts=unpack.starts, sinks=None if sinks is None else sinks.data_ptr(), out=out.data_ptr(),
        lse=None if request.lse is None else request.lse.data_ptr(), state=units + 16 * rows * tiles,
        query_stride=query.stride(0), query_head_stride=query.stride(1), out_stride=out.stride(0),
        out_head_stride=out.stride(1), scale=request.softmax_scale * LOG2E, softcap=options.softcap * LOG2E,
        key_norm=key.orthonormal,
        value_norm=value.orthonormal, key_sign_bits=_signs(dim, spec.seed), value_sign_bits=_signs(dim, spec.seed),
        sequences=sequences, heads=num_kv_heads, group=group, most_queries=MAX_DECODE_QUERIES, causal=options.causal,
        window=options.sliding_window or 0, query_blocks=query_blocks, ranks=ranks,
        section=max(1, min(num_kv_heads, _CACHED_BYTES // ((key_bytes + value_bytes) // num_kv_heads))), tiles=tiles,
        aligned=all(x * out.element_size() % 16 == 0 for x in out.stride()[:2]) and out.data_ptr() % 16 == 0,
    )  # fmt: skip
    to_unpack = unpack_defines(layout, shape)
    to_attend = attend_defines(
        layout, shape, DTYPE_NUMBERS[query.dtype], DTYPE_NUMBERS[out.dtype], options.sliding_window is not None,
        options.softcap > 0,
    )  # fmt: skip
    for first_rank in range(0, most_long, ranks):
        unpack.first_rank = args.first_rank = first_rank
        for step in range(passes):
            unpack.first_tile = args.first_tile = step * tiles
            args.first_pass, args.last_pass = step == 0, step == passes - 1
            grid, threads = (tiles * num_kv_heads, sequences), 2 * shape.step
            launch(UNPACK, "unpack", to_unpack, grid, threads, to_unpack["SHARED"], unpack)
            launch(ATTEND, "attend", to_attend, (blocks, 1), _THREADS, to_attend["SHARED"], args)


def shared_bytes(dim: int, shape: Shape) -> int:
    """Shared memory of a block of ``attend``: queries, rings of tiles, totals, barriers; as prefill/work.cuh counts."""
    queries = ROWS * (128 if shape.eight_bit else 2 * dim)
    tiles = shape.stages * (shape.keys_bytes(dim) + shape.values_bytes(dim))
    totals = 4 * ROWS * dim if shape.eight_bit else 0
    return queries + tiles + totals + 48 * shape.stages + 1024


def _byte_tables(layout: PageLayout, shape: Shape) -> dict[str, object]:
    """What ``unpack`` looks bytes up in."""
    if not shape.eight_bit:
        return {}
    spec = layout.spec
    levels = byte_levels(spec.value.bits, spec.value_dim)
    magnitudes = torch.tensor(levels.value[len(levels.value) // 2 :], dtype=torch.float32).to(torch.float8_e4m3fn)
    words = magnitudes.view(torch.uint8).tolist() + [0] * 8
    low, high = (sum(byte << 8 * i for i, byte in enumerate(words[at : at + 4])) for at in (0, 4))
    return {
        "key_table": _Table(*level_bytes(spec.key, spec.key_dim), 0x80808080),
        "value_table": _Table(low, high, 0),
        "value_factor": levels.value_factor,
    }


@lru_cache(maxsize=256)
def unpack_defines(layout: PageLayout, shape: Shape) -> Defines:
    """What prefill/unpack.cu is compiled with."""

    def side(prefix: str, s: SideLayout) -> dict[str, int]:
        return {
            f"{prefix}_KIND": KIND_NUMBERS[s.format.kind],
            f"{prefix}_BITS": s.format.bits,
            f"{prefix}_FIELDS": s.fields_offset,
        }

    return Defines({
        "D": layout.spec.key_dim, "STEP": shape.step, "EIGHT_BIT": int(shape.eight_bit),
        "BLOCK_SIZE": layout.block_size, "V_CODES": layout.value.codes_offset, **side("K", layout.key),
        **side("V", layout.value),
        "SHARED": _unpack_shared_bytes(layout, shape),
    })  # fmt: skip


def _unpack_shared_bytes(layout: PageLayout, shape: Shape) -> int:
    """Shared memory of a block of ``unpack``: exponents, levels and a tile of values as bytes."""
    levels = shape.step // 2 + _levels_bytes(layout.spec.key) + _levels_bytes(layout.spec.value)
    return -(-levels // 16) * 16 + shape.values_bytes(layout.spec.value_dim) if shape.eight_bit else levels


def _levels_bytes(fmt: TensorFormat) -> int:
    return 4 << fmt.bits if fmt.kind == Kind.LLOYD else 0


@lru_cache(maxsize=256)
def attend_defines(
    layout: PageLayout, shape: Shape, q_type: int, out_type: int, window: bool, softcap: bool
) -> Defines:
    """What prefill/attend.cu is compiled with."""
    spec = layout.spec
    return Defines({
        "D": spec.key_dim, "STEP": shape.step, "EIGHT_BIT": int(shape.eight_bit), "PROMOTE": shape.promote,
        "STAGES": shape.stages, "SHARED": shared_bytes(spec.key_dim, shape),
        "WINDOW": int(window), "SOFTCAP": int(softcap), "Q_TYPE": q_type, "OUT_TYPE": out_type,
        "K_ROTATED": int(spec.key.rotated), "V_ROTATED": int(spec.value.rotated),
    })  # fmt: skip


@lru_cache(maxsize=64)
def _signs(dim: int, seed: int) -> ctypes.Array[ctypes.c_uint32]:
    return _SignBits(*sign_words(dim, seed))


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
