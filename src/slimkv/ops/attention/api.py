"""attend: queries and pages -> attention output, for decode, speculative verification and prefill."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from slimkv.arguments import typed, typed_fields
from slimkv.codec import Codec
from slimkv.codec.key_offset import check_offset, score_shift, subtract_offset
from slimkv.errors import InputError
from slimkv.ops.batch import AttentionBatch, PackedKV
from slimkv.ops.checks import check_lse, check_packed, check_pair, check_vectors
from slimkv.ops.registry import Registry
from slimkv.spec import PageLayout

MAX_DECODE_QUERIES = 32  # sequences with more queries take the prefill path: kernels unpack their pages first
NO_WINDOW = 1 << 30  # tokens: a window longer than any sequence
MIN_TRITON_HEAD_DIM = 32
EIGHT_BIT, SIXTEEN_BIT = "8bit", "16bit"
PREFILL = ("auto", EIGHT_BIT, SIXTEEN_BIT)


@typed_fields()
@dataclass(frozen=True)
class AttendOptions:
    """The properties of a model's attention.

    Attributes:
        softmax_scale: multiplies q.k; 1 / sqrt(key_dim) when None.
        causal: a query at position p attends to keys 0..p; otherwise to every key of its sequence.
        sliding_window: a query at p attends only to the last ``sliding_window`` keys up to and including p (needs
            ``causal``).
        softcap: scores become softcap * tanh(score / softcap); 0 is off.
        sinks: float [num_heads], a learned logit per head that joins the softmax's denominator.
        prefill: the arithmetic for sequences with more than ``MAX_DECODE_QUERIES`` queries. ``16bit``: operands of 16
            bits or more. ``8bit``: see ``slimkv.ops.attention.eight_bit``; an error if the request does not support it.
            ``auto``: 16 bits.
        deterministic: the result of a query depends only on its own sequence, bit for bit: neither on other
            sequences nor on how many of its own queries are in the call. Needs ``prefill="16bit"`` and no ``fresh``.
        prompt: for deterministic calls on a GPU, where kernels for prompts and for generated tokens differ in the last
            bits. True: queries of a prompt, in chunks of any size. False: generated tokens, decoded or verified. None:
            sequences of more than ``MAX_DECODE_QUERIES`` queries are prompts.
    """

    softmax_scale: float | None = None
    causal: bool = True
    sliding_window: int | None = None
    softcap: float = 0.0
    sinks: Tensor | None = None
    prefill: str = SIXTEEN_BIT
    deterministic: bool = False
    prompt: bool | None = None

    def __post_init__(self) -> None:
        if self.sliding_window is not None and (self.sliding_window < 1 or not self.causal):
            raise InputError(
                f"sliding_window must be a positive number of keys under a causal mask, "
                f"not {self.sliding_window} (causal={self.causal})"
            )
        if self.softcap < 0 or not math.isfinite(self.softcap):
            raise InputError(f"softcap must be 0 (off) or positive, not {self.softcap}")
        if self.softmax_scale is not None and not math.isfinite(self.softmax_scale):
            raise InputError(f"softmax_scale must be finite, not {self.softmax_scale}")
        if self.prefill not in PREFILL:
            raise InputError(f"prefill must be one of {', '.join(PREFILL)}, not {self.prefill!r}")
        if self.deterministic and self.prefill != SIXTEEN_BIT:
            raise InputError(
                f"deterministic attention takes prefill={SIXTEEN_BIT!r}, not {self.prefill!r}: in 8 bits the "
                "result of a query depends on the number of queries of its sequence"
            )


@dataclass(frozen=True)
class AttendRequest:
    """The checked arguments of one ``attend`` call."""

    query: Tensor
    pages: Tensor
    block_table: Tensor
    seq_lens: Tensor
    cu_seqlens_q: Tensor
    max_query_len: int
    max_seq_len: int
    codec: Codec
    layout: PageLayout
    options: AttendOptions
    fresh: tuple[Tensor, Tensor] | None
    out: Tensor
    lse: Tensor | None
    workspace: Tensor | None
    num_splits: int | None
    min_query_len: int = 0
    key_offset: Tensor | None = None
    # float32 [total_queries, num_heads]: added to scaled scores before the soft cap. Set only with a soft cap.
    score_shift: Tensor | None = None
    # float32, contiguous: [num_heads], or [total_queries, num_heads] if centred keys make them differ by query.
    sinks: Tensor | None = None

    @property
    def softmax_scale(self) -> float:
        """The factor on q.k."""
        scale = self.options.softmax_scale
        return scale if scale is not None else 1 / math.sqrt(self.layout.spec.key_dim)

    @property
    def must_be_eight_bit(self) -> bool:
        """Whether ``prefill="8bit"`` is requested and a sequence may have enough queries for it."""
        return self.options.prefill == EIGHT_BIT and self.max_query_len > MAX_DECODE_QUERIES

    @property
    def refuses_unasked_reference(self) -> str | None:
        """Why the reference is not used on a GPU unless requested by name, or None."""
        return "it reads lengths back for every query; request it by name" if self.options.deterministic else None

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return self.query.shape[1] // self.pages.shape[1]

    @property
    def sees_offset(self) -> bool:
        """Whether the result depends on the absolute scores of centred keys, not only on their softmax."""
        seen = self.options.softcap > 0 or self.options.sinks is not None or self.lse is not None
        return self.key_offset is not None and seen

    @property
    def sink_stride(self) -> int:
        """The stride of the sinks between queries: 0, unless centred keys make them differ by query."""
        return 0 if self.sinks is None or self.sinks.ndim == 1 else self.sinks.stride(0)

    def sinks_of(self, rows: slice) -> Tensor | None:
        """The sinks of these queries: float32 [num_heads] or [queries, num_heads]; None without sinks."""
        return self.sinks if self.sinks is None or self.sinks.ndim == 1 else self.sinks[rows]

    def run(self, backend: Any) -> None:
        """Runs a backend. Where absolute scores matter, shifted sinks or scores undo the centring of keys."""
        if not self.sees_offset:
            backend.run(self)
            return
        assert self.key_offset is not None
        shift = score_shift(self.query, self.key_offset, self.softmax_scale, self.options.deterministic)
        if self.options.softcap:  # the cap, sinks and log-sum-exp then see the scores of uncentred keys
            backend.run(replace(self, score_shift=shift))
            return
        backend.run(replace(self, sinks=None if self.sinks is None else self.sinks - shift))
        if self.lse is not None:
            self.lse.add_(shift)


REGISTRY = Registry.of_kernels(
    "attend", "attention", cpu="cpu", cuda="cuda.decode", triton="triton.launch", reference="reference"
)


@typed
def attend(
    query: Tensor, kv: PackedKV, batch: AttentionBatch, options: AttendOptions | None = None, *,
    fresh: tuple[Tensor, Tensor] | None = None, out: Tensor | None = None, lse: Tensor | None = None,
    workspace: Tensor | None = None, num_splits: int | None = None, backend: str | None = None,
) -> Tensor:  # fmt: skip
    """Attention of variable-length queries over packed pages.

    Sequence i has ``seq_lens[i]`` tokens in the cache; its queries are rows ``cu_seqlens_q[i]:cu_seqlens_q[i + 1]`` of
    ``query``, at its last positions (their keys are already stored). Decode is one query per sequence.

    Args:
        query: [total_queries, num_heads, key_dim], float16, bfloat16 or float32; num_heads a multiple of num_kv_heads.
        fresh: K [total_queries, num_kv_heads, key_dim] and V of the query tokens, read by attention instead of their
            codes.
        out: [total_queries, num_heads, value_dim] to write into, any of the three dtypes (default: the query's).
        lse: float32 [total_queries, num_heads], contiguous: receives the natural log-sum-exp.
        workspace: uint8, at least ``workspace_bytes(...)``, for backends that split keys; allocated if None.
        num_splits: the number of split-KV parts per sequence, for backends that let the caller choose (``triton``); by
            default chosen from the shapes and the device.
        backend: the name of a backend; by default the best one that supports the request.

    Returns out.
    """
    request = checked_request(query, kv, batch, options, fresh, out, lse, workspace, num_splits)
    request.run(REGISTRY.select(request.pages.device, request, backend).load())
    return request.out


def checked_request(
    query: Tensor, kv: PackedKV, batch: AttentionBatch, options: AttendOptions | None = None,
    fresh: tuple[Tensor, Tensor] | None = None, out: Tensor | None = None, lse: Tensor | None = None,
    workspace: Tensor | None = None, num_splits: int | None = None,
) -> AttendRequest:  # fmt: skip
    """The arguments of ``attend``, checked; ``out`` is allocated if it is None."""
    pages, layout, key_offset = kv.pages, kv.layout, kv.key_offset
    block_table, max_query_len, max_seq_len = batch.block_table, batch.max_query_len, batch.max_seq_len
    check_packed(kv)
    options = options or AttendOptions()
    device, num_kv_heads = pages.device, pages.shape[1]
    check_vectors("query", query, ("queries", "heads", layout.spec.key_dim), device)
    total, heads, _ = query.shape
    if heads % num_kv_heads:
        raise InputError(f"{heads} query heads are not a multiple of {num_kv_heads} KV heads")
    check_tables(block_table, batch.seq_lens, batch.cu_seqlens_q, device)
    if not 0 <= max_query_len <= total or max_seq_len > block_table.shape[1] * layout.block_size:
        raise InputError(
            f"max_query_len {max_query_len} must lie in 0..{total} and max_seq_len {max_seq_len} must fit the block "
            f"table's {block_table.shape[1]} blocks of {layout.block_size}"
        )
    _check_min_query_len(batch.min_query_len, max_query_len, batch.cu_seqlens_q)
    if num_splits is not None and num_splits < 1:
        raise InputError(f"num_splits must be at least 1, or None, not {num_splits}")
    if key_offset is not None:
        check_offset(key_offset, layout.spec, num_kv_heads, device)
    if fresh is not None:
        if options.deterministic:
            raise InputError(
                "deterministic attention reads every token through its codes; fresh K and V depend on how a prompt was "
                "chunked: leave fresh at None"
            )
        check_pair("fresh", fresh)
        check_vectors("fresh key", fresh[0], (total, num_kv_heads, layout.spec.key_dim), device)
        check_vectors("fresh value", fresh[1], (total, num_kv_heads, layout.spec.value_dim), device)
        if key_offset is not None:
            fresh = subtract_offset(fresh[0], key_offset), fresh[1]
    if options.sinks is not None and (options.sinks.shape != (heads,) or options.sinks.device != query.device):
        raise InputError(
            f"sinks must be one number per query head ({heads}) on {query.device}, not {list(options.sinks.shape)}"
        )
    shape = (total, heads, layout.spec.value_dim)
    if out is None:
        out = query.new_empty(shape)
    check_vectors("out", out, shape, device)
    check_lse(lse, total, heads, device)
    return AttendRequest(
        query, pages, block_table, batch.seq_lens, batch.cu_seqlens_q, max_query_len, max_seq_len, kv.codec, layout,
        options, fresh, out, lse, workspace, num_splits, batch.min_query_len, key_offset,
        sinks=None if options.sinks is None else options.sinks.detach().float().contiguous(),
    )  # fmt: skip


def _check_min_query_len(least: int, most: int, cu_seqlens_q: Tensor) -> None:
    """Checks ``min_query_len`` against ``max_query_len``, and against the lengths if they are on the host."""
    if not 0 <= least <= most:
        raise InputError(f"min_query_len {least} must lie in 0..{most} (max_query_len)")
    if least == 0 or cu_seqlens_q.device.type != "cpu":
        return
    lengths = cu_seqlens_q.diff()
    fewer = lengths[(lengths >= 0) & (lengths < least)]  # backends check that cu_seqlens_q ascends
    if fewer.numel():
        raise InputError(f"min_query_len is {least}, but a sequence of cu_seqlens_q has {int(fewer[0])} queries")


def refuses_split_arguments(request: AttendRequest) -> str | None:
    """Why a backend that does not split keys refuses the request's ``num_splits`` or workspace, or None."""
    if request.num_splits is not None:
        return f"it does not split keys; leave num_splits at None, not {request.num_splits}"
    if request.workspace is not None and request.workspace.numel():
        return f"it uses no workspace; leave workspace at None, not {request.workspace.numel()} bytes"
    return None


def refuses_eight_bit(request: AttendRequest) -> str | None:
    """Why a backend without 8-bit prefill refuses the request, or None."""
    if request.must_be_eight_bit:
        return (
            "it has no 8-bit prefill; use 'cuda' (compute capability 8.0 or newer) or 'reference', or leave prefill at "
            "'auto'"
        )
    return None


def split_workspace_bytes(total_queries: int, num_heads: int, value_dim: int, num_splits: int) -> int:
    """The bytes of the partial results of ``num_splits`` splits; 0 without splitting."""
    return 0 if num_splits == 1 else 4 * total_queries * num_heads * num_splits * (value_dim + 1)


def check_tables(block_table: Tensor, seq_lens: Tensor, cu_seqlens_q: Tensor, device: torch.device) -> None:
    """Raises unless the tables are int32 and describe the same sequences."""
    tables = (("block_table", block_table, 2), ("seq_lens", seq_lens, 1), ("cu_seqlens_q", cu_seqlens_q, 1))
    for name, x, ndim in tables:
        if x.dtype != torch.int32 or x.ndim != ndim or x.device != device or (x.stride(-1) != 1 and x.numel()):
            raise InputError(
                f"{name} must be int32 with {ndim} axes on {device}, not {x.dtype} {list(x.shape)} on {x.device}"
            )
    count = seq_lens.shape[0]
    if block_table.shape[0] != count or cu_seqlens_q.shape[0] != count + 1:
        raise InputError(
            f"block_table {list(block_table.shape)}, seq_lens {list(seq_lens.shape)} and cu_seqlens_q "
            f"{list(cu_seqlens_q.shape)} do not describe the same sequences"
        )
