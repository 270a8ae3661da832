"""Shared by store and gather with one warp per vector (source/vectors)."""

from __future__ import annotations

from functools import cache

import numpy as np
import torch
from torch import Tensor

from slimkv.codec.rotation import block_size, core_size, sign_words, signed_hadamard
from slimkv.ops.cuda.constants import DTYPE_NUMBERS, KIND_NUMBERS, RAW_NUMBER
from slimkv.ops.cuda.device import multiprocessors
from slimkv.ops.cuda.module import Defines
from slimkv.spec import Kind, LatentSpec, PageLayout, SideLayout

LARGEST_DIM, LARGEST_TILE_DIM = 512, 256  # of these kernels, and of those with 16 tokens in a warp
WARPS = 4  # of a thread block


@cache
def format_refusal(layout: PageLayout, any_size: bool = False) -> str | None:
    """Why pages of this layout are not supported, or None. ``any_size``: small heads are."""
    small = max(layout.spec.key_dim, layout.spec.value_dim) <= LARGEST_TILE_DIM
    if small and not any_size and not isinstance(layout.spec, LatentSpec):
        return f"it takes latents, and K and V of head sizes beyond {LARGEST_TILE_DIM}; triton takes others"
    for side in (layout.key, layout.value):
        kind, dim = side.format.kind, side.dim
        if kind == Kind.UNIFORM:
            return f"of latents and of such head sizes it does not take {side.format.name}; triton does"
        if kind == Kind.RAW:
            continue
        if dim > LARGEST_DIM:
            return f"it takes head sizes up to {LARGEST_DIM}, not {dim}; triton takes more"
        core = core_size(dim)
        if kind == Kind.LLOYD and (dim % 32 or block_size(dim) != dim or core > 32 or (core > 1 and dim // core > 32)):
            return f"its rotation does not take a head size of {dim}; triton's does"
    return None


def rotation_signs(side: SideLayout, seed: int, device: torch.device, inverse: bool = False) -> Tensor:
    """uint8: the signs of the dimensions, eight to a byte, and of every column (inverse: row) of the core, a word each.

    Empty where there is no rotation.
    """
    if side.format.kind != Kind.LLOYD:
        return torch.zeros(0, dtype=torch.uint8, device=device)
    core = core_size(side.dim)
    signs = np.array(sign_words(side.dim, seed), np.uint32)
    flips = np.where(np.unpackbits(signs.view(np.uint8), bitorder="little")[:core], -1, 1)
    negative = signed_hadamard(side.dim, seed)[:core, :core] * flips[:, None] < 0
    columns = (negative.T if inverse else negative).astype(np.uint64)
    words = (columns << np.arange(core, dtype=np.uint64)[:, None]).sum(0).astype(np.uint32)
    return torch.from_numpy(np.concatenate([signs, words]).view(np.uint8)).to(device)


def vector_bytes(side: SideLayout) -> int:
    """``VECTOR_BYTES`` of layout.cuh: shared memory of a warp."""
    if side.format.kind == Kind.RAW:
        return 0
    numbers = 4 * (side.dim + -(-side.dim // 32) * 2) if side.format.kind == Kind.LLOYD else 0
    codes = -(-(side.dim + side.dim // 128 * 8) // 16) * 16
    return -(-(numbers + codes) // 16) * 16


def common_defines(layout: PageLayout, long_slots: bool, blocks: int) -> Defines:
    """The defines of both kernels; ``blocks``: thread blocks that a multiprocessor is to hold."""
    return Defines({
        "BLOCK_SIZE": layout.block_size, "LONG_SLOTS": int(long_slots), "WARPS": WARPS, "MIN_BLOCKS": blocks,
    })  # fmt: skip


def side_defines(prefix: str, side: SideLayout, dtype: torch.dtype, **own: int) -> dict[str, int]:
    """The defines for a side of dense vectors of ``dtype``; ``own``: those of one kernel alone."""
    common = {
        "D": side.dim, "CORE": core_size(side.dim), "KIND": KIND_NUMBERS.get(side.format.kind, RAW_NUMBER),
        "BITS": side.format.bits, "CODES": side.codes_offset, "FIELDS": side.fields_offset,
        "DTYPE": DTYPE_NUMBERS[dtype],
    }  # fmt: skip
    return {f"{prefix}_{name}": number for name, number in (common | own).items()}


def grid(tokens: int, heads: int, device: torch.device, blocks: int) -> tuple[int, int]:
    """As many thread blocks for each side as run at a time, ``blocks`` a multiprocessor: the shorter side ends soon."""
    return min(-(-tokens // WARPS), max(1, blocks * multiprocessors(device) // heads)), 2 * heads
