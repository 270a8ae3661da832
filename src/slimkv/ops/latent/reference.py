"""attend_latent in plain torch: decodes the latents and rope parts of each sequence and applies a softmax."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from slimkv.codec import Codec
from slimkv.ops.gather.reference import decode_slots
from slimkv.ops.latent.api import LatentRequest
from slimkv.spec import PageLayout

# pages, slots, codec, layout -> latents and rope parts in their stored (rotated) space
DecodeTokens = Callable[[Tensor, Tensor, Codec, PageLayout], tuple[Tensor, Tensor]]


def supports(request: LatentRequest) -> str | None:
    """Supports every format and size, but does not split keys."""
    if request.num_splits is not None:
        return f"it does not split keys; leave num_splits at None, not {request.num_splits}"
    return None


def run(request: LatentRequest) -> None:
    """See ``slimkv.ops.attend_latent``."""
    attend_decoded(request, partial(decode_slots, rotated=True))


def attend_decoded(request: LatentRequest, decode: DecodeTokens) -> None:
    """Attention on the tokens of each sequence, decoded by ``decode`` to [tokens, 1, dim] each."""
    starts, lengths, query_rope = request.cu_seqlens_q.tolist(), request.seq_lens.tolist(), request.stored_query_rope
    for sequence, length in enumerate(lengths):
        rows = slice(starts[sequence], starts[sequence + 1])
        count = rows.stop - rows.start
        if count == 0:
            continue
        position, slots = _visible(request, sequence, length)
        if not len(slots):
            request.out[rows] = 0
            if request.lse is not None:
                request.lse[rows] = -torch.inf
            continue
        latent, rope = (x[:, 0].float() for x in decode(request.pages, slots, request.codec, request.layout))
        scores = torch.einsum("qhd,kd->hqk", request.query_latent[rows].float(), latent)
        scores = scores + torch.einsum("qhd,kd->hqk", query_rope[rows].float(), rope)
        seen = position[None, :] <= torch.arange(length - count, length, device=slots.device)[:, None]
        scores = (scores * request.softmax_scale).masked_fill(~seen, -torch.inf)
        lse = scores.logsumexp(-1)  # [heads, queries]
        weights = torch.exp(scores - lse.masked_fill(lse == -torch.inf, 0)[..., None])  # zeros if no token is visible
        # A token with NaN must not affect queries that do not see it.
        value = latent.masked_fill(~latent.isfinite().all(-1, keepdim=True), 0)
        request.out[rows] = torch.einsum("hqk,kd->qhd", weights, value).to(request.out.dtype)
        if request.lse is not None:
            request.lse[rows] = lse.T.float()


def _visible(request: LatentRequest, sequence: int, length: int) -> tuple[Tensor, Tensor]:
    """The positions and slots, int64 [tokens] each, of the tokens of a sequence that are not skipped."""
    position, tokens = torch.arange(max(length, 0), device=request.pages.device), request.layout.block_size
    if not request.layout.token_rows:
        return position, request.block_table[sequence, position // tokens].long() * tokens + position % tokens
    slots = request.block_table[sequence, : len(position)].long()
    return position[slots >= 0], slots[slots >= 0]
