"""The result of a packed layer's ``update``: tensors that are decoded on first use. The registered attention reads the
pages behind them; any other code gets decoded values.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from slimkv import ops
from slimkv.errors import InputError, UnsupportedError
from slimkv.integrations.transformers.switching import count as count_call
from slimkv.integrations.transformers.switching import warn_if_off
from slimkv.integrations.transformers.tables import SequenceTables, Step
from slimkv.ops import AttentionBatch, PackedKV

if TYPE_CHECKING:
    from slimkv.integrations.transformers.tiered_kv import TieredKV

LazyKV: TypeAlias = "PagedKV | TieredKV"  # a layer's keys and values at one step
AttendCodes = Callable[[Tensor, PackedKV, AttentionBatch, ops.AttendOptions], Tensor]


@dataclass
class PagedKV:
    """Keys and values in pages, the new tokens optionally raw beside them."""

    kv: PackedKV  # as of this step: offloading may move the layer's pages
    tables: SequenceTables
    step: Step
    first: int  # the first position that attention may see
    positions: int  # number of positions from there on, padding included
    dtype: torch.dtype
    window: int | None  # positions that a query sees, its own included; None: all up to it
    chunked: bool
    fresh: tuple[Tensor, Tensor] | None  # K, V [batch, num_kv_heads, new, dim] of the new tokens
    backend: str | None  # name of the backend of ``attend``; None: the best for the device
    attend_codes: AttendCodes  # the layer's method
    prefill: str  # see ``AttendOptions``
    deterministic: bool = False  # a token's attention depends on its own sequence alone
    _dense: tuple[Tensor, Tensor] | None = field(default=None, repr=False)

    @property
    def shape(self) -> tuple[int, int, int]:
        """Sequences, KV heads, positions."""
        return self.tables.batch, self.kv.pages.shape[1], self.positions

    @property
    def new(self) -> int:
        """The number of last positions, which belong to the queries."""
        return self.step.new

    @property
    def pads(self) -> list[int]:
        """Leading positions of each sequence that are known to be padding."""
        return self.tables.pads

    def _check_current(self) -> None:
        if self.tables.tokens != self.step.tokens:
            raise InputError(
                f"these keys and values belong to a step of {self.step.tokens} tokens, but the cache has moved on to "
                f"{self.tables.tokens}; copy them (for instance with .clone()) while their layer runs"
            )

    def dense(self) -> tuple[Tensor, Tensor]:
        """K and V, decoded: contiguous [batch, num_kv_heads, positions, dim]; zeros where there is padding."""
        if self._dense is None:
            self._check_current()
            count_call("decoded")
            count = self.positions - (self.step.new if self.fresh is not None else 0)
            slots = self.tables.slots(self.first, count)
            key, value = ops.gather_kv(self.kv, slots.reshape(-1), dtype=self.dtype)
            pair = [x.unflatten(0, (self.tables.batch, count)).transpose(1, 2) for x in (key, value)]
            if self.fresh is None:
                pair = [x.contiguous() for x in pair]  # as stock tensors are, because some models create views of them
            else:
                pair = [torch.cat([past, new.to(past.dtype)], 2) for past, new in zip(pair, self.fresh, strict=True)]
            self._dense = pair[0], pair[1]
        return self._dense

    def attends(self, pads: list[int] | None) -> bool:
        """Whether ``attend`` supports causal attention with this left padding."""
        return not self.chunked

    def attend(self, query: Tensor, options: ops.AttendOptions, pads: list[int] | None) -> Tensor:
        """query [batch, heads, new, key_dim] -> [batch, new, heads, value_dim]."""
        self._check_current()
        if pads is None and any(self.tables.pads):
            raise InputError(
                "the cached batch has left padding, but this step came without an attention mask that says so; "
                "pass the attention_mask of all tokens to every forward call"
            )
        self.step = self.tables.set_padding(pads) if pads is not None else self.step
        step = self.step
        rows = token_rows(query)
        fresh = (token_rows(self.fresh[0]), token_rows(self.fresh[1])) if self.fresh is not None else None
        if step.query_rows is not None:
            rows = rows[step.query_rows]
            fresh = (fresh[0][step.query_rows], fresh[1][step.query_rows]) if fresh is not None else None
        if fresh is None:
            out = self.attend_codes(rows, self.kv, step.batch, options)
        else:
            out = ops.attend(rows, self.kv, step.batch, options, fresh=fresh, backend=self.backend)
        if step.query_rows is not None:  # padding attends to nothing
            out = out.new_zeros(query.shape[0] * step.new, *out.shape[1:]).index_copy_(0, step.query_rows, out)
        return out.view(query.shape[0], step.new, out.shape[1], out.shape[2])


def token_rows(x: Tensor) -> Tensor:
    """[batch, heads, tokens, dim] -> [batch * tokens, heads, dim] with a contiguous last axis."""
    _, heads, tokens, dim = x.shape
    rows = x.squeeze(2) if tokens == 1 else x.transpose(1, 2).reshape(-1, heads, dim)
    return rows if rows.stride(-1) == 1 else rows.contiguous()


class PackedStates(Tensor):
    """The keys (or values) of a ``LazyKV``, as a tensor [batch, num_kv_heads, positions, dim] without storage."""

    kv: LazyKV
    side: int  # 0 keys, 1 values
    for_attention: bool = False  # for a model's attention, not for code that inspects the cache

    @staticmethod
    def __new__(cls, kv: LazyKV, side: int, dim: int, dtype: torch.dtype, device: torch.device) -> PackedStates:
        """Keys (side 0) or values (1) of ``kv``, as vectors of ``dim``."""
        out = Tensor._make_wrapper_subclass(cls, (*kv.shape, dim), dtype=dtype, device=device)
        out.kv, out.side = kv, side
        return out

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Sequence[type], args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Runs an operation on the decoded tensor; raises if the operation would write to it."""
        kwargs = kwargs or {}
        if (schema := getattr(func, "_schema", None)) is not None and schema.is_mutable:
            for number, parameter in enumerate(schema.arguments):
                x = args[number] if number < len(args) else kwargs.get(parameter.name)
                if isinstance(x, PackedStates) and parameter.alias_info is not None and parameter.alias_info.is_write:
                    raise UnsupportedError(
                        f"{schema.name} writes to keys or values of a packed cache, whose pages would not change: "
                        "write to a copy (.clone())"
                    )
        unwrap = tree_map_only(PackedStates, PackedStates._touched, (args, kwargs))
        return func(*unwrap[0], **unwrap[1])

    def _touched(self) -> Tensor:
        if self.for_attention:
            warn_if_off()
            if self.kv.deterministic:
                raise UnsupportedError(
                    "deterministic needs attention on pages, and this model's own attention reads decoded keys and "
                    "values: use slimkv.enable or slimkv.attention, or leave deterministic out"
                )
        return self.decoded()

    def decoded(self) -> Tensor:
        """The decoded tensor."""
        return self.kv.dense()[self.side]

    def __repr__(self) -> str:  # type: ignore[override]
        return f"PackedStates({'keys' if self.side == 0 else 'values'}, shape={tuple(self.shape)}, dtype={self.dtype})"
