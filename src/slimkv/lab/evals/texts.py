"""Text to measure on: a file, a data set on the Hugging Face hub, or the text included in slimkv."""

from __future__ import annotations

from importlib import resources
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from slimkv.errors import InputError
from slimkv.lab.engine_process import import_package

SHIPPED = "shipped"  # the opening of "Pride and Prejudice" (Jane Austen, 1813; public domain)
CHARACTERS_PER_TOKEN = 12  # more than any tokenizer needs on prose


def load_text(source: str = SHIPPED) -> str:
    """The text of ``source``: ``shipped``, a file, or a hub data set with a text column (``name:config:split``)."""
    if source == SHIPPED:
        data = resources.files("slimkv.lab.evals").joinpath("data", "pride_and_prejudice.txt")
        return data.read_text(encoding="utf-8")
    path = Path(source)
    if path.is_file():
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise InputError(f"{source} is not a UTF-8 text file (byte {error.start}); give a text file") from error
        if not text.strip():
            raise InputError(f"{source} has no words in it; give a text file")
        return text
    if source and path.is_dir():
        raise InputError(f"{source} is a folder; give a text file")
    if not source or path.suffix or source.startswith((".", "/", "~")) or source.count("/") > 1:
        raise InputError(f"no text file {source!r}; give a file, a hub data set (name:config:split) or {SHIPPED!r}")
    return _hub_text(source)


def _hub_text(source: str) -> str:
    datasets = import_package("datasets", f"{source!r} is not a file; loading it from the hub", "datasets")
    name, config, split = [*source.split(":"), None, None][:3]
    try:
        rows = datasets.load_dataset(name, config, split=split or "test")
    except Exception as error:  # the hub client raises many kinds of error; each means that the data set is unavailable
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise InputError(f"the data set {source!r} could not be loaded ({reason}); give a text file instead") from error
    if "text" not in rows.column_names:
        raise InputError(f"the data set {source!r} has no column 'text'; it has {', '.join(rows.column_names)}")
    return "\n\n".join(rows["text"])


def token_windows(tokenizer: Any, text: str, count: int, tokens: int, offset: int = 0) -> Tensor:
    """``count`` consecutive windows of ``tokens`` tokens, from token ``offset`` of the text on: int64 [count, tokens].

    If the model expects a BOS token (Gemma), every window begins with it.
    """
    bos = tokenizer.bos_token_id if wants_bos(tokenizer) else None
    body = tokens - (bos is not None)
    if count < 1 or body < 2:
        raise InputError(f"cannot make {count} windows of {tokens} tokens: use at least one, of at least 3 tokens")
    if offset < 0:
        raise InputError(f"the offset into the text must be 0 or more tokens, not {offset}")
    needed = offset + count * body
    ids = tokenizer(text[: needed * CHARACTERS_PER_TOKEN], add_special_tokens=False, verbose=False)["input_ids"]
    if len(ids) < needed:
        raise InputError(
            f"the text has {len(ids)} tokens; {count} windows of {tokens} from token {offset} on need {needed}: use "
            "fewer or shorter windows, or a longer text"
        )
    starts = range(offset, needed, body)
    rows = [([bos] if bos is not None else []) + ids[start : start + body] for start in starts]
    return torch.tensor(rows, dtype=torch.int64)


def wants_bos(tokenizer: Any) -> bool:
    """Whether a model with this tokenizer expects text to begin with the BOS token."""
    return tokenizer.bos_token == "<bos>"
