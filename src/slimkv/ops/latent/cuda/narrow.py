"""How the kernel of few rows (source/latent/narrow.cu) is cut: a grid that fills the device, whatever the lengths."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from slimkv.ops.attention.cuda.shape import Device
from slimkv.spec import Kind, PageLayout, TensorFormat

ROWS = 16
_STEP, _WARPS, _LEVEL_COPIES, _ROPE_COPIES = 32, 4, 32, 8  # as narrow.cu has them
_RESERVED = 1024  # bytes of shared memory that the driver keeps of every block


@dataclass(frozen=True)
class Variant:
    """Choices of the kernel."""

    resident: int = 3  # blocks of a multiprocessor
    most_stages: int = 4
    shared_values: int = 0
    query_registers: int = 0
    move_early: int = 0


VARIANT = Variant()
EXTRA: dict[str, int] = {}


@dataclass(frozen=True)
class Cut:
    """How requests of a kind are compiled and launched."""

    stages: int  # of the ring
    shared: int  # bytes of a block
    blocks: int  # of the grid
    resident: int  # blocks of a multiprocessor
    variant: Variant = field(default_factory=Variant)

    SOURCE: ClassVar[str] = "latent/narrow.cu"
    THREADS: ClassVar[int] = 128
    ROWS: ClassVar[int] = ROWS

    @property
    def defines(self) -> dict[str, int]:
        """What the kernel is compiled with beside the format."""
        v = self.variant
        return {
            "STAGES": self.stages, "SHARED": self.shared, "RESIDENT": self.resident, "V_SHARED": v.shared_values,
            "Q_REGISTERS": v.query_registers, "MOVE_EARLY": v.move_early, **EXTRA,
        }  # fmt: skip


def _level_entries(fmt: TensorFormat) -> int:
    return 1 << fmt.bits if fmt.kind == Kind.LLOYD and fmt.bits > 4 else 0


def shared_bytes(layout: PageLayout, stages: int, variant: Variant) -> int:
    """Shared memory of a block, as narrow.cu counts it."""
    spec = layout.spec
    slices, rope_slices = spec.key_dim // 16, spec.value_dim // 16
    tile = 4 * (spec.key_dim * spec.key.bits + spec.value_dim * spec.value.bits)
    stage = tile + 2 * _STEP * (1 if spec.value.kind == Kind.RAW else 2)
    levels = 4 * (_LEVEL_COPIES * _level_entries(spec.key) + _ROPE_COPIES * _level_entries(spec.value))
    scores = 4 * _WARPS * 512 + 1024 + 4 * _WARPS * ROWS + 16 * ROWS + 64
    values = 2 * slices * 512 if variant.shared_values else 0
    queries = 512 * ((0 if variant.shared_values and variant.query_registers else slices) + rope_slices)
    return queries + scores + values + stages * stage + levels


def cut_for(layout: PageLayout, device: Device) -> Cut:
    """The largest ring of as many blocks as the registers allow."""
    for resident in range(VARIANT.resident, 0, -1):
        room = min(device.shared_of_block, device.shared_of_multiprocessor // resident - _RESERVED)
        for stages in range(VARIANT.most_stages, 1, -1):
            need = shared_bytes(layout, stages, VARIANT)
            if need <= room:
                return Cut(stages, need, device.multiprocessors * resident, resident, VARIANT)
    raise AssertionError("a ring of two stages fits")
