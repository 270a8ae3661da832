"""Constants that the launchers share with the CUDA sources (``source/common/types.cuh``)."""

from __future__ import annotations

import math

import torch

from slimkv.spec import Kind, SideLayout

KIND_NUMBERS = {Kind.LLOYD: 0, Kind.UNIFORM: 1, Kind.FP8: 2}
RAW_NUMBER = 3  # only latent attention and stores support raw sides
DTYPE_NUMBERS = {torch.float16: 0, torch.bfloat16: 1, torch.float32: 2}
LOG2E = math.log2(math.e)


def side_defines(prefix: str, side: SideLayout) -> dict[str, int]:
    """The kind and width of K's or V's codes, and the place of their fields in a page."""
    kind = KIND_NUMBERS[side.format.kind]
    return {f"{prefix}_KIND": kind, f"{prefix}_BITS": side.format.bits, f"{prefix}_FIELDS": side.fields_offset}
