"""Calibration inside vLLM: collects statistics while the stock engine, with its own attention, generates text.

Models that have quantised weights, need several GPUs or run only in vLLM are thus calibrated as they are served.
``Observer`` is mixed into vLLM's workers (``worker_extension_cls``).
"""

from __future__ import annotations

from typing import Any

from slimkv.calibration import Calibration
from slimkv.errors import UnsupportedError
from slimkv.integrations.serving import listener
from slimkv.integrations.vllm.compat import AttentionType, forward_metadata, layer_number, tensor_parallel_rank

EXTENSION = "slimkv.integrations.vllm.observe.Observer"


class Observer:
    """Methods that the engine's process calls, by name, in every worker."""

    model_runner: Any

    def slimkv_attach(self) -> int:
        """Starts observing every decoder layer; returns the number of layers."""
        self._slimkv_listener = listener.QueryListener()
        self.model_runner.get_model().register_forward_pre_hook(self._slimkv_before_model, with_kwargs=True)
        known = self.model_runner.vllm_config.compilation_config.static_forward_context
        for name, layer in known.items():
            number = layer_number(name)
            decodes = getattr(layer, "attn_type", None) == AttentionType.DECODER and hasattr(layer, "head_size")
            if decodes and number is not None and getattr(layer, "kv_sharing_target_layer_name", None) is None:
                window = getattr(layer, "sliding_window", None)
                value_dim = int(getattr(layer, "head_size_v", None) or layer.head_size)
                self._slimkv_listener.layers[number] = listener.ObservedLayer(
                    layer.num_kv_heads, layer.head_size, value_dim, window if isinstance(window, int) else None
                )
                layer.register_forward_pre_hook(self._slimkv_before_attention(number, name), with_kwargs=True)
        return len(self._slimkv_listener.layers)

    def slimkv_ask(self, method: str, **given: Any) -> None:
        """Calls a method of this worker's ``QueryListener``."""
        getattr(self._slimkv_listener, method)(**given)

    def slimkv_collect(self) -> bytes:
        """See ``QueryListener.collect``."""
        return self._slimkv_listener.collect(*tensor_parallel_rank())

    def _slimkv_before_model(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        shifted = self._slimkv_listener.shifted
        if "positions" in kwargs:
            return args, {**kwargs, "positions": shifted(kwargs["positions"])}
        return (args[0], shifted(args[1]), *args[2:]), kwargs

    def _slimkv_before_attention(self, number: int, name: str) -> Any:
        def hook(layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            step = forward_metadata(name)
            if step is None:  # vLLM profiles memory
                return
            query = kwargs["query"] if "query" in kwargs else args[0]
            key = kwargs["key"] if "key" in kwargs else args[1]
            count = min(int(getattr(step, "num_actual_tokens", len(query))), len(query))
            self._slimkv_listener.take(number, query, key, count)

        return hook


def gather_calibration(
    model: str,
    *,
    samples: tuple[int, int] = (3, 1024),
    seed: int = 0,
    max_positions: int | None = None,
    progress: listener.Progress = listener.silent,
    **engine_options: Any,
) -> Calibration:
    """Collects statistics while vLLM generates tokens with ``model``.

    Args:
        model: a folder or a hub name.
        samples: the number of windows, and of ids per window. Ids are sampled in fragments, from ``seed``.
        max_positions: the longest context that the statistics must cover; None: the model's.
        engine_options: options of ``vllm.LLM``; use those that the model is served with.
    """
    from vllm import LLM, SamplingParams

    progress("starting vLLM", 0, listener.STEPS)
    fixed = {"enforce_eager": True, "enable_prefix_caching": False, "worker_extension_cls": EXTENSION}
    listener.refuse_fixed(fixed, engine_options)
    engine = LLM(model=model, **fixed, **engine_options)
    config = engine.llm_engine.vllm_config.model_config
    if not sum(engine.collective_rpc("slimkv_attach")):
        raise UnsupportedError(f"vLLM runs no attention layer in {model} that calibration can see")
    plan = listener.ListeningPlan.of(config.hf_text_config, config.max_model_len, samples, seed)
    once = SamplingParams(max_tokens=1, temperature=0.0)
    asked = [
        SamplingParams(max_tokens=plan.fragment - 1, temperature=1.0, seed=own, ignore_eos=True, detokenize=False)
        for own in plan.seeds
    ]
    return plan.calibrate(
        "vLLM", config.get_total_num_kv_heads(), max_positions, progress,
        ask=lambda method, **given: engine.collective_rpc("slimkv_ask", args=(method,), kwargs=given),
        read=lambda: engine.generate({"prompt_token_ids": plan.probe}, once, use_tqdm=False),
        say=lambda: engine.generate([{"prompt_token_ids": [i]} for i in plan.first], asked, use_tqdm=False),
        collect=lambda: engine.collective_rpc("slimkv_collect"),
    )  # fmt: skip
