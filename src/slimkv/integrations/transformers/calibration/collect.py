"""Statistics of a model's queries, collected while it samples or reads tokens, in constant memory."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from slimkv.calibration import Calibration, LayerStatistics, ModelIdentity, gather
from slimkv.calibration.rotary import CONTEXTS
from slimkv.errors import InputError, UnsupportedError
from slimkv.integrations.serving.listener import FRAGMENT, ObservedLayer, Progress, QueryListener, silent
from slimkv.integrations.transformers.calibration import samples as sampling
from slimkv.integrations.transformers.compat import caches_latents
from slimkv.integrations.transformers.decoded_attention import probabilities
from slimkv.integrations.transformers.plugin import observed_attention
from slimkv.integrations.transformers.stock_attention import layer_number

_SAMPLED = 32  # queries per pass and head whose attention probabilities are computed
_PROBED = 128  # tokens on which the sensitivity of layers is measured
_NOISE = 0.1  # relative to the attention output: small enough for a linear response, large enough to measure
_OUTPUT_NAMES = ("o_proj", "out_proj", "dense", "c_proj", "wo")
_UNSTABLE_ROPE = ("dynamic", "longrope")  # frequencies depend on the length


def gather_calibration(
    model: Any, windows: Tensor | None = None, *, source: str | None = None, costs: bool = True,
    max_positions: int | None = None, samples: tuple[int, int] = (sampling.WINDOWS, sampling.TOKENS), seed: int = 0,
    progress: Progress = silent,
) -> Calibration:  # fmt: skip
    """Statistics of ``model`` on windows int64 [count, tokens], one at a time; by default on its own samples.

    Args:
        windows: None: ids are sampled from the model, and statistics are collected while it samples.
        source: a description of the tokens, for the file.
        costs: also measure the cost of noise in each layer, which takes a short pass per layer and is needed to choose
            widths.
        max_positions: the longest context that the statistics must cover; None: that of the model.
        samples: the number of windows to sample, and of ids per window.
        seed: seed of the sampled ids.
        progress: called with a description of each stage.

    Returns the calibration, with its statistics on the CPU.
    """
    if caches_latents(model.config):
        raise InputError("slimkv does not calibrate latent attention: use a latent format, such as c4, uncalibrated")
    declared = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
    wanted = _checked_range(model.config, max_positions, declared)
    recorder = _Recorder()
    with observed_attention(model, recorder.observe), torch.no_grad():
        _measure_positions(model, recorder, declared or wanted, progress)
        read = FRAGMENT
        if windows is None:
            windows = sampling.sampled_windows(model, *samples, seed, progress, recorder.at)
            source = source or f"{windows.numel()} token ids sampled from the model, seed {seed}"
            recorder.moments = False
        else:
            read = windows.shape[1]
        recorder.measures_costs = costs
        count = windows.shape[0] if costs or recorder.moments else 0
        for number in range(count):
            progress("reading", number, count)
            recorder.at(0)
            model.base_model(windows[number : number + 1].to(model.device), use_cache=False)
    layers = sorted(recorder.sums)
    gains: dict[int, float] = {}
    if costs and recorder.costs.keys() == recorder.sums.keys():
        ids = windows[:1, :_PROBED].to(model.device)
        gains = layer_gains(model, ids, layers, progress)
    progress("calibrated", 1, 1)
    statistics = {number: recorder.with_costs(number, gains.get(number)) for number in layers}
    held = gather.common_range(recorder.measured, wanted, declared or wanted, read)
    return Calibration(ModelIdentity.of(model.config), statistics, source or f"{windows.numel()} tokens", held)


def _checked_range(config: Any, wanted: int | None, declared: int | None) -> int:
    text = config.get_text_config(decoder=True)
    if wanted is None:
        return declared or FRAGMENT
    if wanted < 1:
        raise InputError(f"max_positions must be at least 1, not {wanted}")
    rope = getattr(text, "rope_parameters", None)
    kind = rope.get("rope_type") if isinstance(rope, Mapping) else None
    if declared is not None and wanted > declared and kind in _UNSTABLE_ROPE:
        raise UnsupportedError(
            f"max_positions {wanted} is beyond the {declared} that the model declares, where its {kind} rotary "
            f"embedding changes its frequencies: give at most {declared}"
        )
    return wanted


def _measure_positions(model: Any, recorder: _Recorder, declared: int, progress: Progress) -> None:
    """Measures the rotary embedding of every layer's queries."""
    ids = sampling.random_window(model.config, gather.PROBE_TOKENS).to(model.device)
    shifts = (0, *(gather.probe_shifts(declared) if declared > gather.PROBE_TOKENS else ()))
    for number, shift in enumerate(shifts):
        progress("measuring positions", number, len(shifts))
        recorder.probe(shift, ids.shape[1])
        positions = torch.arange(ids.shape[1], device=ids.device)[None] + shift
        model.base_model(ids, position_ids=positions, use_cache=False)
    if not recorder.layers:
        raise UnsupportedError(f"{type(model).__name__} has no attention layers that calibration can see")
    recorder.measure()


@dataclass
class _Costs:
    """The effect of noise in one layer: sums over sampled queries."""

    keys: Tensor | float = 0.0  # float64 [num_kv_heads]
    values: Tensor | float = 0.0
    output_energy: float = 0.0  # squared output of the attention block


class _Recorder(QueryListener):
    """Observes every attention call of a model."""

    def __init__(self) -> None:
        super().__init__()
        self.moments, self.measures_costs = True, False  # what is summed
        self.costs: dict[int, _Costs] = {}
        self._first = 0
        self._grams: dict[int, Tensor | None] = {}

    def at(self, position: int) -> None:
        """Sets the first position of the next pass."""
        self._first = position

    def observe(
        self, out: Tensor, module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **kwargs: Any
    ) -> Tensor:
        """Sums the inputs of one call of attention; see ``observed_attention``."""
        number, new = layer_number(module), query.shape[2]
        if number not in self.layers:
            dims = key.shape[1], key.shape[-1], value.shape[-1]
            self.layers[number] = ObservedLayer(*dims, kwargs.get("sliding_window"))
        if self.moments:
            self.positions = torch.arange(self._first, self._first + new, device=query.device)
            # Heads come first, so the query heads of a KV head are adjacent. Keys may include earlier passes.
            tokens, keys = (x.permute(2, 1, 0, 3).flatten(1, 2) for x in (query, key[:, :, -new:]))
            self.take(number, tokens, keys, new)
        gram = self._gram(module, query.shape[1], value.shape[-1]) if self.measures_costs else None
        if gram is not None:
            self._add_costs(number, gram, query, key, value, mask, kwargs)
        return out

    def with_costs(self, number: int, gain: float | None) -> LayerStatistics:
        """The statistics of a layer. ``gain``: from ``layer_gains``; None if costs are unknown."""
        known, costs = self.statistics(number), self.costs.get(number)
        if gain is None or costs is None:
            return known
        factor = gain / max(costs.output_energy, 1e-30)
        key, value = (torch.as_tensor(x * factor).cpu() for x in (costs.keys, costs.values))
        return replace(known, key_weight=key, value_weight=value)

    def _add_costs(
        self, number: int, gram: Tensor, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, kwargs: Any
    ) -> None:
        """The effect of noise in keys and values on the block's output, from the attention of a few late queries.

        An error s_t in token t's logit changes the output by a_t s_t (v_t - o); an error e_t in its value, by a_t e_t.
        """
        tokens, heads, num_kv_heads = query.shape[2], query.shape[1], key.shape[1]
        at = torch.linspace(tokens // 4, tokens - 1, min(_SAMPLED, tokens), device=query.device).long().unique()
        weights = _weights(query[:1, :, at], key[:1], mask, at, kwargs)[0]  # [heads, queries, tokens]
        values = value[0].float().repeat_interleave(heads // num_kv_heads, 0)
        sums, costs = self.sums[number], self.costs.setdefault(number, _Costs())
        centre = sums.rotary.mean_of_contexts(sums.key_mean(), max(CONTEXTS)).to(key.device, torch.float32)
        sizes = (key[0].float() - centre[:, None]).square().sum(-1).repeat_interleave(heads // num_kv_heads, 0)
        scale = kwargs.get("scaling") or 1 / math.sqrt(query.shape[-1])
        out = weights @ values  # [heads, queries, dim]
        projected = values @ gram
        squares = (projected * values).sum(-1)[:, None, :] + ((out @ gram) * out).sum(-1)[..., None]
        apart = (squares - 2 * out @ projected.mT).clamp(min=0)  # |v - o|^2 after the output projection
        squared = weights.square()
        keys = (squared * apart * sizes[:, None, :]).sum((1, 2)) * scale**2
        per_number = gram.diagonal(dim1=-2, dim2=-1).mean(-1)
        plain = (squared * values.square().sum(-1)[:, None, :]).sum((1, 2)) * per_number
        key_cost, value_cost = (x.double().reshape(num_kv_heads, -1).sum(1) for x in (keys, plain))
        costs.keys, costs.values = costs.keys + key_cost, costs.values + value_cost
        costs.output_energy += float(((out @ gram) * out).sum())

    def _gram(self, module: Any, heads: int, dim: int) -> Tensor | None:
        """W' W per query head, W being its output projection: float32 [heads, dim, dim]; None if unknown."""
        if id(module) not in self._grams:
            found = next((getattr(module, name) for name in _OUTPUT_NAMES if hasattr(module, name)), None)
            weight = getattr(found, "weight", None)
            fits = isinstance(weight, Tensor) and weight.ndim == 2 and heads * dim in weight.shape
            gram = None
            if fits and weight is not None:
                columns = (weight if weight.shape[1] == heads * dim else weight.mT).detach().float()
                by_head = columns.unflatten(1, (heads, dim)).permute(1, 0, 2)
                gram = by_head.mT @ by_head
            self._grams[id(module)] = gram
        return self._grams[id(module)]


def _weights(query: Tensor, key: Tensor, mask: Tensor | None, at: Tensor, kwargs: Any) -> Tensor:
    """Attention weights of the queries ``at``: float32 [batch, heads, queries, tokens]."""
    if mask is None:
        rows = torch.arange(key.shape[2], device=query.device)[None, :] <= at[:, None]
    else:
        rows = mask[: len(query), :, at, : key.shape[2]]
    scale, softcap = kwargs.get("scaling"), kwargs.get("softcap") or 0.0
    return probabilities(query, key, rows, scale=scale, softcap=softcap, sinks=kwargs.get("s_aux"))[0]


def layer_gains(model: Any, ids: Tensor, layers: Sequence[int], progress: Progress) -> dict[int, float]:
    """KL divergence of predictions per relative squared error of a layer's attention output, for each of ``layers``.

    The model reads ids int64 [1, tokens] once unchanged and once per layer, with white noise in that layer's output
    before the output projection.
    """
    noisy: list[int] = []

    def add_noise(out: Tensor, module: Any, *_: Any, **__: Any) -> Tensor:
        if layer_number(module) not in noisy:
            return out
        generator = torch.Generator(device=out.device).manual_seed(layer_number(module))
        noise = torch.randn(out.shape, generator=generator, device=out.device, dtype=torch.float32)
        size = out.float().square().mean((-2, -1), keepdim=True).sqrt()  # rms of each token
        return (out.float() + _NOISE * size * noise).to(out.dtype)

    gains = {}
    with observed_attention(model, add_noise), torch.no_grad():
        base = _log_probabilities(model, ids)
        for number, layer in enumerate(layers):
            progress("sensitivity of layers", number, len(layers))
            noisy[:] = [layer]
            other = _log_probabilities(model, ids)
            gains[layer] = max(float((base.exp() * (base - other)).sum(-1).mean()), 0.0) / _NOISE**2
    return gains


def _log_probabilities(model: Any, ids: Tensor) -> Tensor:
    return torch.log_softmax(model(ids, use_cache=False).logits[0].float(), -1)
