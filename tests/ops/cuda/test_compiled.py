"""Every configuration compiles for every architecture, within registers and shared memory; needs NVRTC but no GPU."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import pytest
import torch
from cubin import resources

from slimkv.ops.attention.api import AttendOptions
from slimkv.ops.attention.cuda import prefill_config, prefill_defines
from slimkv.ops.attention.cuda.decode_config import DECODE, VERIFY, VERIFY_WARPS, config_for
from slimkv.ops.attention.cuda.decode_defines import kernel_defines
from slimkv.ops.cuda.compiler import compile_kernels
from slimkv.ops.cuda.device import Device, record_of
from slimkv.ops.latent.cuda import launch as latent
from slimkv.ops.latent.cuda.config import config_for as latent_config_for
from slimkv.ops.store.cuda import launch as store
from slimkv.spec import CodecSpec, LatentSpec, PageLayout
from tail import sample

ARCHITECTURES = {
    "sm_80": (8, 0), "sm_86": (8, 6), "sm_89": (8, 9), "sm_90a": (9, 0), "sm_100": (10, 0), "sm_103": (10, 3),
    "sm_120": (12, 0),
}  # fmt: skip
LAYOUTS = [
    ("k4v4", 64),
    ("k4v4", 96),
    ("k4v4", 128),
    ("k4v4", 256),
    ("k6v5", 128),
    ("ku4vfp8", 128),
    ("turboquant_k8v4", 128),
    ("k8v8", 256),
]
BF16 = 1
REGISTERS = 65536  # per multiprocessor
MOST_LOCAL = 176  # bytes per thread: spills outside of loops; kernels with mma.sync have hardly any
# The limits of verification include maxima and sums of up to 16 rows a lane, which are used once per tile of scores.
MOST_LOCAL_BY_SOURCE = {DECODE: MOST_LOCAL, VERIFY_WARPS: 320, VERIFY: 540}


@dataclass(frozen=True)
class Kernel:
    """A kernel and its launch parameters."""

    name: str
    source: str
    defines: dict[str, int]
    threads: int
    shared: int
    blocks_per_sm: int = 1
    kernel: str = "attend"
    most_local: int = MOST_LOCAL


ROWS = ((4, 1), (8, 1), (4, 4), (4, 8), (4, 16), (6, 8))  # query heads per KV head, queries per sequence


def _decode(device: Device, layout: PageLayout, name: str, rows: Iterable[tuple[int, int]] = ROWS) -> Iterator[Kernel]:
    for group, queries in rows:
        config = config_for(device, layout, group, queries)
        if config is None:  # the Triton kernel is used instead
            continue
        defines = kernel_defines(layout, config, BF16, BF16, False, False)
        yield Kernel(
            f"decode-{name}-{config}",
            config.source,
            defines,
            32 * config.warps,
            defines["SHARED"],
            config.blocks_per_sm,
            most_local=MOST_LOCAL_BY_SOURCE[config.source],
        )


def _prefill(device: Device, layout: PageLayout, name: str) -> Iterator[Kernel]:
    spec, kinds = layout.spec, [(u, e) for u in prefill_defines.Unpack for e in (False, True)]
    found = [config for kind in kinds for config in prefill_config.configs(spec, *kind)]
    if not device.warpgroups:
        options = (AttendOptions(prefill=prefill) for prefill in ("16bit", "8bit"))
        found = [config for option in options for config in prefill_config.reachable(device, spec, option)]
    for config in found:
        defines = prefill_defines.attend_defines(layout, config, BF16, BF16, True, True)
        local = 80 if config.single_warps and not config.eight_bit else MOST_LOCAL
        yield Kernel(
            f"prefill-{name}-{config}", config.source, defines, config.threads, defines["SHARED"],
            config.blocks_per_sm, most_local=local,
        )  # fmt: skip
        if not (config.fused or config.ahead):
            to_unpack = prefill_defines.unpack_defines(layout, config)
            yield Kernel(
                f"unpack-{name}-{config}", prefill_defines.UNPACK, to_unpack, 2 * config.tile_tokens,
                to_unpack["SHARED"], kernel="unpack",
            )  # fmt: skip


def _store(layout: PageLayout, name: str) -> Iterator[Kernel]:
    rows = (torch.bfloat16, True)
    for few in (False, True):
        for query_aware in (0, 1):
            if store.format_refusal(layout) is None and store.in_tiles(layout):
                plan = store._plan(layout, torch.device("cpu"), rows, rows, True, few, query_aware)
                yield Kernel(
                    f"store-{name}-{few}-{query_aware}", plan.source, dict(plan.defines), plan.threads, plan.shared,
                    kernel=plan.kernel,
                )  # fmt: skip


def _latents(device: Device) -> Iterator[Kernel]:
    layout, bf16 = PageLayout(LatentSpec.parse("c4"), 64), torch.bfloat16
    for heads in (16, 32, 64) if device.warpgroups else ():
        config = latent_config_for(layout, heads, device)
        defines = latent.kernel_defines(layout, config, bf16, bf16, bf16)
        yield Kernel(f"latent-{heads}", config.kernel.source, defines, config.kernel.threads, config.shared)


def kernels(device: Device) -> dict[str, Kernel]:
    """The distinct kernels that the tables select for a device, by name."""
    found = [*_latents(device)]
    for format, dim in LAYOUTS:
        layout, name = PageLayout(CodecSpec.parse(format, dim), 64), f"{format}-{dim}"
        found += [*_decode(device, layout, name), *_prefill(device, layout, name), *_store(layout, name)]
    return {kernel.name: kernel for kernel in found}


def check(kernel: Kernel, architecture: str, folder) -> None:
    """Compiles a kernel and checks its resources."""
    device = record_of(ARCHITECTURES[architecture], 100)
    used = resources(compile_kernels(kernel.source, kernel.defines, architecture, folder))[kernel.kernel]
    shared = kernel.shared + (0 if device.copy_engine else used.shared_bytes)  # from sm_90 on, a reserved 1 KB
    assert shared <= device.shared_of_block
    assert (shared + 1024) * kernel.blocks_per_sm <= device.shared_of_multiprocessor
    assert -(-used.registers // 8) * 8 * kernel.threads * kernel.blocks_per_sm <= REGISTERS
    assert used.local_bytes <= kernel.most_local, f"{used.local_bytes} bytes of local memory a thread"
    assert not (architecture == "sm_90a" and used.serialized), "products wait for one another"


@pytest.fixture
def smallest(monkeypatch, request):
    """Makes plans of ``store`` use the record of the given device."""
    monkeypatch.setattr(store, "device_of", lambda device: record_of(ARCHITECTURES[request.param], 100))
    store._plan.cache_clear()
    yield request.param
    store._plan.cache_clear()


@pytest.mark.slow
@pytest.mark.parametrize("smallest", ARCHITECTURES, indirect=True)
def test_every_configuration(smallest, tmp_path, subtests):
    pytest.importorskip("cuda.bindings.nvrtc")
    for name, kernel in kernels(record_of(ARCHITECTURES[smallest], 100)).items():
        with subtests.test(name):
            check(kernel, smallest, tmp_path)


@pytest.mark.parametrize("architecture", sample(ARCHITECTURES, len(ARCHITECTURES)))
def test_decode_and_verification(architecture, tmp_path):
    pytest.importorskip("cuda.bindings.nvrtc")
    layout = PageLayout(CodecSpec.parse("k4v4", 64), 64)
    kernels = list(_decode(record_of(ARCHITECTURES[architecture], 100), layout, "sample", ((4, 1), (4, 8))))
    assert len(kernels) == 2
    for kernel in kernels:
        check(kernel, architecture, tmp_path)


@pytest.mark.parametrize("architecture", sample(["sm_80", "sm_120"], 2))
def test_prefill_without_warpgroups(architecture, tmp_path):
    pytest.importorskip("cuda.bindings.nvrtc")
    layout = PageLayout(CodecSpec.parse("k4v4", 64), 64)
    for kernel in _prefill(record_of(ARCHITECTURES[architecture], 100), layout, "sample"):
        check(kernel, architecture, tmp_path)


def test_every_architecture_has_all_kernels():
    """Every device gets kernels: shared memory suffices for some configuration."""
    counts = {name: len(kernels(record_of(capability, 100))) for name, capability in ARCHITECTURES.items()}
    assert min(counts.values()) >= 40
    assert counts["sm_90a"] == max(counts.values())
