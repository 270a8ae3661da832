"""The demonstration on a real model: the size and quality of each cache, and two questions answered by all of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from slimkv.calibration import Calibration
from slimkv.integrations.serving.listener import Progress, silent
from slimkv.lab.demo.questions import LONG_QUESTION, SHORT_QUESTION, Question, Shown, ask, long_prompt
from slimkv.lab.evals.agreement import AgreementReport, measure_agreement
from slimkv.lab.evals.generation import prompt_ids
from slimkv.lab.evals.harness import RAW, Stopwatch, cache_kinds
from slimkv.lab.evals.texts import load_text, token_windows
from slimkv.lab.provenance import Provenance, provenance
from slimkv.memory_plan import sequence_bytes, shape_of

BEST = "k4v4+cal"
ANSWERING = (BEST, "k4v4", "turboquant_4bit_nc", "fp8")
MEASURED = (*ANSWERING, "k3v3+cal", "k6v6+cal")
REMEMBERED = ("fp8", "turboquant_4bit_nc", "k4v4", "k3v3")  # formats of the memory chart
CONTEXTS = (4096, 8192, 16384, 32768, 65536, 131072)
TEXT_TOKENS = 1024


@dataclass(frozen=True)
class Showcase:
    """Everything ``slimkv demo`` measures."""

    model: str
    calibration: str  # the tokens the calibration was made on
    best: str  # the cache shown beside the stock cache
    short: Question
    long: Question | None  # None: the context of the model is too short
    quality: AgreementReport
    contexts: tuple[int, ...]
    memory: dict[str, tuple[int, ...]]  # cache bytes of one sequence at each context, by format
    run: Provenance
    seconds: float


def memory_curves(model: Any, formats: Sequence[str], contexts: Sequence[int]) -> dict[str, tuple[int, ...]]:
    """Bytes of one sequence at each context by format, bfloat16 first; sliding layers hold at most their window."""
    shape, named = shape_of(model.config.to_dict()), {"bf16": RAW, **{format: format for format in formats}}
    return {name: tuple(sequence_bytes(shape, x, c, 64) for c in contexts) for name, x in named.items()}


def run_showcase(
    model: Any, tokenizer: Any, calibration: Calibration, *, name: str, best: str = BEST, new_tokens: int = 64,
    long_new_tokens: int = 24, text_tokens: int = TEXT_TOKENS, windows: int = 2, window_tokens: int = 192,
    shown: Shown = lambda question, texts: None, progress: Progress = silent,
) -> Showcase:  # fmt: skip
    """Asks both questions and measures every format on the included text.

    ``best`` answers the short question beside the stock cache; all of ``ANSWERING`` answer the long one.
    """
    watch = Stopwatch()
    text = load_text()
    answering, measured = ([best, *(x for x in formats if x != best)] for formats in (ANSWERING, MEASURED))
    kinds = cache_kinds([*answering, BEST], calibration)[:-1]  # with BEST in the list only ``+cal`` is calibrated
    short = ask(model, tokenizer, kinds[:1], SHORT_QUESTION, prompt_ids(tokenizer, SHORT_QUESTION), new_tokens, shown)
    prompt, long = long_prompt(model, tokenizer, text, text_tokens, long_new_tokens), None
    if prompt is not None:
        progress(f"reading {prompt.shape[1]:,} tokens", 0, 1)
        long = ask(model, tokenizer, kinds, LONG_QUESTION, prompt, long_new_tokens, shown)
    ids = token_windows(tokenizer, text, windows, window_tokens)
    quality = measure_agreement(model, ids, measured, name=name, progress=progress, calibration=calibration)
    curves = memory_curves(model, REMEMBERED, CONTEXTS)
    return Showcase(
        name, calibration.source, best, short, long, quality, CONTEXTS, curves, provenance(model.device), watch.seconds
    )
