"""Acceptance length of speculative drafts with a packed cache, relative to the stock cache.

    python benchmarks/acceptance.py --model qwen2.5-coder-1.5b-instruct --device cuda --prompts 768

Drafts come from n-gram lookup and from the model's first layers. Half of the prompts are Python source, half prose.
Greedy verification accepts a drafted token if the model would generate it, so answers generated without drafts show how
many would be accepted. The standard error of each ratio comes from 400 bootstrap resamples of the prompts.
"""

from __future__ import annotations

import argparse
import random
from pathlib import Path
from typing import Any

import torch

import slimkv
from slimkv.integrations.transformers.calibration.cached import auto_calibration
from slimkv.lab import models
from slimkv.lab.evals.acceptance import DRAFTED, verifications
from slimkv.lab.evals.harness import STOCK, STRICT, CacheKind, attending, cache_kinds
from slimkv.lab.evals.texts import load_text


def matching_steps(matches: list[bool], drafted: int = DRAFTED) -> int:
    """Verification steps of one answer. ``matches``: for each of its tokens, whether the draft model predicts it."""
    steps, done = 0, 0
    while done < len(matches):
        accepted = 0
        while accepted < drafted and done + accepted < len(matches) and matches[done + accepted]:
            accepted += 1
        done, steps = done + accepted + 1, steps + 1
    return steps


def prompts_of(tokenizer: Any, count: int, tokens: int) -> list[list[int]]:
    """Evenly spaced windows of tokens, half of them from Python source and half from prose."""
    source = "\n".join(path.read_text() for path in sorted(Path(slimkv.__file__).parent.rglob("*.py")))
    found = []
    for text in (source, load_text("shipped")):
        ids = tokenizer(text)["input_ids"]
        stride = max(1, (len(ids) - tokens) // max(1, count // 2))
        found += [ids[i * stride : i * stride + tokens] for i in range(count // 2)]
    return found


def answers_of(model: Any, prompts: list[list[int]], kind: CacheKind, new: int, batch: int) -> list[list[int]]:
    """Greedy continuations of the prompts."""
    found = []
    for first in range(0, len(prompts), batch):
        ids = torch.tensor(prompts[first : first + batch], device=model.device)
        with attending(model, kind.format), torch.no_grad():
            out = model.generate(
                ids, attention_mask=torch.ones_like(ids), past_key_values=kind.new(model, STRICT), max_new_tokens=new,
                min_new_tokens=new, do_sample=False, pad_token_id=0,
            )  # fmt: skip
        found += out[:, ids.shape[1] :].tolist()
    return found


def steps_with_first_layers(model: Any, prompts: list[list[int]], answers: list[list[int]], kept: int) -> list[int]:
    """Verification steps of the answers, with drafts from the first ``kept`` layers and the model's head."""
    layers, start, found = model.model.layers, len(prompts[0]), []
    model.model.layers = layers[:kept]
    try:
        with torch.no_grad():
            for prompt, answer in zip(prompts, answers, strict=True):
                ids = torch.tensor([prompt + answer], device=model.device)
                hidden = model.model(ids, use_cache=False).last_hidden_state[:, start - 1 : -1]
                found.append(matching_steps((model.lm_head(hidden).argmax(-1) == ids[:, start:])[0].tolist()))
    finally:
        model.model.layers = layers
    return found


def ratio_of(stock: list[int], own: list[int]) -> tuple[float, float]:
    """The ratio of the acceptance lengths and its standard error."""

    def ratio(rows: list[int]) -> float:
        return sum(stock[i] for i in rows) / sum(own[i] for i in rows)

    generator, every = random.Random(0), list(range(len(own)))
    again = torch.tensor([ratio(generator.choices(every, k=len(every))) for _ in range(400)])
    return ratio(every), float(again.std())


def main() -> None:
    """Command-line entry point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=models.DEFAULT)
    parser.add_argument("--format", default="k4v4+cal,k4v4")
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=192)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--layers", type=int, help="of the draft; default: six of seven")
    parser.add_argument("--device", default="cpu")
    given = parser.parse_args()
    models.quiet_loading()
    loaded = models.load(given.model, torch.bfloat16 if given.device == "cuda" else torch.float32, given.device)
    model, formats = loaded.model, given.format.split(",")
    calibration = auto_calibration(model) if any(name.endswith("+cal") for name in formats) else None
    prompts = prompts_of(loaded.tokenizer, given.prompts, given.tokens)
    kept = given.layers or model.config.num_hidden_layers * 6 // 7
    stock: dict[str, list[int]] = {}
    for kind in [STOCK, *cache_kinds(formats, calibration)]:
        answers = answers_of(model, prompts, kind, given.new_tokens, given.batch)
        steps = {
            "n-gram": [verifications(*pair) for pair in zip(prompts, answers, strict=True)],
            f"first {kept} layers": steps_with_first_layers(model, prompts, answers, kept),
        }
        stock = stock or steps
        for draft, own in steps.items():
            ratio, error = ratio_of(stock[draft], own)
            length = given.new_tokens * len(own) / sum(own)
            print(f"{kind.name:10} {draft:16} length {length:.3f}, over raw {ratio:.4f} +- {error:.4f}", flush=True)


if __name__ == "__main__":
    main()
