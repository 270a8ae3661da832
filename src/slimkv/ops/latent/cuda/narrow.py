"""How the kernel of few rows (source/latent/narrow.cu) is cut: one block for every multiprocessor."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from slimkv.ops.attention.cuda.shape import Device
from slimkv.spec import Kind, PageLayout, TensorFormat

MOST_ROWS = 16
_PAIRS, _LEVEL_COPIES, _ROPE_COPIES = 2, 32, 8  # as narrow.cu has them


@dataclass(frozen=True)
class Cut:
    """How requests of a kind are compiled and launched."""

    rows: int  # (query, head) pairs of a block
    shared: int  # bytes of a block
    blocks: int  # of the grid

    source: ClassVar[str] = "latent/narrow.cu"
    threads: ClassVar[int] = 256 * _PAIRS
    parts: ClassVar[int] = _PAIRS  # that a block leaves of an item

    @property
    def defines(self) -> dict[str, int]:
        """What the kernel is compiled with beside the format."""
        return {"ROWS": self.rows, "SHARED": self.shared}


def _level_bytes(fmt: TensorFormat, copies: int) -> int:
    return 4 * copies << fmt.bits if fmt.kind == Kind.LLOYD and fmt.bits > 4 else 0


def shared_bytes(layout: PageLayout, rows: int) -> int:
    """Shared memory of a block, as narrow.cu counts it."""
    spec = layout.spec
    chunks = spec.key_dim // 64 + -(-spec.value_dim // 64)
    levels = _level_bytes(spec.key, _LEVEL_COPIES) + _level_bytes(spec.value, _ROPE_COPIES)
    return chunks * (_PAIRS * 8192 + 128 * rows) + _PAIRS * (144 * rows + 80) + 16 * rows + levels


def cut_for(layout: PageLayout, rows: int, device: Device) -> Cut:
    """Blocks of 8 or 16 rows, whichever is enough."""
    own = 8 if rows <= 8 else MOST_ROWS
    return Cut(own, shared_bytes(layout, own), device.multiprocessors)
