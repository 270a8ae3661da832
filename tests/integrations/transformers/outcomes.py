"""Runs models with a lossless packed cache: the outcome is the stock answer, a refusal with its reason, or a bug."""

from __future__ import annotations

import gc
import warnings
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from typing import Any

import torch
from architectures import FIRST_SPECIAL, build, classes
from tiny import LOSSLESS, LOSSLESS_LATENT

import slimkv
from slimkv.integrations.transformers.compat import caches_latents

PROMPT, NEW = 20, 6
TOLERANCE = 2e-4  # relative to the largest logit: allows another order of summation, but not another mask

SAME, REFUSED, DIFFERENT, ERROR = "same", "refused", "different", "error"


@dataclass(frozen=True)
class Outcome:
    """One model with one kind of attention."""

    result: str  # SAME, REFUSED, DIFFERENT or ERROR
    detail: str = ""  # the reason, unless the result is SAME
    packed: int = 0  # layers that held packed tokens
    fused: int = 0  # attention calls on packed pages
    decoded: int = 0  # attention calls on decoded keys and values
    error: float = 0.0  # largest difference between logits, relative to the largest logit


@dataclass(frozen=True)
class Row:
    """The outcomes of one model class."""

    name: str
    kind: str
    stock: str = ""  # why the class does not run with the stock cache; empty if it runs
    cache: Outcome | None = None  # the packed cache under stock attention
    fused: Outcome | None = None  # inside slimkv.attention

    def to_dict(self) -> dict[str, Any]:
        """The row as JSON data."""
        return asdict(self)


def prompt(batch: int = 3, count: int = PROMPT, pads: tuple[int, ...] = (5, 0, 11)) -> dict[str, torch.Tensor]:
    """Random sequences with ``pads`` tokens of left padding."""
    ids = torch.randint(3, FIRST_SPECIAL, (batch, count), generator=torch.Generator().manual_seed(3))
    mask = torch.ones_like(ids)
    for row, pad in enumerate(pads):
        mask[row, :pad] = 0
    return {"input_ids": ids * mask, "attention_mask": mask}


def candidates(model: Any) -> list[dict[str, Any]]:
    """Inputs that a model of this kind may accept, the most complete first."""
    generator = torch.Generator().manual_seed(4)
    text = prompt()
    if not model.config.is_encoder_decoder:
        return [text]
    decoder = prompt(count=14, pads=(0, 0, 0))["input_ids"]
    decoder[:, 0] = 1  # the start token; generate would insert one before any other token
    sources: list[dict[str, Any]] = [text]
    if model.main_input_name != "input_ids":
        shapes = [(3, 16, 80), (3, 80, 16), (3, 40, 16), (3, 16, 40), (3, 16), (3, 4000), (3, 64, 160), (3, 3, 64, 64)]
        sources = [{model.main_input_name: torch.randn(shape, generator=generator)} for shape in shapes]
    return [{**source, **target} for target in ({"decoder_input_ids": decoder}, {}) for source in sources]


def generate(model: Any, inputs: dict[str, Any], cache: Any = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Greedy tokens [batch, length] and logits [steps, batch, vocab]."""
    torch.manual_seed(0)
    given = {} if cache is None else {"past_key_values": cache}
    out = model.generate(
        **inputs,
        **given,
        max_new_tokens=NEW,
        do_sample=False,
        use_cache=True,
        output_logits=True,
        return_dict_in_generate=True,
    )
    return out.sequences, torch.stack(out.logits).float()


def stock_answer(model: Any) -> tuple[dict[str, Any], torch.Tensor, torch.Tensor]:
    """Inputs that the model accepts with the stock cache, and its answer. Raises the first error if it accepts none."""
    reason: Exception | None = None
    for inputs in candidates(model):
        try:
            tokens, logits = generate(model, inputs)
            again = generate(model, inputs)[1]
        except Exception as error:
            reason = reason or error
            continue
        if not logits.isfinite().all():
            raise ValueError("its logits are not finite")
        if not torch.equal(logits, again):
            raise ValueError("it answers differently every time")
        return inputs, tokens, logits
    assert reason is not None
    raise reason


def attempt(model: Any, inputs: dict[str, Any], tokens: torch.Tensor, logits: torch.Tensor, fused: bool) -> Outcome:
    """Generates from the same inputs with a packed cache."""
    counts = None
    try:
        cache = slimkv.SlimKVCache(model, LOSSLESS_LATENT if caches_latents(model.config) else LOSSLESS)
        with slimkv.attention(model) if fused else nullcontext() as counts:
            actual_tokens, actual = generate(model, inputs, cache)
    except slimkv.SlimKVError as error:
        return Outcome(REFUSED, str(error).splitlines()[0])
    except Exception as error:
        return Outcome(
            ERROR, f"{type(error).__name__}: {str(error).strip().splitlines()[0][:160] if str(error) else ''}"
        )
    packed = sum(layer.is_initialized and layer.get_seq_length() > 0 for layer in cache.packed_layers)
    ran = {"fused": counts.fused, "decoded": counts.decoded} if counts is not None else {}
    difference = float((actual - logits).abs().max() / logits.abs().max())
    same = torch.equal(actual_tokens, tokens) and difference <= TOLERANCE
    detail = "" if same else f"logits differ by {difference:.2g} of the largest"
    return Outcome(SAME if same else DIFFERENT, detail, packed, **ran, error=difference)


def outcome(name: str) -> Row:
    """Runs the class ``name`` with stock and packed caches."""
    kind = classes()[name][0]
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        try:
            model = build(name)
            inputs, tokens, logits = stock_answer(model)
        except Exception as error:
            text = str(error).strip().splitlines()[0] if str(error).strip() else ""
            return Row(name, kind, stock=f"{type(error).__name__}: {text[:160]}")
        row = Row(name, kind, "", *(attempt(model, inputs, tokens, logits, fused) for fused in (False, True)))
        del model
        gc.collect()
        return row
