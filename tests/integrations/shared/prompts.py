"""Prompts for real engines: tokens of an English text, of many lengths."""

from __future__ import annotations

import json
import re
import shutil
import tempfile
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[3]
SHORT_LAYERS = (0, 1, 2, 3, 4, 5, 28, 29)  # without the last two, the text repeats itself endlessly


class EngineError(RuntimeError):
    """An engine did not start, or stopped. The message is its output."""


@lru_cache(maxsize=1)
def model_folder() -> str:
    """The folder of SmolLM2-135M-Instruct."""
    from slimkv.lab import models

    return str(models.folder(models.DEFAULT))


@lru_cache(maxsize=1)
def short_model_folder() -> str:
    """The folder of a SmolLM2 with 8 of its 30 layers: on a CPU, the whole model would take most of a test's time.

    On a GPU, the folder of the whole model.
    """
    import torch
    from safetensors.torch import load_file, save_file

    from slimkv.paths import cache_dir

    whole = Path(model_folder())
    if torch.version.cuda:
        return str(whole)
    short = cache_dir("tests") / f"{whole.name}-{len(SHORT_LAYERS)}-layers"
    if not short.is_dir():
        short.parent.mkdir(parents=True, exist_ok=True)
        beside = Path(tempfile.mkdtemp(dir=short.parent))
        for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
            shutil.copy(whole / name, beside)
        config = json.loads((whole / "config.json").read_text())
        (beside / "config.json").write_text(json.dumps({**config, "num_hidden_layers": len(SHORT_LAYERS)}))
        renamed = {f"model.layers.{old}.": f"model.layers.{new}." for new, old in enumerate(SHORT_LAYERS)}
        kept = {}
        for name, weight in load_file(whole / "model.safetensors").items():
            layer = re.match(r"model\.layers\.\d+\.", name)
            if layer is None or layer[0] in renamed:
                kept[name if layer is None else name.replace(layer[0], renamed[layer[0]])] = weight
        save_file(kept, beside / "model.safetensors", metadata={"format": "pt"})
        with suppress(OSError):  # another process has already created it
            beside.rename(short)
        shutil.rmtree(beside, ignore_errors=True)
    return str(short)


@lru_cache(maxsize=1)
def text_tokens() -> list[int]:
    """A few thousand tokens of English text."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model_folder())
    return tokenizer((ROOT / "LICENSE").read_text())["input_ids"]


def piece(start: int, length: int) -> list[int]:
    """Consecutive tokens of the text."""
    return text_tokens()[start : start + length]


def run(name: str, prompts: list[list[int]], max_tokens: int = 16, **how: bool) -> dict[str, Any]:
    """Describes one batch for an engine."""
    return {"name": name, "prompts": prompts, "max_tokens": max_tokens, **how}


def ragged() -> list[list[int]]:
    """Prompts of 3 to 69 tokens."""
    return [piece(40 * i, 3 + 11 * (i % 7)) for i in range(7)]


def long() -> list[list[int]]:
    """Prompts that are prefilled in several chunks. Their lengths are not multiples of a block."""
    return [piece(100, 301), piece(700, 203)]


def repeating() -> list[list[int]]:
    """Repetitive text, so that n-gram lookup finds drafts."""
    return [piece(0, 40) * 3 + piece(0, 20), piece(200, 30) * 4]


def various() -> list[list[int]]:
    """32 prompts of 11 to 610 tokens, the last two of repeating text."""
    return [piece(53 * i, 11 + (53 * i * i + 37 * i) % 600) for i in range(30)] + repeating()


def sharing(tokens: int) -> list[list[int]]:
    """Three requests that share a prefix of ``tokens`` tokens, each followed by a few others."""
    return [piece(100, tokens) + piece(1500 + 20 * i, 9 + i) for i in range(3)]


def partings(alone: dict[str, Any], other: dict[str, Any], name: str) -> dict[int, tuple[int, float]]:
    """By prompt whose tokens differ: the first differing position, and the gap in nats of both tokens in ``alone``."""
    out = {}
    for i, (one, two) in enumerate(zip(alone["tokens"][name], other["tokens"][name], strict=True)):
        if one != two:
            at = next(j for j, (a, b) in enumerate(zip(one, two, strict=True)) if a != b)
            known = alone["logprobs"][name][i][at]
            out[i] = at, known[str(one[at])] - known.get(str(two[at]), float("-inf"))
    return out


def first_token_difference(found: dict[str, Any], one: str, two: str) -> float:
    """Largest difference in nats between the logprobs of first tokens in two runs, over tokens listed in both."""
    pairs = zip(found["logprobs"][one], found["logprobs"][two], strict=True)
    return max(abs(a[0][token] - b[0][token]) for a, b in pairs for token in a[0].keys() & b[0].keys())
