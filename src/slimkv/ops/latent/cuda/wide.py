"""How the kernel of many rows (source/latent/wide.cu) is cut: one block for every multiprocessor."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from slimkv.ops.attention.cuda.device import Device
from slimkv.ops.latent.cuda.narrow import wants_table
from slimkv.spec import Kind, PageLayout

_STAGES = 2
_LATENT_DIMS = (128, 256, 512)


@dataclass(frozen=True)
class Cut:
    """How requests of a kind are compiled and launched."""

    shared: int  # bytes of a block
    blocks: int  # of the grid

    source: ClassVar[str] = "latent/wide.cu"
    threads: ClassVar[int] = 384  # as wide.cu has them
    rows: ClassVar[int] = 64

    @property
    def defines(self) -> dict[str, int]:
        """What the kernel is compiled with beside the format."""
        return {"SHARED": self.shared}


def shared_bytes(layout: PageLayout) -> int:
    """Shared memory of a block, as wide.cu counts it."""
    spec = layout.spec
    stage = 8192 * (spec.key_dim // 64 + -(-spec.value_dim // 64))
    levels = 2 << spec.value.bits if wants_table(spec.value) else 0
    scales = 256 * 3 + (16 if spec.value.kind == Kind.RAW else 256)
    return (1 + _STAGES) * stage + 8192 + 4 * Cut.rows + _STAGES * (scales + 48) + 48 + levels


def cut_for(layout: PageLayout, rows: int, device: Device) -> Cut | None:
    """None where it does not fit (latents that want a table of levels, or that are too large) or not pay."""
    # 64 rows here take as long as 51 in blocks of 32 (see split.py), of which some rows would fill fewer.
    if 8 * -(-rows // Cut.rows) > 5 * -(-rows // 32):
        return None
    spec, need = layout.spec, shared_bytes(layout)
    if wants_table(spec.key) or spec.key_dim not in _LATENT_DIMS or need > device.shared_of_block:
        return None
    return Cut(need, device.multiprocessors)
