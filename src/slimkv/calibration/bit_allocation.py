"""Widths per layer: the least predicted cost within a budget of bytes."""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass

from slimkv.calibration.calibration import Calibration
from slimkv.calibration.predict import predicted_cost
from slimkv.calibration.statistics import LayerStatistics
from slimkv.errors import InputError
from slimkv.spec import CodecSpec, PageLayout

WIDTHS = range(2, 9)
# The budget of a profile is the size of this format in all layers.
PROFILES = {"lossless": "k6v6", "balanced": "k4v4", "aggressive": "k3v3"}
_BLOCK_TOKENS = 64
# How much a prediction is trusted, on a logarithmic scale: single layers turn out several times better or worse than
# predicted (docs/design/query-aware.md). Chosen on SmolLM2 alone.
SHRINKAGE = 0.6
_TYPICAL_BITS = 4


@dataclass(frozen=True)
class LayerChoice:
    """The widths chosen for one layer."""

    layer: int
    key_bits: int
    value_bits: int
    format: str
    key_cost: float  # see ``believed_costs``
    value_cost: float


@dataclass(frozen=True)
class Solution:
    """The widths of every layer, their size and predicted cost."""

    choices: tuple[LayerChoice, ...]
    bits_per_number: float  # as allocated, scales included
    bytes_per_token: float  # all layers
    cost: float  # summed over layers

    @property
    def formats(self) -> dict[int, str]:
        """A format name per layer."""
        return {choice.layer: choice.format for choice in self.choices}


def format_of(key_bits: int, value_bits: int) -> str:
    """The format name of Lloyd-Max keys and values."""
    return f"k{key_bits}v{value_bits}"


def layer_bytes(statistics: LayerStatistics, format: str) -> float:
    """Bytes per token of a layer in a format."""
    spec = CodecSpec.parse(format, statistics.key_dim, statistics.value_dim)
    return PageLayout(spec, _BLOCK_TOKENS).bytes_per_token * statistics.num_kv_heads


def profile_bytes(calibration: Calibration, profile: str) -> float:
    """Bytes per token of a profile."""
    if profile not in PROFILES:
        raise InputError(f"unknown profile {profile!r}; known are {', '.join(PROFILES)}")
    return sum(layer_bytes(x, PROFILES[profile]) for x in calibration.layers.values())


def budget_bytes(calibration: Calibration, bits_per_number: float) -> float:
    """Bytes per token at ``bits_per_number`` bits per value in every layer, scales included."""
    return bits_per_number / 8 * _numbers(calibration)


def _numbers(calibration: Calibration) -> int:
    return sum(x.num_kv_heads * (x.key_dim + x.value_dim) for x in calibration.layers.values())


def _budgets(calibration: Calibration, budget: float) -> dict[int | None, float]:
    """``budget`` split between the layers of each sliding window (None: no window) as equal widths would split it."""
    typical: dict[int | None, float] = {}
    for layer in calibration.layers.values():
        size = layer_bytes(layer, format_of(_TYPICAL_BITS, _TYPICAL_BITS))
        typical[layer.sliding_window] = typical.get(layer.sliding_window, 0.0) + size
    total = sum(typical.values())
    return {window: budget * size / total for window, size in typical.items()}


def believed_costs(calibration: Calibration) -> dict[tuple[int, str, int], float]:
    """(layer, side, bits) -> the predicted cost, shrunk towards the typical cost of the model; see ``SHRINKAGE``."""
    sides = [(layer, side) for layer in sorted(calibration.layers) for side in ("key", "value")]
    typical = {key: max(predicted_cost(calibration, key[0], _TYPICAL_BITS, key[1]), 1e-30) for key in sides}
    middle = math.exp(sum(map(math.log, typical.values())) / len(typical))
    return {
        (layer, side, bits): predicted_cost(calibration, layer, bits, side)
        * (middle / typical[layer, side]) ** (1 - SHRINKAGE)
        for layer, side in sides
        for bits in WIDTHS
    }


def solve_widths(calibration: Calibration, budget: float) -> Solution:
    """The widths with the least predicted cost (after shrinkage) within ``budget`` bytes per token.

    A greedy search: starting from the smallest widths, the bit that reduces the cost most per byte is added next.
    Returns diminish with every bit, so the result is optimal if all bits have equal sizes, and otherwise off by at most
    the last bit.

    Layers with the same sliding window share the budget that they would have at equal widths. Bytes do not move between
    windows: a sliding layer stores fewer tokens, so bytes moved from it to a full layer would exceed the budget at long
    contexts.
    """
    layers = sorted(calibration.layers)
    costs = believed_costs(calibration)
    bits = {(layer, side): WIDTHS[0] for layer in layers for side in ("key", "value")}

    def size(layer: int) -> float:
        return layer_bytes(calibration.layers[layer], format_of(bits[layer, "key"], bits[layer, "value"]))

    window = {layer: calibration.layers[layer].sliding_window for layer in layers}
    left = _budgets(calibration, budget)
    for layer in layers:
        left[window[layer]] -= size(layer)
    spent = sum(map(size, layers))
    if min(left.values()) < -1e-6:
        least = 8 * spent / _numbers(calibration)
        raise InputError(
            f"a budget of {8 * budget / _numbers(calibration):.3f} bits per value is less than {WIDTHS[0]}-bit codes "
            f"and their scales need: {least:.3f}"
        )

    def offer(layer: int, side: str) -> tuple[float, int, str, float] | None:
        now = bits[layer, side]
        if now + 1 not in WIDTHS:
            return None
        before = size(layer)
        bits[layer, side] += 1
        price = size(layer) - before
        bits[layer, side] -= 1
        return -(costs[layer, side, now] - costs[layer, side, now + 1]) / price, layer, side, price

    heap = [found for key in bits if (found := offer(*key)) is not None]
    heapq.heapify(heap)
    while heap:
        _, layer, side, price = heapq.heappop(heap)
        if price > left[window[layer]] + 1e-6:
            continue  # a smaller offer may fit
        left[window[layer]] -= price
        spent += price
        bits[layer, side] += 1
        if (found := offer(layer, side)) is not None:
            heapq.heappush(heap, found)
    choices = []
    for layer in layers:
        key, value = bits[layer, "key"], bits[layer, "value"]
        believed = costs[layer, "key", key], costs[layer, "value", value]
        choices.append(LayerChoice(layer, key, value, format_of(key, value), *believed))
    return Solution(
        tuple(choices),
        8 * spent / _numbers(calibration),
        spent,
        sum(c.key_cost + c.value_cost for c in choices),
    )


def chooses_widths(budget: float | None, profile: str | None) -> bool:
    """Whether widths per layer are requested; raises for invalid arguments."""
    if budget is not None and profile is not None:
        raise InputError(f"budget {budget:g} and profile {profile!r} both choose the widths; give one of them")
    if profile is not None and profile not in PROFILES:
        raise InputError(f"unknown profile {profile!r}; use one of {', '.join(PROFILES)}")
    if budget is not None and not WIDTHS[0] < budget < WIDTHS[-1] + 1:
        raise InputError(
            f"the budget is in bits per value, scales included: more than {WIDTHS[0]} and less than {WIDTHS[-1] + 1}, "
            f"not {budget:g}"
        )
    return budget is not None or profile is not None


def choose_widths(calibration: Calibration, budget: float | None, profile: str | None) -> Solution:
    """The widths within a budget or a profile, whichever is given."""
    size = budget_bytes(calibration, budget) if budget is not None else profile_bytes(calibration, str(profile))
    return solve_widths(calibration, size)
