"""Configurations of the CUDA decode kernels: a table, and the choice of the first entry that fits pages and device.

The choice depends on the layer, the query rows per KV head, the device, and a bound on the visible bytes per KV head
that the sliding window or the caller gives. The number of sequences and their lengths are handled on the device
(source/decode/schedule.cuh), so a captured graph and an eager call with the same bound run the same kernel.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

from slimkv.ops.attention.cuda.level_bytes import in_bytes
from slimkv.ops.attention.cuda.shared_memory import (
    DECODE,
    VERIFY,
    VERIFY_WARPS,
    shared_bytes,
    team_registers,
    values_in_parts,
    writes_whole_tiles,
)
from slimkv.ops.cuda.device import Device
from slimkv.spec import Kind, PageLayout

# Upper bounds on the bytes of one KV head that a query may see. The smallest one that holds selects the configuration.
FEW_BYTES, SHORT_BYTES, UNBOUNDED = BOUNDS = (1 << 16, 3 << 19, 1 << 50)
# Up to this many KV blocks per warp, one thread block processes a whole work tile and nothing is merged. The first
# limit holds with work tiles for more than half the multiprocessors, the second with fewer.
_WHOLE_ROUNDS, _WHOLE_ROUNDS_OF_FEW = 6, 2
SPLIT_TOKENS = 8192  # per deterministic split: few partial results to merge, yet 16 splits for the longest contexts


@dataclass(frozen=True)
class DecodeConfig:
    """The compile-time parameters of a kernel apart from the page layout."""

    rows: int  # query rows of a thread block: query heads of a KV head x queries
    block_tokens: int
    warps: int
    stages: int
    blocks_per_sm: int = 1
    source: str = DECODE
    bulk: bool = False  # KV blocks are whole pages, loaded by bulk copies (cp.async.bulk)
    exact: bool = False  # a row's result depends on its own sequence alone, bit for bit
    narrow: bool = False  # more than 4 rows, computed with the arithmetic of 4-row blocks


class _Entry(NamedTuple):
    """Tile sizes for tokens of up to ``token_bytes`` and up to ``seen_bytes`` visible bytes per KV head."""

    block_tokens: int
    warps: int
    stages: int
    blocks_per_sm: int = 1
    token_bytes: int = 1 << 30  # key and value
    seen_bytes: int = UNBOUNDED


# Query rows of a thread block, by kernel and head size (up to 128 or 256), and the measured time of such a block
# relative to the kernel's other blocks. For DECODE only the order matters; 16 rows of large heads fill the registers.
_TEAM_TIMES = {16: 0.78, 24: 0.9, 32: 1.0, 40: 1.17, 48: 1.38, 64: 1.78}
_ROW_TIMES = {
    (DECODE, 128): {4: 1.0, 8: 1.5, 16: 2.0},
    (DECODE, 256): {4: 1.0, 8: 1.5, 16: 5.0},
    (VERIFY, 128): {24: 0.93, 32: 1.0, 40: 1.17, 48: 1.33, 64: 1.6},
    (VERIFY, 256): {16: 0.83, 24: 0.94, 32: 1.0, 40: 1.27, 48: 1.36},
    (VERIFY_WARPS, 128): _TEAM_TIMES,
    (VERIFY_WARPS, 256): _TEAM_TIMES,
}
FEW_VERIFIED_ROWS = 32  # query rows of a thread block if only some sequences have several queries
# Tile sizes, from fastest to smallest. With one stage, keys are copied while values are multiplied and vice versa;
# eight warps with one stage are faster than four with two.
_SMALLEST = (_Entry(32, 8, 1), _Entry(32, 4, 2), _Entry(16, 4, 2))
_WIDE = (_Entry(64, 8, 2), _Entry(32, 8, 2), *_SMALLEST)
_BYTES = (_Entry(64, 8, 2), _Entry(64, 8, 1, token_bytes=200), _Entry(32, 12, 2), _Entry(32, 8, 2), *_SMALLEST)
_LUT = (_Entry(32, 12, 2), _Entry(32, 8, 2), _Entry(32, 12, 1), *_SMALLEST)
# By representation of levels and head size. Short sequences get thread blocks of four warps: one computes while another
# switches sequences. 12 warps with large KV blocks leave no shared memory for prefetching, unless tokens are small.
_FOUR_ROWS: dict[tuple[str, int], tuple[_Entry, ...]] = {
    ("bytes", 128): (
        *(_Entry(64, 4, 2, 3, seen_bytes=SHORT_BYTES), _Entry(128, 12, 2), _Entry(64, 12, 2, token_bytes=128)),
        *_BYTES,
    ),
    ("bytes", 256): (
        *(_Entry(64, 12, 2, token_bytes=132), _Entry(64, 8, 2), _Entry(32, 8, 2, seen_bytes=SHORT_BYTES)),
        *_BYTES,
    ),
    ("LUT", 128): (_Entry(64, 12, 2), _Entry(64, 12, 1), *_LUT),
    ("LUT", 256): _LUT,
}
_FEW_TOKENS = (_Entry(32, 4, 1, 4, token_bytes=80, seen_bytes=FEW_BYTES), _Entry(32, 4, 2, 2, seen_bytes=FEW_BYTES))
_EIGHT_ROWS = {128: (*_FEW_TOKENS, _Entry(64, 12, 2), *_WIDE), 256: _WIDE}
# Three stages of long KV blocks are faster than four of short ones, which are faster than two of long ones. For large
# heads, long ones are always faster because they take fewer instructions, but many rows leave no registers for them.
_LONG_PAIRS = (_Entry(128, 16, 4), _Entry(128, 16, 3), _Entry(128, 16, 2))
_SHORT_PAIRS = (_Entry(64, 16, 4), _Entry(64, 16, 3), _Entry(64, 16, 2))
_TEAMS = (_Entry(128, 8, 1, 2), _Entry(128, 8, 1, 1), _Entry(64, 4, 1, 2), _Entry(64, 4, 1, 1))
# The estimated registers per thread up to which two blocks of eight warps fit, and up to which one hardly spills.
_REGISTERS_OF_TWO_TEAMS, _REGISTERS_OF_A_TEAM = 84, 185


@lru_cache(maxsize=1024)
def config_for(
    device: Device, layout: PageLayout, group: int, queries: int, bound: int = UNBOUNDED
) -> DecodeConfig | None:
    """The first configuration that fits, for ``queries`` queries per sequence and ``group`` query heads per KV head.

    Row counts are tried in the order of their total time for all queries.
    """
    head = _head_class(layout)
    # For large heads, several work tiles of 8 rows take less time than one of 16.
    in_one_block = group * queries <= (8 if head == 256 and group <= 8 else 16)
    # Blocks of 4 rows multiply codes of few bits as int8; blocks of more rows multiply fp16.
    as_bytes = any(in_bytes(fmt) for fmt in (layout.spec.key, layout.spec.value))
    fewest = max(group, 8) if as_bytes and not device.multiplies_bytes else group

    def candidates() -> Iterator[DecodeConfig]:
        for source in (DECODE,) if in_one_block else (VERIFY, VERIFY_WARPS, DECODE):
            times = {n: time for n, time in _ROW_TIMES[source, head].items() if n >= fewest}
            for rows in sorted(times, key=lambda n: times[n] * -(-queries // (n // group))):
                for tokens, warps, stages, blocks, token_bytes, seen_bytes in _entries(layout, source, rows):
                    bulk = device.copy_engine and tokens % layout.block_size == 0 and source != VERIFY_WARPS
                    if bound <= seen_bytes and layout.page_bytes <= token_bytes * layout.block_size:
                        yield DecodeConfig(rows, tokens, warps, stages, blocks, source, bulk)

    return next((config for config in candidates() if _fits(device, layout, config)), None)


def _entries(layout: PageLayout, source: str, rows: int) -> tuple[_Entry, ...]:
    """The tile sizes of a kernel, from fastest to smallest."""
    head, spec = _head_class(layout), layout.spec
    if source == VERIFY_WARPS:
        return _TEAMS
    if source == DECODE and rows == 4:
        looked_up = any(fmt.kind == Kind.LLOYD and not in_bytes(fmt) for fmt in (spec.key, spec.value))
        return _FOUR_ROWS["LUT" if looked_up else "bytes", head]
    if source == DECODE:
        return _EIGHT_ROWS[head] if rows == 8 else _WIDE
    if head == 128:
        return (*_LONG_PAIRS[:2], *_SHORT_PAIRS[:2], *_LONG_PAIRS[2:])
    if rows > 40:  # three stages measured faster than four
        return _SHORT_PAIRS[1:]
    return _SHORT_PAIRS if rows > 32 else (*_LONG_PAIRS, *_SHORT_PAIRS)


@lru_cache(maxsize=256)
def deterministic_config(
    device: Device, layout: PageLayout, group: int, queries: int, bound: int = UNBOUNDED
) -> DecodeConfig | None:
    """A configuration with the KV block, warps, arithmetic and results of the one-query case, but perhaps more rows."""
    found = config_for(device, layout, group, 1, bound)
    if found is None or found.source != DECODE:
        return None
    one = replace(found, exact=True)
    if group * queries <= one.rows:
        return one
    # With 12 warps on a multiprocessor, the output of 16 rows does not fit the registers.
    rows = (8,) if one.warps > 8 or _head_class(layout) == 256 else (16, 8)
    few = replace(one, blocks_per_sm=max(1, min(one.blocks_per_sm, 8 // one.warps)), narrow=one.rows <= 4)
    wider = (replace(few, rows=n, stages=stages) for n in rows for stages in (one.stages, 1))
    return next((x for x in wider if x.rows > one.rows and _fits(device, layout, x)), one)


def bound_of(layout: PageLayout, tokens: int | None, few_tiles: bool = False) -> int:
    """The smallest of ``BOUNDS`` that covers ``tokens`` visible tokens (None: any number).

    ``few_tiles``: there are work tiles for at most half the multiprocessors, so several share even a short tile.
    """
    if tokens is None or (few_tiles and _head_class(layout) == 128):
        return UNBOUNDED
    seen = tokens * layout.page_bytes // layout.block_size
    return next(bound for bound in BOUNDS if seen <= bound)


def reachable(
    device: Device, layout: PageLayout, group: int, max_queries: int, window: int | None = None,
    deterministic: bool = False,
) -> tuple[DecodeConfig, ...]:  # fmt: skip
    """All configurations for up to ``max_queries`` queries per sequence in a layer with this sliding window."""
    if deterministic:
        choose, bounds = deterministic_config, {bound_of(layout, window)}
    else:
        most = bound_of(layout, None if window is None else window + max_queries)
        choose, bounds = config_for, {UNBOUNDED, *(bound for bound in BOUNDS if bound <= most)}
    queries = range(1, max_queries + 1)
    found = (choose(device, layout, group, n, bound) for bound in sorted(bounds, reverse=True) for n in queries)
    return tuple(dict.fromkeys(config for config in found if config is not None))


def split_steps(config: DecodeConfig, window: int | None) -> int:
    """KV blocks per deterministic split. A window no longer than one split is not split."""
    return 1 << 20 if window is not None and window <= SPLIT_TOKENS else SPLIT_TOKENS // config.block_tokens


def takes_whole_tiles(device: Device, layout: PageLayout, config: DecodeConfig, tiles: int, tokens: int) -> bool:
    """Whether each of ``tiles`` work tiles of up to ``tokens`` tokens gets one thread block, without a merge."""
    rounds = _WHOLE_ROUNDS if 2 * tiles > device.multiprocessors else _WHOLE_ROUNDS_OF_FEW
    most = rounds * config.block_tokens * config.warps
    return config.source == DECODE and writes_whole_tiles(layout) and tokens <= most


def _head_class(layout: PageLayout) -> int:
    return 128 if max(layout.spec.key_dim, layout.spec.value_dim) <= 128 else 256


def _fits(device: Device, layout: PageLayout, config: DecodeConfig) -> bool:
    shared, available = shared_bytes(layout, config), device.shared_of_multiprocessor
    if shared > device.shared_of_block or (shared + 1024) * config.blocks_per_sm > available:
        return False
    if config.source == VERIFY:
        return device.warpgroups and config.bulk and values_in_parts(layout, 4)
    if config.source == VERIFY_WARPS:
        most = _REGISTERS_OF_TWO_TEAMS if config.warps * config.blocks_per_sm > 8 else _REGISTERS_OF_A_TEAM
        return values_in_parts(layout, config.warps) and team_registers(layout, config) <= most
    return True
