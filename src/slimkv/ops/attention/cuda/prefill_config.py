"""Configurations of the CUDA prefill kernels, and which of them a request takes.

A thread block of ``attend`` gets its tiles of keys and values in one of three ways:

- FIRST: a launch of ``unpack`` writes them to the workspace. The only way without warpgroup products (``wgmma``).
- AHEAD: spare warps of earlier blocks write them there (source/prefill/ahead.cuh).
- FUSED: producer warpgroups of the block unpack pages into shared memory (source/prefill/producer.cuh).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum
from functools import lru_cache
from itertools import combinations

import torch

from slimkv.codec.byte_levels import MOST_BITS
from slimkv.ops.attention import eight_bit
from slimkv.ops.attention.api import EIGHT_BIT, MAX_DECODE_QUERIES, AttendRequest
from slimkv.ops.attention.cuda.prefill_defines import packed_stages, shared_bytes
from slimkv.ops.attention.cuda.prefill_workspace import WORKSPACE_BYTES, cut_ahead, seen_tokens
from slimkv.ops.cuda.constants import KIND_NUMBERS
from slimkv.ops.cuda.device import Device, device_of, multiprocessors
from slimkv.spec import CodecSpec, Kind

ATTEND, ATTEND_WARPS, UNPACK = "prefill/attend.cu", "prefill/attend_warps.cu", "prefill/unpack.cu"


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
    row_blocks: int = 1  # of 64 rows, per consumer
    producers: int = 1  # warpgroups that fetch or unpack tiles
    producer_registers: int = 24  # per thread
    eight_bit: bool = False  # queries and keys as int8, probabilities and values as e4m3; else fp16
    tile_time: float = 1.0  # eight_bit: time of a tile, relative to the smallest block's
    promote: int = 16  # tiles whose e4m3 products the tensor cores, which keep 14 bits, add up on their own
    packed_stages: int = 4  # FUSED: tiles of pages in shared memory at a time, if they fit
    by_row: bool = False  # FIRST: a row's result depends on its own sequence alone, to the last bit
    single_warps: bool = False  # products of single warps (mma.sync), not of warpgroups; all threads copy tiles
    blocks_per_sm: int = 1  # the registers of a thread allow this many
    held_queries: bool = False  # single_warps: queries stay in registers

    @property
    def source(self) -> str:
        """The file of ``attend``."""
        return ATTEND_WARPS if self.single_warps else ATTEND

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
        """Whether blocks unpack what later ones attend."""
        return self.unpack == Unpack.AHEAD

    def tile_bytes(self, dim: int) -> int:
        """Bytes of a tile of keys, and of a tile of values (source/prefill/tiles.cuh)."""
        return self.tile_tokens * (dim + 8) if self.eight_bit else 128 * self.tile_tokens * -(-dim // 64)


FIRST, AHEAD, FUSED = Unpack
# Codes by how long they take to unpack: Lloyd-Max of at most 4 bits; uniform of at most 4 bits, whose zero points take
# registers; more than 4 bits, from a table in shared memory.
SHORT, UNIFORM, LONG = ANY = ("short", "uniform", "long")
_80_TO_128, _TO_128, _TO_256 = (80, 96, 112, 128), (64, 80, 96, 112, 128), (192, 256)

# Head sizes and codes, and a configuration of their kernel. Of several, the one with the least estimated time is taken.
CONFIGS: tuple[tuple[tuple[int, ...], tuple[str, ...], PrefillConfig], ...] = (
    (_TO_128, ANY, PrefillConfig(FIRST, 128, 2)),
    (_TO_256, ANY, PrefillConfig(FIRST, 64, 2)),
    # At head size 64 there are few products to hide unpacking behind, so unpacking first is faster.
    (_80_TO_128, ANY, PrefillConfig(AHEAD, 128, 2, producer_registers=56)),
    (_TO_128, (SHORT,), PrefillConfig(FUSED, 128, 2, producers=2, producer_registers=48)),
    (_TO_128, (UNIFORM,), PrefillConfig(FUSED, 128, 2, producer_registers=88)),  # two producers with 48 would spill
    (_TO_256, ANY, PrefillConfig(FUSED, 64, 2, producer_registers=72)),
    # An unpacked tile serves twice as many rows.
    ((64,), ANY, PrefillConfig(FUSED, 128, 3, row_blocks=2, producer_registers=56)),
    (_80_TO_128, (SHORT,), PrefillConfig(FUSED, 64, 3, row_blocks=2, producer_registers=40)),
    (_80_TO_128, (UNIFORM, LONG), PrefillConfig(FUSED, 64, 3, row_blocks=2, producer_registers=56)),
    ((64, 128), (SHORT,), PrefillConfig(FIRST, 128, 4, eight_bit=True)),
    ((64,), (SHORT,), PrefillConfig(FIRST, 128, 4, consumers=3, eight_bit=True, tile_time=1.26)),
    ((128,), (SHORT,), PrefillConfig(FIRST, 128, 3, consumers=3, eight_bit=True, tile_time=1.41)),
)
_WARPS = PrefillConfig(FIRST, 64, 1, 1, 2, producers=0, single_warps=True, blocks_per_sm=2)
# Without warpgroup products: the first one whose blocks fit shared memory. Two blocks of four warps, or one of eight
# where a multiprocessor has 100 KB.
WARP_CONFIGS: tuple[tuple[tuple[int, ...], PrefillConfig], ...] = (
    ((64,), replace(_WARPS, held_queries=True)),
    (_80_TO_128, _WARPS),
    (_80_TO_128, replace(_WARPS, consumers=2, blocks_per_sm=1)),
    (_TO_256, replace(_WARPS, tile_tokens=32, consumers=2, row_blocks=1, blocks_per_sm=1, held_queries=True)),
)
HEAD_DIMS = tuple(sorted({dim for dims, _, _ in CONFIGS for dim in dims}))
EIGHT_BIT_HEAD_DIMS = tuple(sorted({dim for dims, _, config in CONFIGS if config.eight_bit for dim in dims}))
MOST_GROUP = 64
# Query rows of a sequence up to which FUSED is measured to gain, by head size (64, up to 128, above) and codes.
_FUSED_UP_TO = {
    64: {SHORT: 512, UNIFORM: 512, LONG: 512},
    128: {SHORT: 768, UNIFORM: 512, LONG: 512},
    256: {SHORT: 512, UNIFORM: 256, LONG: 0},
}
FUSED_FROM_ROWS, FUSED_FROM_QUERIES = 65, 17  # of a sequence, from which FUSED is faster than the decode kernel
# Measured times, in waves of FUSED blocks of 128 rows: a wave of 256 rows, or of the 128 left of them; a wave of FIRST;
# unpacking a KV head of a sequence first on one multiprocessor; the start of FUSED blocks. AHEAD: what unpacking one
# adds to a wave of one block, and the least time it takes.
WIDE_ROUND, PART_ROUND, UNPACKED_ROUND, UNPACKING, FUSED_START = 1.69, 1.35, 0.68, 1.79, 0.15
BESIDE_ATTENDING, UNPACKING_AHEAD = 0.5, 3.6
SECOND_LAUNCH = 0.05  # eight_bit: its cost in waves of the smallest blocks
EVERY_QUERY = 1 << 30


@lru_cache(maxsize=64)
def codes_of(spec: CodecSpec) -> str:
    """The kind of codes of the side that takes longer to unpack."""
    if max(spec.key.bits, spec.value.bits) > MOST_BITS:
        return LONG
    return UNIFORM if Kind.UNIFORM in (spec.key.kind, spec.value.kind) else SHORT


@lru_cache(maxsize=256)
def configs(spec: CodecSpec, unpack: Unpack, eight_bit: bool = False) -> tuple[PrefillConfig, ...]:
    """The entries of the table that fit shared memory, in its order."""
    found = (
        config
        for dims, codes, config in CONFIGS
        if spec.key_dim in dims and codes_of(spec) in codes and (config.unpack, config.eight_bit) == (unpack, eight_bit)
    )
    return tuple(config for config in found if unpack != FUSED or packed_stages(spec, config) > 0)


def refusal(request: AttendRequest) -> str | None:
    """Why these kernels do not support the request, or None."""
    spec = request.layout.spec
    for name, side in (("key", spec.key), ("value", spec.value)):
        if side.kind not in KIND_NUMBERS:
            return f"{name} format {side.name} is not unpacked by the CUDA prefill (Lloyd-Max, uniform and fp8 are)"
    if spec.key_dim != spec.value_dim or spec.key_dim not in HEAD_DIMS:
        sizes = ", ".join(map(str, HEAD_DIMS))
        return f"head sizes {spec.key_dim}/{spec.value_dim} are not alike and one of {sizes}"
    if request.layout.block_size < 16:
        return "blocks of less than 16 tokens"
    if request.group > MOST_GROUP:
        return f"{request.group} query heads per KV head are more than {MOST_GROUP}"
    if request.fresh is not None:
        return "fresh K and V"
    return None


def eight_bit_refusal(request: AttendRequest) -> str | None:
    """Why 8-bit tensor cores do not support the request, or None."""
    reason = eight_bit.refusal(request) or refusal(request)
    if reason is None and request.layout.spec.key_dim not in EIGHT_BIT_HEAD_DIMS:
        sizes = " and ".join(map(str, EIGHT_BIT_HEAD_DIMS))
        reason = f"head size {request.layout.spec.key_dim} is not prefilled in 8 bits; {sizes} are"
    return reason


def has_warpgroups(device: torch.device) -> bool:
    """Whether prefill uses warpgroup products; 8 bits, AHEAD and FUSED need them."""
    return device_of(device).warpgroups


@lru_cache(maxsize=256)
def warp_config(spec: CodecSpec, device: Device) -> PrefillConfig:
    """The first of ``WARP_CONFIGS`` that fits the device."""

    def fits(config: PrefillConfig) -> bool:
        shared = shared_bytes(spec, config)
        within = (shared + 1024) * config.blocks_per_sm <= device.shared_of_multiprocessor
        return within and shared <= device.shared_of_block

    return next(config for dims, config in WARP_CONFIGS if spec.key_dim in dims and fits(config))


def config_for(request: AttendRequest) -> PrefillConfig:
    """The configuration of a request that is not refused."""
    spec, options, device = request.layout.spec, request.options, request.query.device
    if not has_warpgroups(device):
        return replace(warp_config(spec, device_of(device)), by_row=options.deterministic)
    if options.deterministic:
        return replace(configs(spec, FIRST)[0], by_row=True)
    if options.prefill == EIGHT_BIT:  # more rows a block take less time each, but may leave multiprocessors idle
        queries = request.query.shape[0]
        return min(configs(spec, FIRST, eight_bit=True), key=lambda c: _rounds(request, queries, c) * c.tile_time)
    fused = configs(spec, FUSED) if _can_fuse(request) else ()
    unpacked = () if fused and spec.key_dim > 128 else configs(spec, FIRST)
    ahead = configs(spec, AHEAD) if unpacked and _can_unpack_ahead(request) else ()
    return min((*fused, *unpacked, *ahead), key=lambda config: _time(request, config))


def _can_fuse(request: AttendRequest) -> bool:
    spec = request.layout.spec
    size = 64 if spec.key_dim <= 64 else 128 if spec.key_dim <= 128 else 256
    return request.max_query_len * request.group <= _FUSED_UP_TO[size][codes_of(spec)]


def _can_unpack_ahead(request: AttendRequest) -> bool:
    """Whether sequences are alike, or all but one decode, and unpacking seldom waits for room in the workspace.

    A block that unpacks for a sequence much longer than its own would take longer than it attends.
    """
    total, longest, sequences = request.query.shape[0], request.max_query_len, request.seq_lens.shape[0]
    config, alike = configs(request.layout.spec, AHEAD), total == sequences * longest or total - longest < sequences
    available = multiprocessors(request.query.device)
    return bool(config) and alike and cut_ahead(request, config[0], sequences, available, WORKSPACE_BYTES).flows


def _time(request: AttendRequest, config: PrefillConfig) -> float:
    """The estimated time of all blocks if sequences are alike, in waves of FUSED blocks of 128 rows."""
    sequences, available = request.seq_lens.shape[0], multiprocessors(request.query.device)
    items, rows = sequences * request.pages.shape[1], request.max_query_len * request.group
    if config.fused:
        blocks, rest = divmod(rows, config.rows)
        part = 0 < rest <= config.rows - config.rows // config.row_blocks
        whole = -(-items * (blocks + (rest > 0 and not part)) // available)
        rounds = whole * (WIDE_ROUND if config.row_blocks > 1 else 1) + part * -(-items // available) * PART_ROUND
        return FUSED_START + rounds
    # Tokens that a sequence's queries see, over those that a block's queries see: more than 1 with a window.
    spread = seen_tokens(request, request.max_query_len) / seen_tokens(request, config.rows // request.group)
    blocks = -(-rows // config.rows)
    rounds, round_time, first = -(-items * blocks // available), UNPACKED_ROUND, items
    if config.ahead:
        beside = UNPACKED_ROUND + BESIDE_ATTENDING * spread / blocks
        round_time = max(beside, UNPACKING_AHEAD * spread / blocks)
        first = cut_ahead(request, config, sequences, available, WORKSPACE_BYTES).lead
    return rounds * round_time + first / available * UNPACKING * spread


def most_packed_queries(request: AttendRequest) -> int:
    """Queries of a sequence up to which the decode kernel attends it.

    Decode reads pages again for every few rows, but it splits contexts: it keeps requests that would not keep the
    device busy otherwise.
    """
    if request.options.deterministic:
        prompt = request.options.prompt
        return MAX_DECODE_QUERIES if prompt is None else 0 if prompt else request.max_query_len
    device, few = request.query.device, max(FUSED_FROM_QUERIES, -(-FUSED_FROM_ROWS // request.group)) - 1
    if few >= MAX_DECODE_QUERIES or request.max_query_len <= few or not has_warpgroups(device):
        return MAX_DECODE_QUERIES
    if refusal(request) is not None or not _can_fuse(request) or not config_for(request).fused:
        return MAX_DECODE_QUERIES
    most_long = min(request.seq_lens.shape[0], request.query.shape[0] // (few + 1))
    busy = most_long * request.pages.shape[1] >= 0.9 * multiprocessors(device)
    return few if busy else MAX_DECODE_QUERIES


def _rounds(request: AttendRequest, queries: int, config: PrefillConfig) -> int:
    """How many waves of blocks the multiprocessors run."""
    blocks = -(-queries // (config.rows // request.group)) * request.pages.shape[1]
    return -(-blocks // multiprocessors(request.query.device))


@dataclass(frozen=True)
class Part:
    """One launch: its configuration, and the queries of each sequence that it attends."""

    config: PrefillConfig
    first: int = 0
    end: int = EVERY_QUERY
    beside: bool = False  # it follows a launch on the same tiles and need not wait for its end


def parts_of(request: AttendRequest) -> list[Part]:
    """One launch; for a single sequence in 8 bits maybe two: waves of large blocks, and small blocks for the rest.

    The last blocks of a fresh prompt are short, so there a second launch gains nothing.
    """
    config, alike = config_for(request), request.max_seq_len >= 4 * request.query.shape[0]
    if not config.eight_bit or request.seq_lens.shape[0] > 1 or not alike:
        return [Part(config)]
    queries, heads, available = request.query.shape[0], request.pages.shape[1], multiprocessors(request.query.device)
    best, least = [Part(config)], _rounds(request, queries, config) * config.tile_time
    for small, large in combinations(configs(request.layout.spec, FIRST, eight_bit=True), 2):
        for full in range(1, _rounds(request, queries, large)):
            rest = queries - full * available // heads * (large.rows // request.group)
            time = full * large.tile_time + _rounds(request, rest, small) * small.tile_time
            if rest > 0 and time < least - SECOND_LAUNCH:
                best, least = [Part(large, first=rest), Part(small, end=rest, beside=True)], time
    return best
