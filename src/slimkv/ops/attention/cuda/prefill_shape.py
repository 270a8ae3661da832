"""How the prefill kernels are cut, what they are compiled with, and what they take of shared memory."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from slimkv.codec.byte_levels import MOST_BITS
from slimkv.codec.rotation import core_size
from slimkv.ops.cuda.constants import KIND_NUMBERS
from slimkv.ops.cuda.module import Defines
from slimkv.spec import CodecSpec, Kind, PageLayout, SideLayout, TensorFormat


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
    ahead: bool = False  # blocks of ``attend`` unpack what later ones attend; else ``unpack`` does, before the first
    consumers: int = 2  # warpgroups that multiply
    producers: int = 1  # warpgroups that fetch tiles
    producer_registers: int = 24  # of each of their threads
    row_blocks: int = 1  # of 64 rows, that each warpgroup that multiplies has
    packed_stages: int = 4  # of those that unpack: tiles of pages in shared memory at a time, if they fit

    @property
    def rows(self) -> int:
        """Of queries, times heads of a group, in a block."""
        return 64 * self.consumers * self.row_blocks

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


_SHARED_OF_BLOCK = 227 << 10

SHAPES = {dim: Shape(128 if dim <= 128 else 64, 2) for dim in (64, 80, 96, 112, 128, 192, 256)}
FUSED_SHAPES = {
    **{dim: Shape(128, 2, fused=True, producers=2, producer_registers=48) for dim in (64, 80, 96, 112, 128)},
    **{dim: Shape(64, 2, fused=True, producer_registers=72) for dim in (192, 256)},
}
# What is unpacked serves twice as many rows.
WIDE_SHAPES = {
    64: Shape(128, 3, fused=True, producer_registers=56, row_blocks=2),
    **{dim: Shape(64, 3, fused=True, producer_registers=40, row_blocks=2) for dim in (80, 96, 112, 128)},
}
# At head size 64 there is so little to multiply that what unpacks beside it takes more time than before it.
AHEAD_SHAPES = {dim: Shape(128, 2, ahead=True, producer_registers=56) for dim in (80, 96, 112, 128)}
# Each with the time that a tile takes, over that of two warpgroups.
EIGHT_BIT_SHAPES = {
    64: {Shape(128, 4, True): 1.0, Shape(128, 4, True, consumers=3): 1.26, Shape(128, 4, True, consumers=4): 1.72},
    128: {Shape(128, 4, True): 1.0, Shape(128, 3, True, consumers=3): 1.41},
}


def shared_bytes(dim: int, shape: Shape) -> int:
    """Shared memory of a block of ``attend``: queries, rings of tiles, totals, barriers; as prefill/work.cuh counts.

    Beside the levels of formats that are looked up.
    """
    queries = shape.rows * 128 * (1 if shape.eight_bit else _halves(dim))
    tiles = shape.stages * (shape.keys_bytes(dim) + shape.values_bytes(dim))
    totals = 4 * shape.rows * dim if shape.eight_bit else 0
    return queries + tiles + totals + 48 * shape.stages + (0 if shape.fused else 1024)


def packed_bytes(spec: CodecSpec, shape: Shape) -> int:
    """What the warps that unpack copy of a tile's pages: codes, and all fields for each of them."""
    fields = 2 + (spec.key.kind == Kind.UNIFORM) + (spec.value.kind == Kind.UNIFORM)
    codes = 2 * spec.key_dim * (spec.key.bits + spec.value.bits) * shape.step // 16
    return codes + 4 * shape.producers * fields * 2 * shape.step


def packed_stages(spec: CodecSpec, shape: Shape) -> int:
    """Tiles of pages for which there is room in shared memory."""
    room = _SHARED_OF_BLOCK - shared_bytes(spec.key_dim, shape) - tables_bytes(spec)
    return min(shape.packed_stages, room // packed_bytes(spec, shape))


def tables_bytes(spec: CodecSpec) -> int:
    """Of the levels that ``attend`` looks up: one table if keys and values are alike."""
    return 128 * (_level_entries(spec.key) + (0 if spec.key == spec.value else _level_entries(spec.value)))


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
    layout: PageLayout, shape: Shape, q_type: int, out_type: int, window: bool, softcap: bool,
    shifted: bool = False, beside: bool = False, hands_on: bool = False,
) -> Defines:  # fmt: skip
    """What prefill/attend.cu is compiled with.

    Bytes at head size 128 have code that hands on a state only where there is one: it takes registers of the loop.
    """
    spec, shared, pages = layout.spec, shared_bytes(layout.spec.key_dim, shape), {}
    if shape.fused or shape.ahead:
        pages = {"K_LEVELS": _level_entries(spec.key), "V_LEVELS": _level_entries(spec.value)}
        pages |= {"ONE_TABLE": int(spec.key == spec.value), **_page_defines(layout)}
        shared += tables_bytes(spec)
    if shape.fused:
        stages, packed = packed_stages(spec, shape), packed_bytes(spec, shape)
        pages |= {"PACKED_STAGES": stages, "PACKED_BYTES": packed}
        shared += stages * packed
    return Defines({
        "D": spec.key_dim, "STEP": shape.step, "EIGHT_BIT": int(shape.eight_bit), "PROMOTE": shape.promote,
        "FUSED": int(shape.fused), "AHEAD": int(shape.ahead), "BESIDE": int(beside), "CONSUMERS": shape.consumers,
        "PRODUCERS": shape.producers, "PRODUCER_REGISTERS": shape.producer_registers,
        "ROW_BLOCKS": shape.row_blocks, "STAGES": shape.stages, "SHARED": shared,
        "WINDOW": int(window), "SOFTCAP": int(softcap), "SCORE_SHIFT": int(shifted), "Q_TYPE": q_type,
        "OUT_TYPE": out_type,
        "ROTATION_CORE": core_size(spec.key_dim), "K_ROTATED": int(spec.key.rotated),
        "V_ROTATED": int(spec.value.rotated),
        "HANDS_ON": int(hands_on or not shape.eight_bit or spec.key_dim == 64), **pages,
    })  # fmt: skip
