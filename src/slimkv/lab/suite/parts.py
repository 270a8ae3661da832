"""The parts of a run: each measures one property of every cache and returns a JSON document."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from slimkv.formats import DEFAULT_FORMAT
from slimkv.integrations.serving.listener import Progress
from slimkv.lab.bench.generate import GenerateSettings, time_generation
from slimkv.lab.evals.acceptance import measure_acceptance
from slimkv.lab.evals.agreement import measure_agreement
from slimkv.lab.evals.harness import MEMORY, STRICT, WITH_CALIBRATION, takes_budget
from slimkv.lab.evals.needle import measure_needle
from slimkv.lab.evals.positions import measure_positions
from slimkv.lab.suite.lm_eval import run_lm_eval
from slimkv.lab.suite.settings import PARTS, VLLM, SuiteSettings
from slimkv.lab.suite.tasks import TASKS, answer_context
from slimkv.lab.suite.vllm_engine import run_engine
from slimkv.lab.suite.workbench import Workbench
from slimkv.memory_plan import make_plan, parse_size, shape_of

Data = dict[str, Any]
BUDGET = f"{MEMORY}{DEFAULT_FORMAT}"  # a cache whose formats follow memory, in addition to the fixed ones
_START = 20_000  # cost of starting an engine, in tokens read


@dataclass(frozen=True)
class Part:
    """One part of a run."""

    name: str  # also names its file
    kind: str  # one of ``settings.PARTS``
    title: str
    settings: Data  # inputs of its result besides the model and the versions
    weight: float  # expected cost, in tokens that the model reads
    run: Callable[..., Data]  # takes ``progress``


def _part(bench: Workbench, name: str, title: str, weight: float, run: Callable[..., Data], **given: Any) -> Part:
    """A part called ``kind`` or ``kind-more``. Its result depends on ``given``, the text and the formats."""
    kind = next(kind for kind in PARTS if name == kind or name.startswith(f"{kind}-"))
    formats = {} if "format" in given else {"formats": bench.settings.formats}
    return Part(name, kind, title, {"text": bench.text_digest, **formats, **given}, weight, run)


def plan_parts(bench: Workbench) -> tuple[list[Part], list[str]]:
    """The parts of a run in order, and notes on what was left out and why."""
    settings, notes = bench.settings, list[str]()
    makers: dict[str, Callable[[Workbench, list[str]], list[Part]]] = {
        "memory": _memory, "agreement": _agreement, "positions": _positions, "needle": _needle, "tasks": _tasks,
        "lm-eval": _lm_eval, "drafts": _drafts, "generate": _generate,
    }  # fmt: skip
    absent = ("agreement", "positions", "needle", "drafts", "generate") if settings.engine == VLLM else ()
    kinds = [kind for kind in makers if kind in settings.parts and kind not in absent]
    return [part for kind in kinds for part in makers[kind](bench, notes)], notes


def _limit(bench: Workbench, of_text: bool) -> tuple[float, str]:
    """The longest window that the model, and with ``of_text`` also the text, allows; and which of them limits it."""
    limits = [(bench.max_positions or math.inf, "the model's positions")]
    return min([*limits, (bench.text_tokens, "the text")] if of_text else limits)


def _fitting(bench: Workbench, lengths: tuple[int, ...], what: str, notes: list[str], of_text: bool) -> list[int]:
    """The lengths within the limit."""
    limit, why = _limit(bench, of_text)
    if dropped := ", ".join(f"{length:,}" for length in lengths if length > limit):
        notes.append(f"{what}: {dropped} tokens are left out, limited to {limit:,} by {why}")
    return [length for length in lengths if length <= limit]


def _window(bench: Workbench, tokens: int, what: str, notes: list[str]) -> int:
    """The tokens of a window, reduced to the limit."""
    limit, why = _limit(bench, of_text=True)
    if limit < tokens:
        notes.append(f"{what}: {limit:,} tokens in place of {tokens:,}, limited by {why}")
    return int(min(tokens, limit))


def _reading(settings: SuiteSettings, tokens: float) -> float:
    return tokens * len(settings.formats)


def _memory(bench: Workbench, notes: list[str]) -> list[Part]:
    settings = bench.settings

    def run(progress: Progress) -> Data:
        shape = shape_of(bench.config.to_dict())
        names = {format: format.removesuffix(WITH_CALIBRATION) for format in bench.formats}
        plan = make_plan(shape, list(dict.fromkeys(names.values())), parse_size(settings.memory))
        rows = {row.format: asdict(row) for row in plan.formats}
        return {"memory_bytes": plan.memory_bytes, "formats": {name: rows[plain] for name, plain in names.items()}}

    return [_part(bench, "memory", "bytes per token, tokens that fit", 500, run, memory=settings.memory)]


def _agreement(bench: Workbench, notes: list[str]) -> list[Part]:
    settings, size = bench.settings, bench.settings.size
    tokens = _window(bench, size.window_tokens, "agreement", notes)
    count = min(size.windows, bench.text_tokens // tokens)
    if count < size.windows:
        notes.append(
            f"agreement: {count} windows in place of {size.windows}, the text is shorter; give a longer --text"
        )
    run = partial(bench.measured, measure_agreement, windows=(count, tokens))
    weight, title = _reading(settings, count * tokens), "perplexity, agreement, KL divergence"
    return [_part(bench, "agreement", title, weight, run, windows=count, tokens=tokens)]


def _positions(bench: Workbench, notes: list[str]) -> list[Part]:
    settings = bench.settings
    tokens = _window(bench, settings.size.position_tokens, "positions", notes)

    def run(progress: Progress) -> Data:
        more = [BUDGET] if takes_budget(bench.loaded.model) else []
        return bench.measured(measure_positions, windows=(1, tokens), progress=progress, more=more)

    weight, title = _reading(settings, tokens * (1 + tokens / 8192)), f"KL divergence by position to {tokens:,}"
    return [_part(bench, "positions", title, weight, run, budget=BUDGET, tokens=tokens)]


def _needle(bench: Workbench, notes: list[str]) -> list[Part]:
    settings, depths = bench.settings, bench.settings.size.needle_depths

    def at(context: int) -> Part:
        asked: Data = {"contexts": [context], "depths": depths, "mode": STRICT}
        run = partial(bench.measured, measure_needle, bench.tokenizer, bench.text, **asked)
        weight, title = _reading(settings, 4 * len(depths) * (context + 100)), f"needle grid at {context:,} tokens"
        return _part(bench, f"needle-{context}", title, weight, run, context=context, depths=depths)

    fitting = _fitting(bench, settings.size.needle_contexts, "needle", notes, of_text=True)
    return [at(context) for context in fitting]


def task_contexts(bench: Workbench, task: str, length: int) -> list[Any]:
    """The contexts of a task and length."""
    size = bench.settings.size
    return [bench.tasks.make(task, length, n, size.questions, bench.settings.seed) for n in range(size.contexts)]


def task_items(contexts: list[Any]) -> list[Data]:
    """One row for each question: its context, and the depth of its answer."""
    return [
        {"task": context.task, "length": context.length, "context": number, "question": q, "depth": question.depth}
        for number, context in enumerate(contexts)
        for q, question in enumerate(context.questions)
    ]


def _tasks(bench: Workbench, notes: list[str]) -> list[Part]:
    settings, size = bench.settings, bench.settings.size
    lengths = _fitting(bench, size.lengths, "tasks", notes, of_text=False)
    given = {"contexts": size.contexts, "questions": size.questions, "seed": settings.seed}
    if settings.engine == VLLM:
        return _tasks_in_vllm(bench, lengths, given)

    def of(task: str, length: int) -> Part:
        def run(progress: Progress) -> Data:
            contexts, kinds = task_contexts(bench, task, length), bench.kinds()
            answers: dict[str, Data] = {kind.name: {"exact": []} for kind in kinds}
            steps = len(contexts) * len(kinds)
            for number, context in enumerate(contexts):
                for which, kind in enumerate(kinds):
                    progress(f"{task} at {length:,}: {kind.name}", number * len(kinds) + which, steps)
                    answers[kind.name]["exact"] += answer_context(bench.loaded.model, kind, context)
            progress(task, steps, steps)
            return {"items": task_items(contexts), "answers": answers}

        weight = _reading(settings, size.contexts * (length + 40 * size.questions))
        name, title = f"tasks-{task}-{length}", f"{task} at {length:,} tokens"
        return _part(bench, name, title, weight, run, task=task, length=length, **given)

    return [of(task, length) for length in lengths for task in TASKS]


def _tasks_in_vllm(bench: Workbench, lengths: list[int], given: Data) -> list[Part]:
    """One part for each format: an engine is started once and answers everything."""
    size = bench.settings.size

    def of(format: str) -> Part:
        def run(progress: Progress) -> Data:
            contexts = [task_contexts(bench, task, length) for length in lengths for task in TASKS]
            bench.release()
            found = run_engine(bench, format, [one for several in contexts for one in several], progress)
            items = [item for several in contexts for item in task_items(several)]
            return {"items": items, "answers": {format: {"exact": found.pop("exact")}}, "engine": found}

        weight = _START + len(TASKS) * sum(size.contexts * (length + 40 * size.questions) for length in lengths)
        name, title = f"tasks-vllm-{format}", f"tasks through vLLM: {format}"
        return _part(bench, name, title, weight, run, format=format, lengths=lengths, **given)

    return [of(format) for format in bench.settings.formats]


def _lm_eval(bench: Workbench, notes: list[str]) -> list[Part]:
    settings, size = bench.settings, bench.settings.size

    def of(format: str) -> Part:
        given = {"format": format, "tasks": settings.tasks, "limit": size.limit, "folder": settings.task_folder}
        title, run = f"lm-evaluation-harness: {format}", partial(run_lm_eval, bench, format)
        return _part(bench, f"lm-eval-{format}", title, _START * len(settings.tasks), run, **given)

    return [of(format) for format in settings.formats] if settings.tasks else []


def _drafts(bench: Workbench, notes: list[str]) -> list[Part]:
    settings, size = bench.settings, bench.settings.size
    new = 3 * size.decode_tokens
    tokens = _window(bench, min(size.window_tokens, max((bench.max_positions or 1024) - new, 16)), "drafts", notes)
    count = max(1, min(size.windows, 8, bench.text_tokens // tokens))
    run = partial(bench.measured, measure_acceptance, windows=(count, tokens), new_tokens=new)
    weight, title = _reading(settings, count * tokens + 25.0 * new), f"n-gram drafts accepted after {tokens:,} tokens"
    return [_part(bench, "drafts", title, weight, run, windows=count, tokens=tokens, new_tokens=new)]


def _generate(bench: Workbench, notes: list[str]) -> list[Part]:
    settings, size = bench.settings, bench.settings.size
    rounds, new = size.decode_rounds, size.decode_tokens
    room = (bench.max_positions or math.inf) - (new + 4) * (rounds + 1)
    context = int(min(size.decode_context, max(room, 16)))

    def run(progress: Progress) -> Data:
        wanted = GenerateSettings(
            model=settings.model, context=context, new_tokens=new, rounds=rounds, formats=tuple(bench.packed),
            dtype=settings.dtype, device=settings.device,
        )  # fmt: skip
        report = asdict(time_generation(wanted, bench.loaded.model, bench.used_calibration))
        del report["run"]  # the whole run has one
        return report

    weight, title = _reading(settings, rounds * (context + 50.0 * (new + 1))), f"decoding speed at {context:,} tokens"
    return [_part(bench, "generate", title, weight, run, context=context, new_tokens=new, rounds=rounds)]
