"""The compile-time defines of the CUDA decode kernels."""

from __future__ import annotations

from functools import lru_cache

from slimkv.codec.rotation import core_size
from slimkv.ops.attention.cuda.decode_config import DecodeConfig
from slimkv.ops.attention.cuda.shared_memory import shared_bytes
from slimkv.ops.cuda.constants import side_defines
from slimkv.ops.cuda.module import Defines
from slimkv.spec import PageLayout


@lru_cache(maxsize=256)
def kernel_defines(
    layout: PageLayout, config: DecodeConfig, q_type: int, out_type: int, window: bool, softcap: bool
) -> Defines:
    """The defines of ``config.source``; decode/shape.cuh explains them."""
    key_core, value_core = (core_size(s.dim) if s.format.rotated else 0 for s in (layout.key, layout.value))
    return Defines({
        "BLOCK_SIZE": layout.block_size, "KD": layout.spec.key_dim, "VD": layout.spec.value_dim,
        "V_CODES": layout.value.codes_offset, **side_defines("K", layout.key), **side_defines("V", layout.value),
        "K_CORE": key_core, "V_CORE": value_core,
        "COLUMNS": config.rows, "BLOCK_TOKENS": config.block_tokens, "WARPS": config.warps, "STAGES": config.stages,
        "BULK": int(config.bulk), "EXACT": config.exact + config.narrow, "BLOCKS_PER_SM": config.blocks_per_sm,
        "SHARED": shared_bytes(layout, config), "Q_TYPE": q_type, "OUT_TYPE": out_type,
        "WINDOW": int(window), "SOFTCAP": int(softcap),
    })  # fmt: skip
