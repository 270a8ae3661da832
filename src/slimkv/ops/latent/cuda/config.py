"""Which latent kernel attends a request, and the numbers it is compiled and launched with.

=======  ==========  =========  =================================================================================
kernel   query rows  KV block   latents
=======  ==========  =========  =================================================================================
narrow   16          32 tokens  all that ``launch.refusal`` accepts in tiles
columns  24, 32      64 tokens  of no fewer numbers than the rope part, in tiles
wide     64          64 tokens  of 128, 256 or 512 numbers whose levels take no LUT (1-4 bits, fp8); token rows
=======  ==========  =========  =================================================================================

A request takes the fewest work tiles for its query rows (queries x heads of a sequence), and of those the smallest. All
run one block on every multiprocessor.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial

from slimkv.errors import UnsupportedError
from slimkv.ops.cuda.device import Device
from slimkv.spec import Kind, PageLayout, TensorFormat

Offsets = dict[str, int]  # of regions of shared memory, by the name that the CUDA source knows them by

MIN_MERGE_WARPS, MAX_MERGE_WARPS = 8, 32  # of a block of the merge kernel
_WIDE_DIMS = (128, 256, 512)


@dataclass(frozen=True)
class Kernel:
    """A CUDA source and its tile sizes."""

    source: str
    rows: int  # query rows of a work tile
    kv_block: int  # tokens
    stages: tuple[int, ...]  # KV blocks that a ring may hold, most first
    offsets: Callable[[PageLayout, int], Offsets]  # by stages; SHARED_BYTES is their total
    takes: Callable[[PageLayout], bool]
    threads: int = 384  # of a block


@dataclass(frozen=True)
class LatentConfig:
    """A kernel on a device."""

    kernel: Kernel
    stages: int
    offsets: tuple[tuple[str, int], ...]
    shared: int  # bytes of a block
    blocks: int  # of the grid

    @property
    def defines(self) -> dict[str, int]:
        """What the kernel is compiled with beside the format."""
        return {"ROWS": self.kernel.rows, "KV_BLOCK": self.kernel.kv_block, "STAGES": self.stages, **dict(self.offsets)}

    def row_tiles(self, rows: int) -> int:
        """Work tiles of a sequence of ``rows`` query rows."""
        return -(-rows // self.kernel.rows)

    def partial_rows(self, rows: int, sequences: int) -> int:
        """Rows of partial results: a work tile has one, and one more for every block that starts inside it."""
        return (sequences * self.row_tiles(rows) + self.blocks) * self.kernel.rows


@lru_cache(maxsize=512)
def config_for(layout: PageLayout, rows: int, device: Device) -> LatentConfig:
    """The kernel for sequences of up to ``rows`` query rows, with as many stages as fit the device."""
    fitting = [found for kernel in KERNELS if (found := _fitting(kernel, layout, device)) is not None]
    if fitting:
        return min(fitting, key=lambda config: (config.row_tiles(rows), config.kernel.rows))
    raise UnsupportedError(
        f"latents of format {layout.spec.format} ({layout.spec.key_dim} + {layout.spec.value_dim}) take more than the "
        f"{device.shared_of_block} bytes of shared memory that a block has on this device; use backend='triton'"
    )


def _fitting(kernel: Kernel, layout: PageLayout, device: Device) -> LatentConfig | None:
    """The kernel with as many stages as fit the device; None if it does not take the layout, or nothing fits."""
    for stages in kernel.stages if kernel.takes(layout) else ():
        offsets = kernel.offsets(layout, stages)
        shared = offsets.pop("SHARED_BYTES")
        if shared <= device.shared_of_block:
            return LatentConfig(kernel, stages, tuple(offsets.items()), shared, device.multiprocessors)
    return None


def _takes_lut(fmt: TensorFormat) -> bool:
    """Whether its levels come from a LUT, one by one; byte permutations make those of up to 4 bits."""
    return fmt.kind == Kind.LLOYD and fmt.bits > 4


def _in_tiles(layout: PageLayout) -> bool:
    return not layout.token_rows


def _wide_takes(layout: PageLayout) -> bool:
    return layout.spec.key_dim in _WIDE_DIMS and not _takes_lut(layout.spec.key)


def _in_order(end: str, **sizes: int) -> Offsets:
    """Offsets of regions that follow one another; ``end`` is the name of their total."""
    offsets, at = {}, 0
    for name, size in sizes.items():
        offsets[f"{name}_AT"] = at
        at += size
    return offsets | {end: at}


def _narrow_offsets(layout: PageLayout, stages: int) -> Offsets:
    """A stage, the memory of a team of warps that attends, and that of the block."""
    spec, rows, kv_block = layout.spec, 16, 32
    entries = 0  # of the LUT: pairs of 4-bit codes, bytes with a 6-bit code and anything above it, or codes
    if spec.key.kind == Kind.LLOYD and spec.key.bits >= 4:
        entries = 256 if spec.key.bits in (4, 6) else 1 << spec.key.bits
    stage = _in_order(
        "STAGE_BYTES",
        LATENT_CODES=kv_block * spec.key_dim * spec.key.bits // 8,
        ROPE_CODES=kv_block * spec.value_dim * spec.value.bits // 8,
        LATENT_FIELDS=2 * kv_block,
        ROPE_FIELDS=0 if spec.value.kind == Kind.RAW else 2 * kv_block,
    )
    team = _in_order(
        "TEAM_BYTES", SCORES=256 * kv_block, PROBABILITIES=2 * rows * kv_block, WARP_MAX=16 * rows,
        ROW_MAX=4 * rows, BARRIERS=16 * stages, RAISED=16, RING=stages * stage["STAGE_BYTES"],
    )  # fmt: skip
    block = _in_order(
        "SHARED_BYTES",
        QUERIES=2 * rows * spec.key_dim,
        ROPE_QUERIES=2 * rows * spec.value_dim,
        ROWS=16 * rows,
        RANGES=64,
        ROPE_LEVELS=128 << spec.value.bits if _takes_lut(spec.value) else 0,
        LEVELS=128 * entries,
        OUTPUT=64 * spec.key_dim,
        TEAMS=2 * team["TEAM_BYTES"],
    )
    return stage | team | block


def _wide_offsets(layout: PageLayout, stages: int) -> Offsets:
    """A stage has 64 tokens x 64 dimensions in 8 KiB, of the latent and of the rope part, as queries have."""
    spec = layout.spec
    stage = 8192 * (spec.key_dim // 64 + -(-spec.value_dim // 64))
    return _in_order(
        "SHARED_BYTES",
        QUERIES=stage,
        RING=stages * stage,
        PROBABILITIES=8192,
        ROW_MAX=256,
        SCALES=stages * (3 * 256 + (16 if spec.value.kind == Kind.RAW else 256)),
        BARRIERS=stages * 48,
        RANGES=48,
        ROPE_LEVELS=2 << spec.value.bits if _takes_lut(spec.value) else 0,
    )


def _columns_offsets(layout: PageLayout, stages: int, *, rows: int) -> Offsets:
    """A stage has 64 tokens x 64 dimensions of latents in 8 KiB; queries and probabilities have ``rows`` rows."""
    spec = layout.spec
    return _in_order(
        "SHARED_BYTES",
        QUERIES=128 * rows * (spec.key_dim // 64 + -(-spec.value_dim // 64)),
        RING=stages * 8192 * (spec.key_dim // 64),
        PROBABILITIES=stages * 128 * rows,
        COLUMNS=64 * rows + 16,
        BARRIERS=stages * 40,
        RANGES=48,
        LEVELS=128 << spec.key.bits if _takes_lut(spec.key) else 0,
        ROPE_LEVELS=2 << spec.value.bits if _takes_lut(spec.value) else 0,
    )


def _columns_takes(layout: PageLayout) -> bool:
    """The rope part passes through the latent's stage."""
    return _in_tiles(layout) and layout.spec.key_dim >= layout.spec.value_dim


def _columns(rows: int) -> Kernel:
    offsets = partial(_columns_offsets, rows=rows)
    return Kernel("latent/columns.cu", rows, 64, stages=(2,), offsets=offsets, takes=_columns_takes, threads=512)


NARROW = Kernel("latent/narrow.cu", 16, 32, stages=(4, 3, 2), offsets=_narrow_offsets, takes=_in_tiles)
COLUMNS = tuple(_columns(rows) for rows in (24, 32))
WIDE = Kernel("latent/wide.cu", rows=64, kv_block=64, stages=(2,), offsets=_wide_offsets, takes=_wide_takes)
KERNELS = (NARROW, *COLUMNS, WIDE)


def merge_dims(dim: int) -> int:
    """Dimensions of a row that a block of the merge kernel takes."""
    return 256 if dim % 256 == 0 else 128


def merge_warps(rows: int, dim: int, device: Device) -> int:
    """Warps that share the partial results of a row: as many as the device has room for, with 64 registers a thread."""
    warps = rows * -(-dim // merge_dims(dim))
    shared_by = 1
    while shared_by < MAX_MERGE_WARPS and 2 * shared_by * warps <= 32 * device.multiprocessors:
        shared_by *= 2
    return shared_by


def merge_rounds(rows: int, rows_of_block: int, rows_of_tile: int, dim: int, device: Device) -> int:
    """Groups of rows that a block of the merge kernel takes in turn, so that all blocks fit on the device at a time."""
    warps, rounds = rows * -(-dim // merge_dims(dim)), 1  # a row has more than one only if they fit
    while warps > rounds * 32 * device.multiprocessors and rows_of_tile % (2 * rounds * rows_of_block) == 0:
        rounds *= 2
    return rounds
