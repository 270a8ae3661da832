"""The compiled library in this process: loading, threads, and translation of its error codes."""

from __future__ import annotations

import ctypes
import logging
import os
import re
from collections.abc import Callable
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import torch

from slimkv.codec import Codec
from slimkv.errors import InputError
from slimkv.ops.cpu import isa
from slimkv.ops.cpu.compiler import CompileError, build_library
from slimkv.ops.cpu.structures import LayoutTables
from slimkv.spec import PageLayout

_LOG = logging.getLogger("slimkv")
_OPENMP = re.compile(r"(/\S*/lib(?:gomp|omp|iomp5)[^/\s]*\.so\S*)")
_BAD_SLOT, _BAD_BLOCK, _BAD_LENGTH, _BAD_QUERY_START = 1, 2, 3, 4


class Library:
    """The three operations of one build."""

    def __init__(self, path: Path, name: str) -> None:
        self.path = path
        self.name = name  # the name of its instruction set
        self._library = ctypes.CDLL(str(path))
        self.store: Callable[[Any], int] = self._library.slimkv_store
        self.attend: Callable[[Any], int] = self._library.slimkv_attend
        self.gather: Callable[[Any], int] = self._library.slimkv_gather
        for function in (self.store, self.attend, self.gather):
            function.argtypes, function.restype = [ctypes.c_void_p], ctypes.c_int32  # type: ignore[attr-defined]
        self._library.slimkv_set_team.argtypes = [ctypes.c_void_p]
        self.team = openmp_of_torch()
        if self.team is not None:
            entry = ctypes.cast(ctypes.CDLL(self.team).GOMP_parallel, ctypes.c_void_p)
            self._library.slimkv_set_team(entry)
            # OpenMP threads do not survive a fork; in the child the library starts its own threads for long work.
            os.register_at_fork(after_in_child=lambda: self._library.slimkv_set_team(None))


def openmp_of_torch() -> str | None:
    """The OpenMP library that torch has loaded, if it exports GOMP_parallel; None otherwise."""
    try:
        maps = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    found = sorted(set(_OPENMP.findall(maps)), key=lambda path: ("/torch" not in path, path))
    return next((path for path in found if hasattr(ctypes.CDLL(path), "GOMP_parallel")), None)


@cache
def library(name: str | None = None) -> Library:
    """The library for the best instruction set of this machine, or for the one called ``name``."""
    chosen = isa.find(name)
    return Library(build_library(chosen), chosen.name)


@cache
def build_failure() -> str | None:
    """Why the library cannot be built or loaded here, or None; logged once."""
    try:
        library()
    except (CompileError, OSError) as error:
        lines = str(error).splitlines()
        _LOG.warning("the CPU kernels cannot be compiled, so the reference in plain torch runs, slowly: %s", lines[0])
        return str(error)
    return None


def compiled_unavailable_reason(device: torch.device) -> str | None:
    """Why the compiled kernels cannot run on ``device``, or None."""
    if device.type != "cpu":
        return f"it runs on a CPU, not on {device.type}"
    return build_failure()


@lru_cache(maxsize=256)
def layout_tables(layout: PageLayout) -> LayoutTables:
    """The tables of ``layout``; layers with equal layouts share them."""
    return LayoutTables(layout, Codec(layout.spec))


class Call:
    """A repeatable call of the library: its arguments, and the objects that they point to."""

    def __init__(self, function: Callable[[Any], int], args: Any, *kept: object) -> None:
        self.args, self.kept = args, kept
        self._function, self._address = function, ctypes.addressof(args)

    def __call__(self) -> None:
        """Runs the call on torch's number of threads; raises if the library rejects its arguments."""
        self.args.threads = torch.get_num_threads()
        status = self._function(self._address)
        if status:
            _raise(status, self.args.fault)


def _raise(status: int, fault: Any) -> None:
    """Raises the error for ``status``; the rejected call has written nothing."""
    if status == _BAD_SLOT:
        raise InputError(
            f"slot {fault.value} of token {fault.index} is beyond the pages' {fault.limit} slots; "
            "slots are block * block_size + position, negative ones are skipped"
        )
    if status == _BAD_BLOCK:
        raise InputError(
            f"block_table[{fault.where}, {fault.index}] is {fault.value}; the pages have blocks 0 to {fault.limit - 1}"
        )
    if status == _BAD_LENGTH:
        raise InputError(
            f"seq_lens[{fault.where}] is {fault.value}; the block table has room for 0 to {fault.limit} tokens"
        )
    if status == _BAD_QUERY_START:
        raise InputError(
            f"cu_seqlens_q[{fault.index}] is {fault.value}; it must ascend from 0 and stay within the "
            f"{fault.limit} rows of query"
        )
    raise MemoryError("the compiled CPU kernels could not allocate their working memory")
