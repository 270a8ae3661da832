"""attend in plain torch: decodes the keys and values of each sequence, still rotated, and applies a softmax."""

from __future__ import annotations

import torch
from torch import Tensor

from slimkv.errors import InputError
from slimkv.ops.attention import eight_bit
from slimkv.ops.attention.api import MAX_DECODE_QUERIES, AttendRequest, refuses_split_arguments
from slimkv.ops.gather.reference import decode_slots


def supports(request: AttendRequest) -> str | None:
    """Supports every format, size and option, but does not split keys."""
    return refuses_split_arguments(request) or (eight_bit.refusal(request) if request.must_be_eight_bit else None)


def run(request: AttendRequest) -> None:
    """See ``slimkv.ops.attend``."""
    starts, lengths = request.cu_seqlens_q.tolist(), request.seq_lens.tolist()
    _check_tables(request, starts, lengths)
    for sequence, length in enumerate(lengths):
        rows = slice(starts[sequence], starts[sequence + 1])
        if rows.stop == rows.start:
            continue
        if length <= 0:
            _see_nothing(request, rows)
        elif request.options.deterministic:
            _row_by_row(request, sequence, length, rows)
        elif request.must_be_eight_bit and rows.stop - rows.start > MAX_DECODE_QUERIES:
            _in_eight_bits(request, sequence, length, rows)
        else:
            _one_sequence(request, sequence, length, rows)


def _see_nothing(request: AttendRequest, rows: slice) -> None:
    """Queries without keys: zero output; the log-sum-exp of the sinks, or -inf."""
    request.out[rows] = 0
    if request.lse is not None:
        sinks = request.sinks_of(rows)
        request.lse[rows] = -torch.inf if sinks is None else sinks


def _check_tables(request: AttendRequest, starts: list[int], lengths: list[int]) -> None:
    """Raises for starts, lengths and blocks that lie outside the query, the block table and the pages."""
    total, room = request.query.shape[0], request.block_table.shape[1] * request.layout.block_size
    if starts[0] < 0:
        raise InputError(f"cu_seqlens_q[0] is {starts[0]}; it must ascend from 0")
    for i, length in enumerate(lengths):
        count = starts[i + 1] - starts[i]
        if count < 0 or starts[i + 1] > total:
            raise InputError(
                f"cu_seqlens_q[{i + 1}] is {starts[i + 1]}; it must ascend from 0 and stay within the {total} rows of "
                "query"
            )
        if count == 0:
            continue
        if not 0 <= length <= room:
            raise InputError(f"seq_lens[{i}] is {length}; the block table has room for 0 to {room} tokens")
        if request.pages.device.type == "cpu" and length:
            window, size = request.options.sliding_window, request.layout.block_size
            first = 0 if window is None else max(length - count - window + 1, 0)
            last = length - count if request.fresh is not None else length
            blocks = request.block_table[i, first // size : -(-max(last, 0) // size)]
            bad = ((blocks < 0) | (blocks >= request.pages.shape[0])).nonzero().flatten()
            if len(bad):
                at = int(bad[0])
                raise InputError(
                    f"block_table[{i}, {first // size + at}] is {int(blocks[at])}; the pages have blocks 0 to "
                    f"{request.pages.shape[0] - 1}"
                )


def _one_sequence(request: AttendRequest, sequence: int, length: int, rows: slice) -> None:
    codec, heads = request.codec, request.query.shape[1]
    count = rows.stop - rows.start
    key, value = _sequence_kv(request, sequence, length, rows)
    query = codec.rotate_query(request.query[rows]).to(key.dtype)  # [queries, heads, dim]
    query = query.unflatten(1, (key.shape[1], request.group))
    scores = torch.einsum("qhgd,khd->hgqk", query, key) * request.softmax_scale
    scores = scores.flatten(0, 1)  # [num_heads, queries, keys]
    if request.score_shift is not None:
        scores = scores + request.score_shift[rows].T[..., None]
    if request.options.softcap:
        scores = request.options.softcap * torch.tanh(scores / request.options.softcap)
    scores = scores.masked_fill(~visible(request, length, count), -torch.inf)
    lse = scores.logsumexp(-1)  # [num_heads, queries]
    sinks = request.sinks_of(rows)
    if sinks is not None:
        lse = torch.logaddexp(lse, (sinks[:, None] if sinks.ndim == 1 else sinks.T).to(lse.dtype))
    weights = torch.exp(scores - lse[..., None]).unflatten(0, (key.shape[1], request.group))
    out = torch.einsum("hgqk,khd->qhgd", weights, value).reshape(count, heads, -1)
    request.out[rows] = codec.unrotate_output(out).to(request.out.dtype)
    if request.lse is not None:
        request.lse[rows] = lse.T.float()


def _row_by_row(request: AttendRequest, sequence: int, length: int, rows: slice) -> None:
    """Attention of each query alone to its visible keys: products of the same shape round in the same way."""
    for row in range(rows.start, rows.stop):
        seen = length - (rows.stop - 1 - row) if request.options.causal else length
        if seen > 0:
            _one_sequence(request, sequence, seen, slice(row, row + 1))
        else:  # more queries than tokens
            _see_nothing(request, slice(row, row + 1))


def _in_eight_bits(request: AttendRequest, sequence: int, length: int, rows: slice) -> None:
    window = request.options.sliding_window
    seen_from = 0 if window is None else max(0, length - (rows.stop - rows.start) - window + 1)
    slots = _slots(request, sequence, length)
    kv = eight_bit.operands(request.codec, request.layout, request.pages, slots, seen_from)
    query = request.codec.rotate_query(request.query[rows])
    out, lse = eight_bit.attend_sequence(
        query, kv, visible(request, length, rows.stop - rows.start), request.softmax_scale, request.options.softcap,
        request.sinks_of(rows), None if request.score_shift is None else request.score_shift[rows],
    )  # fmt: skip
    request.out[rows] = request.codec.unrotate_output(out).to(request.out.dtype)
    if request.lse is not None:
        request.lse[rows] = lse.T


def _slots(request: AttendRequest, sequence: int, length: int) -> Tensor:
    """The slots of a sequence's tokens: int64 [length]."""
    tokens = request.layout.block_size
    position = torch.arange(length, device=request.pages.device)
    blocks = request.block_table[sequence, position // tokens].long()
    return blocks.clamp(min=0) * tokens + position % tokens  # blocks before a window may have been freed


def _sequence_kv(request: AttendRequest, sequence: int, length: int, rows: slice) -> tuple[Tensor, Tensor]:
    """K and V of the whole sequence, rotated as stored: float32 [tokens, num_kv_heads, dim].

    Tokens that no query attends to are not read: other sequences may own their pages, and zero times NaN is not zero.
    """
    count, position = rows.stop - rows.start, torch.arange(length, device=request.pages.device)
    read = visible(request, length, count).any(0)
    if request.fresh is not None:
        read &= position < length - count
    slots = torch.where(read, _slots(request, sequence, length), 0)
    key, value = decode_slots(request.pages, slots, request.codec, request.layout, rotated=True)
    key, value = (x.float().masked_fill(~read[:, None, None], 0) for x in (key, value))
    if request.fresh is not None:
        count = min(rows.stop - rows.start, length)
        key[length - count :] = request.codec.rotate_query(request.fresh[0][rows][-count:])
        value[length - count :] = request.codec.rotate_value(request.fresh[1][rows][-count:])
    return key, value


def visible(request: AttendRequest, length: int, count: int) -> Tensor:
    """bool [queries, keys]: the mask of the last ``count`` positions of a sequence of ``length`` tokens."""
    key = torch.arange(length, device=request.pages.device)[None, :]
    query = torch.arange(length - count, length, device=request.pages.device)[:, None]
    mask = torch.ones(count, length, dtype=torch.bool, device=request.pages.device)
    if request.options.causal:
        mask = key <= query
    if request.options.sliding_window is not None:
        mask &= key > query - request.options.sliding_window
    return mask
