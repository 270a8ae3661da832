"""Device records, and limiting a larger GPU to the record of a smaller one."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from slimkv.doctor import _cuda
from slimkv.errors import InputError
from slimkv.lab.provenance import device_name
from slimkv.ops.cuda import device as devices
from slimkv.ops.cuda.device import NAMED, device_of, held_to, record_of

H200 = record_of((9, 0), 132)
SMALL_BLOCK = 101376


@pytest.fixture
def gpu(monkeypatch):
    """Makes torch report a GPU of this compute capability."""

    def make(capability, as_device=None, shared=(233472, 232448)):
        about = SimpleNamespace(
            name="a GPU", total_memory=24 << 30, major=capability[0], minor=capability[1], multi_processor_count=132,
            shared_memory_per_multiprocessor=shared[0], shared_memory_per_block_optin=shared[1],
        )  # fmt: skip
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: about)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        if as_device:
            monkeypatch.setenv(devices.AS_DEVICE, as_device)
        device_of.cache_clear()
        return device_of(torch.device("cuda", 0))

    yield make
    device_of.cache_clear()


def test_hopper_alone_has_products_of_warpgroups(gpu):
    assert gpu((9, 0)).warpgroups
    for capability in ((8, 0), (8, 6), (8, 9), (10, 0), (10, 3), (12, 0), (12, 1), (13, 0)):
        assert not gpu(capability).warpgroups, capability


@pytest.mark.parametrize("name", sorted(NAMED))
def test_a_gpu_that_is_held_to_a_record_has_no_more_than_that(name, gpu):
    held = gpu((9, 0), name)
    named = record_of(NAMED[name], 1)
    assert held.shared_of_block == min(named.shared_of_block, H200.shared_of_block)
    assert not held.warpgroups
    assert held.copy_engine == named.copy_engine
    assert held.multiprocessors == 132
    # Kernels are compiled for the older architecture, because a GPU does not run those of newer ones.
    assert held.target == {"a100": "compute_80", "rtx4090": "compute_89"}.get(name, "")


def test_a_smaller_gpu_gains_nothing(gpu):
    held = gpu((8, 9), "b300", (102400, SMALL_BLOCK))
    assert (held.shared_of_block, held.copy_engine, held.target) == (SMALL_BLOCK, False, "")


def test_an_unknown_name_is_refused(monkeypatch):
    with pytest.raises(InputError, match=r"'rtx3060' is not .*known are a100, b300, rtx4090, rtx5090"):
        held_to(H200, "rtx3060", (9, 0))
    with pytest.raises(InputError, match="rtx3060"):
        devices.hold_to("rtx3060")


def test_doctor_says_which_record_a_gpu_got(gpu):
    gpu((9, 0))
    assert "227 KB of shared memory a block, prefill with wgmma, bulk copies" in _cuda().detail
    gpu((9, 0), "rtx4090")
    detail = _cuda().detail
    assert "held to SLIMKV_AS_DEVICE=rtx4090" in detail
    assert "99 KB of shared memory a block, prefill with mma.sync, no bulk copies" in detail
    gpu((10, 3), "b300")
    detail = _cuda().detail
    assert "int8 at 0.06x the rate of fp16, fp8 at 2x" in detail
    assert "decode multiplies codes of up to 4 bits as fp16" in detail


def test_reports_name_the_record_that_a_gpu_is_held_to(gpu, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    gpu((9, 0))
    assert device_name("cuda") == "a GPU"
    gpu((9, 0), "rtx4090")
    assert device_name("cuda") == "a GPU limited to rtx4090"
