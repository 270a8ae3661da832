"""The mask function of ``slimkv`` attention, and the causal patterns that masks are equivalent to.

Fused attention implements causal order, a window and left padding, but takes no mask. Before it runs, the mask must be
known to be exactly that. ``slimkv_mask`` notes on a mask how it was made; any other mask is
inspected. A mask that is not recognised is applied to decoded keys and values.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from slimkv.integrations.transformers.compat import AttentionMaskInterface, sdpa_mask
from slimkv.integrations.transformers.stock_attention import SDPA
from slimkv.integrations.transformers.switching import stock_of

if TYPE_CHECKING:
    from slimkv.integrations.transformers.lazy_kv import LazyKV

_NOTE = "_slimkv_note"
_READ = "_slimkv_read"


@dataclass(frozen=True)
class Pattern:
    """Causal attention in a window, with ``pads[b]`` leading positions of sequence b hidden."""

    pads: list[int] | None  # None: padding is unknown
    window: int | None


@dataclass(frozen=True)
class _Note:
    """How ``slimkv_mask`` made a mask."""

    pads: list[int]
    window: int | None
    first: int
    keys: int
    queries: int


def slimkv_mask(*args: Any, **kwargs: Any) -> Tensor | None:
    """The mask that the model's own attention gets (boolean, additive or None), with a note of its pattern."""
    config = kwargs.get("config")
    stock = stock_of(config)
    make = sdpa_mask if stock in (None, SDPA) else AttentionMaskInterface()[stock]
    mask = make(*args, **kwargs)
    if mask is None or args:
        return mask
    window, chunk = kwargs.get("local_size"), getattr(config, "attention_chunk_size", None)
    offset = kwargs.get("kv_offset", 0)
    plain = (
        kwargs.get("allow_is_causal_skip", True)  # false if a caller extends the pattern
        and not kwargs.get("allow_is_bidirectional_skip", False)
        and not kwargs.get("use_vmap", False)
        and (window is None or (chunk is None and window == getattr(config, "sliding_window", None)))
        and isinstance(offset, int)
    )
    pads = left_padding(kwargs.get("attention_mask"), mask.shape[0]) if plain else None
    if pads is not None:
        setattr(mask, _NOTE, _Note(pads, window, offset, mask.shape[-1], mask.shape[-2]))
    return mask


def left_padding(attention_mask: Tensor | None, batch: int) -> list[int] | None:
    """Leading hidden positions per sequence of a mask [batch, positions]; None if anything else is hidden."""
    if attention_mask is None:
        return [0] * batch
    shown = attention_mask.bool()
    leading = (shown.cumsum(-1) == 0).sum(-1)
    both = torch.stack([leading, shown.shape[-1] - shown.sum(-1)]).tolist()
    return both[0] if both[0] == both[1] else None


def pattern_of(mask: Tensor, keys: LazyKV) -> Pattern | None:
    """The causal pattern of ``mask`` on ``keys``; None for every other mask."""
    if mask.dim() != 4 or mask.shape[1] != 1 or tuple(mask.shape[-2:]) != (keys.new, keys.positions):
        return None
    note: _Note | None = getattr(mask, _NOTE, None)
    if note is not None and (note.first, note.keys, note.queries) == (keys.first, keys.positions, keys.new):
        windows = [x for x in (note.window, keys.window) if x is not None]
        window = min(windows, default=None)
        # A windowed layer returns the keys that a single query sees; several queries need the mask.
        if keys.window in (None, note.window) or keys.new == 1 or keys.positions <= min(windows):
            return Pattern(note.pads, window)
    return _read(mask, keys)


def _read(mask: Tensor, keys: LazyKV) -> Pattern | None:
    """``pattern_of`` from the mask's values; stored on the mask, which many layers share."""
    key = keys.first, keys.window, len(keys.pads)
    known = getattr(mask, _READ, None)
    if known is None or known[0] != key:
        known = key, _leading(mask, keys)
        setattr(mask, _READ, known)
    leading = known[1]
    if leading is None:
        return None
    # Padding that has left the window is no longer visible, so earlier knowledge of it is kept.
    pads = [keys.first + n if n else min(pad, keys.first) for n, pad in zip(leading, keys.pads, strict=True)]
    return Pattern(pads, keys.window)


def _leading(mask: Tensor, keys: LazyKV) -> list[int] | None:
    """The number of leading keys per sequence that are hidden from every query; None unless the rest is the causal
    pattern. Padding queries may see anything.
    """
    shown = mask[:, 0]
    odd = torch.zeros((), dtype=torch.bool, device=mask.device)
    if mask.dtype != torch.bool:
        shown = shown == 0
        odd = (~shown & ~(mask[:, 0] <= torch.finfo(mask.dtype).min / 2)).any()  # a bias, not a mask
    shown = shown.expand(len(keys.pads), -1, -1)
    leading = (shown.any(-2).cumsum(-1) == 0).sum(-1)
    at = torch.arange(keys.positions, device=mask.device)[None, None, :]
    asking = torch.arange(keys.positions - keys.new, keys.positions, device=mask.device)[None, :, None]
    expected = (at <= asking) & (at >= leading[:, None, None])
    if keys.window is not None:
        expected &= at > asking - keys.window
    wrong = ((shown != expected) & (asking >= leading[:, None, None])).any() | odd
    *found, bad = torch.cat([leading, wrong.reshape(1).to(leading.dtype)]).tolist()
    return None if bad else found
