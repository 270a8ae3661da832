"""Compiled kernels on a device, and their launch on torch's current stream."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache, partial
from threading import Lock
from typing import Any

import torch

from slimkv.ops.cuda.compiler import CompileError, compile_kernels
from slimkv.ops.cuda.device import device_of


class Kernel:
    """One kernel of a module. It takes exactly one argument: a structure, by value."""

    def __init__(self, function: Any, driver: Any, name: str, may_overlap: bool = True) -> None:
        self.name = name
        self._may_overlap = may_overlap
        self._function = function
        self._driver = driver
        self._configs: dict[tuple, Any] = {}
        self._shared_limit = 48 << 10

    def launch(
        self, grid: tuple[int, int], threads: int, shared: int, args: ctypes.Structure, device: torch.device,
        overlap: bool = False,
    ) -> None:  # fmt: skip
        """Queues the kernel on the device's current stream.

        With ``overlap`` (programmatic dependent launch), blocks may start before the previous kernel of the stream has
        finished, if the hardware supports it. The kernel must then wait before it reads that kernel's results.
        """
        # A configuration per stream, because threads with different streams share this kernel.
        stream = torch._C._cuda_getCurrentRawStream(_index(device))
        key = (grid, threads, shared, overlap, stream)
        config = self._configs.get(key)
        if config is None:
            config = self._config(grid, threads, shared, overlap)
            config.hStream = stream
            self._configs[key] = config
        self._queue(config, ctypes.pointer(args))

    def bound(
        self, grid: tuple[int, int], threads: int, shared: int, args: ctypes.Structure, device: torch.device,
        overlap: bool = False,
    ) -> Callable[[], None]:  # fmt: skip
        """A function that does what ``launch`` does, with the current content of ``args``; it is not thread-safe."""
        config = self._config(grid, threads, shared, overlap)
        return partial(self._start, config, ctypes.pointer(args), _index(device))

    def _start(self, config: Any, args: Any, index: int) -> None:
        # As torch's compiled code does; torch.cuda.current_stream() would create an object for the same number.
        config.hStream = torch._C._cuda_getCurrentRawStream(index)
        self._queue(config, args)

    def _queue(self, config: Any, args: Any) -> None:
        result = self._driver.cuLaunchKernelEx(config, self._function, ctypes.addressof(args), 0)
        if result[0]:
            _checked(self._driver, result, self.name)

    def _config(self, grid: tuple[int, int], threads: int, shared: int, overlap: bool) -> Any:
        driver = self._driver
        if shared > self._shared_limit:
            which = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            _checked(driver, driver.cuFuncSetAttribute(self._function, which, shared), self.name)
            self._shared_limit = shared
        config = driver.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = *grid, 1
        config.blockDimX, config.blockDimY, config.blockDimZ = threads, 1, 1
        config.sharedMemBytes = shared
        if overlap and self._may_overlap:
            attribute = driver.CUlaunchAttribute()
            attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
            attribute.value.programmaticStreamSerializationAllowed = 1
            config.attrs = [attribute]
            config.numAttrs = 1
        else:
            config.numAttrs = 0
        return config


class Module:
    """The kernels of one source file, compiled with one set of defines, on one device."""

    def __init__(self, code: bytes, device: torch.device, may_overlap: bool = True) -> None:
        from cuda.bindings import driver

        with torch.cuda.device(device):
            torch.cuda.current_stream(device).cuda_stream  # noqa: B018 - makes torch create the device's context
            # A new thread has no current context, and warm-up loads modules in several threads.
            context = _checked(driver, driver.cuDevicePrimaryCtxRetain(torch.cuda.current_device()))
            _checked(driver, driver.cuCtxSetCurrent(context))
            self._handle = _checked(driver, driver.cuModuleLoadData(code))
        self._driver = driver
        self._may_overlap = may_overlap
        self._kernels: dict[str, Kernel] = {}

    def kernel(self, name: str) -> Kernel:
        """The kernel called ``name``."""
        if name not in self._kernels:
            function = _checked(self._driver, self._driver.cuModuleGetFunction(self._handle, name.encode()), name)
            self._kernels[name] = Kernel(function, self._driver, name, self._may_overlap)
        return self._kernels[name]


class Defines(dict[str, int]):
    """The compile-time defines of a source, created once per kind of request and compared by identity."""

    __hash__ = object.__hash__  # type: ignore[assignment]


def load(source: str, defines: Defines, device: torch.device, exactly: bool = False) -> Module:
    """The kernels of ``source`` compiled with ``defines`` for ``device``; compiled once per machine, loaded once.

    ``exactly``: with architecture-specific instructions, which successors do not support (sm_90a instead of sm_90).
    """
    if _only_loading.get():
        start_loading(source, defines, device, exactly)
        return _Skipped()
    return _loaded(source, defines, _index(device), exactly)


def start_loading(source: str, defines: Defines, device: torch.device, exactly: bool = False) -> Future[Module]:
    """A future of ``load``. Threads compile in parallel, since the compiler releases the interpreter lock."""
    key = (source, tuple(defines.items()), _index(device), exactly)
    with _lock:
        if key not in _loading:
            _loading[key] = _pool().submit(_load, *key)
        return _loading[key]


@contextmanager
def only_loading() -> Iterator[None]:
    """A context in which requested kernels start to compile and load, and launches do nothing."""
    token = _only_loading.set(True)
    try:
        yield
    finally:
        _only_loading.reset(token)


class _Skipped(Module):
    """A module and a kernel at once, whose launches do nothing."""

    def __init__(self) -> None:
        pass

    def kernel(self, name: str) -> Any:
        return self

    def launch(self, *call: Any, **options: Any) -> None:
        pass


_only_loading: ContextVar[bool] = ContextVar("only_loading", default=False)
_loading: dict[tuple[Any, ...], Future[Module]] = {}
_lock = Lock()


@cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(os.cpu_count(), "slimkv-compile")


@cache
def _loaded(source: str, defines: Defines, index: int, exactly: bool) -> Module:
    return start_loading(source, defines, torch.device("cuda", index), exactly).result()


def _load(source: str, defines: tuple[tuple[str, int], ...], index: int, exactly: bool) -> Module:
    device = torch.device("cuda", index)
    major, minor = torch.cuda.get_device_capability(device)
    target = device_of(device).target
    code = compile_kernels(source, dict(defines), target or f"sm_{major}{minor}{'a' if exactly else ''}")
    return Module(code, device, may_overlap=not target)  # code for older devices lacks griddepcontrol.wait


def _index(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else device.index


def _checked(driver: Any, result: tuple, what: str = "") -> Any:
    if result[0].value:
        text = driver.cuGetErrorString(result[0])[1]
        raise CompileError(f"CUDA driver{', ' + what if what else ''}: {text.decode() if text else result[0]}")
    return result[1] if len(result) > 1 else None
