"""Statistics of a model's queries, gathered while it reads tokens. Nothing that grows with the tokens is kept."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from slimkv.calibration import Calibration, LayerStatistics, ModelIdentity
from slimkv.errors import UnsupportedError
from slimkv.integrations.transformers.calibration.samples import Progress, sampled_windows, silent
from slimkv.integrations.transformers.calibration.sensitivity import layer_gains
from slimkv.integrations.transformers.compat import AttentionInterface, AttentionMaskInterface
from slimkv.integrations.transformers.mask import slimkv_mask
from slimkv.integrations.transformers.plugin import slimkv_attention, use_attn_implementation

NAME = "slimkv_statistics"
_SAMPLED = 32  # queries per pass and head whose attention is looked at in full
_PROBED = 128  # tokens on which the sensitivity of layers is measured
_OUTPUT_NAMES = ("o_proj", "out_proj", "dense", "c_proj", "wo")


def gather_calibration(
    model: Any,
    windows: Tensor | None = None,
    *,
    source: str | None = None,
    costs: bool = True,
    progress: Progress = silent,
) -> Calibration:
    """Runs ``model`` over windows int64 [count, tokens], one at a time; by default over what it says itself.

    ``source`` says in the file what was read; ``costs``: also measure what noise in each layer costs, which takes a
    short pass per layer and is needed to choose widths. Returns the calibration, with its statistics on the CPU.
    """
    if windows is None:
        windows = sampled_windows(model, progress=progress)
        source = source or f"{windows.numel()} token ids sampled from the model, seed 0"
    recorder, count = _Recorder(model, costs), windows.shape[0]
    with recorder.attached(), torch.no_grad():
        for number in range(count):
            progress("reading", number, count)
            model.base_model(windows[number : number + 1].to(model.device), use_cache=False)
    layers = dict(sorted(recorder.layers.items()))
    if not layers:
        raise UnsupportedError(f"{type(model).__name__} has no attention layers that calibration can see")
    gains: dict[int, float] = {}
    if all(isinstance(x.key_cost, Tensor) for x in layers.values()):
        ids = windows[:1, :_PROBED].to(model.device)
        gains = layer_gains(
            model, ids, layers, layer_number, lambda number: progress("sensitivity of layers", number, len(layers))
        )
    progress("calibrated", count, count)
    statistics = {number: layer.statistics(gains.get(number)) for number, layer in layers.items()}
    return Calibration(ModelIdentity.of(model.config), statistics, source or f"{windows.numel()} tokens")


@dataclass
class _Layer:
    """Sums over what one layer has seen."""

    moment: Tensor  # float64 [num_kv_heads, key_dim, key_dim]
    value_dim: int
    vectors: int = 0  # queries in the moment, per KV head
    key_cost: Tensor | float = 0.0  # float64 [num_kv_heads], sums over sampled queries
    value_cost: Tensor | float = 0.0
    output_energy: float = 0.0  # of the attention block's output, over the same queries

    def statistics(self, gain: float | None) -> LayerStatistics:
        """``gain``: of ``layer_gains``; None where costs are not known."""
        moment = (self.moment / self.vectors).cpu()
        if gain is None or not isinstance(self.key_cost, Tensor) or not isinstance(self.value_cost, Tensor):
            return LayerStatistics(moment, self.value_dim)
        factor = gain / max(self.output_energy, 1e-30)
        return LayerStatistics(moment, self.value_dim, (self.key_cost * factor).cpu(), (self.value_cost * factor).cpu())


class _Recorder:
    """Looks over the shoulder of every attention call."""

    def __init__(self, model: Any, costs: bool) -> None:
        self.model = model
        self.costs = costs
        self.layers: dict[int, _Layer] = {}
        self._grams: dict[int, Tensor | None] = {}

    @contextmanager
    def attached(self) -> Iterator[None]:
        """The model's attention is recorded inside."""
        AttentionInterface.register(NAME, self._attention)
        AttentionMaskInterface.register(NAME, slimkv_mask)
        with use_attn_implementation(self.model, NAME):
            yield

    def _attention(
        self, module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
    ) -> tuple[Tensor, None]:
        out, _ = slimkv_attention(module, query, key, value, attention_mask, **kwargs)
        number = layer_number(module)
        if number not in self.layers:
            heads, dim = key.shape[1], key.shape[-1]
            zeros = torch.zeros(heads, dim, dim, dtype=torch.float64, device=query.device)
            self.layers[number] = _Layer(zeros, value.shape[-1])
        layer = self.layers[number]
        grouped = query.transpose(0, 1).reshape(key.shape[1], -1, query.shape[-1]).double()
        layer.moment += grouped.mT @ grouped
        layer.vectors += grouped.shape[1]
        gram = self._gram(module, query.shape[1], value.shape[-1]) if self.costs else None
        if gram is not None:
            self._costs(layer, gram, query, key, value, attention_mask, kwargs)
        return out, None

    def _costs(
        self, layer: _Layer, gram: Tensor, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, kwargs: Any
    ) -> None:
        """What noise in keys and values does to the block's output, by the attention of a few late queries.

        An error s_t of the logit of token t moves the output by a_t s_t (v_t - o), an error of value t by a_t times it.
        """
        tokens, heads, num_kv_heads = query.shape[2], query.shape[1], key.shape[1]
        at = torch.linspace(tokens // 4, tokens - 1, min(_SAMPLED, tokens), device=query.device).long().unique()
        weights = _weights(query[:1, :, at], key[:1], mask, at, kwargs)[0]  # [heads, queries, tokens]
        values = value[0].float().repeat_interleave(heads // num_kv_heads, 0)
        sizes = key[0].float().square().sum(-1).repeat_interleave(heads // num_kv_heads, 0)
        scale = kwargs.get("scaling") or 1 / math.sqrt(query.shape[-1])
        out = weights @ values  # [heads, queries, dim]
        seen = values @ gram  # [heads, tokens, dim]
        apart = (
            (seen * values).sum(-1)[:, None, :] - 2 * out @ seen.mT + ((out @ gram) * out).sum(-1)[..., None]
        ).clamp(min=0)
        squared = weights.square()
        keys = (squared * apart * sizes[:, None, :]).sum((1, 2)) * scale**2
        per_number = gram.diagonal(dim1=-2, dim2=-1).mean(-1)
        plain = (squared * values.square().sum(-1)[:, None, :]).sum((1, 2)) * per_number
        by_group = (x.double().reshape(num_kv_heads, -1).sum(1) for x in (keys, plain))
        key_cost, value_cost = by_group
        layer.key_cost, layer.value_cost = layer.key_cost + key_cost, layer.value_cost + value_cost
        layer.output_energy += float(((out @ gram) * out).sum())

    def _gram(self, module: Any, heads: int, dim: int) -> Tensor | None:
        """W' W of the output projection's columns of each query head: float32 [heads, dim, dim]; None if unknown."""
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


def layer_number(module: Any) -> int:
    """The layer whose cache a module reads: its own, or an earlier one's where layers share."""
    if getattr(module, "is_kv_shared_layer", False):
        return int(module.kv_shared_layer_index)
    return int(module.layer_idx)


def _weights(query: Tensor, key: Tensor, mask: Tensor | None, at: Tensor, kwargs: Any) -> Tensor:
    """Attention weights of the queries at positions ``at``: float32 [1, heads, queries, tokens]."""
    group = query.shape[1] // key.shape[1]
    scores = query.float() @ key.float().repeat_interleave(group, 1).mT
    scores = scores * (kwargs.get("scaling") or 1 / math.sqrt(query.shape[-1]))
    if softcap := kwargs.get("softcap"):
        scores = softcap * torch.tanh(scores / softcap)
    if mask is None:
        hidden = torch.arange(key.shape[2], device=query.device)[None, :] > at[:, None]
        scores = scores.masked_fill(hidden, -math.inf)
    else:
        rows = mask[:1, :, at, : key.shape[2]]
        scores = scores.masked_fill(~rows, -math.inf) if rows.dtype == torch.bool else scores + rows
    total = scores.logsumexp(-1, keepdim=True)
    if (sinks := kwargs.get("s_aux")) is not None:
        total = torch.logaddexp(total, sinks.float().reshape(1, -1, 1, 1).to(total.device))
    return torch.exp(scores - total)
