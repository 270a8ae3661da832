"""How the kernel of few rows (source/latent/narrow.cu) is cut: one block for every multiprocessor."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from slimkv.ops.attention.cuda.device import Device
from slimkv.spec import Kind, PageLayout, TensorFormat

_STEP, _WARPS, _ROPE_COPIES = 32, 4, 32  # as narrow.cu has them
_MOST_TEAMS = 2  # they have all registers of a multiprocessor
_MOST_STAGES, _LEAST_STAGES = 4, 2


@dataclass(frozen=True)
class Cut:
    """How requests of a kind are compiled and launched."""

    teams: int  # of four warps, which take turns with the steps of a block
    stages: int  # of a team's ring
    shared: int  # bytes of a block
    blocks: int  # of the grid

    source: ClassVar[str] = "latent/narrow.cu"
    rows: ClassVar[int] = 16

    @property
    def threads(self) -> int:
        """Of a block."""
        return 32 * _WARPS * (self.teams + 1)

    @property
    def defines(self) -> dict[str, int]:
        """What the kernel is compiled with beside the format."""
        return {"TEAMS": self.teams, "STAGES": self.stages, "SHARED": self.shared}


def wants_table(fmt: TensorFormat) -> bool:
    """Whether its levels are looked up one by one: those of up to 4 bits are made by byte permutations, or in pairs."""
    return fmt.kind == Kind.LLOYD and fmt.bits > 4


def _entries(fmt: TensorFormat) -> int:
    """Of the table of the latent's levels: pairs of codes of 4 bits, bytes that have codes of 6 bits, or codes."""
    if wants_table(fmt):
        return 1 << (8 if fmt.bits == 6 else fmt.bits)
    return 256 if fmt.kind == Kind.LLOYD and fmt.bits == 4 else 0


def shared_bytes(layout: PageLayout, teams: int, stages: int) -> int:
    """Shared memory of a block, as narrow.cu counts it."""
    spec = layout.spec
    queries = 32 * (spec.key_dim + spec.value_dim)
    scores = 4 * _WARPS * 512 + 1024 + 4 * _WARPS * Cut.rows + 96 + 4 * Cut.rows
    fields = 2 * _STEP * (1 if spec.value.kind == Kind.RAW else 2)
    stage = _STEP * (spec.key_dim * spec.key.bits + spec.value_dim * spec.value.bits) // 8 + fields
    levels = 4 * _ROPE_COPIES << spec.value.bits if wants_table(spec.value) else 0
    entries = _entries(spec.key)
    scratch = 64 * spec.key_dim if teams > 1 else 0
    return queries + 16 * Cut.rows + 64 + levels + 128 * entries + scratch + teams * (scores + stages * stage)


def cut_for(layout: PageLayout, device: Device) -> Cut | None:
    """As many teams as fit a multiprocessor, then as many stages; None where nothing fits."""
    for teams in range(_MOST_TEAMS, 0, -1):
        for stages in range(_MOST_STAGES, _LEAST_STAGES - 1, -1):
            need = shared_bytes(layout, teams, stages)
            if need <= device.shared_of_block:
                return Cut(teams, stages, need, device.multiprocessors)
    return None
