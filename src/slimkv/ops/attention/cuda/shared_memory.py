"""Shared memory of a block of the CUDA decode kernel."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

from slimkv.ops.attention.cuda.level_bytes import in_bytes
from slimkv.spec import SLICE_DIMS, Kind, PageLayout, TensorFormat

if TYPE_CHECKING:
    from slimkv.ops.attention.cuda.shape import Shape


@lru_cache(maxsize=1024)
def shared_bytes(layout: PageLayout, shape: Shape) -> int:
    """Shared memory of a block; decode/shape.cuh counts the same and is not compiled otherwise."""
    spec = layout.spec
    fields = 32 * (spec.key.field_count + spec.value.field_count)
    tile = 16 * (spec.key_dim * spec.key.bits + spec.value_dim * spec.value.bits) // 8 + fields
    if shape.team > 1 and not shape.warpgroup and 256 * shape.groups > 2 * spec.key_dim * spec.key.bits:
        tile += 256 * shape.groups  # probabilities that do not fit in the place of key codes
    rings, workers = (shape.warps // 8, shape.warps // 2) if shape.roles else (shape.warps, shape.warps)
    padded = padded_value_dim(layout, shape.team)
    slot = max(shape.tiles * tile, 4 * shape.columns // shape.groups * (padded // shape.team + 8))
    slices = spec.key_dim // 16
    as_bytes = in_bytes(spec.key) and not shape.wide
    query = 256 * shape.groups * (_products_of_bytes(spec.key, slices) if as_bytes else slices)
    if shape.warpgroup:  # operands of 64 numbers: queries, and probabilities of every team
        own_tiles = shape.tiles // 4 if shape.roles else shape.tiles
        query = 128 * shape.columns * (-(-spec.key_dim // 64) + 2 * own_tiles * workers // shape.team)
        if shape.roles:  # where the output of a pair takes their place
            query = max(query, 4 * shape.columns * (padded + 4 * shape.team))
    tables = _level_table_bytes(layout, shape)
    if shape.stages == 1 and shape.resident > 1 and tables >= query:
        query = 0  # they take the place of levels
    states = shape.columns * (16 + (8 if shape.team == 1 else 12) * workers)
    barriers = 8 * rings * max(2, shape.stages) if shape.bulk else 0
    if shape.roles:  # factors of the output, and barriers of the probabilities
        barriers += rings * (2 * (4 * shape.columns + 8) + 32)
        if shape.columns > 40:  # references of the softmax
            barriers += 4 * shape.columns * workers
    total = rings * shape.stages * slot + tables + query + states + barriers
    if shape.cluster > 1:  # what its blocks send each other, and a barrier for every column
        columns = -(-shape.columns // shape.cluster)
        total = -(-(total + 8 * columns) // 16) * 16 + 4 * columns * shape.cluster * (spec.value_dim + 4)
    if shape.stages == 1 and not (is_power_of_two(spec.key_dim) and spec.key_dim >= 32):
        total = -(-total // 16) * 16 + 4 * spec.key_dim * min(shape.columns, shape.warps)  # rotates without a free slot
    elif shape.roles and spec.value.rotated and not is_power_of_two(spec.value_dim):
        total = -(-total // 16) * 16 + 4 * spec.value_dim * shape.warps  # rotates the output back
    return total


def is_single_bit(fmt: TensorFormat) -> bool:
    """Whether codes are bits, whose levels are one number and its negative."""
    return fmt.kind == Kind.LLOYD and fmt.bits == 1


def _products_of_bytes(fmt: TensorFormat, slices: int) -> int:
    if is_single_bit(fmt):  # two words of four slices at a time
        words = -(-slices // 4)
        return 4 * (words // 2) + 2 * (words % 2)
    return -(-slices // 2)


def _level_table_bytes(layout: PageLayout, shape: Shape) -> int:
    """Levels in shared memory, 4 bytes an entry for each lane; one table where K and V have the same levels."""
    spec = layout.spec
    permutes = shape.wide and (not shape.warpgroup or shape.warps > 8)

    def entries(fmt: TensorFormat, permuted: bool) -> int:
        if fmt.kind != Kind.LLOYD or (in_bytes(fmt) and not shape.wide) or (permuted and fmt.bits == 4):
            return 0
        # Up to 5 bits by pairs of codes; of 6 bits, apart, all bytes that have them, as low and as high halves.
        return 512 if fmt.bits == 6 and shape.apart else 256 if fmt.bits <= 5 else 1 << fmt.bits

    keys, values = entries(spec.key, permutes and spec.key_dim == 256), entries(spec.value, permutes)
    alike = (spec.key.kind, spec.key.bits, spec.key_dim) == (spec.value.kind, spec.value.bits, spec.value_dim)
    return 128 * (keys if alike else keys + values)


def padded_value_dim(layout: PageLayout, team: int) -> int:
    """Dimensions of the output that the warps of a team have together: of each as many slices."""
    each = team * SLICE_DIMS
    return -(-layout.spec.value_dim // each) * each


def is_power_of_two(n: int) -> bool:
    """Of a positive number."""
    return n & (n - 1) == 0
