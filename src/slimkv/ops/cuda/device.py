"""The device properties that kernels and their configurations depend on, in one record."""

from __future__ import annotations

import os
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import Any

import torch

from slimkv.errors import InputError

AS_DEVICE = "SLIMKV_AS_DEVICE"  # environment variable: names the record that a larger GPU is limited to
_LARGE = {"shared_of_multiprocessor": 228 << 10, "shared_of_block": 227 << 10}
_SMALL = {"shared_of_multiprocessor": 100 << 10, "shared_of_block": 99 << 10}


@dataclass(frozen=True)
class Device:
    """Multiprocessors, shared memory in bytes, instructions, and tensor-core rates.

    Rates of int8 and e4m3 are relative to fp16 with fp32 accumulation; 0 means not supported.
    """

    multiprocessors: int
    shared_of_multiprocessor: int
    shared_of_block: int
    copy_engine: bool = False  # cp.async.bulk with an mbarrier
    warpgroups: bool = False  # wgmma
    int8_rate: float = 2.0
    fp8_rate: float = 0.0
    target: str = ""  # the architecture that kernels are compiled for, if not the device's own

    @property
    def multiplies_bytes(self) -> bool:
        """Whether int8 products are at least as fast as fp16 ones. If not, decode multiplies codes as fp16."""
        return self.int8_rate >= 1

    def says(self) -> str:
        """The record in words."""
        prefill = "wgmma" if self.warpgroups else "mma.sync"
        rates = ", ".join(
            f"{name} at {rate:g}x the rate of fp16" if rate else f"no {name} tensor cores"
            for name, rate in (("int8", self.int8_rate), ("fp8", self.fp8_rate))
        )
        return (
            f"{self.multiprocessors} multiprocessors, {self.shared_of_block >> 10} KB of shared memory a block, "
            f"prefill with {prefill}, {'bulk' if self.copy_engine else 'no bulk'} copies, {rates}; decode multiplies "
            f"codes of up to 4 bits as {'int8' if self.multiplies_bytes else 'fp16'}"
        )


# Shared memory and instructions by compute capability; rates of data-centre cards. On consumer cards fp16 products with
# fp32 sums run at half rate, so both relative rates double.
_BY_CAPABILITY: dict[tuple[int, int], dict[str, Any]] = {
    (8, 0): {"shared_of_multiprocessor": 164 << 10, "shared_of_block": 163 << 10},
    (8, 6): {**_SMALL, "int8_rate": 4.0},
    (8, 7): {"shared_of_multiprocessor": 164 << 10, "shared_of_block": 163 << 10},
    (8, 9): {**_SMALL, "int8_rate": 4.0, "fp8_rate": 2.0},
    (9, 0): {**_LARGE, "copy_engine": True, "warpgroups": True, "fp8_rate": 2.0},
    (10, 0): {**_LARGE, "copy_engine": True, "fp8_rate": 2.0},
    (10, 3): {**_LARGE, "copy_engine": True, "int8_rate": 0.06, "fp8_rate": 2.0},
    (12, 0): {**_SMALL, "copy_engine": True, "int8_rate": 4.0, "fp8_rate": 2.0},
}
# The names that AS_DEVICE accepts. On a newer GPU, kernels are compiled for the named one.
NAMED = {"a100": (8, 0), "rtx4090": (8, 9), "rtx5090": (12, 0), "b300": (10, 3)}


def record_of(capability: tuple[int, int], multiprocessors: int) -> Device:
    """The record of a compute capability, or of the nearest older one in the table."""
    known = max((c for c in _BY_CAPABILITY if c <= capability), default=(8, 0))
    return Device(multiprocessors, **_BY_CAPABILITY[known] | ({} if known == capability else {"warpgroups": False}))


def held_to(device: Device, name: str, capability: tuple[int, int]) -> Device:
    """``device`` limited to the features of the named GPU; it keeps its own number of multiprocessors."""
    if name not in NAMED:
        raise InputError(f"{AS_DEVICE}={name!r} is not a known device; known are {', '.join(sorted(NAMED))}")
    named = record_of(NAMED[name], device.multiprocessors)
    least = {f.name: min(getattr(device, f.name), getattr(named, f.name)) for f in fields(Device) if f.name != "target"}
    major, minor = NAMED[name]
    return replace(device, **least, target=f"compute_{major}{minor}" if (major, minor) < capability else "")


def held_name() -> str:
    """The name of the record that this process's GPUs are limited to; empty if they are not."""
    return os.environ.get(AS_DEVICE, "")


def hold_to(name: str) -> None:
    """Limits the GPUs of this process and its children to a named record. Call it before anything runs on them."""
    held_to(record_of((12, 0), 1), name, (12, 0))  # refuses an unknown name
    os.environ[AS_DEVICE] = name
    device_of.cache_clear()


@lru_cache(maxsize=64)
def device_of(device: torch.device) -> Device:
    """The record of a device, limited by AS_DEVICE. A CPU, where tests run kernels, counts as a small Hopper GPU."""
    if device.type != "cuda":
        return record_of((9, 0), 2)
    about: Any = torch.cuda.get_device_properties(device)
    capability = (about.major, about.minor)
    record = replace(
        record_of(capability, about.multi_processor_count),
        shared_of_multiprocessor=about.shared_memory_per_multiprocessor,
        shared_of_block=about.shared_memory_per_block_optin,
    )
    return held_to(record, held_name(), capability) if held_name() else record
