"""The functions that SGLang's CPU engine calls to draft and verify chains of tokens, in plain torch, without trees."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor


def copy_all_layer_kv_cache_cpu(data_ptrs: Tensor, strides: Tensor, target: Tensor, source: Tensor) -> None:
    """Copies slots ``source`` to ``target`` in buffers given by their address and bytes per slot."""
    for address, stride in zip(data_ptrs.tolist(), strides.tolist(), strict=True):
        slots = [ctypes.string_at(address + slot * stride, stride) for slot in source.tolist()]
        for slot, content in zip(target.tolist(), slots, strict=True):
            ctypes.memmove(address + slot * stride, content, stride)


def assign_req_to_token_pool_cpu(
    requests: Tensor, req_to_token: Tensor, start: Tensor, end: Tensor, locations: Tensor, pool_len: int
) -> None:
    """Writes each request's new locations, consecutive in ``locations``, to positions start..end of its row."""
    at = 0
    for request, first, last in zip(requests.tolist(), start.tolist(), end.tolist(), strict=True):
        req_to_token[request, first:last] = locations[at : at + last - first].to(req_to_token.dtype)
        at += last - first


def assign_extend_cache_locs_cpu(
    requests: Tensor, req_to_token: Tensor, start: Tensor, end: Tensor, out: Tensor, pool_len: int
) -> None:
    """Concatenates the locations start..end of all requests."""
    at = 0
    for request, first, last in zip(requests.tolist(), start.tolist(), end.tolist(), strict=True):
        out[at : at + last - first] = req_to_token[request, first:last].to(out.dtype)
        at += last - first


def assign_draft_cache_locs_contiguous_cpu(
    requests: Tensor, req_to_token: Tensor, lengths: Tensor, out: Tensor, pool_len: int, topk: int, steps: int
) -> None:
    """Collects the ``topk * steps`` locations after each request's tokens."""
    count = topk * steps
    for row, (request, length) in enumerate(zip(requests.tolist(), lengths.tolist(), strict=True)):
        out[row * count : (row + 1) * count] = req_to_token[request, length : length + count].to(out.dtype)


def build_tree_kernel_efficient_cpu(
    parents: Tensor, selected: Tensor, lengths: Tensor, mask: Tensor, positions: Tensor, index: Tensor,
    next_token: Tensor, next_sibling: Tensor, topk: int, steps: int, tokens: int, mask_mode: int,
) -> None:  # fmt: skip
    """Builds chains: every token's child is the next token, and a token sees itself and those before it."""
    if topk != 1:
        raise NotImplementedError(f"trees of {topk} tokens a step are not in the stand-in for SGLang's kernels")
    batch, chain = len(lengths), torch.arange(tokens)
    mask.view(-1)[: batch * tokens * tokens] = (chain[None] <= chain[:, None]).repeat(batch, 1, 1).view(-1)
    positions[: batch * tokens] = (lengths[:, None] + chain).flatten().to(positions.dtype)
    index.copy_(torch.arange(batch * tokens).view(batch, tokens))
    next_token.copy_(torch.where(chain < tokens - 1, chain + 1, -1).expand(batch, tokens))
    next_sibling.fill_(-1)


def verify_tree_greedy_cpu(
    predicts: Tensor, accept_index: Tensor, accept_token_num: Tensor, candidates: Tensor, retrive_index: Tensor,
    retrive_next_token: Tensor, retrive_next_sibling: Tensor, target_predict: Tensor,
) -> None:  # fmt: skip
    """Accepts each chain as far as it agrees with the target's tokens, then takes one more token from the target."""
    said = target_predict.flatten().tolist()
    for row, (drafted, index, following) in enumerate(
        zip(candidates.tolist(), retrive_index.tolist(), retrive_next_token.tolist(), strict=True)
    ):
        at, accepted = 0, 0
        accept_index[row, 0] = index[0]
        while accepted + 1 < accept_index.shape[1] and following[at] != -1:
            if drafted[following[at]] != said[index[at]]:
                break
            predicts[index[at]] = said[index[at]]
            at, accepted = following[at], accepted + 1
            accept_index[row, accepted] = index[at]
        predicts[index[at]] = said[index[at]]
        accept_token_num[row] = accepted


def fill_bonus_tokens_cpu(tokens: Tensor, lengths: Tensor, bonus: Tensor, stride: int) -> None:
    """Writes the last accepted token of each request."""
    bonus.copy_(tokens.flatten()[torch.arange(len(lengths)) * stride + lengths.long() - 1])


def fill_accept_out_cache_loc_cpu(accept_index: Tensor, locations: Tensor, out: Tensor) -> None:
    """Writes the locations of all accepted tokens, one after another."""
    accepted = accept_index.flatten()
    accepted = accepted[accepted > -1].long()
    out[: len(accepted)] = locations[accepted].to(out.dtype)
