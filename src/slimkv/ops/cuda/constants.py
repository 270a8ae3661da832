"""Constants that the launchers share with the CUDA sources (``source/common/types.cuh``)."""

from __future__ import annotations

import math

import torch

from slimkv.spec import Kind

KIND_NUMBERS = {Kind.LLOYD: 0, Kind.UNIFORM: 1, Kind.FP8: 2}
RAW_NUMBER = 3  # only latent attention and stores support raw sides
DTYPE_NUMBERS = {torch.float16: 0, torch.bfloat16: 1, torch.float32: 2}
LOG2E = math.log2(math.e)
