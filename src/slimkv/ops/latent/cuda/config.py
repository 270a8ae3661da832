"""The choice of the latent attention kernel for a request, and its compile-time and launch parameters.

=======  ==========  =========  =================================================================================
kernel   query rows  KV block   latents
=======  ==========  =========  =================================================================================
narrow   16          32 tokens  all that ``launch.refusal`` accepts in tiles
columns  24, 32      64 tokens  no smaller than the rope part, in tiles
wide     64          64 tokens  sizes 128, 256 and 512 in formats without LUT (1-4 bits, fp8); token rows
=======  ==========  =========  =================================================================================

A request takes the kernel with the fewest work tiles for its query rows (queries x heads of a sequence) and, among
those, the smallest tiles. All kernels run one block per multiprocessor.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

from slimkv.errors import UnsupportedError
from slimkv.ops.cuda.device import Device
from slimkv.spec import CodecSpec, Kind, PageLayout, TensorFormat


@dataclass(frozen=True)
class Kernel:
    """A CUDA source and its tile sizes."""

    source: str
    rows: int  # query rows of a work tile
    kv_block: int  # tokens
    stages: tuple[int, ...]  # numbers of KV blocks in a ring, the largest first
    shared: Callable[[CodecSpec, int, int], int]  # (spec, rows, stages) -> bytes per block, as in the source
    takes: Callable[[PageLayout], bool]
    threads: int = 384  # per block


@dataclass(frozen=True)
class LatentConfig:
    """A kernel on a device."""

    kernel: Kernel
    stages: int
    shared: int  # bytes per block
    blocks: int  # in the grid

    def row_tiles(self, rows: int) -> int:
        """The work tiles of a sequence with ``rows`` query rows."""
        return -(-rows // self.kernel.rows)

    def partial_rows(self, rows: int, sequences: int) -> int:
        """Rows of partial results: one result per work tile, and one per block that starts inside a tile."""
        return (sequences * self.row_tiles(rows) + self.blocks) * self.kernel.rows


@lru_cache(maxsize=512)
def config_for(layout: PageLayout, rows: int, device: Device) -> LatentConfig:
    """The kernel for sequences of up to ``rows`` query rows, with as many stages as fit the device."""
    fitting: dict[Kernel, LatentConfig] = {}
    for kernel in KERNELS:
        for stages in kernel.stages if kernel.takes(layout) else ():
            shared = kernel.shared(layout.spec, kernel.rows, stages)
            if shared <= device.shared_of_block:
                fitting.setdefault(kernel, LatentConfig(kernel, stages, shared, device.multiprocessors))
    if fitting:
        return min(fitting.values(), key=lambda config: (config.row_tiles(rows), config.kernel.rows))
    raise UnsupportedError(
        f"latents of format {layout.spec.format} ({layout.spec.key_dim} + {layout.spec.value_dim}) take more than the "
        f"{device.shared_of_block} bytes of shared memory that a block has on this device; use backend='triton'"
    )


def _lut(fmt: TensorFormat) -> int:
    """Entries of a LUT of single levels; codes of up to 4 bits use byte permutations instead."""
    return 1 << fmt.bits if fmt.kind == Kind.LLOYD and fmt.bits > 4 else 0


def _chunks(spec: CodecSpec) -> tuple[int, int]:
    """The number of 64-dimension chunks of the latent and of the rope part."""
    return spec.key_dim // 64, -(-spec.value_dim // 64)


def _narrow_shared(spec: CodecSpec, rows: int, stages: int) -> int:
    pairs = spec.key.kind == Kind.LLOYD and spec.key.bits in (4, 6)  # LUT indexed by pairs of codes, or by bytes
    levels = 256 if pairs else _lut(spec.key)
    fields = 2 if spec.value.kind == Kind.RAW else 4
    stage = 4 * (spec.key_dim * spec.key.bits + spec.value_dim * spec.value.bits) + 32 * fields
    team = 256 * 32 + 2 * rows * 32 + 20 * rows + 16 * stages + 16 + 128 * 32 + stages * stage
    queries = 2 * rows * (spec.key_dim + spec.value_dim) + 16 * rows
    return queries + 64 + 128 * (_lut(spec.value) + levels) + 64 * spec.key_dim + 2 * team


def _columns_shared(spec: CodecSpec, rows: int, stages: int) -> int:
    latent, rope = _chunks(spec)
    ring = stages * (8192 * latent + 128 * rows + 40)  # with probabilities and barriers
    return 128 * rows * (latent + rope) + ring + 64 * rows + 16 + 48 + 128 * _lut(spec.key) + 2 * _lut(spec.value)


def _wide_shared(spec: CodecSpec, rows: int, stages: int) -> int:
    scales = 3 * 256 + (16 if spec.value.kind == Kind.RAW else 256)
    ring = stages * (8192 * sum(_chunks(spec)) + scales + 64)
    return 128 * rows * sum(_chunks(spec)) + ring + 8192 + 256 + 48 + 2 * _lut(spec.value)


def _columns_takes(layout: PageLayout) -> bool:
    """The rope part is staged in the latent's slot of the ring, so it must not be larger."""
    return not layout.token_rows and layout.spec.key_dim >= layout.spec.value_dim


NARROW = Kernel("latent/narrow.cu", 16, 32, (4, 3, 2), _narrow_shared, lambda layout: not layout.token_rows)
COLUMNS = tuple(Kernel("latent/columns.cu", n, 64, (2,), _columns_shared, _columns_takes, 512) for n in (24, 32))
WIDE = Kernel(
    "latent/wide.cu", 64, 64, (2,), _wide_shared,
    lambda layout: layout.spec.key_dim in (128, 256, 512) and not _lut(layout.spec.key),
)  # fmt: skip
KERNELS = (NARROW, *COLUMNS, WIDE)
