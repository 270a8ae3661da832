"""The choice of a backend: a named one runs or the call fails, and no other one silently takes its place."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest
import torch

from slimkv.errors import InputError, UnsupportedError
from slimkv.ops.attention.api import REGISTRY as ATTEND
from slimkv.ops.cpu.module import compiled_unavailable_reason
from slimkv.ops.gather.api import REGISTRY as GATHER
from slimkv.ops.registry import Backend, Registry, anywhere, triton_unavailable_reason
from slimkv.ops.store.api import REGISTRY as STORE

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def module(name: str, refusal: str | None, monkeypatch: pytest.MonkeyPatch) -> str:
    made = ModuleType(name)
    made.supports = lambda request: refusal
    made.run = lambda request: name
    monkeypatch.setitem(sys.modules, name, made)
    return name


@pytest.fixture
def registry(monkeypatch):
    return Registry(
        "attend",
        [
            Backend("picky", module("a_picky_one", "it takes no request", monkeypatch), anywhere),
            Backend("cpu_only", module("a_cpu_one", None, monkeypatch), compiled_unavailable_reason),
            Backend("any", module("an_easy_one", None, monkeypatch), anywhere),
        ],
    )


def test_the_first_that_takes_the_request_is_used(registry):
    assert registry.select(CPU, None, None).name == "cpu_only"
    assert registry.select(CUDA, None, None).name == "any"


def test_the_reference_stands_in_on_a_gpu_only_where_the_request_lets_it(monkeypatch):
    kernels = Backend("cuda", module("a_picky_one", "too odd", monkeypatch), anywhere)
    both = Registry("attend", [kernels, Backend("reference", module("an_easy_one", None, monkeypatch), anywhere)])
    strict = type("Request", (), {"refuses_unasked_reference": "it is slow"})()
    assert both.select(CUDA, None).name == both.select(CPU, strict).name == "reference"
    assert both.select(CUDA, strict, "reference").name == "reference"
    with pytest.raises(UnsupportedError, match="cuda: too odd; reference: it is slow"):
        both.select(CUDA, strict)


def test_one_asked_for_by_name_is_used_or_the_call_fails(registry):
    assert registry.select(CPU, None, "any").name == "any"
    with pytest.raises(UnsupportedError, match="attend with 'picky': it takes no request"):
        registry.select(CPU, None, "picky")
    with pytest.raises(UnsupportedError, match="not on cuda"):
        registry.select(CUDA, None, "cpu_only")


def test_an_unknown_name_lists_the_known(registry):
    with pytest.raises(InputError, match="no backend 'fast'; known are picky, cpu_only, any"):
        registry.select(CPU, None, "fast")


def test_when_none_takes_it_every_reason_is_given(monkeypatch):
    sole = Registry("store", [Backend("picky", module("a_picky_one", "too odd", monkeypatch), anywhere)])
    with pytest.raises(UnsupportedError, match="no backend of store supports this call on cpu: picky: too odd"):
        sole.select(CPU, None, None)


@pytest.mark.parametrize("registry", [STORE, ATTEND, GATHER], ids=lambda r: r.operation)
def test_every_operation_has_kernels_and_a_reference(registry):
    assert list(registry.names)[-1] == "reference"
    assert "triton" in registry.names


def test_triton_says_why_it_cannot_run(monkeypatch):
    import triton

    monkeypatch.setattr(triton.knobs.runtime, "interpret", False)
    assert "TRITON_INTERPRET=1" in triton_unavailable_reason(CPU)
    assert triton_unavailable_reason(CUDA) is None
    monkeypatch.setattr(triton.knobs.runtime, "interpret", True)
    assert triton_unavailable_reason(CPU) is None
    monkeypatch.setitem(sys.modules, "triton", None)
    assert "pip install" in triton_unavailable_reason(CUDA)
