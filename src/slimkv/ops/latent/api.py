"""attend_latent: absorbed queries and pages of latents -> attention output, for decode and verification.

A token's scores are q_latent . latent + q_rope . rope, and its value is the latent again, for all heads. With the
rotation of the latent folded into the projections around attention (``latent_rotation``), nothing is rotated here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from slimkv.arguments import typed
from slimkv.codec import Codec
from slimkv.errors import InputError
from slimkv.ops.attention.api import check_tables
from slimkv.ops.batch import AttentionBatch, PackedKV
from slimkv.ops.checks import check_lse, check_packed, check_vectors
from slimkv.ops.registry import Registry
from slimkv.spec import LatentSpec, PageLayout


@dataclass(frozen=True)
class LatentRequest:
    """The checked arguments of one ``attend_latent``; latent queries and output are in the latent's stored space."""

    query_latent: Tensor  # [total_queries, num_heads, latent_dim]
    query_rope: Tensor  # [total_queries, num_heads, rope_dim], not rotated
    pages: Tensor  # uint8 [blocks, 1, page_bytes]
    block_table: Tensor
    seq_lens: Tensor
    cu_seqlens_q: Tensor
    max_query_len: int
    max_seq_len: int
    softmax_scale: float
    codec: Codec
    layout: PageLayout
    out: Tensor
    lse: Tensor | None
    workspace: Tensor | None
    num_splits: int | None

    @property
    def stored_query_rope(self) -> Tensor:
        """The rope part of the queries in its stored space."""
        return self.codec.rotate_value(self.query_rope) if self.layout.spec.value.rotated else self.query_rope


REGISTRY = Registry.of_kernels(
    "attend_latent", "latent", cpu="cpu", cuda="cuda.launch", triton="triton.launch", reference="reference"
)


@typed
def latent_rotation(codec: Codec) -> Tensor | None:
    """The rotation R, float32 [latent_dim, latent_dim], that takes a latent (as a row) to its stored space.

    None if the latent is stored unrotated. If it is folded into the absorbed projections once, W_UK' = W_UK R before
    attention and W_UV' = R^T W_UV after it, ``query_is_rotated`` and ``output_is_rotated`` can be set.
    """
    _check_codec(codec)
    return codec.key_rotation if codec.spec.key.rotated else None


@typed
def attend_latent(
    query_latent: Tensor, query_rope: Tensor, kv: PackedKV, batch: AttentionBatch, *, softmax_scale: float,
    query_is_rotated: bool = False, output_is_rotated: bool = False, out: Tensor | None = None,
    lse: Tensor | None = None, workspace: Tensor | None = None, num_splits: int | None = None,
    backend: str | None = None,
) -> Tensor:  # fmt: skip
    """Attention of absorbed queries over packed latents.

    Sequence i has ``seq_lens[i]`` tokens in the cache; its queries are rows ``cu_seqlens_q[i]:cu_seqlens_q[i + 1]``, at
    its last positions; each attends to the tokens up to its own. Decode is one query per sequence.

    Args:
        query_latent: [total_queries, num_heads, latent_dim], queries after the absorbed up-projection of keys;
            float16, bfloat16 or float32.
        query_rope: [total_queries, num_heads, rope_dim], the rope part of the queries, as the model computes it.
        kv: its pages are uint8 [blocks, page_bytes] or [blocks, 1, page_bytes].
        batch: for layouts of token rows (sparse attention), its block_table is int32 [sequences, max_tokens] with the
            slot (block * block_size + position) of every token; negative slots are skipped.
        softmax_scale: multiplies the scores; from the model, because it depends on the head size before absorption.
        query_is_rotated: ``query_latent`` is in the stored space of the latent, because ``latent_rotation`` is folded
            into the preceding projection. It has no effect for unrotated formats.
        output_is_rotated: the output stays in that space.
        out: [total_queries, num_heads, latent_dim] to write into (default: of the query's dtype).
        lse: float32 [total_queries, num_heads], contiguous: receives the natural log-sum-exp.
        workspace: uint8, at least ``latent_workspace_bytes(...)``; allocated if None.
        num_splits: the number of split-KV parts per sequence, for backends that let the caller choose (``triton``).
        backend: the name of a backend; by default the best one that supports the request.

    Returns out.
    """
    request = checked_request(query_latent, query_rope, kv, batch, softmax_scale, out, lse, workspace, num_splits)
    codec, rotated, out = kv.codec, kv.codec.spec.key.rotated, request.out
    if rotated and not query_is_rotated:
        request = replace(request, query_latent=codec.rotate_query(query_latent))
    if rotated and not output_is_rotated:
        request = replace(request, out=torch.empty(out.shape, dtype=torch.float32, device=out.device))
    REGISTRY.select(request.pages.device, request, backend).load().run(request)
    if request.out is not out:
        result = (request.out @ codec.key_rotation.T).to(out.dtype)
        real = torch.arange(out.shape[0], device=out.device) < request.cu_seqlens_q[-1]  # not padding
        out.copy_(torch.where(real[:, None, None], result, out))  # without a synchronisation
    return out


def checked_request(
    query_latent: Tensor, query_rope: Tensor, kv: PackedKV, batch: AttentionBatch, softmax_scale: float,
    out: Tensor | None = None, lse: Tensor | None = None, workspace: Tensor | None = None,
    num_splits: int | None = None,
) -> LatentRequest:  # fmt: skip
    """The arguments of ``attend_latent``, checked; ``out`` is allocated if it is None."""
    kv = checked_latents(kv)
    device, layout, spec = kv.pages.device, kv.layout, kv.layout.spec
    check_vectors("query_latent", query_latent, ("queries", "heads", spec.key_dim), device)
    total, heads, _ = query_latent.shape
    check_vectors("query_rope", query_rope, (total, heads, spec.value_dim), device)
    check_tables(batch.block_table, batch.seq_lens, batch.cu_seqlens_q, device)
    width = batch.block_table.shape[1]
    of_entry, entries = (1, "tokens") if layout.token_rows else (layout.block_size, "blocks")
    if not 0 <= batch.max_query_len <= total or batch.max_seq_len > width * of_entry:
        raise InputError(
            f"max_query_len {batch.max_query_len} must lie in 0..{total} and max_seq_len {batch.max_seq_len} must fit "
            f"the block table's {width} {entries}"
        )
    if not math.isfinite(softmax_scale):
        raise InputError(f"softmax_scale must be finite, not {softmax_scale}")
    if num_splits is not None and num_splits < 1:
        raise InputError(f"num_splits must be at least 1, not {num_splits}")
    shape = (total, heads, spec.key_dim)
    if out is None:
        out = query_latent.new_empty(shape)
    check_vectors("out", out, shape, device)
    check_lse(lse, total, heads, device)
    return LatentRequest(
        query_latent, query_rope, kv.pages, batch.block_table, batch.seq_lens, batch.cu_seqlens_q, batch.max_query_len,
        batch.max_seq_len, softmax_scale, kv.codec, layout, out, lse, workspace, num_splits,
    )  # fmt: skip


def checked_latents(kv: PackedKV) -> PackedKV:
    """``kv`` with pages uint8 [blocks, 1, page_bytes], checked."""
    codec, layout, pages = kv.codec, kv.layout, kv.pages
    _check_codec(codec)
    pages = pages.unsqueeze(1) if pages.ndim == 2 else pages
    if kv.key_offset is not None:
        raise InputError("latents are stored without a key offset; leave out key_offset")
    kv = PackedKV(pages, codec, layout)
    check_packed(kv)
    if pages.shape[1] != 1:
        raise InputError(f"pages of latents have one KV head, not {pages.shape[1]}")
    return kv


def _check_codec(codec: Codec) -> None:
    if not isinstance(codec.spec, LatentSpec):
        raise InputError(f"{codec.spec.format} is a format of K and V; use one of latents: LatentSpec.parse('c4')")
