"""Calibration inside SGLang: collects statistics while the stock engine, with its own attention, generates text.

SGLang's engine calls methods of its schedulers by name (``collective_rpc``), one scheduler for each GPU. While
``names.LISTENING`` is in the environment, the plugin hooks that call, and ``Observer`` answers it. The schedulers
return their results in files, because SGLang only returns whether a call succeeded.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from slimkv.calibration import Calibration
from slimkv.errors import UnsupportedError
from slimkv.integrations.serving.listener import (
    STEPS,
    ListeningPlan,
    ObservedLayer,
    Progress,
    QueryListener,
    refuse_fixed,
)
from slimkv.integrations.sglang.names import BACKEND, LISTENING

PREFIX = "slimkv_"  # begins the names of methods that the engine calls in its schedulers


class Observer(QueryListener):
    """Collects the inputs of one scheduler's model. The engine's process can call its public methods."""

    def __init__(self, scheduler: Any) -> None:
        super().__init__()
        self._model = scheduler.tp_worker.model_runner.model

    def attach(self) -> None:
        """Starts observing every decoder layer."""
        from slimkv.integrations.sglang.compat import AttentionType, window_of
        from slimkv.integrations.sglang.refusals import attention_layers

        for layer in attention_layers(self._model):
            if layer.attn_type != AttentionType.DECODER or layer.is_cross_attention:
                continue
            self.layers[layer.layer_id] = ObservedLayer(
                layer.tp_k_head_num, layer.qk_head_dim, layer.v_head_dim, window_of(layer)
            )
            layer.register_forward_pre_hook(self._before_attention, with_kwargs=True)
        if not self.layers:
            raise UnsupportedError("SGLang runs no attention layer in this model that calibration can see")
        forward = self._model.forward

        def shifted(input_ids: Any, positions: Tensor, *args: Any, **kwargs: Any) -> Any:
            return forward(input_ids, self.shifted(positions), *args, **kwargs)

        self._model.forward = shifted  # SGLang bypasses the module's hooks

    def save(self, folder: str) -> None:
        """Writes the result of ``collect`` to a file in ``folder``."""
        from slimkv.integrations.sglang.compat import attention_tp

        Path(folder, str(os.getpid())).write_bytes(self.collect(*attention_tp()))

    def _before_attention(self, layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        query: Tensor = kwargs["q"] if "q" in kwargs else args[0]
        key: Tensor | None = kwargs["k"] if "k" in kwargs else args[1]
        count = min(len(query), len(self.positions))
        if key is not None and count:  # a layer without keys shares another layer's cache
            self.take(layer.layer_id, query, key, count)


def answer(original: Callable[..., Any], scheduler: Any, request: Any) -> Any:
    """Wraps ``Scheduler.handle_rpc_request``: looks methods up in the observer."""
    if request.method.startswith(PREFIX):
        observer = getattr(scheduler, "_slimkv_observer", None)
        if observer is None:
            observer = scheduler._slimkv_observer = Observer(scheduler)
        setattr(scheduler, request.method, getattr(observer, request.method.removeprefix(PREFIX)))
    return original(scheduler, request)


def gather_calibration(
    model: str, *, samples: tuple[int, int] = (3, 1024), seed: int = 0, max_positions: int | None = None,
    progress: Progress = lambda what, done, total: None, **engine_options: Any,
) -> Calibration:  # fmt: skip
    """Collects statistics while SGLang generates tokens with ``model``.

    Call it from a module that SGLang's processes can import (``if __name__ == "__main__"``).

    Args:
        model: a folder or a hub name.
        samples: the number of windows, and of ids per window. Ids are sampled in fragments, from ``seed``.
        max_positions: the longest context that the statistics must cover; None: the model's.
        engine_options: options of ``sglang.Engine``, such as ``tp_size``; use those that the model is served with.
    """
    fixed = {
        "model_path": model, "disable_cuda_graph": True, "disable_radix_cache": True, "disable_overlap_schedule": True,
        "skip_tokenizer_init": True, "random_seed": seed,
    }  # fmt: skip
    refuse_fixed(fixed, engine_options)
    for name in ("pp_size", "dp_size"):
        if engine_options.get(name, 1) != 1:
            raise UnsupportedError(f"calibration in SGLang takes {name} = 1, not {engine_options[name]}; use tp_size")
    if engine_options.get("attention_backend") == BACKEND:
        raise UnsupportedError("calibration observes SGLang's own attention: leave out attention_backend slimkv")
    from slimkv.integrations.sglang.versions import installed_version

    installed_version()
    import sglang

    progress("starting SGLang", 0, STEPS)
    os.environ[LISTENING] = "1"
    engine = None
    try:
        engine = sglang.Engine(**fixed, **engine_options)
        return _listen(engine, samples, seed, max_positions, progress)
    finally:
        del os.environ[LISTENING]
        if engine is not None:
            engine.shutdown()


def _listen(
    engine: Any, samples: tuple[int, int], seed: int, max_positions: int | None, progress: Progress
) -> Calibration:
    config = engine.tokenizer_manager.model_config
    plan = ListeningPlan.of(config.hf_text_config, config.context_len, samples, seed)
    once = {"max_new_tokens": 1, "temperature": 0}
    asked = {"max_new_tokens": plan.fragment - 1, "temperature": 1.0, "ignore_eos": True}
    _call(engine, "attach")
    return plan.calibrate(
        "SGLang", int(config.num_key_value_heads), max_positions, progress,
        ask=partial(_call, engine),
        read=lambda: engine.generate(input_ids=plan.probe, sampling_params=once),
        say=lambda: engine.generate(input_ids=[[token] for token in plan.first], sampling_params=asked),
        collect=lambda: _collect(engine),
    )  # fmt: skip


def _collect(engine: Any) -> list[bytes]:
    with tempfile.TemporaryDirectory(prefix="slimkv-listen-") as folder:
        _call(engine, "save", folder=folder)
        return [path.read_bytes() for path in sorted(Path(folder).iterdir())]


def _call(engine: Any, method: str, **parameters: Any) -> None:
    """Calls a method of every scheduler's observer."""
    try:
        engine.collective_rpc(PREFIX + method, **parameters)
    except AssertionError as error:  # raised by SGLang, with the scheduler's message
        raise UnsupportedError(
            f"SGLang's scheduler failed in a step of calibration ({method}): {error}. "
            "`slimkv doctor --require sglang` says whether the plugin loads"
        ) from error
