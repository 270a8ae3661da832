"""Resources of a thread block of the CUDA decode kernels: shared memory, registers, and how warps share values.

The sources compute shared memory as well; a static_assert fails if the two disagree.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

from slimkv.ops.attention.cuda.level_bytes import in_bytes
from slimkv.spec import SLICE_DIMS, Kind, PageLayout, TensorFormat

if TYPE_CHECKING:
    from slimkv.ops.attention.cuda.decode_config import DecodeConfig

# A KV block is processed by one warp, by a pair of warpgroups (wgmma), or by all warps of a thread block (mma.sync).
DECODE, VERIFY, VERIFY_WARPS = "decode/decode.cu", "decode/verify.cu", "decode/verify_warps.cu"
_TEAM = 4  # warps of a warpgroup, which share values


def shared_bytes(layout: PageLayout, config: DecodeConfig) -> int:
    """The bytes of shared memory of a thread block."""
    count = {DECODE: decode_shared_bytes, VERIFY: verify_shared_bytes, VERIFY_WARPS: verify_warps_shared_bytes}
    return count[config.source](layout, config)


@lru_cache(maxsize=1024)
def decode_shared_bytes(layout: PageLayout, config: DecodeConfig) -> int:
    """Mirrors decode/decode_memory.cuh."""
    spec, warps, wide = layout.spec, config.warps, config.rows > 4 and not config.narrow
    group = 8 if wide else 4
    slot = max(_block_bytes(layout, config), 4 * group * (spec.value_dim + 8))
    slices = spec.key_dim // SLICE_DIMS
    products = -(-slices // 2) if in_bytes(spec.key) and not wide else slices
    query = 256 * config.rows // group * products
    states = config.rows * (16 + 8 * warps)
    barriers = 8 * warps * max(2, config.stages) if config.bulk else 0
    tables = _level_table_bytes(layout, wide, wide and spec.key_dim == 256)
    total = tables + warps * config.stages * slot + query + states + barriers
    if config.stages == 1 and not (_is_power_of_two(spec.key_dim) and spec.key_dim >= 32):
        total = -(-total // 16) * 16 + 4 * spec.key_dim * min(config.rows, warps)  # scratch to rotate queries
    return total


@lru_cache(maxsize=1024)
def verify_shared_bytes(layout: PageLayout, config: DecodeConfig) -> int:
    """Mirrors decode/verify_memory.cuh."""
    spec, rows = layout.spec, config.rows
    rings, workers, own_tiles = config.warps // 8, config.warps // 2, config.block_tokens // 64
    padded = padded_value_dim(layout)
    slot = max(_block_bytes(layout, config), 32 * (padded // _TEAM + 8))
    operands = 128 * rows * (-(-spec.key_dim // 64) + 2 * own_tiles * workers // _TEAM)  # queries, 2x probabilities
    operands = max(operands, 4 * rows * (padded + 4 * _TEAM))  # later the output of a pair
    states = rows * (16 + 12 * workers)
    barriers = 8 * rings * config.stages + rings * (2 * (4 * rows + 8) + 32)  # and rescaling factors
    tables = _level_table_bytes(layout, True, spec.key_dim == 256 and rows <= 40)
    total = tables + operands + rings * config.stages * slot + states + barriers
    total = -(-total // 16) * 16 + 48 * workers  # cursors
    if spec.value.rotated and not (_is_power_of_two(spec.value_dim) and spec.value_dim >= 32):
        total += 4 * spec.value_dim * config.warps  # scratch to rotate the output back
    return total


@lru_cache(maxsize=1024)
def verify_warps_shared_bytes(layout: PageLayout, config: DecodeConfig) -> int:
    """Mirrors decode/verify_warps_memory.cuh."""
    spec, rows, warps = layout.spec, config.rows, config.warps
    queries, probabilities = 2 * rows * spec.key_dim, 64 * rows * warps  # double-buffered
    slices = -(-spec.value_dim // (SLICE_DIMS * warps))
    results = 4 * (SLICE_DIMS * slices + 4) * rows * warps  # in the memory of queries and probabilities
    fields = 4 * config.block_tokens * (spec.key.field_count + spec.value.field_count)
    states = rows * (16 + 12 * warps + 4)
    operands = max(queries + max(probabilities, 4 * spec.key_dim * warps), results)  # scratch to rotate queries
    total = _level_table_bytes(layout, True, True) + operands + fields + states
    if spec.value.rotated and not (_is_power_of_two(spec.value_dim) and spec.value_dim >= 32):
        total += 4 * spec.value_dim * warps  # scratch to rotate the output back
    return total


def writes_whole_tiles(layout: PageLayout) -> bool:
    """Whether thread blocks can write whole work tiles: rotating outputs back must fit the memory of the queries."""
    dim = layout.spec.value_dim
    return not layout.spec.value.rotated or (dim & (dim - 1) == 0 and dim >= 32) or dim <= 2 * layout.spec.key_dim


def team_registers(layout: PageLayout, config: DecodeConfig) -> float:
    """Estimated registers per thread: codes (values double-buffered) and, per row, outputs, scores, maxima and sums."""
    spec = layout.spec
    codes = (spec.key_dim * spec.key.bits + 2 * spec.value_dim * spec.value.bits) / 64
    return codes + config.rows * (spec.value_dim / (32 * config.warps) + 1.25)


def values_in_parts(layout: PageLayout, parts: int) -> bool:
    """Whether ``parts`` warps can share the value slices, each with whole words of every plane or a fraction of one.

    The last warps may have fewer slices but compute as many products: at least 5/8 of the slices must exist.
    """
    slices = layout.spec.value_dim // SLICE_DIMS
    each = -(-slices // parts)
    slices_of_words = [4 // plane.bits for plane in layout.value.planes if plane.bits <= 4]
    whole = all(n % each == 0 or (each % n == 0 and slices % n == 0) for n in slices_of_words)
    return whole and 8 * slices >= 5 * parts * each


def padded_value_dim(layout: PageLayout) -> int:
    """The output dimensions of a warpgroup, whose warps all compute the same number of slices."""
    each = _TEAM * SLICE_DIMS
    return -(-layout.spec.value_dim // each) * each


def _block_bytes(layout: PageLayout, config: DecodeConfig) -> int:
    """The bytes of the codes and scales of a KV block."""
    spec = layout.spec
    fields = 2 * (spec.key.field_count + spec.value.field_count)
    return config.block_tokens * ((spec.key_dim * spec.key.bits + spec.value_dim * spec.value.bits) // 8 + fields)


def _level_table_bytes(layout: PageLayout, wide: bool, permuted_keys: bool) -> int:
    """The bytes of the LUTs, 4 per entry and lane. K and V share one table if they have the same levels."""
    spec = layout.spec

    def entries(fmt: TensorFormat, permuted: bool) -> int:
        if fmt.kind != Kind.LLOYD or (in_bytes(fmt) and not wide) or (permuted and fmt.bits == 4):
            return 0
        return 256 if fmt.bits <= 5 else 1 << fmt.bits  # up to 5 bits, indexed by pairs of codes

    keys, values = entries(spec.key, permuted_keys), entries(spec.value, wide)
    alike = (spec.key.kind, spec.key.bits, spec.key_dim) == (spec.value.kind, spec.value.bits, spec.value_dim)
    return 128 * (keys if alike else keys + values)


def _is_power_of_two(n: int) -> bool:
    return n & (n - 1) == 0
