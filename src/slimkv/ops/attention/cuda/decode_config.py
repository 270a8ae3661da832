"""Configurations of the CUDA decode kernels: one table, and the first entry that fits a layer's pages and a device.

A configuration depends on the layer, the query rows of a KV head, the device, and the bytes of a KV head that a query
may see, as a sliding window or the caller bounds them. The device judges lengths of sequences and their number
(source/decode/schedule.cuh): a captured graph and an eager call of one bound run the same kernel.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

from slimkv.ops.attention.cuda.level_bytes import in_bytes
from slimkv.ops.attention.cuda.shared_memory import (
    decode_shared_bytes,
    padded_value_dim,
    verify_shared_bytes,
    verify_warps_shared_bytes,
)
from slimkv.ops.cuda.device import Device
from slimkv.spec import FIELD_BYTES, SLICE_DIMS, Kind, PageLayout

DECODE, VERIFY, VERIFY_WARPS = "decode/decode.cu", "decode/verify.cu", "decode/verify_warps.cu"
# Bytes of a KV head that a query may see: configurations are told apart by these bounds.
FEW_BYTES, SHORT_BYTES, UNBOUNDED = 1 << 16, 3 << 19, 1 << 50
# Blocks of KV that a warp takes after one another, up to which one block has all keys of a work tile and nothing is
# left to merge: where there are work tiles for half the multiprocessors, and where other blocks would be idle.
_WHOLE_ROUNDS, _WHOLE_ROUNDS_OF_FEW = 6, 2
SPLIT_TOKENS = 8192  # of a deterministic split: few results to merge, and 16 splits of the longest contexts


@dataclass(frozen=True)
class DecodeConfig:
    """What a kernel is compiled for beside the pages. ``pairs``: verify.cu, ``team``: verify_warps.cu."""

    rows: int  # query rows of a block: query heads of a KV head times queries
    block_tokens: int
    warps: int
    stages: int
    blocks_per_sm: int = 1
    pairs: bool = False
    bulk: bool = False  # blocks of tokens are whole pages, which the copy engine copies
    exact: bool = False  # results depend on a row's own sequence alone, to the last bit
    narrow: bool = False  # more than 4 rows in the arithmetic of 4
    team: bool = False  # all warps share a block of tokens, a tile of keys each

    @property
    def source(self) -> str:
        """The file of the kernel."""
        return VERIFY if self.pairs else VERIFY_WARPS if self.team else DECODE


class _Entry(NamedTuple):
    """A way to cut work. ``token_bytes``: not for tokens of more bytes, key and value together.

    ``seen_bytes``: not where a query may see more bytes of a KV head.
    """

    block_tokens: int
    warps: int
    stages: int
    blocks_per_sm: int = 1
    token_bytes: int = 1 << 30
    seen_bytes: int = UNBOUNDED


# Eight warps with one stage are faster than four with two.
_SMALLEST = (_Entry(32, 8, 1), _Entry(32, 4, 2), _Entry(16, 4, 2))
_WIDE = (_Entry(64, 8, 2), _Entry(32, 8, 2), *_SMALLEST)
# Beside 12 warps of large blocks nothing is left to copy ahead, unless a token has few bytes.
_BYTES = (_Entry(64, 8, 2), _Entry(64, 8, 1, token_bytes=200), _Entry(32, 12, 2), _Entry(32, 8, 2), *_SMALLEST)
_LUT = (
    *(_Entry(32, 16, 2), _Entry(32, 12, 2), _Entry(64, 8, 2), _Entry(32, 8, 2)),
    *(_Entry(32, 12, 1), *_SMALLEST),
)
_PAIRS = (_Entry(128, 16, 4), _Entry(128, 16, 3), _Entry(128, 16, 2))
_SHORT_PAIRS = (_Entry(64, 16, 4), _Entry(64, 16, 3), _Entry(64, 16, 2))
# By query rows of a block, levels (as bytes, from a look-up table, either) and head size, up to 128 or 256: from best
# to smallest. With one stage, keys are copied while values are multiplied and the other way round.
# Of many short sequences, blocks of four warps: one computes while another changes its sequence.
_TABLE: dict[tuple[int, str, int], tuple[_Entry, ...]] = {
    (4, "bytes", 128): (
        _Entry(64, 4, 2, 3, seen_bytes=SHORT_BYTES),
        *(_Entry(128, 12, 2, token_bytes=88), _Entry(128, 8, 2, token_bytes=88)),
        *(_Entry(64, 12, 2, token_bytes=128), *_BYTES),
    ),
    (4, "bytes", 256): (
        *(_Entry(64, 12, 2, token_bytes=132), _Entry(64, 8, 2)),
        *(_Entry(32, 8, 2, seen_bytes=SHORT_BYTES), *_BYTES),
    ),
    (4, "LUT", 128): (_Entry(64, 12, 2), _Entry(64, 12, 1), *_LUT),
    (4, "LUT", 256): (_Entry(64, 12, 2), *_LUT),
    (8, "any", 128): (_Entry(32, 4, 2, 2, seen_bytes=FEW_BYTES), _Entry(64, 12, 2), *_WIDE),
    (8, "any", 256): (_Entry(64, 12, 2), *_WIDE),
    (16, "any", 128): _WIDE,
    (16, "any", 256): _WIDE,
}
# What blocks of so many rows take by pairs, by head size, and by a team of warps: measured.
FEWEST_PAIR_ROWS = 32
_PAIR_TIMES = {
    128: {24: 0.93, 32: 1.0, 40: 1.17, 48: 1.33, 64: 1.6},
    256: {16: 0.83, 24: 0.94, 32: 1.0, 40: 1.27, 48: 1.42},
}
_TEAM_TIMES = {16: 0.78, 24: 0.9, 32: 1.0, 40: 1.17, 48: 1.38, 64: 1.78}
# Registers of a thread up to which two blocks of a team fit, and one block with hardly any spills.
_TWO_TEAMS, _ONE_TEAM = 84, 185


def max_group(layout: PageLayout) -> int:
    """Query heads of a KV head that a block can have: their output is in registers."""
    return FEWEST_PAIR_ROWS if _head_class(layout) == 128 else 16


def bound_of(device: Device, layout: PageLayout, tiles: int, tokens: int) -> int:
    """The bound that tells configurations apart, of ``tiles`` work tiles whose queries see up to ``tokens`` tokens."""
    if 2 * tiles <= device.multiprocessors and _head_class(layout) == 128:
        return UNBOUNDED
    return _bound(layout, tokens)


def deterministic_bound(layout: PageLayout, window: int | None) -> int:
    """Likewise, of any call: the layer's window alone decides."""
    return UNBOUNDED if window is None else _bound(layout, window)


def _bound(layout: PageLayout, tokens: int) -> int:
    seen = tokens * layout.page_bytes // layout.block_size
    return next(bound for bound in (FEW_BYTES, SHORT_BYTES, UNBOUNDED) if seen <= bound)


@lru_cache(maxsize=1024)
def config_for(
    device: Device, layout: PageLayout, group: int, queries: int, bound: int = UNBOUNDED
) -> DecodeConfig | None:
    """The first configuration that fits, for ``queries`` of a sequence and ``group`` query heads of a KV head."""
    # Of large heads 8 rows at a time, more often, take less time than 16, whose output fills the registers.
    most = 8 if _head_class(layout) == 256 and group <= 8 else 16
    if group * queries > most:
        config = _verification(device, layout, group, queries)
        if config is not None or group > most:
            return config
    rows = next(n for n in (4, 8, 16) if n >= min(most, group * queries))
    levels = "any" if rows > 4 else "LUT" if _is_looked_up(layout) else "bytes"
    entries = tuple(x for x in _TABLE[rows, levels, _head_class(layout)] if bound <= x.seen_bytes)
    return next(_fitting(device, layout, rows, entries, False), None)


@lru_cache(maxsize=256)
def deterministic_config(
    device: Device, layout: PageLayout, group: int, queries: int, bound: int = UNBOUNDED
) -> DecodeConfig | None:
    """One with the results of that of a single query: its blocks of tokens, warps and arithmetic, maybe more rows."""
    found = config_for(device, layout, group, 1, bound)
    if found is None or found.source != DECODE:
        return None
    one = replace(found, exact=True)
    if group * queries <= one.rows:
        return one
    # 12 warps of a multiprocessor have no registers for the output of 16 rows.
    rows = (8,) if one.warps > 8 or _head_class(layout) == 256 else (16, 8)
    few = replace(one, blocks_per_sm=max(1, min(one.blocks_per_sm, 8 // one.warps)), narrow=one.rows <= 4)
    wider = (replace(few, rows=n, stages=stages) for n in rows for stages in (one.stages, 1))
    return next((x for x in wider if x.rows > one.rows and _fits(device, layout, x)), one)


def split_steps(config: DecodeConfig, window: int | None) -> int:
    """Blocks of tokens of a deterministic split; a window of no more than one is not split."""
    return 1 << 20 if window is not None and window <= SPLIT_TOKENS else SPLIT_TOKENS // config.block_tokens


def reachable(
    device: Device, layout: PageLayout, group: int, max_queries: int, tokens: int | None = None,
    deterministic: bool = False,
) -> tuple[DecodeConfig, ...]:  # fmt: skip
    """All configurations for up to ``max_queries`` queries of a sequence, which see up to ``tokens`` tokens."""
    if deterministic:
        bound = deterministic_bound(layout, tokens)
        exact = (deterministic_config(device, layout, group, queries, bound) for queries in range(1, max_queries + 1))
        return tuple(dict.fromkeys(config for config in exact if config is not None))
    most = UNBOUNDED if tokens is None else bound_of(device, layout, device.multiprocessors, tokens + max_queries)
    bounds = [bound for bound in (UNBOUNDED, SHORT_BYTES, FEW_BYTES) if bound <= most or bound == UNBOUNDED]
    configs = (
        config_for(device, layout, group, queries, bound) for bound in bounds for queries in range(1, max_queries + 1)
    )
    return tuple(dict.fromkeys(config for config in configs if config is not None))


def takes_whole_tiles(device: Device, layout: PageLayout, config: DecodeConfig, tiles: int, tokens: int) -> bool:
    """Whether each of ``tiles`` work tiles of up to ``tokens`` tokens has a block of its own, in a single launch."""
    rounds = _WHOLE_ROUNDS if 2 * tiles > device.multiprocessors else _WHOLE_ROUNDS_OF_FEW
    most = rounds * config.block_tokens * config.warps
    return config.source == DECODE and writes_whole_items(layout) and tokens <= most


def shared_bytes(layout: PageLayout, config: DecodeConfig) -> int:
    """Shared memory of a block."""
    count = {DECODE: decode_shared_bytes, VERIFY: verify_shared_bytes, VERIFY_WARPS: verify_warps_shared_bytes}
    return count[config.source](layout, config)


def writes_whole_items(layout: PageLayout) -> bool:
    """Whether a block writes the output of what it has all keys of: if queries leave the memory to rotate back."""
    dim = layout.spec.value_dim
    return not layout.spec.value.rotated or (dim & (dim - 1) == 0 and dim >= 32) or dim <= 2 * layout.spec.key_dim


def _head_class(layout: PageLayout) -> int:
    return 128 if max(layout.spec.key_dim, layout.spec.value_dim) <= 128 else 256


def _is_looked_up(layout: PageLayout) -> bool:
    return any(fmt.kind == Kind.LLOYD and not in_bytes(fmt) for fmt in (layout.spec.key, layout.spec.value))


def _fits(device: Device, layout: PageLayout, config: DecodeConfig) -> bool:
    shared, available = shared_bytes(layout, config), device.shared_of_multiprocessor
    return shared <= device.shared_of_block and (shared + 1024) * config.blocks_per_sm <= available


def _fitting(
    device: Device, layout: PageLayout, rows: int, entries: tuple[_Entry, ...], pairs: bool
) -> Iterator[DecodeConfig]:
    for tokens, warps, stages, blocks_per_sm, token_bytes, _ in entries:
        bulk = _is_in_pages(device, layout, tokens)
        config = DecodeConfig(rows, tokens, warps, stages, blocks_per_sm, pairs, bulk)
        if (
            _fits(device, layout, config)
            and (bulk or not pairs)
            and layout.page_bytes <= token_bytes * layout.block_size
        ):
            yield config


def _pairs(device: Device, layout: PageLayout, group: int, queries: int) -> DecodeConfig | None:
    """By pairs of warpgroups, of as many rows as take the least time for all queries."""
    if not _values_in_parts(layout, 4):
        return None

    def fitting(rows: int, entries: tuple[_Entry, ...]) -> Iterator[DecodeConfig]:
        return _fitting(device, layout, rows, entries, True)

    # Shorter blocks for many rows of large heads, which lack registers otherwise, and of 8 bits at 96 and 112, so that
    # more than two of them fit.
    head, uneven = _head_class(layout), padded_value_dim(layout) > layout.spec.value_dim
    if head == 128 and uneven and next(fitting(FEWEST_PAIR_ROWS, _PAIRS[:2]), None) is None:
        return next(fitting(FEWEST_PAIR_ROWS, _SHORT_PAIRS), None)
    times = {rows: -(-queries // (rows // group)) * t for rows, t in _PAIR_TIMES[head].items() if rows >= group}
    few = _PAIRS if head == 128 else (*_PAIRS, *_SHORT_PAIRS)
    many = _PAIRS if head == 128 else _SHORT_PAIRS
    by_time = ((rows, few if rows <= FEWEST_PAIR_ROWS else many) for rows in sorted(times, key=lambda n: times[n]))
    return next((config for rows, entries in by_time for config in fitting(rows, entries)), None)


def _verification(device: Device, layout: PageLayout, group: int, queries: int) -> DecodeConfig | None:
    """By pairs, or without them by a team."""
    pairs = _pairs(device, layout, group, queries) if device.warpgroups else None
    return pairs or _team(device, layout, group, queries)


def _team(device: Device, layout: PageLayout, group: int, queries: int) -> DecodeConfig | None:
    """By a team of warps, of as many rows as take the least time for all queries."""

    def fitting(rows: int) -> Iterator[DecodeConfig]:
        for warps, blocks, registers in ((8, 2, _TWO_TEAMS), (8, 1, _ONE_TEAM), (4, 2, _ONE_TEAM), (4, 1, _ONE_TEAM)):
            config = DecodeConfig(rows, 16 * warps, warps, 1, blocks, team=True)
            fits = _values_in_parts(layout, warps) and _fits(device, layout, config)
            if fits and _registers(layout, config) <= registers:
                yield config

    rows_of_block = [rows for rows in _TEAM_TIMES if rows >= group]
    by_time = sorted(rows_of_block, key=lambda rows: -(-queries // (rows // group)) * _TEAM_TIMES[rows])
    return next((config for rows in by_time for config in fitting(rows)), None)


def _registers(layout: PageLayout, config: DecodeConfig) -> float:
    """Of a thread of a team: codes, those of values twice; of all rows, outputs, scores, maxima and sums."""
    spec = layout.spec
    codes = (spec.key_dim * spec.key.bits + 2 * spec.value_dim * spec.value.bits) / 64
    return codes + config.rows * (spec.value_dim / (32 * config.warps) + 1.25)


def _values_in_parts(layout: PageLayout, parts: int) -> bool:
    """Whether so many warps can share the value slices, each with whole words of every plane or a fraction of one.

    The last ones may have fewer or none, but products are made of as many: at least five of eight are to be there.
    """
    slices = layout.spec.value_dim // SLICE_DIMS
    each = -(-slices // parts)
    slices_of_words = [4 // plane.bits for plane in layout.value.planes if plane.bits <= 4]
    whole = all(n % each == 0 or (each % n == 0 and slices % n == 0) for n in slices_of_words)
    return whole and 8 * slices >= 5 * parts * each


def _is_in_pages(device: Device, layout: PageLayout, block_tokens: int) -> bool:
    """Whether a block is whole pages, for the copy engine: codes and fields follow each other without a gap."""
    if not device.copy_engine or block_tokens % layout.block_size:
        return False
    key, value, tokens = layout.key, layout.value, layout.block_size
    values_at = tokens * key.dim * key.format.bits // 8
    fields_at = values_at + tokens * value.dim * value.format.bits // 8
    after_keys = fields_at + key.format.field_count * FIELD_BYTES * tokens
    return (value.codes_offset, key.fields_offset, value.fields_offset) == (values_at, fields_at, after_keys)
