"""Calibration inside vLLM: the stock engine, with its own attention, says something and is listened to.

So quantised weights, models of many GPUs and architectures that only the engine knows are calibrated as they are
served. ``Observer`` is mixed into vLLM's workers (``worker_extension_cls``): it sums what attention layers are given,
on the device and for the worker's own heads; ``gather_calibration`` puts the workers' sums together.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from slimkv.calibration import Calibration, LayerStatistics, ModelIdentity
from slimkv.calibration.gather import (
    PROBE_TOKENS,
    MeasuredRotary,
    MomentSum,
    common_range,
    probe_shifts,
    rotary_of_layer,
)  # fmt: skip
from slimkv.calibration.rotary import Rotary
from slimkv.calibration.serving import rank_heads
from slimkv.errors import InputError, UnsupportedError
from slimkv.integrations.vllm.compat import AttentionType, forward_metadata, layer_number, tensor_parallel_rank

FRAGMENT = 128  # tokens that are sampled in a row
EXTENSION = "slimkv.integrations.vllm.observe.Observer"


class Observer:
    """Methods of every worker, called by name from the engine's process. Results are plain numbers and bytes."""

    model_runner: Any

    def slimkv_attach(self) -> int:
        """Listens to every decoder layer from now on; returns how many there are."""
        self._slimkv_shift = 0
        self._slimkv_positions = torch.zeros(0, dtype=torch.int64)
        self._slimkv_probes: dict[int, dict[int, Tensor]] = {}
        self._slimkv_measured: dict[int, MeasuredRotary] = {}
        self._slimkv_sums: dict[int, MomentSum] = {}
        self._slimkv_probing = True
        self._slimkv_layers: dict[int, Any] = {}
        self.model_runner.get_model().register_forward_pre_hook(self._slimkv_before_model, with_kwargs=True)
        known = self.model_runner.vllm_config.compilation_config.static_forward_context
        for name, layer in known.items():
            number = layer_number(name)
            decodes = getattr(layer, "attn_type", None) == AttentionType.DECODER and hasattr(layer, "head_size")
            if decodes and number is not None and getattr(layer, "kv_sharing_target_layer_name", None) is None:
                self._slimkv_layers[number] = layer
                layer.register_forward_pre_hook(self._slimkv_before_attention(number, name), with_kwargs=True)
        return len(self._slimkv_layers)

    def slimkv_probe(self, shift: int) -> None:
        """What is read next is read ``shift`` positions later, and kept."""
        self._slimkv_shift = shift
        self._slimkv_probes[shift] = {}

    def slimkv_measure(self) -> None:
        """Finds what positions do; what is read from now on is summed."""
        plain, shifted = self._slimkv_probes.pop(0), self._slimkv_probes
        for number, queries in plain.items():
            self._slimkv_measured[number] = rotary_of_layer(queries, {s: x[number] for s, x in shifted.items()})
        self._slimkv_probes, self._slimkv_probing, self._slimkv_shift = {}, False, 0

    def slimkv_collect(self) -> dict[str, Any]:
        """This worker's sums, by layer."""
        rank, ranks = tensor_parallel_rank()
        layers = {}
        for number, sums in self._slimkv_sums.items():
            layer, measured = self._slimkv_layers[number], self._slimkv_measured[number]
            window = getattr(layer, "sliding_window", None)
            layers[str(number)] = {
                "heads": sums.total.shape[0],
                "dim": sums.total.shape[-1],
                "value_dim": int(getattr(layer, "head_size_v", None) or layer.head_size),
                "moment": sums.mean().numpy().tobytes(),
                "planes": measured.rotary.planes.flatten().tolist(),
                "frequencies": measured.rotary.frequencies.tolist(),
                "max_positions": measured.max_positions,
                "sliding_window": window if isinstance(window, int) else None,
            }
        return {"rank": rank, "ranks": ranks, "layers": layers}

    def _slimkv_before_model(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The model's positions, shifted."""
        if "positions" in kwargs:
            kwargs = {**kwargs, "positions": kwargs["positions"] + self._slimkv_shift}
            positions = kwargs["positions"]
        else:
            args = (args[0], args[1] + self._slimkv_shift, *args[2:])
            positions = args[1]
        self._slimkv_positions = positions if positions.ndim == 1 else positions[0]  # text has one of three alike
        return args, kwargs

    def _slimkv_before_attention(self, number: int, name: str) -> Any:
        def hook(layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            steps = forward_metadata()
            step = steps.get(name) if isinstance(steps, dict) else None
            if step is None:  # vLLM measures memory
                return
            query = kwargs["query"] if "query" in kwargs else args[0]
            count = min(int(getattr(step, "num_actual_tokens", query.shape[0])), query.shape[0])
            query = query.reshape(query.shape[0], layer.num_heads, layer.head_size)[:count]
            self._slimkv_take(number, layer, query, self._slimkv_positions[:count])

        return hook

    def _slimkv_take(self, number: int, layer: Any, query: Tensor, positions: Tensor) -> None:
        if self._slimkv_probing:
            if self._slimkv_shift in self._slimkv_probes and query.shape[0] == PROBE_TOKENS:
                self._slimkv_probes[self._slimkv_shift][number] = query.flatten(0, 1).float().clone()
            return
        if number not in self._slimkv_sums:
            rotary = self._slimkv_measured[number].rotary
            self._slimkv_sums[number] = MomentSum(layer.num_kv_heads, layer.head_size, rotary, query.device)
        self._slimkv_sums[number].add(query, positions)


def gather_calibration(
    model: str,
    *,
    samples: tuple[int, int] = (3, 1024),
    seed: int = 0,
    max_positions: int | None = None,
    progress: Any = lambda what, done, total: None,
    **engine_options: Any,
) -> Calibration:
    """Starts vLLM with ``model`` and listens while it says windows x ids tokens (``samples``).

    Args:
        model: a folder or a hub name, as vLLM takes it.
        samples: windows, and ids in each; they are said in fragments.
        seed: of the sampling.
        max_positions: the longest context that the statistics are for; None: the model's own.
        progress: told what is being done.
        engine_options: of ``vllm.LLM``; give those that the model is served with.
    """
    from vllm import LLM, SamplingParams

    steps = 4
    progress("starting vLLM", 0, steps)
    fixed = {"enforce_eager": True, "enable_prefix_caching": False, "worker_extension_cls": EXTENSION}
    if clash := sorted(set(fixed) & set(engine_options)):
        raise InputError(f"calibration sets {', '.join(clash)} itself; leave it out of the engine's options")
    engine = LLM(model=model, **fixed, **engine_options)
    config = engine.llm_engine.vllm_config.model_config
    text = config.hf_text_config
    declared = int(getattr(text, "max_position_embeddings", None) or config.max_model_len)
    if not sum(engine.collective_rpc("slimkv_attach")):
        raise UnsupportedError(f"vLLM runs no attention layer in {model} that calibration can see")
    generator = torch.Generator().manual_seed(seed)
    probe = torch.randint(text.vocab_size, (PROBE_TOKENS,), generator=generator).tolist()
    progress("what positions do", 1, steps)
    for shift in (0, *probe_shifts(declared)):
        engine.collective_rpc("slimkv_probe", args=(shift,))
        engine.generate({"prompt_token_ids": probe}, SamplingParams(max_tokens=1, temperature=0.0), use_tqdm=False)
    engine.collective_rpc("slimkv_measure")
    progress("sampling", 2, steps)
    windows, tokens = samples
    length = min(FRAGMENT, tokens, config.max_model_len)
    rows = -(-windows * tokens // length)
    begin = getattr(text, "bos_token_id", None)
    first = (
        [begin] * rows
        if isinstance(begin, int)
        else torch.randint(text.vocab_size, (rows,), generator=generator).tolist()
    )
    asked = [
        SamplingParams(
            max_tokens=length - 1, temperature=1.0, seed=seed * 100_003 + row, ignore_eos=True, detokenize=False
        )
        for row in range(rows)
    ]
    engine.generate([{"prompt_token_ids": [i]} for i in first], asked, use_tqdm=False)
    progress("collecting", 3, steps)
    parts = engine.collective_rpc("slimkv_collect")
    layers, measured = merge_ranks(parts, config.get_total_num_kv_heads())
    progress("calibrated", steps, steps)
    held = common_range(measured, max_positions or declared, declared, length)
    source = f"{rows * length} token ids sampled from the model in vLLM, seed {seed}"
    return Calibration(ModelIdentity.of(text), layers, source, held)


def merge_ranks(
    parts: list[dict[str, Any]], total_heads: int
) -> tuple[dict[int, LayerStatistics], dict[int, MeasuredRotary]]:
    """Statistics of whole layers from those of tensor- and pipeline-parallel ranks."""
    moments: dict[int, Tensor] = {}
    counts: dict[int, Tensor] = {}
    layers: dict[int, LayerStatistics] = {}
    measured: dict[int, MeasuredRotary] = {}
    for part in parts:
        for name, given in part["layers"].items():
            number, dim, held = int(name), given["dim"], given["heads"]
            # Fewer heads than ranks are held by several ranks alike; layers may differ in their heads.
            total = total_heads if total_heads < part["ranks"] else held * part["ranks"]
            heads = rank_heads(total, held, part["rank"], part["ranks"])
            own = torch.frombuffer(bytearray(given["moment"]), dtype=torch.float64).view(held, dim, dim)
            if number not in moments:
                moments[number] = torch.zeros(total, dim, dim, dtype=torch.float64)
                counts[number] = torch.zeros(total, 1, 1, dtype=torch.float64)
                planes = torch.tensor(given["planes"], dtype=torch.int64).view(-1, 2)
                rotary = Rotary(planes, torch.tensor(given["frequencies"], dtype=torch.float64))
                measured[number] = MeasuredRotary(rotary, given["max_positions"])
                layers[number] = LayerStatistics(
                    moments[number], given["value_dim"], rotary=rotary, sliding_window=given["sliding_window"]
                )
            moments[number][heads] += own
            counts[number][heads] += 1
    for number, moment in moments.items():
        moment /= counts[number].clamp(min=1)
    return dict(sorted(layers.items())), measured
