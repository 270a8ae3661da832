"""What a block of the CUDA decode kernels takes: shared memory, registers, parts of the values.

The sources count shared memory as well and do not compile if they count otherwise.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

from slimkv.ops.attention.cuda.level_bytes import in_bytes
from slimkv.spec import SLICE_DIMS, Kind, PageLayout, TensorFormat

if TYPE_CHECKING:
    from slimkv.ops.attention.cuda.decode_config import DecodeConfig

# One block of tokens a warp; a block for pairs of warpgroups (wgmma); a block for a team of warps (mma.sync).
DECODE, VERIFY, VERIFY_WARPS = "decode/decode.cu", "decode/verify.cu", "decode/verify_warps.cu"
_TEAM = 4  # warps of a warpgroup, which share values


def shared_bytes(layout: PageLayout, config: DecodeConfig) -> int:
    """Shared memory of a block."""
    count = {DECODE: decode_shared_bytes, VERIFY: verify_shared_bytes, VERIFY_WARPS: verify_warps_shared_bytes}
    return count[config.source](layout, config)


@lru_cache(maxsize=1024)
def decode_shared_bytes(layout: PageLayout, config: DecodeConfig) -> int:
    """As decode/decode_memory.cuh counts."""
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
        total = -(-total // 16) * 16 + 4 * spec.key_dim * min(config.rows, warps)  # queries are rotated there
    return total


@lru_cache(maxsize=1024)
def verify_shared_bytes(layout: PageLayout, config: DecodeConfig) -> int:
    """As decode/verify_memory.cuh counts."""
    spec, rows = layout.spec, config.rows
    rings, workers, own_tiles = config.warps // 8, config.warps // 2, config.block_tokens // 64
    padded = padded_value_dim(layout)
    slot = max(_block_bytes(layout, config), 32 * (padded // _TEAM + 8))
    operands = 128 * rows * (-(-spec.key_dim // 64) + 2 * own_tiles * workers // _TEAM)  # queries, probabilities twice
    operands = max(operands, 4 * rows * (padded + 4 * _TEAM))  # the output of a pair takes their place
    states = rows * (16 + 12 * workers)
    running_max = 4 * rows * workers if rows > 40 else 0
    barriers = 8 * rings * config.stages + rings * (2 * (4 * rows + 8) + 32)  # and factors of the output
    tables = _level_table_bytes(layout, True, spec.key_dim == 256 and rows <= 40)
    total = tables + operands + rings * config.stages * slot + states + running_max + barriers
    if spec.value.rotated and not (_is_power_of_two(spec.value_dim) and spec.value_dim >= 32):
        total = -(-total // 16) * 16 + 4 * spec.value_dim * config.warps  # the output is rotated back there
    return total


@lru_cache(maxsize=1024)
def verify_warps_shared_bytes(layout: PageLayout, config: DecodeConfig) -> int:
    """As decode/verify_warps_memory.cuh counts."""
    spec, rows, warps = layout.spec, config.rows, config.warps
    queries, probabilities = 2 * rows * spec.key_dim, 64 * rows * warps  # of two blocks
    slices = -(-spec.value_dim // (SLICE_DIMS * warps))
    results = 4 * (SLICE_DIMS * slices + 4) * rows * warps  # take their place
    fields = 4 * config.block_tokens * (spec.key.field_count + spec.value.field_count)
    states = rows * (16 + 12 * warps + 4)
    operands = max(queries + max(probabilities, 4 * spec.key_dim * warps), results)  # queries are rotated there as well
    total = _level_table_bytes(layout, True, True) + operands + fields + states
    if spec.value.rotated and not (_is_power_of_two(spec.value_dim) and spec.value_dim >= 32):
        total += 4 * spec.value_dim * warps  # the output is rotated back there
    return total


def writes_whole_items(layout: PageLayout) -> bool:
    """Whether a block writes the output of what it has all keys of: if queries leave the memory to rotate back."""
    dim = layout.spec.value_dim
    return not layout.spec.value.rotated or (dim & (dim - 1) == 0 and dim >= 32) or dim <= 2 * layout.spec.key_dim


def team_registers(layout: PageLayout, config: DecodeConfig) -> float:
    """Of a thread of a team: codes, those of values twice; of all rows, outputs, scores, maxima and sums."""
    spec = layout.spec
    codes = (spec.key_dim * spec.key.bits + 2 * spec.value_dim * spec.value.bits) / 64
    return codes + config.rows * (spec.value_dim / (32 * config.warps) + 1.25)


def values_in_parts(layout: PageLayout, parts: int) -> bool:
    """Whether so many warps can share the value slices, each with whole words of every plane or a fraction of one.

    The last ones may have fewer or none, but products are made of as many: at least five of eight are to be there.
    """
    slices = layout.spec.value_dim // SLICE_DIMS
    each = -(-slices // parts)
    slices_of_words = [4 // plane.bits for plane in layout.value.planes if plane.bits <= 4]
    whole = all(n % each == 0 or (each % n == 0 and slices % n == 0) for n in slices_of_words)
    return whole and 8 * slices >= 5 * parts * each


def padded_value_dim(layout: PageLayout) -> int:
    """Dimensions of the output that the warps of a warpgroup have together: of each as many slices."""
    each = _TEAM * SLICE_DIMS
    return -(-layout.spec.value_dim // each) * each


def _block_bytes(layout: PageLayout, config: DecodeConfig) -> int:
    """Codes and scales of a block of tokens."""
    spec = layout.spec
    fields = 2 * (spec.key.field_count + spec.value.field_count)
    return config.block_tokens * ((spec.key_dim * spec.key.bits + spec.value_dim * spec.value.bits) // 8 + fields)


def _level_table_bytes(layout: PageLayout, wide: bool, permuted_keys: bool) -> int:
    """Levels in shared memory, 4 bytes an entry for each lane; one table where K and V have the same levels."""
    spec = layout.spec

    def entries(fmt: TensorFormat, permuted: bool) -> int:
        if fmt.kind != Kind.LLOYD or (in_bytes(fmt) and not wide) or (permuted and fmt.bits == 4):
            return 0
        return 256 if fmt.bits <= 5 else 1 << fmt.bits  # up to 5 bits by pairs of codes

    keys, values = entries(spec.key, permuted_keys), entries(spec.value, wide)
    alike = (spec.key.kind, spec.key.bits, spec.key_dim) == (spec.value.kind, spec.value.bits, spec.value_dim)
    return 128 * (keys if alike else keys + values)


def _is_power_of_two(n: int) -> bool:
    return n & (n - 1) == 0
