"""What the CUDA decode kernel is compiled with."""

from __future__ import annotations

from functools import lru_cache

from slimkv.codec.rotation import core_size
from slimkv.ops.attention.cuda.shape import Shape
from slimkv.ops.attention.cuda.shared_memory import shared_bytes
from slimkv.ops.cuda.constants import KIND_NUMBERS
from slimkv.ops.cuda.module import Defines
from slimkv.spec import PageLayout, SideLayout


@lru_cache(maxsize=256)
def kernel_defines(
    layout: PageLayout, shape: Shape, q_type: int, out_type: int, window: bool, softcap: bool
) -> Defines:
    """What decode/decode.cu is compiled with."""

    def side(prefix: str, s: SideLayout) -> dict[str, int]:
        return {
            f"{prefix}_KIND": KIND_NUMBERS[s.format.kind],
            f"{prefix}_BITS": s.format.bits,
            f"{prefix}_FIELDS": s.fields_offset,
            f"{prefix}_ROTATED": int(s.format.rotated),
            f"{prefix}_CORE": core_size(s.dim),
        }

    return Defines({
        "BLOCK_SIZE": layout.block_size, "KD": layout.spec.key_dim, "VD": layout.spec.value_dim,
        "V_CODES": layout.value.codes_offset, **side("K", layout.key), **side("V", layout.value),
        "NG": shape.groups, "WIDE": int(shape.wide), "NT": shape.tiles, "WARPS": shape.warps,
        "TEAM": shape.team, "WGMMA": int(shape.warpgroup), "ROLES": int(shape.roles), "STAGES": shape.stages,
        "BULK": int(shape.bulk), "APART": int(shape.apart), "CLUSTER": shape.cluster,
        "WHOLE": int(shape.whole), "POLLED": int(shape.polled), "MIN_BLOCKS": shape.resident,
        "SHARED": shared_bytes(layout, shape), "Q_TYPE": q_type, "OUT_TYPE": out_type,
        "WINDOW": int(window), "SOFTCAP": int(softcap),
    })  # fmt: skip
