"""store on a CPU in one call of the compiled library: rotates, encodes and packs each token, on several threads."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from slimkv.ops.cpu.module import Call, layout_tables, library
from slimkv.ops.cpu.structures import tokens_call
from slimkv.ops.store.api import StoreRequest, refuses_policy, refuses_raw_dtype

_transposed: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def supports(request: StoreRequest) -> str | None:
    """Supports every format with the scale policy ``norm``; a raw side needs tensors of its dtype."""
    return refuses_policy(request.layout) or refuses_raw_dtype(request)


def run(request: StoreRequest) -> None:
    """See ``slimkv.ops.store_kv``."""
    _call(request)()


def plan(request: StoreRequest) -> Callable[[Tensor, Tensor, Tensor, Tensor | None], None]:
    """A prepared ``run`` for K, V, slots and indices of the same shapes, strides and dtypes, on the same pages."""
    call = _call(request)
    args, key_of, value_of = call.args, call.args.key, call.args.value

    def launch(key: Tensor, value: Tensor, slots: Tensor, index: Tensor | None) -> None:
        slots = slots.contiguous()
        if index is not None:
            index = index.contiguous()
            args.query_aware_index = index.data_ptr()
        key_of.data, value_of.data, args.slots = key.data_ptr(), value.data_ptr(), slots.data_ptr()
        call()

    return launch


def _call(request: StoreRequest) -> Call:
    tables = layout_tables(request.layout)
    matrices = None if request.query_aware is None else _columns(request.query_aware)
    slots = request.slot_mapping.contiguous()
    index = None if request.query_aware_index is None else request.query_aware_index.contiguous()
    args = tokens_call(
        tables, request, slots, matrices=request.matrices,
        query_aware=None if matrices is None else matrices.data_ptr(),
        query_aware_index=None if index is None else index.data_ptr(),
    )  # fmt: skip
    return Call(library().store, args, tables, matrices, slots, index)


def _columns(matrices: Tensor) -> Tensor:
    """int8 [..., heads, dim, dim] transposed, so that the corrections for one error are contiguous.

    Cached until the matrices change; inference tensors have no version and are transposed each time.
    """
    if matrices.is_inference():
        return matrices.mT.contiguous()
    held = _transposed.get(matrices)
    if held is None or held[0] != matrices._version:
        held = matrices._version, matrices.mT.contiguous()
        _transposed[matrices] = held
    return held[1]
