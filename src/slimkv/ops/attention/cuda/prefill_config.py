"""Configurations of the CUDA prefill kernels, and which of them a request takes.

Tiles of keys and values reach a block of ``attend`` in one of three ways:

- FIRST: a launch of ``unpack`` writes them to the workspace; the only way where products are those of single warps;
- AHEAD: spare warps of earlier blocks write them there (source/prefill/ahead.cuh);
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
from slimkv.ops.attention.cuda.prefill_workspace import WORKSPACE_BYTES, AheadCut, cut_ahead, seen_tokens
from slimkv.ops.cuda.constants import KIND_NUMBERS
from slimkv.ops.cuda.device import Device, device_of
from slimkv.spec import CodecSpec, Kind

ATTEND, ATTEND_WARPS, UNPACK = "prefill/attend.cu", "prefill/attend_warps.cu", "prefill/unpack.cu"


class Unpack(Enum):
    """Who unpacks tiles."""

    FIRST = "first"
    AHEAD = "ahead"
    FUSED = "fused"


class Codes(Enum):
    """How long codes take to unpack."""

    SHORT = "short"  # Lloyd-Max, at most 4 bits
    UNIFORM = "uniform"  # at most 4 bits; zeros take registers
    LONG = "long"  # more than 4 bits: from a table in shared memory


@dataclass(frozen=True)
class PrefillConfig:
    """A block of ``attend``: 64 x ``consumers`` x ``row_blocks`` rows of queries x heads of a group."""

    unpack: Unpack
    tile_tokens: int
    stages: int  # tiles of K, and of V, in shared memory at a time
    consumers: int = 2  # warpgroups that multiply
    row_blocks: int = 1  # of 64 rows, per consumer
    producers: int = 1  # warpgroups that fetch or unpack tiles
    producer_registers: int = 24  # per thread
    eight_bit: bool = False  # queries and keys as int8, probabilities and values as e4m3; else fp16
    tile_time: float = 1.0  # of a tile, over that of the smallest block (EIGHT_BIT)
    promote: int = 16  # tiles whose e4m3 products the tensor cores, which keep 14 bits, add up on their own
    packed_stages: int = 4  # FUSED: tiles of pages in shared memory at a time, if they fit
    by_row: bool = False  # FIRST: a row's result depends on its own sequence alone, to the last bit
    single_warps: bool = False  # products of single warps (mma.sync), not of warpgroups; all threads copy tiles
    blocks_per_sm: int = 1  # that registers are to suffice for
    held_queries: bool = False  # of single warps: they stay in registers

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
SHORT, UNIFORM, LONG = Codes
ANY = tuple(Codes)
_TO_128, _TO_256 = (64, 80, 96, 112, 128), (192, 256)

# Head sizes and codes, and a configuration of their kernel. Of several, the one with the least estimated time is taken.
CONFIGS: tuple[tuple[tuple[int, ...], tuple[Codes, ...], PrefillConfig], ...] = (
    (_TO_128, ANY, PrefillConfig(FIRST, 128, 2)),
    (_TO_256, ANY, PrefillConfig(FIRST, 64, 2)),
    # At head size 64 there is so little to multiply that unpacking beside it takes longer than before it.
    ((80, 96, 112, 128), ANY, PrefillConfig(AHEAD, 128, 2, producer_registers=56)),
    (_TO_128, (SHORT,), PrefillConfig(FUSED, 128, 2, producers=2, producer_registers=48)),
    (_TO_128, (UNIFORM,), PrefillConfig(FUSED, 128, 2, producer_registers=88)),  # two producers with 48 would spill
    (_TO_256, ANY, PrefillConfig(FUSED, 64, 2, producer_registers=72)),
    # An unpacked tile serves twice as many rows.
    ((64,), ANY, PrefillConfig(FUSED, 128, 3, row_blocks=2, producer_registers=56)),
    ((80, 96, 112, 128), (SHORT,), PrefillConfig(FUSED, 64, 3, row_blocks=2, producer_registers=40)),
    ((80, 96, 112, 128), (UNIFORM, LONG), PrefillConfig(FUSED, 64, 3, row_blocks=2, producer_registers=56)),
    ((64, 128), (SHORT,), PrefillConfig(FIRST, 128, 4, eight_bit=True)),
    ((64,), (SHORT,), PrefillConfig(FIRST, 128, 4, consumers=3, eight_bit=True, tile_time=1.26)),
    ((128,), (SHORT,), PrefillConfig(FIRST, 128, 3, consumers=3, eight_bit=True, tile_time=1.41)),
)


def _of_warps(
    tile_tokens: int, consumers: int, row_blocks: int, blocks_per_sm: int, held: bool = False
) -> PrefillConfig:
    return PrefillConfig(
        FIRST, tile_tokens, 1, consumers, row_blocks, producers=0, single_warps=True, blocks_per_sm=blocks_per_sm,
        held_queries=held,
    )  # fmt: skip


# Without products of warpgroups. Of several, the first whose blocks fit the shared memory is taken: two blocks of four
# warps, or one of eight where a multiprocessor has 100 KB.
WARP_CONFIGS: tuple[tuple[tuple[int, ...], PrefillConfig], ...] = (
    ((64,), _of_warps(64, 1, 2, 2, held=True)),
    ((80, 96, 112, 128), _of_warps(64, 1, 2, 2)),
    ((80, 96, 112, 128), _of_warps(64, 2, 2, 1)),
    (_TO_256, _of_warps(32, 2, 1, 1, held=True)),
)
HEAD_DIMS = tuple(sorted({dim for dims, _, _ in CONFIGS for dim in dims}))
EIGHT_BIT_HEAD_DIMS = tuple(sorted({dim for dims, _, config in CONFIGS if config.eight_bit for dim in dims}))
MOST_GROUP = 64

# Rows and queries of a sequence from which FUSED is faster than the decode kernel.
FUSED_FROM_ROWS, FUSED_FROM_QUERIES = 65, 17
# Times of a round of blocks over that of FUSED blocks of 128 rows: of 256 rows, or of the 128 that there are of them;
# of FIRST; of unpacking first, a sequence's head a multiprocessor; and what passes before FUSED blocks have something
# to multiply. AHEAD: what unpacking a sequence's head adds to a round of one block, and how long it takes at least.
WIDE_ROUND, PART_ROUND, UNPACKED_ROUND, UNPACKING, FUSED_START = 1.69, 1.35, 0.68, 1.79, 0.15
BESIDE_ATTENDING, UNPACKING_AHEAD = 0.5, 3.6
SECOND_LAUNCH = 0.05  # EIGHT_BIT: what it costs, in rounds of the smallest blocks
EVERY_QUERY = 1 << 30


@lru_cache(maxsize=64)
def codes_of(spec: CodecSpec) -> Codes:
    """Those of keys and values that take longer."""
    if max(spec.key.bits, spec.value.bits) > MOST_BITS:
        return LONG
    return UNIFORM if Kind.UNIFORM in (spec.key.kind, spec.value.kind) else SHORT


@lru_cache(maxsize=256)
def configs(spec: CodecSpec, unpack: Unpack, eight_bit: bool = False) -> tuple[PrefillConfig, ...]:
    """The table's, in the order of their rows, as far as they fit shared memory."""
    found = (
        config
        for dims, codes, config in CONFIGS
        if spec.key_dim in dims and codes_of(spec) in codes and (config.unpack, config.eight_bit) == (unpack, eight_bit)
    )
    return tuple(config for config in found if unpack != FUSED or packed_stages(spec, config) > 0)


def refusal(request: AttendRequest) -> str | None:
    """None for what these kernels attend, else the reason."""
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
    """None for what is attended on 8-bit tensor cores, else the reason."""
    reason = eight_bit.refusal(request) or refusal(request)
    if reason is None and request.layout.spec.key_dim not in EIGHT_BIT_HEAD_DIMS:
        sizes = " and ".join(map(str, EIGHT_BIT_HEAD_DIMS))
        reason = f"head size {request.layout.spec.key_dim} is not prefilled in 8 bits; {sizes} are"
    return reason


def has_warpgroups(device: torch.device) -> bool:
    """Whether products of warpgroups prefill: in 8 bits, and with warps that unpack ahead, they alone do."""
    return device_of(device).warpgroups


def multiprocessors(device: torch.device) -> int:
    """Multiprocessors of a GPU; 2 for the CPU, where tests run the kernels."""
    return device_of(device).multiprocessors


@lru_cache(maxsize=256)
def warp_config(spec: CodecSpec, device: Device) -> PrefillConfig:
    """The first of products of single warps that fits the device."""

    def fits(config: PrefillConfig) -> bool:
        shared = shared_bytes(spec, config)
        within = (shared + 1024) * config.blocks_per_sm <= device.shared_of_multiprocessor
        return within and shared <= device.shared_of_block

    return next(config for dims, config in WARP_CONFIGS if spec.key_dim in dims and fits(config))


def config_for(request: AttendRequest) -> PrefillConfig:
    """The configuration of a request that is not refused."""
    spec, exact = request.layout.spec, request.options.deterministic
    if not has_warpgroups(request.query.device):
        return replace(warp_config(spec, device_of(request.query.device)), by_row=exact)
    if exact:
        return replace(configs(spec, FIRST)[0], by_row=True)
    if request.options.prefill == EIGHT_BIT:
        return eight_bit_config(request)
    unpacked, time = unpacked_config(request)
    if request.max_query_len * request.group > fused_up_to(request.layout.spec):
        return unpacked
    config = min(configs(request.layout.spec, FUSED), key=lambda config: _fused_time(request, config))
    return unpacked if request.layout.spec.key_dim <= 128 and time < _fused_time(request, config) else config


def unpacked_config(request: AttendRequest) -> tuple[PrefillConfig, float]:
    """FIRST or, if sequences are alike and it gains, AHEAD; and its time.

    What a block unpacks for a sequence that is much longer than its own would take longer than what it attends.
    """
    spec, sequences = request.layout.spec, request.seq_lens.shape[0]
    total, longest, first = request.query.shape[0], request.max_query_len, configs(spec, FIRST)[0]
    best, ahead = (first, _unpacked_time(request, first)), configs(spec, AHEAD)
    alike = total == sequences * longest or total - longest < sequences  # or all but one decode
    if not alike or not ahead:
        return best
    cut = cut_ahead(request, ahead[0], sequences, multiprocessors(request.query.device), WORKSPACE_BYTES)
    return min(best, (ahead[0], _ahead_time(request, ahead[0], cut)), key=lambda x: x[1]) if cut.flows else best


def _fused_time(request: AttendRequest, config: PrefillConfig) -> float:
    """The time of all blocks, if sequences are alike."""
    items, available = request.seq_lens.shape[0] * request.pages.shape[1], multiprocessors(request.query.device)
    blocks, rest = divmod(request.max_query_len * request.group, config.rows)
    part = 0 < rest <= config.rows - config.rows // config.row_blocks
    whole = -(-items * (blocks + (rest > 0 and not part)) // available)
    rounds = whole * (WIDE_ROUND if config.row_blocks > 1 else 1) + part * -(-items // available) * PART_ROUND
    return FUSED_START + rounds


def _unpacked_time(request: AttendRequest, config: PrefillConfig) -> float:
    """Likewise, if pages are unpacked first."""
    items, available = request.seq_lens.shape[0] * request.pages.shape[1], multiprocessors(request.query.device)
    blocks = items * -(-request.max_query_len * request.group // config.rows)
    return -(-blocks // available) * UNPACKED_ROUND + items / available * UNPACKING * _spread(request, config)


def _ahead_time(request: AttendRequest, config: PrefillConfig, cut: AheadCut) -> float:
    """Likewise, if blocks unpack for later ones."""
    available, spread = multiprocessors(request.query.device), _spread(request, config)
    rounds = -(-cut.items * cut.blocks // available)
    round_time = max(UNPACKED_ROUND + BESIDE_ATTENDING * spread / cut.blocks, UNPACKING_AHEAD * spread / cut.blocks)
    return rounds * round_time + cut.lead / available * UNPACKING * spread


def _spread(request: AttendRequest, config: PrefillConfig) -> float:
    """Tokens that the queries of a sequence see, over those that a block's see: more than 1 where there is a window."""
    of_block = seen_tokens(request, config.rows // request.group)
    return seen_tokens(request, request.max_query_len) / of_block


def fused_up_to(spec: CodecSpec) -> int:
    """Rows (queries x heads of a group) of a sequence up to which FUSED is known to gain."""
    codes = codes_of(spec)
    if spec.key_dim > 128:
        return {SHORT: 512, UNIFORM: 256, LONG: 0}[codes]
    return 768 if codes == SHORT and spec.key_dim > 64 else 512


def most_packed_queries(request: AttendRequest) -> int:
    """Queries of a sequence up to which its pages are attended as decode attends them.

    Decode reads pages again for every few rows, but splits contexts: it keeps what would not keep the device busy.
    """
    if request.options.deterministic:
        prompt = request.options.prompt
        return MAX_DECODE_QUERIES if prompt is None else 0 if prompt else request.max_query_len
    group, device, rows = request.group, request.query.device, request.max_query_len * request.group
    few = max(FUSED_FROM_QUERIES, -(-FUSED_FROM_ROWS // group)) - 1
    if few >= MAX_DECODE_QUERIES or request.max_query_len <= few or not has_warpgroups(device):
        return MAX_DECODE_QUERIES
    if refusal(request) is not None or rows > fused_up_to(request.layout.spec) or not config_for(request).fused:
        return MAX_DECODE_QUERIES
    most_long = min(request.seq_lens.shape[0], request.query.shape[0] // (few + 1))
    busy = most_long * request.pages.shape[1] >= 0.9 * multiprocessors(device)
    return few if busy else MAX_DECODE_QUERIES


def eight_bit_config(request: AttendRequest) -> PrefillConfig:
    """The one whose blocks are done first: more rows a block take less each, but may leave multiprocessors idle."""
    return min(
        configs(request.layout.spec, FIRST, eight_bit=True),
        key=lambda config: _rounds(request, request.query.shape[0], config) * config.tile_time,
    )


def _rounds(request: AttendRequest, queries: int, config: PrefillConfig) -> int:
    """How many waves of blocks the multiprocessors run."""
    blocks = -(-queries // (config.rows // request.group)) * request.pages.shape[1]
    return -(-blocks // multiprocessors(request.query.device))


@dataclass(frozen=True)
class Part:
    """Queries of each sequence that a launch attends, and its configuration."""

    config: PrefillConfig
    first: int = 0
    end: int = EVERY_QUERY
    beside: bool = False  # it follows another launch on the same tiles, whose end it need not wait for


def parts_of(request: AttendRequest) -> list[Part]:
    """One launch, or for a single sequence in 8 bits two: rounds of large blocks, and small ones for the rest.

    In a fresh prompt the last blocks are short ones, and there is nothing to gain.
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
