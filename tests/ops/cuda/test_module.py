"""Kernel launches with a driver that records its calls."""

from __future__ import annotations

import ctypes
import gc
import threading
from enum import IntEnum

import pytest
import torch

from slimkv.ops.cuda import module
from slimkv.ops.cuda.compiler import CompileError
from slimkv.ops.cuda.module import Defines, Kernel, load, only_loading, start_loading


class Result(IntEnum):
    SUCCESS, FAILURE = 0, 700


class Args(ctypes.Structure):
    _fields_ = (("number", ctypes.c_int),)


class Config:
    hStream = 0


class Driver:
    def __init__(self):
        self.launched, self.answer = [], Result.SUCCESS

    def cuLaunchKernelEx(self, config, function, parameters, extra):
        args = ctypes.c_void_p.from_address(parameters).value
        assert args is not None
        self.launched.append((config.hStream, function, ctypes.c_int.from_address(args).value))
        return (self.answer,)

    def cuGetErrorString(self, result):
        return Result.SUCCESS, b"an illegal memory access"


@pytest.fixture
def driver():
    return Driver()


@pytest.fixture
def kernel(driver, monkeypatch):
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 70 + index, raising=False)
    monkeypatch.setattr(Kernel, "_config", lambda *call: Config())
    return Kernel("function", driver, "store")


def test_a_launch_takes_the_arguments_as_they_are_and_the_devices_stream(kernel, driver):
    kernel.launch((1, 1), 32, 0, Args(5), torch.device("cuda", 1))
    assert driver.launched == [(71, "function", 5)]


def test_launches_on_two_streams_share_no_configuration(kernel, driver, monkeypatch):
    """Two threads with different current streams launch one kernel."""
    used = []
    monkeypatch.setattr(driver, "cuLaunchKernelEx", lambda config, *rest: used.append(config) or (Result.SUCCESS,))
    for stream in (1, 2, 1):
        monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index, stream=stream: stream)
        kernel.launch((1, 1), 32, 0, Args(5), torch.device("cuda", 0))
    assert [config.hStream for config in used] == [1, 2, 1]
    assert used[0] is used[2]


def test_a_bound_launch_keeps_its_arguments_and_sees_what_they_become(kernel, driver):
    args = Args(5)
    launch = kernel.bound((1, 1), 32, 0, args, torch.device("cuda", 0))
    launch()
    args.number = 6
    del args
    gc.collect()
    launch()
    assert driver.launched == [(70, "function", 5), (70, "function", 6)]


def test_a_failed_launch_says_which_kernel_and_why(kernel, driver):
    driver.answer = Result.FAILURE
    with pytest.raises(CompileError, match="store: an illegal memory access"):
        kernel.launch((1, 1), 32, 0, Args(5), torch.device("cuda", 0))


def test_kernels_are_compiled_once_at_the_same_time_and_not_launched(monkeypatch):
    """Two compilations run concurrently: each waits until the other has started."""
    both, compiled, device = threading.Barrier(2), [], torch.device("cuda", 0)

    def compile_one(source, defines, *rest):
        compiled.append(defines)
        both.wait(timeout=30)
        return source

    monkeypatch.setattr(module, "_load", compile_one)
    monkeypatch.setattr(module, "_loading", {})
    sources = ["one.cu", "two.cu"]
    with only_loading():
        for source in sources * 2:
            load(source, Defines(A=1), device).kernel("attend").launch((1, 1), 32, 0, Args(5), device)
    assert [start_loading(source, Defines(A=1), device).result() for source in sources] == sources
    assert load("one.cu", Defines(A=1), device) == "one.cu"
    assert len(compiled) == 2
