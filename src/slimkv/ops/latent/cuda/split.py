"""How the kernel of any rows and formats (source/latent_split/attend.cu) is cut: equal parts of every sequence."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from slimkv.ops.attention.cuda.device import Device
from slimkv.spec import Kind, PageLayout, TensorFormat

GROUP_THREADS, GROUP_TOKENS, MERGE_THREADS, MERGERS = 128, 64, 512, 4  # as shape.cuh and attend.cu have them
_ROWS = (8, 16, 32, 64)
# 64 rows unpack for twice as many, but take two warpgroups in step and a multiprocessor to themselves; two blocks of 32
# overlap, one unpacking while the other multiplies.
MOST_ROWS = 32
_RESERVED = 1024  # bytes of shared memory that the driver keeps of every block
_LEVEL_COPIES = 32  # of a latent's levels
_LEAST_TILES, _MOST_SPLITS = 4, 256


@dataclass(frozen=True)
class Cut:
    """How a request is cut into blocks."""

    rows: int  # (query, head) pairs of a block
    row_tiles: int  # blocks for the rows of a sequence
    splits: int  # parts of a sequence's tokens
    shared: int  # bytes of a block
    resident: int  # blocks of a multiprocessor

    source: ClassVar[str] = "latent_split/attend.cu"

    @property
    def defines(self) -> dict[str, int]:
        """What the kernel is compiled with beside the format."""
        return {"ROWS": self.rows, "WARPGROUPS": self.groups, "RESIDENT": self.resident, "SHARED": self.shared}

    @property
    def groups(self) -> int:
        """Warpgroups of a block: two where the output of all rows does not fit the registers of one."""
        return groups_of(self.rows)

    def workspace_bytes(self, sequences: int, latent_dim: int) -> int:
        """Bytes of the parts and of their states."""
        return 4 * sequences * self.row_tiles * self.splits * self.rows * (latent_dim + 2)


def groups_of(rows: int) -> int:
    """Warpgroups of a block of ``rows``."""
    return 2 if rows > 32 else 1


def _level_entries(fmt: TensorFormat) -> int:
    """Levels that a kernel looks up in shared memory: those of up to 4 bits are made by byte permutations."""
    return 1 << fmt.bits if fmt.kind == Kind.LLOYD and fmt.bits > 4 else 0


def shared_bytes(layout: PageLayout, rows: int) -> int:
    """Shared memory of a block, as shape.cuh counts it."""
    spec = layout.spec
    chunks, rope_chunks = spec.key_dim // 64, -(-spec.value_dim // 64)
    groups = groups_of(rows)
    operands = 128 * (groups * chunks * GROUP_TOKENS + (chunks + rope_chunks + groups) * rows)
    rope_copies = 8 if rows < 32 else 4
    levels = 4 * (_LEVEL_COPIES * _level_entries(spec.key) + rope_copies * _level_entries(spec.value))
    return operands + 16 * (1 + groups) * rows + levels + 1024


def _rows_of_block(layout: PageLayout, wanted: int, device: Device) -> int:
    """Rows of a block for ``wanted`` rows of a sequence, as many as fit."""
    fit = [
        rows
        for rows in _ROWS
        if rows <= MOST_ROWS
        and shared_bytes(layout, rows) <= device.shared_of_block
        and layout.spec.key_dim % (64 * groups_of(rows)) == 0
    ]
    return next((rows for rows in fit if rows >= wanted), fit[-1])


def cut_for(
    layout: PageLayout, heads: int, max_query_len: int, sequences: int, max_seq_len: int, device: Device
) -> Cut:
    """The blocks for sequences of up to ``max_query_len`` queries and ``max_seq_len`` tokens."""
    wanted = heads * max_query_len
    rows = _rows_of_block(layout, wanted, device)
    row_tiles = -(-wanted // rows)
    shared = shared_bytes(layout, rows)
    # Two warpgroups of a block take all registers.
    resident = 2 if groups_of(rows) == 1 and 2 * (shared + _RESERVED) <= device.shared_of_multiprocessor else 1
    slots, blocks = device.multiprocessors * resident, sequences * row_tiles
    tiles = max(1, -(-max_seq_len // (GROUP_TOKENS * groups_of(rows))))

    def time(splits: int) -> int:  # in tiles, with what it takes to start a block and to merge its part
        return -(-blocks * splits // slots) * (-(-tiles // splits) + _LEAST_TILES) + splits // 32

    most = min(_MOST_SPLITS, max(1, tiles // _LEAST_TILES), max(1, 2 * slots // blocks))
    return Cut(rows, row_tiles, min(range(1, most + 1), key=time), shared, resident)


def workspace_bytes(layout: PageLayout, rows: int, sequences: int, device: Device) -> int:
    """Bytes that are enough for ``rows`` rows of every sequence, whatever the lengths."""
    own = _rows_of_block(layout, rows, device)
    row_tiles = -(-rows // own)
    most = min(_MOST_SPLITS, max(1, 4 * device.multiprocessors // (sequences * row_tiles)))
    return Cut(own, row_tiles, most, 0, 0).workspace_bytes(sequences, layout.spec.key_dim)
