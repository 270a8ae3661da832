"""Configurations of the CUDA prefill kernels, and the compile-time defines that follow from them.

A thread block of ``attend`` gets its tiles of keys and values in one of three ways:

- FIRST: a launch of ``unpack`` writes them to the workspace. The only way without ``wgmma``.
- AHEAD: spare warps of earlier blocks write them there (source/prefill/ahead.cuh).
- FUSED: producer warpgroups of the block unpack pages into shared memory (source/prefill/producer.cuh).

The defines include every offset into shared memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from itertools import accumulate

from slimkv.codec.byte_levels import MOST_BITS
from slimkv.codec.rotation import core_size
from slimkv.ops.cuda.constants import side_defines
from slimkv.ops.cuda.module import Defines
from slimkv.spec import CodecSpec, Kind, PageLayout, TensorFormat

ATTEND, ATTEND_WARPS, UNPACK = "prefill/attend.cu", "prefill/attend_warps.cu", "prefill/unpack.cu"
SHARED_OF_BLOCK = 227 << 10  # compute capability 9.0


class Unpack(Enum):
    """Who unpacks tiles."""

    FIRST = "first"
    AHEAD = "ahead"
    FUSED = "fused"


@dataclass(frozen=True)
class PrefillConfig:
    """A thread block of ``attend``: 64 x ``consumers`` x ``row_blocks`` query rows (queries x heads of a group)."""

    unpack: Unpack
    tile_tokens: int
    stages: int  # tiles of K, and of V, in shared memory at a time
    consumers: int = 2  # warpgroups that multiply
    row_blocks: int = 1  # blocks of 64 rows, per consumer
    producers: int = 1  # warpgroups that fetch or unpack tiles
    producer_registers: int = 24  # per thread
    eight_bit: bool = False  # queries and keys as int8, probabilities and values as e4m3 or int8; else fp16
    tile_time: float = 1.0  # eight_bit: time of a tile, relative to the smallest block's
    promote: int = 16  # tiles between promotions: tensor cores accumulate e4m3 products with 14 bits only
    packed_stages: int = 4  # FUSED: packed tiles in shared memory at a time, if they fit
    by_row: bool = False  # FIRST: a row's result depends on its own sequence alone, bit for bit
    single_warps: bool = False  # mma.sync instead of wgmma; all threads copy tiles
    blocks_per_sm: int = 1  # as many as the registers allow
    held_queries: bool = False  # single_warps: queries stay in registers

    @property
    def source(self) -> str:
        """The file of ``attend``."""
        return ATTEND_WARPS if self.single_warps else ATTEND

    @property
    def kind(self) -> tuple[Unpack, bool, bool]:
        """Who unpacks tiles, whether attention is 8-bit, and whether it uses mma.sync."""
        return self.unpack, self.eight_bit, self.single_warps

    @property
    def rows(self) -> int:
        """Query rows of a block."""
        return 64 * self.consumers * self.row_blocks

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return 128 * (self.consumers + self.producers)

    @property
    def fused(self) -> bool:
        """Whether producers unpack pages into shared memory."""
        return self.unpack == Unpack.FUSED

    @property
    def ahead(self) -> bool:
        """Whether blocks unpack tiles for later blocks."""
        return self.unpack == Unpack.AHEAD

    @property
    def integers(self) -> bool:
        """With ``eight_bit``: whether values and probabilities are 8-bit integers, not e4m3."""
        return self.eight_bit and self.single_warps

    def tile_bytes(self, dim: int) -> int:
        """Bytes of a tile of keys; a tile of values takes no more (source/prefill/tiles.cuh)."""
        return self.tile_tokens * (dim + 8) if self.eight_bit else 128 * self.tile_tokens * -(-dim // 64)


def packed_bytes(spec: CodecSpec, config: PrefillConfig) -> int:
    """Bytes of a packed tile in shared memory: its codes, and per producer warp a copy of its scales and zeros."""
    fields = 2 + (spec.key.kind == Kind.UNIFORM) + (spec.value.kind == Kind.UNIFORM)
    codes = 2 * spec.key_dim * (spec.key.bits + spec.value.bits) * config.tile_tokens // 16
    return codes + 4 * config.producers * fields * 2 * config.tile_tokens


def packed_stages(spec: CodecSpec, config: PrefillConfig) -> int:
    """The number of packed tiles that fit the shared memory of a FUSED block."""
    room = SHARED_OF_BLOCK - shared_bytes(spec, config)
    return min(config.packed_stages, room // packed_bytes(spec, config))


def shared_bytes(spec: CodecSpec, config: PrefillConfig) -> int:
    """Shared memory of a block of ``attend``, without the packed tiles of FUSED."""
    return _shared_memory(spec, config, packed=0)["SHARED"]


def _tables(spec: CodecSpec, unpacks: bool, by_row: bool = False) -> dict[str, int]:
    """Entries of the LUTs. Keys and values of the same format share one."""

    def entries(fmt: TensorFormat) -> int:
        looked_up = unpacks and fmt.kind == Kind.LLOYD and (by_row or fmt.bits > MOST_BITS)
        return 1 << fmt.bits if looked_up else 0

    one = not unpacks or spec.key == spec.value
    return {"K_LEVELS": entries(spec.key), "V_LEVELS": entries(spec.value), "ONE_TABLE": int(one)}


def _table_bytes(tables: dict[str, int]) -> int:
    return 128 * (tables["K_LEVELS"] + (0 if tables["ONE_TABLE"] else tables["V_LEVELS"]))


def _value_tile(spec: CodecSpec, config: PrefillConfig) -> int:
    return config.tile_tokens * spec.value_dim if config.integers else config.tile_bytes(spec.value_dim)


def _shared_memory(spec: CodecSpec, config: PrefillConfig, packed: int) -> dict[str, int]:
    """Sizes and offsets of ``attend``'s shared memory, relative to a 1,024-byte boundary, and the total (SHARED)."""
    tile, value_tile = config.tile_bytes(spec.key_dim), _value_tile(spec, config)
    query = 64 * 128 * -(-spec.key_dim // (128 if config.eight_bit else 64))
    sizes = {
        "QUERIES": 0 if config.held_queries else config.rows // 64 * query,
        "KEYS": config.stages * tile,
        "VALUES": config.stages * value_tile,
        "TOTALS": 4 * config.rows * spec.key_dim if config.eight_bit and not config.integers else 0,
        "BARRIERS": 0 if config.single_warps else 4 * 8 * config.stages,
        "SCALES": 0 if config.integers else 16 * config.stages,
        "LEVELS": _table_bytes(_tables(spec, config.fused or config.ahead)),
        "PACKED": packed,
    }
    offsets = dict(zip(sizes, accumulate(sizes.values(), initial=0), strict=False))
    alignment = 0 if config.fused or config.single_warps else 1024
    return {
        "QUERY_BYTES": query, "KEYS_BYTES": tile, "VALUES_BYTES": value_tile,
        **{f"{name}_AT": at for name, at in offsets.items() if name != "QUERIES"},
        "SHARED": max(sum(sizes.values()), config.rows // 64 * query) + alignment,
    }  # fmt: skip


@lru_cache(maxsize=256)
def attend_defines(
    layout: PageLayout, config: PrefillConfig, q_type: int, out_type: int, window: bool, softcap: bool,
    shifted: bool = False, hands_on: bool = False,
) -> Defines:  # fmt: skip
    """The defines of ``config.source``.

    8-bit kernels can hand on their softmax state only if compiled with ``hands_on``: that code takes registers.
    """
    spec, stages, packed = layout.spec, 0, 0
    if config.fused:
        stages, packed = packed_stages(spec, config), packed_bytes(spec, config)
    unpacks = config.fused or config.ahead
    return Defines({
        "D": spec.key_dim, "STEP": config.tile_tokens, "EIGHT_BIT": int(config.eight_bit),
        "INTEGERS": int(config.integers), "PROMOTE": config.promote,
        "FUSED": int(config.fused), "AHEAD": int(config.ahead), "CONSUMERS": config.consumers,
        "PRODUCERS": config.producers, "PRODUCER_REGISTERS": config.producer_registers,
        "ROW_BLOCKS": config.row_blocks, "STAGES": config.stages, "BLOCKS_PER_SM": config.blocks_per_sm,
        "HELD_QUERIES": int(config.held_queries),
        **_shared_memory(spec, config, stages * packed),
        "PACKED_STAGES": stages, "PACKED_BYTES": packed,
        **_tables(spec, unpacks),
        "WINDOW": int(window), "SOFTCAP": int(softcap), "SCORE_SHIFT": int(shifted), "Q_TYPE": q_type,
        "OUT_TYPE": out_type, "ROTATION_CORE": core_size(spec.key_dim), "K_ROTATED": int(spec.key.rotated),
        "V_ROTATED": int(spec.value.rotated),
        "BY_ROW": int(config.by_row), "HANDS_ON": int(not config.fused and (hands_on or not config.eight_bit)),
        **(_page_defines(layout) if unpacks else {}),
    })  # fmt: skip


@lru_cache(maxsize=256)
def unpack_defines(layout: PageLayout, config: PrefillConfig) -> Defines:
    """The defines of prefill/unpack.cu. Shared memory holds LUTs or, in 8 bits, a word per warp and the value tile."""
    tile, value_tile = config.tile_bytes(layout.spec.key_dim), _value_tile(layout.spec, config)
    staged = -(-config.tile_tokens // 64) * 16
    tables = _tables(layout.spec, not config.eight_bit, config.by_row)
    return Defines({
        "D": layout.spec.key_dim, "STEP": config.tile_tokens, "EIGHT_BIT": int(config.eight_bit),
        "INTEGERS": int(config.integers), "BY_ROW": int(config.by_row), "FUSED": 0, "PRODUCERS": 1, "WINDOW": 1,
        "KEYS_BYTES": tile, "VALUES_BYTES": value_tile,
        **tables, "STAGED_AT": staged, "SHARED": staged + value_tile if config.eight_bit else _table_bytes(tables),
        **_page_defines(layout),
    })  # fmt: skip


def _page_defines(layout: PageLayout) -> dict[str, int]:
    pages = {"BLOCK_SIZE": layout.block_size, "V_CODES": layout.value.codes_offset}
    return pages | side_defines("K", layout.key) | side_defines("V", layout.value)
