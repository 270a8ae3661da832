"""The tokens for a calibration without a text: samples from the model itself, or random ids."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from slimkv.errors import InputError
from slimkv.integrations.serving.listener import FRAGMENT, Progress, silent

WINDOWS, TOKENS = 8, 1024  # 64 fragments, which is one batch
_BATCH = 64  # sequences sampled at a time


def random_windows(config: Any, count: int = WINDOWS, tokens: int = TOKENS, seed: int = 0) -> Tensor:
    """Uniformly random ids of a model's vocabulary, int64 [count, tokens]; each window begins with BOS, if any."""
    text = _checked(config, count, tokens)
    ids = torch.randint(text.vocab_size, (count, tokens), generator=torch.Generator().manual_seed(seed))
    if isinstance(text.bos_token_id, int):
        ids[:, 0] = text.bos_token_id
    return ids


def random_window(config: Any, tokens: int) -> Tensor:
    """One window of ``random_windows`` with ``tokens`` ids, or as many as the model can read."""
    longest = getattr(config.get_text_config(decoder=True), "max_position_embeddings", None) or tokens
    return random_windows(config, 1, min(tokens, longest))


@torch.no_grad()
def sampled_windows(
    model: Any,
    count: int = WINDOWS,
    tokens: int = TOKENS,
    seed: int = 0,
    progress: Progress = silent,
    step_begins: Callable[[int], None] = lambda position: None,
) -> Tensor:
    """Ids sampled from the model at temperature 1: int64 [count, tokens] on the CPU.

    Each window concatenates independent fragments of ``FRAGMENT`` ids that begin with BOS (a random id if the model has
    none). Short fragments can be sampled in large batches, and together they cover every position of a window. The same
    seed gives the same ids if the model gives the same logits. ``step_begins`` is called with the position of the token
    that the model reads next.
    """
    text = _checked(model.config, count, tokens)
    length = min(FRAGMENT, tokens)
    rows = -(-tokens // length) * count
    generator = torch.Generator().manual_seed(seed)
    first = torch.randint(text.vocab_size, (rows, 1), generator=generator)
    if isinstance(text.bos_token_id, int):
        first[:] = text.bos_token_id
    batches = first.split(_BATCH)
    total = len(batches) * (length - 1)
    fragments = []
    for number, batch in enumerate(batches):
        said, past = [batch], None
        for step in range(length - 1):
            progress("sampling", number * (length - 1) + step, total)
            step_begins(step)
            out = model(said[-1].to(model.device), past_key_values=past, use_cache=True)
            past = out.past_key_values
            chance = torch.rand(len(batch), generator=generator, dtype=torch.float64)
            said.append(draw(out.logits[:, -1], chance.to(model.device))[:, None].cpu())
        fragments.append(torch.cat(said, 1))
    return torch.cat(fragments).reshape(count, -1)[:, :tokens].contiguous()


def draw(logits: Tensor, chance: Tensor) -> Tensor:
    """The id at which the cumulative probability passes ``chance``: int64 [rows].

    Args:
        logits: float [rows, vocabulary].
        chance: float64 [rows] in [0, 1).
    """
    ends = torch.softmax(logits.float(), -1).double().cumsum(-1)
    target = chance.clamp(max=1 - 2**-40) * ends[:, -1]  # below the end despite rounding
    return torch.searchsorted(ends, target[:, None], right=True)[:, 0]  # an id of nonzero probability


def _checked(config: Any, count: int, tokens: int) -> Any:
    """The configuration of the text model; raises if the model cannot read windows of ``tokens`` tokens."""
    text = config.get_text_config(decoder=True)
    longest = getattr(text, "max_position_embeddings", None) or tokens
    if count < 1 or not 2 <= tokens <= longest:
        raise InputError(f"cannot calibrate on {count} windows of {tokens} tokens; the model reads 2 to {longest}")
    return text
