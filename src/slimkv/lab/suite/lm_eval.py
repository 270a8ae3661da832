"""Tasks of lm-evaluation-harness, by log-likelihood or by generation, with a packed cache.

``SlimKVLM`` is its Hugging Face model with one difference: every forward pass and every ``generate`` has a cache of the
requested kind, and attention reads all keys and values through the codec.
"""

from __future__ import annotations

from functools import lru_cache
from numbers import Real
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from slimkv.errors import InputError
from slimkv.integrations.serving.listener import Progress
from slimkv.lab.engine_process import import_package
from slimkv.lab.evals.harness import RAW, STRICT, CacheKind, attending
from slimkv.lab.suite.settings import VLLM
from slimkv.lab.suite.vllm_engine import engine_arguments
from slimkv.lab.suite.workbench import Workbench

if TYPE_CHECKING:
    from lm_eval.api.model import LM


def import_lm_eval() -> Any:
    """Imports lm_eval; raises if it is not installed."""
    return import_package("lm_eval", "--tasks", '"slimkv[suite]"')


def slimkv_lm(model: Any, tokenizer: Any, kind: CacheKind, batch_size: int = 1) -> LM:
    """A model for ``lm_eval.simple_evaluate`` whose cache is of ``kind``, in strict mode.

    ``raw`` is the stock cache; any other format is packed, formats of raw numbers (``krawfp32vrawfp32``) included.
    """
    import_lm_eval()
    from lm_eval.models.huggingface import HFLM

    class SlimKVLM(HFLM):
        """See ``slimkv_lm``."""

        def _model_call(self, inps: Tensor, attn_mask: Tensor | None = None, labels: Tensor | None = None) -> Tensor:
            if attn_mask is not None or labels is not None:
                raise InputError("encoder-decoder models are not supported with lm-evaluation-harness")
            cache = kind.new(self.model, STRICT)
            with torch.no_grad(), attending(self.model, kind.format):
                return self.model(inps, past_key_values=cache, use_cache=True).logits

        def _model_generate(
            self, context: Tensor, max_length: int, stop: list[str], **generation_kwargs: Any
        ) -> Tensor:
            generation_kwargs["past_key_values"] = kind.new(self.model, STRICT)
            with attending(self.model, kind.format):
                return super()._model_generate(context, max_length, stop, **generation_kwargs)

    return SlimKVLM(pretrained=model, tokenizer=tokenizer, batch_size=batch_size)


@lru_cache(maxsize=4)
def _task_manager(task_folder: str | None) -> Any:
    """Created once, because it reads thousands of files."""
    from lm_eval.tasks import TaskManager

    return TaskManager(include_path=task_folder)


def evaluate(model: LM, tasks: tuple[str, ...], limit: int | None, task_folder: str | None = None) -> dict[str, Any]:
    """Scores of every task, and of every example if the harness has them.

    Returns ``{"results": {task: {metric: value}}, "samples": {task: {metric: [value of each example]}}}``.
    """
    lm_eval = import_lm_eval()
    manager = _task_manager(task_folder)
    unknown = [task for task in tasks if not manager.match_tasks([task])]
    if unknown:
        raise InputError(
            f"lm-evaluation-harness has no task {', '.join(unknown)}; python -m lm_eval ls tasks lists them"
        )
    found = lm_eval.simple_evaluate(
        model=model, tasks=list(tasks), limit=limit, task_manager=manager, bootstrap_iters=0, log_samples=True
    )
    if found is None:
        raise InputError("lm-evaluation-harness returned no result in this process")
    results = {task: _numbers(scores) for task, scores in found["results"].items()}
    samples = {task: _each(rows) for task, rows in found.get("samples", {}).items()}
    return {"results": {task: scores for task, scores in results.items() if scores}, "samples": samples}


def _numbers(scores: dict[str, Any]) -> dict[str, float]:
    """``acc,none`` -> ``acc``; standard errors and names are left out."""
    out = {}
    for name, value in scores.items():
        metric, _, filtered = name.partition(",")
        number = not isinstance(value, (str, bool)) and isinstance(value, Real) and value == value
        if filtered and number and not metric.endswith("_stderr"):
            out[metric if filtered == "none" else f"{metric} ({filtered})"] = float(value)
    return out


def _each(rows: list[dict[str, Any]]) -> dict[str, list[float]]:
    """Values of every example, in the order of the examples, for metrics that are one number each."""
    first = min((row.get("filter", "none") for row in rows), key=lambda name: name != "none", default="none")
    kept = sorted((row for row in rows if row.get("filter", "none") == first), key=lambda row: row["doc_id"])
    names = kept[0].get("metrics", []) if kept else []
    out = {}
    for name in names:
        values = [row.get(name) for row in kept]
        if all(isinstance(value, (int, float)) or getattr(value, "shape", None) == () for value in values):
            label = name if first == "none" else f"{name} ({first})"
            out[label] = [float(value) for value in values if value is not None]
    return out


def run_lm_eval(bench: Workbench, format: str, progress: Progress) -> dict[str, Any]:
    """Runs the tasks of the settings with one cache."""
    settings = bench.settings
    progress(f"lm-evaluation-harness: {format}", 0, 1)
    if settings.engine == VLLM:
        import_lm_eval()
        from lm_eval.models.vllm_causallms import VLLM as VLLMModel

        bench.release()
        arguments = engine_arguments(bench, format, None)  # the harness's own model, with slimkv's pages in the engine
        model = VLLMModel(pretrained=arguments.pop("model"), **arguments)
    else:
        model = slimkv_lm(bench.loaded.model, bench.loaded.tokenizer, bench.kind(format))
    found = evaluate(model, settings.tasks, settings.size.limit, settings.task_folder)
    return {"format": format, "mode": "stock" if format == RAW else STRICT, **found}
