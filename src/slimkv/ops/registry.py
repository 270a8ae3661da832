"""The backends of an operation, and how one is chosen.

A backend reports whether it runs on a device and whether it supports a request: None, or the reason why not. The first
registered backend that supports the request is used. A backend requested by name is used, or the call fails with the
reason: there are no silent fallbacks.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from slimkv.errors import InputError, UnsupportedError
from slimkv.ops.cpu.module import compiled_unavailable_reason
from slimkv.ops.cuda import cuda_unavailable_reason


@dataclass(frozen=True)
class Backend:
    """One way to run an operation; its module is imported when it is first needed."""

    name: str
    module: str  # has run(request) and, unless it supports every request, supports(request) -> reason or None
    available: Callable[[torch.device], str | None]

    def load(self) -> Any:
        """The module of this backend."""
        return self._loaded

    @cached_property
    def _loaded(self) -> Any:
        return importlib.import_module(self.module)

    def refusal(self, device: torch.device, request: Any) -> str | None:
        """Why this backend does not support ``request`` on ``device``, or None."""
        supports = getattr(self.load(), "supports", None)
        return self.available(device) or (supports(request) if supports is not None else None)


class Registry:
    """The backends of one operation, best first."""

    def __init__(self, operation: str, implementations: list[Backend]) -> None:
        self.operation = operation
        self._by_name = {i.name: i for i in implementations}

    @classmethod
    def of_kernels(cls, operation: str, package: str, **modules: str) -> Registry:
        """A registry of backends by name, each with its module in ``slimkv.ops.<package>``."""
        return cls(operation, [Backend(n, f"slimkv.ops.{package}.{m}", AVAILABLE[n]) for n, m in modules.items()])

    @property
    def names(self) -> list[str]:
        """The names of the backends, best first."""
        return list(self._by_name)

    def select(self, device: torch.device, request: Any, explicit: str | None = None) -> Backend:
        """The backend for ``request``; if ``explicit`` names one, that backend or an error."""
        if explicit is not None:
            if explicit not in self._by_name:
                raise InputError(f"{self.operation} has no backend {explicit!r}; known are {', '.join(self.names)}")
            reason = self._by_name[explicit].refusal(device, request)
            if reason:
                raise UnsupportedError(f"{self.operation} with {explicit!r}: {reason}")
            return self._by_name[explicit]
        reasons = []
        for implementation in self._by_name.values():
            reason = implementation.refusal(device, request)
            if reason is None and implementation.name == "reference" and device.type != "cpu":
                reason = getattr(request, "refuses_unasked_reference", None)
            if reason is None:
                return implementation
            reasons.append(f"{implementation.name}: {reason}")
        raise UnsupportedError(f"no backend of {self.operation} supports this call on {device}: " + "; ".join(reasons))


def anywhere(device: torch.device) -> str | None:
    """None: the reference runs on every device of torch."""
    return None


def triton_unavailable_reason(device: torch.device) -> str | None:
    """Why Triton cannot run on ``device``, or None: it needs a CUDA (or ROCm) device or its interpreter."""
    try:
        import triton
    except ImportError:
        return 'triton is not installed; install it with: pip install "slimkv[triton]"'
    if triton.knobs.runtime.interpret:
        return None
    if device.type != "cuda":
        return f"Triton has no compiler for {device.type}; it runs there only under TRITON_INTERPRET=1"
    return None


AVAILABLE: dict[str, Callable[[torch.device], str | None]] = {
    "cpu": compiled_unavailable_reason,
    "cuda": cuda_unavailable_reason,
    "triton": triton_unavailable_reason,
    "reference": anywhere,
}
