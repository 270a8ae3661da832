"""How the kernel of few rows (source/latent/narrow.cu) is cut: a grid that fills the device, whatever the lengths."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from slimkv.ops.attention.cuda.shape import Device
from slimkv.spec import Kind, PageLayout, TensorFormat

_STEP, _WARPS, _ROPE_COPIES = 32, 4, 8  # as narrow.cu has them
_MOST_RESIDENT = 2  # blocks of a multiprocessor, which have all of its registers
_MOST_STAGES, _LEAST_STAGES = 4, 2
_RESERVED = 1024  # bytes of shared memory that the driver keeps of every block


@dataclass(frozen=True)
class Cut:
    """How requests of a kind are compiled and launched."""

    stages: int  # of the ring
    shared: int  # bytes of a block
    resident: int  # blocks of a multiprocessor
    blocks: int  # of the grid

    source: ClassVar[str] = "latent/narrow.cu"
    threads: ClassVar[int] = 32 * _WARPS
    rows: ClassVar[int] = 16

    @property
    def defines(self) -> dict[str, int]:
        """What the kernel is compiled with beside the format."""
        return {"STAGES": self.stages, "SHARED": self.shared, "RESIDENT": self.resident}


def wants_table(fmt: TensorFormat) -> bool:
    """Whether its levels are looked up: those of up to 4 bits are made by byte permutations."""
    return fmt.kind == Kind.LLOYD and fmt.bits > 4


def shared_bytes(layout: PageLayout, stages: int) -> int:
    """Shared memory of a block, as narrow.cu counts it."""
    spec = layout.spec
    queries = 32 * (spec.key_dim + spec.value_dim)
    scores = 4 * _WARPS * 512 + 1024 + 4 * _WARPS * Cut.rows + 16 * Cut.rows + 96
    fields = 2 * _STEP * (1 if spec.value.kind == Kind.RAW else 2)
    stage = _STEP * (spec.key_dim * spec.key.bits + spec.value_dim * spec.value.bits) // 8 + fields
    levels = 4 * _ROPE_COPIES << spec.value.bits if wants_table(spec.value) else 0
    pairs = 256 * 128 if spec.key.kind == Kind.LLOYD and spec.key.bits == 4 else 0  # a copy for every lane
    return queries + scores + stages * stage + levels + pairs


def cut_for(layout: PageLayout, device: Device) -> Cut | None:
    """As many blocks as fit a multiprocessor, then as many stages; None for latents that want a table of levels."""
    if wants_table(layout.spec.key):
        return None
    for resident in range(_MOST_RESIDENT, 0, -1):
        room = min(device.shared_of_block, device.shared_of_multiprocessor // resident - _RESERVED)
        for stages in range(_MOST_STAGES, _LEAST_STAGES - 1, -1):
            need = shared_bytes(layout, stages)
            if need <= room:
                return Cut(stages, need, resident, device.multiprocessors * resident)
    return None
