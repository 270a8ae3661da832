"""How the CUDA decode kernel is cut for a request and a device: columns, steps, warps, shared memory, tables."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

from slimkv.ops.attention.cuda.level_bytes import in_bytes
from slimkv.ops.attention.cuda.shared_memory import is_power_of_two, is_single_bit, padded_value_dim, shared_bytes
from slimkv.spec import FIELD_BYTES, SLICE_DIMS, Kind, PageLayout

# (tiles, warps, stages, resident) from best to smallest, by columns. Warps come in fours: one for each scheduler.
# With one stage, keys are copied while values are multiplied and the other way round.
_SMALLER = ((4, 4, 2, 1), (2, 4, 2, 2), (2, 4, 2, 1), (1, 4, 2, 1))
_LONG = {
    4: ((8, 12, 2, 1), (8, 8, 2, 1), (4, 12, 2, 1), (4, 8, 2, 1), (2, 12, 2, 1), (2, 8, 2, 1), *_SMALLER),
    8: ((4, 12, 2, 1), (4, 8, 2, 1), (2, 8, 2, 1), (4, 4, 2, 2), *_SMALLER),
    16: ((4, 8, 2, 1), (2, 8, 2, 1), (4, 4, 2, 2), *_SMALLER),
    32: ((4, 8, 2, 1), (2, 8, 3, 1), (2, 8, 2, 1), (1, 8, 2, 1), (2, 4, 2, 1), (1, 4, 2, 1)),
}
# Bytes of a step of 64 tokens up to which 12 warps are better than 8, unless codes have 2 bits and logic most of the
# work; and of one of 128 tokens up to which it is better.
_STEP_OF_TWELVE, _STEP_OF_128 = 8 << 10, 11 << 10
# Codes of 1 bit: hardly any instructions are theirs, most are a step's and its tokens'. Larger heads want registers.
_SINGLE_BITS = ((16, 8, 2, 1), *_LONG[4])
_SINGLE_BITS_OF_LARGE_HEADS = ((8, 8, 2, 1), *_LONG[4])
# Levels from tables in shared memory: warps that wait for it.
_LOOKED_UP = (
    *((4, 12, 2, 1), (4, 12, 1, 1), (2, 16, 2, 1), (2, 12, 2, 1), (4, 8, 2, 1), (2, 8, 2, 1)),
    *((2, 12, 1, 1), (2, 8, 1, 1), *_SMALLER),
)
# The same of many short sequences: blocks of four warps, three of them with one slot on a multiprocessor, of which one
# computes while another begins or ends its sequence; of 6 bits, whose tables are small, two with two slots. Of few
# sequences: warps that have something to do.
_LOOKED_UP_SHORT = ((4, 4, 1, 3), (4, 4, 1, 2), *_LOOKED_UP)
_SIX_BITS_SHORT = ((4, 4, 2, 2), *_LOOKED_UP_SHORT)
_LOOKED_UP_FEW = ((4, 8, 1, 1), *_LOOKED_UP)
# The most columns, by products of warpgroups: (tiles, warps).
_WARPGROUPS = ((2, 12), (2, 8))
# The same by pairs of warpgroups, one for keys and one for values: (tiles, warps, stages). Of heads beyond 128 a step
# is shorter, for registers; of 8 bits at 96 and 112, so that more than two of them fit.
_PAIRS = ((8, 16, 4), (8, 16, 3), (8, 16, 2))
_PAIRS_OF_SHORT_STEPS = ((4, 16, 4), (4, 16, 3))
# What so many columns take by pairs, measured; the fewest are the best for sequences of different numbers of queries.
FEW_COLUMNS = 32
_PAIR_TIMES = {32: 1.0, 40: 1.17, 48: 1.33, 56: 1.47, 64: 1.6}
# So little that every block has a step or two: of few heads small steps for many warps, of many heads blocks for all.
_TINY = ((1, 8, 2, 1), (2, 4, 2, 1), (1, 4, 2, 1))
_TINY_AND_MANY = ((2, 4, 2, 2), (2, 4, 2, 1), (1, 4, 2, 1))
# Many sequences of few tokens, a block for each head: as many as there is room for.
_BRIEF = ((2, 4, 2, 4), (2, 4, 2, 3), *_TINY_AND_MANY)
_LOOKED_UP_BRIEF = ((2, 4, 2, 4), (2, 4, 1, 4), (2, 4, 2, 3), (2, 4, 1, 3), *_TINY_AND_MANY)
# Many short sequences: smaller blocks, of which one computes while another changes its sequence.
_SHORT = _LONG | {4: ((4, 4, 2, 3), *_LONG[4])}
_SHORT_BYTES = 3 << 19  # of the keys and values of one head
# The same of few bits, of keys and values together: instructions count there, not bytes.
_FEW_BITS, _SHORT_TOKENS_OF_FEW_BITS = 4, 6 << 10
_LITTLE_TOKENS = 6 << 10  # of one head, a multiprocessor
_SCANT_TOKENS = 15 << 6
# The same times the dimensions of a key and a value, up to head size 128: if values are products of half as many slices
# again as there are; and of few (sequence, KV head), if they are products of those there are, or of more.
_SCANT_NUMBERS, _SPARSE_NUMBERS, _SPARSE_NUMBERS_UNEVEN = 1 << 19, 3 << 17, 11 << 16
_TINY_TOKENS = 1 << 9
# Rows that wait for their parts: on four multiprocessors that have nothing else, or beside the blocks of all.
_POLLED_ROWS, _POLLED_ROWS_BESIDE = 64, 256
# Blocks of a cluster: every device of sm_90 has room for 8 of one a multiprocessor, and for 16 of two.
_CLUSTER, _LARGE_CLUSTER = 8, 16
_CLUSTER_TOKENS = 3 << 10  # of a sequence; of more, blocks on all multiprocessors are worth more than one launch
_FEW_TOKENS = 1 << 7  # are told apart
_BRIEF_TOKENS = 1 << 9
# Steps that a warp takes after one another, up to which a block takes all keys of a sequence's head: rather than a
# cluster's blocks, and rather than blocks whose parts are merged in a second launch; with levels from tables.
_ROUNDS_OF_ONE, _MOST_ROUNDS, _MOST_ROUNDS_LOOKED_UP = 1, 6, 8


@dataclass(frozen=True)
class Shape:
    """How the kernel is cut: all of it known when it is compiled."""

    groups: int  # of columns; a column is a query head of one query
    wide: bool  # 8 columns a group instead of 4
    tiles: int  # 16-token tiles of a step
    warps: int
    stages: int  # steps of a warp in shared memory at a time
    resident: int  # blocks of a multiprocessor
    team: int = 1  # warps that share values
    bulk: bool = False  # a step is whole pages, which the copy engine copies
    apart: bool = False  # low and high halves of 6-bit levels have tables of their own
    roles: bool = False  # keys and values have warpgroups of their own, in pairs
    cluster: int = 1  # blocks that share an item and put its output together, without a second launch
    whole: bool = False  # a block for every sequence and KV head: nothing to merge, without a second launch
    polled: bool = False  # merging starts when parts are there, not when all blocks have ended

    @property
    def warpgroup(self) -> bool:
        """Whether a team is a warpgroup, whose products are those of sm_90a."""
        return self.team == 4

    @property
    def one_launch(self) -> bool:
        """Whether nothing is left to merge."""
        return self.whole or self.cluster > 1

    @property
    def columns(self) -> int:
        """Rows of output that one block computes at a time."""
        return (8 if self.wide else 4) * self.groups


@dataclass(frozen=True)
class Device:
    """What the shape depends on."""

    multiprocessors: int
    shared_of_multiprocessor: int
    shared_of_block: int
    copy_engine: bool = False
    warpgroups: bool = False  # with products of their own
    clusters: bool = False
    one_launch: bool = False  # for short sequences: where it was measured


class Amount(NamedTuple):
    """Are sequences short, is all work little, too little for pairs of warpgroups, or tiny?

    Is it so little, of so few (sequence, KV head), that 16 columns at a time are better than more? Are there more
    (sequence, KV head) than multiprocessors? Has a sequence so few tokens, and are there so many, that every (sequence,
    KV head) has a block? If every one has as many blocks, one a multiprocessor, are nearly all multiprocessors busy, or
    are codes of so few bits that short sequences take as long as others' long ones?
    """

    short: bool
    little: bool
    scant: bool
    tiny: bool
    sparse: bool
    many_rows: bool
    brief: bool
    even: bool


class Few(NamedTuple):
    """Short sequences: how many, up to as many as multiprocessors; queries of the only one, or 0; KV heads; tokens."""

    sequences: int
    queries: int
    heads: int
    tokens: int


def max_columns(layout: PageLayout) -> int:
    """Columns of a block that its registers hold: the output of all of them."""
    return 32 if max(layout.spec.key_dim, layout.spec.value_dim) <= 128 else 16


def shape_on(
    device: Device, layout: PageLayout, group: int, queries: int, tokens: int, rows: int = 1 << 20
) -> Shape | None:
    """The first shape that fits: ``rows`` (sequence, KV head) of up to ``tokens`` tokens and ``queries`` queries."""
    return shape_for(device, layout, group, queries, amount_of(device, layout, tokens, rows))


def amount_of(device: Device, layout: PageLayout, tokens: int, rows: int) -> Amount:
    """All that a shape depends on of the tokens, which differ at every step.

    A block of many warps with little to do for each of them leaves some idle at its end.
    """
    short = tokens * layout.page_bytes < _SHORT_BYTES * layout.block_size
    each = rows * tokens / device.multiprocessors
    brief = device.one_launch and tokens <= _BRIEF_TOKENS and rows > 2 * device.multiprocessors
    slow = _has_few_bits(layout) and tokens >= _SHORT_TOKENS_OF_FEW_BITS and each >= _LITTLE_TOKENS
    scant, sparse = _is_scant(layout, each), 2 * rows <= device.multiprocessors and _is_sparse(layout, each)
    return Amount(
        short=short, little=each < _LITTLE_TOKENS, scant=scant, tiny=each < _TINY_TOKENS, sparse=sparse,
        many_rows=rows > device.multiprocessors, brief=brief, even=slow or _is_even(device, tokens, rows),
    )  # fmt: skip


def _has_few_bits(layout: PageLayout) -> bool:
    spec = layout.spec
    return spec.key.bits + spec.value.bits <= _FEW_BITS and max(spec.key_dim, spec.value_dim) <= 128


def _is_scant(layout: PageLayout, each: float) -> bool:
    """Whether pairs of warpgroups, which take longer to begin and to end, do not make up for it: measured."""
    spec = layout.spec
    wasteful = 2 * padded_value_dim(layout, 4) > 3 * spec.value_dim
    return each < _SCANT_TOKENS or (wasteful and each * (spec.key_dim + spec.value_dim) < _SCANT_NUMBERS)


def _is_sparse(layout: PageLayout, each: float) -> bool:
    spec = layout.spec
    enough = _SPARSE_NUMBERS_UNEVEN if padded_value_dim(layout, 4) > spec.value_dim else _SPARSE_NUMBERS
    return max(spec.key_dim, spec.value_dim) <= 128 and each * (spec.key_dim + spec.value_dim) < enough


def _is_even(device: Device, tokens: int, rows: int) -> bool:
    shares = device.multiprocessors // max(1, rows)  # large clusters of large blocks do not all find room at a time
    return 10 * rows * shares >= 9 * device.multiprocessors and (shares <= 2 or tokens > _CLUSTER_TOKENS)


@lru_cache(maxsize=1024)
def shape_for(device: Device, layout: PageLayout, group: int, queries: int, amount: Amount) -> Shape | None:
    """The first shape that fits, by ``amount_of``."""
    most, team = max_columns(layout), team_of(layout)
    if group <= most // 2 and team == 1:
        most //= 2  # of the most columns so many registers are output that fewer columns, more often, take less time
    sixteen = device.warpgroups and amount.sparse and not amount.tiny and _fill_sixteen(group, queries)
    if sixteen:
        most = min(most, 16)  # which take less time to begin and to end
    columns = next(n for n in (4, 8, 16, 32) if n >= most or n >= group * queries)
    looks_up = columns == 4 and _looks_levels_up(layout)
    as_integers = columns == 4 and not looks_up
    short = amount.short and not (as_integers and amount.even)
    cuts = _looked_up_cuts(layout, amount) if looks_up else (_SHORT if short else _LONG)[columns]
    if as_integers and not short and _are_single_bits(layout):
        cuts = _SINGLE_BITS if max(layout.spec.key_dim, layout.spec.value_dim) <= 128 else _SINGLE_BITS_OF_LARGE_HEADS
    if amount.tiny:
        cuts = _TINY_AND_MANY if amount.many_rows else _TINY
    if amount.brief and columns <= 8 and max(layout.spec.key_dim, layout.spec.value_dim) <= 128:
        cuts = _LOOKED_UP_BRIEF if looks_up else _BRIEF  # whose registers are few
    in_parts = device.warpgroups and _values_in_quarters(layout)
    if in_parts and not amount.scant and not sixteen and (columns == 32 or queries > columns // group):
        pairs = _in_pairs(device, layout, group, queries)
        if pairs is not None:
            return pairs
    if in_parts and columns == 32 and not amount.tiny:
        for tiles, warps in _WARPGROUPS:
            shape = Shape(columns // 8, True, tiles, warps, 2, 1, 4, _in_pages(device, layout, tiles))
            if _fits(device, layout, shape) and (warps <= 8 or amount.short or not amount.little):
                return shape
    for tiles, warps, stages, resident in cuts:
        if amount.little and warps > 8 and (not short or layout.spec.key_dim > 128):
            continue
        if as_integers and _step_is_large(layout, tiles, warps, amount):
            continue
        if stages == 1 and tiles == 4 and layout.spec.value_dim > 128 and not in_bytes(layout.spec.value):
            continue  # its registers spill
        bulk = _in_pages(device, layout, tiles)
        both = columns == 4 and not amount.little and _has_six_bits(layout) and (tiles < 4 or stages == 1)
        for apart in (True, False) if both else (False,):
            shape = Shape(
                max(1, columns // 8), columns > 4, tiles, warps, stages, resident, team if columns == 32 else 1,
                bulk, apart,
            )  # fmt: skip
            if _fits(device, layout, shape):
                return shape
    return None


def _in_pairs(device: Device, layout: PageLayout, group: int, queries: int) -> Shape | None:
    """By pairs of warpgroups, of as many columns as take the least time for all queries."""

    def time(columns: int) -> float:
        return -(-queries // (columns // group)) * _PAIR_TIMES[columns]

    def first_of(cuts: tuple[tuple[int, int, int], ...], columns: int) -> Shape | None:
        for tiles, warps, stages in cuts:
            shape = Shape(columns // 8, True, tiles, warps, stages, 1, 4, _in_pages(device, layout, tiles), roles=True)
            if shape.bulk and _fits(device, layout, shape):
                return shape
        return None

    large = max(layout.spec.key_dim, layout.spec.value_dim) > 128
    uneven = padded_value_dim(layout, 4) > layout.spec.value_dim
    if large or (uneven and first_of(_PAIRS[:2], 32) is None):
        return first_of(_PAIRS_OF_SHORT_STEPS, 32)
    found = (first_of(_PAIRS, columns) for columns in sorted(_PAIR_TIMES, key=time))
    return next((shape for shape in found if shape is not None), None)


def _fill_sixteen(group: int, queries: int) -> bool:
    """Whether 16 columns at a time are at most a third more in all than those of pairs of warpgroups."""
    return group <= 16 and 3 * 16 * -(-queries // (16 // group)) <= 4 * max(32, group * queries)


def _looked_up_cuts(layout: PageLayout, amount: Amount) -> tuple[tuple[int, int, int, int], ...]:
    if not amount.short or not is_power_of_two(layout.spec.key_dim):
        return _LOOKED_UP
    if amount.many_rows:
        return _SIX_BITS_SHORT if _has_six_bits(layout) else _LOOKED_UP_SHORT
    # 8 bits are looked up as they lie: fewer warps, with two slots, keep up with memory. Small heads have small steps.
    fewer = amount.little and max(layout.spec.key.bits, layout.spec.value.bits) < 8 and layout.spec.key_dim >= 128
    return _LOOKED_UP_FEW if fewer else _LOOKED_UP


def _fits(device: Device, layout: PageLayout, shape: Shape) -> bool:
    shared = shared_bytes(layout, shape)
    return shared <= device.shared_of_block and (shared + 1024) * shape.resident <= device.shared_of_multiprocessor


def writes_whole_items(layout: PageLayout) -> bool:
    """Whether a block writes the output of what it has all keys of: if queries leave the memory to rotate back."""
    dim = layout.spec.value_dim
    return not layout.spec.value.rotated or (is_power_of_two(dim) and dim >= 32) or dim <= 2 * layout.spec.key_dim


def in_clusters(device: Device, layout: PageLayout, shape: Shape, items: int) -> Shape:
    """``shape`` for ``items`` of short sequences: where blocks enough are left for each, they are a cluster."""
    each = device.multiprocessors // items
    if not device.clusters or each < 2:
        return shape
    if shape.stages == 1:  # one on a multiprocessor: larger clusters do not all find room at a time
        return replace(shape, cluster=2)
    # Two on a multiprocessor: then all clusters run at the same time, wherever they find room.
    close = replace(shape, resident=2) if not shape.wide and shape.tiles == 1 and shape.warps <= 8 else shape
    if not _fits(device, layout, close):
        close = shape
    if each >= _LARGE_CLUSTER and close.resident == 2:
        return replace(close, cluster=_LARGE_CLUSTER)
    cluster = min(_CLUSTER, each)
    wider = replace(shape, warps=16, cluster=cluster)
    if cluster < each and shape.tiles == 1 and _fits(device, layout, wider):
        return wider
    return replace(close, cluster=cluster)


def few_tokens(device: Device, sequences: int, queries: int, heads: int, tokens: int) -> Few | None:
    """What a shape depends on of sequences of up to ``tokens`` tokens and ``queries`` queries in all, if short."""
    if not device.one_launch or tokens > _CLUSTER_TOKENS:
        return None
    count = min(sequences, device.multiprocessors)  # of more, every block has one or several
    return Few(count, queries if sequences == 1 else 0, heads, -(-tokens // _FEW_TOKENS) * _FEW_TOKENS)


def in_one_launch(device: Device, layout: PageLayout, shape: Shape, group: int, queries: int, few: Few) -> Shape:
    """``shape`` for short sequences of up to ``queries`` queries: nothing is left to merge, if that is quicker.

    A block takes all keys of a sequence's head, or the blocks of a cluster do and put its output together.
    """
    per_chunk = shape.columns // group
    chunks = -(-(few.queries or queries) // per_chunk)
    if shape.team > 1 or not writes_whole_items(layout) or (chunks > 1 and few.sequences > 1):
        return shape
    if chunks == 1 and few.sequences * few.heads > device.multiprocessors:
        shape = _beside_others(device, layout, shape, few.tokens)
    rounds = few.tokens / (SLICE_DIMS * shape.tiles * shape.warps)
    most = _MOST_ROUNDS_LOOKED_UP if shape.stages == 1 or _looks_levels_up(layout) else _MOST_ROUNDS
    whole = replace(shape, whole=True) if chunks == 1 else shape
    if rounds <= _ROUNDS_OF_ONE:
        return whole
    clustered = in_clusters(device, layout, shape, few.sequences * few.heads * chunks)
    return clustered if clustered.cluster > 1 or rounds > most else whole


def _beside_others(device: Device, layout: PageLayout, shape: Shape, tokens: int) -> Shape:
    """Of 8 columns: blocks of four warps with one slot, three on a multiprocessor, of a (sequence, KV head) each."""
    spec, tiles, warps = layout.spec, 4, 4
    if shape.columns != 8 or shape.warps != 8 or Kind.LLOYD not in (spec.key.kind, spec.value.kind):
        return shape
    beside = replace(shape, tiles=tiles, warps=warps, stages=1, resident=3, bulk=_in_pages(device, layout, tiles))
    fits = is_power_of_two(spec.key_dim) and _fits(device, layout, beside)
    return beside if fits and tokens <= _MOST_ROUNDS_LOOKED_UP * SLICE_DIMS * tiles * warps else shape


def rows_bound(rows: int) -> int:
    """As much of a number of rows as ``polls`` looks at."""
    return next((bound for bound in (_POLLED_ROWS, _POLLED_ROWS_BESIDE) if rows <= bound), 1 << 30)


def polls(device: Device, layout: PageLayout, shape: Shape, rows: int, amount: Amount) -> bool:
    """Whether ``rows`` of output are merged by blocks that wait for their parts beside those that attend.

    They must find room there: on multiprocessors that the cut leaves idle, if they are few, or in the registers that 8
    warps leave. And preparing for it takes a warp some time, which little work does not hide.
    """
    if not device.copy_engine or shape.one_launch or shape.roles:  # older ones start no kernel early
        return False
    if layout.spec.value_dim > 128:
        return shape.wide and shape.warps == 8 and rows <= _POLLED_ROWS_BESIDE
    return rows <= _POLLED_ROWS and not amount.little


def team_of(layout: PageLayout) -> int:
    """Warps that share the values of many columns, each with whole words of every plane; 1: they cannot."""
    return 2 if max_columns(layout) == 32 and _values_in_parts(layout, 2) else 1


def _values_in_parts(layout: PageLayout, parts: int) -> bool:
    """Whether parts of the value slices are whole words of every plane."""
    slices = layout.spec.value_dim // SLICE_DIMS
    return slices % (parts * max(_slices_of_words(layout), default=1)) == 0


def _values_in_quarters(layout: PageLayout) -> bool:
    """Whether warps of a warpgroup share the value slices, each with whole words of every plane or a fraction of one.

    The last ones may have fewer or none, but products are made of as many: at least five of eight are to be there.
    """
    slices = layout.spec.value_dim // SLICE_DIMS
    each = -(-slices // 4)
    whole = all(n % each == 0 or (each % n == 0 and slices % n == 0) for n in _slices_of_words(layout))
    return whole and 8 * slices >= 5 * 4 * each


def _slices_of_words(layout: PageLayout) -> list[int]:
    return [4 // plane.bits for plane in layout.value.planes if plane.bits <= 4]


def _looks_levels_up(layout: PageLayout) -> bool:
    return any(fmt.kind == Kind.LLOYD and not in_bytes(fmt) for fmt in (layout.spec.key, layout.spec.value))


def _step_is_large(layout: PageLayout, tiles: int, warps: int, amount: Amount) -> bool:
    """Whether a smaller step is better, or fewer warps are.

    Nothing overlaps the wait for the first steps of all warps, and their last ones.
    """
    step = 16 * tiles * layout.page_bytes // layout.block_size
    if tiles >= 8:
        return amount.little or step > _STEP_OF_128
    bits = layout.spec.key.bits + layout.spec.value.bits
    return tiles == 4 and warps > 8 and bits > 4 and step > _STEP_OF_TWELVE


def _has_six_bits(layout: PageLayout) -> bool:
    return any(fmt.kind == Kind.LLOYD and fmt.bits == 6 for fmt in (layout.spec.key, layout.spec.value))


def _in_pages(device: Device, layout: PageLayout, tiles: int) -> bool:
    """Whether a step is whole pages, for the copy engine: codes and fields follow each other without a gap."""
    if not device.copy_engine or 16 * tiles % layout.block_size:
        return False
    key, value, tokens = layout.key, layout.value, layout.block_size
    values_at = tokens * key.dim * key.format.bits // 8
    fields_at = values_at + tokens * value.dim * value.format.bits // 8
    after_keys = fields_at + key.format.field_count * FIELD_BYTES * tokens
    return (value.codes_offset, key.fields_offset, value.fields_offset) == (values_at, fields_at, after_keys)


def _are_single_bits(layout: PageLayout) -> bool:
    return is_single_bit(layout.spec.key) and is_single_bit(layout.spec.value)
