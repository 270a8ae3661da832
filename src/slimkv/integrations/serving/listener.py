"""Calibration inside a serving engine: collects sums in its processes and merges them.

The engine generates text while a ``QueryListener`` in each process sums the queries and keys of its own layers and
heads, on the device. ``ListeningPlan.calibrate`` drives the engine and combines the sums of all processes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from io import BytesIO
from typing import Any

import torch
from torch import Tensor

from slimkv.calibration import gather
from slimkv.calibration.calibration import Calibration
from slimkv.calibration.identity import ModelIdentity
from slimkv.calibration.rotary import Rotary
from slimkv.calibration.statistics import LayerStatistics
from slimkv.errors import InputError
from slimkv.integrations.serving.model import rank_heads

FRAGMENT = 128  # consecutive sampled tokens
STEPS = 4  # stages that are reported as progress
Progress = Callable[[str, int, int], None]  # stage, steps done, steps in total
_BY_HEAD = ("query_moment", "key_mean", "first_key")  # fields of ``LayerStatistics`` split by head


def silent(what: str, done: int, total: int) -> None:
    """Reports no progress."""


@dataclass(frozen=True)
class ObservedLayer:
    """The part of an attention layer that one process holds."""

    num_kv_heads: int
    dim: int
    value_dim: int
    sliding_window: int | None


class QueryListener:
    """Collects the inputs of one process's attention layers."""

    def __init__(self) -> None:
        self.layers: dict[int, ObservedLayer] = {}
        self.positions = torch.zeros(0, dtype=torch.int64)  # one per token of the current pass
        self.measured: dict[int, gather.MeasuredRotary] = {}
        self.sums: dict[int, gather.LayerSums] = {}
        self._shift = self._probe_tokens = 0
        self._probes: dict[int, dict[int, Tensor]] = {}
        self._probing = True

    def probe(self, shift: int, tokens: int = gather.PROBE_TOKENS) -> None:
        """Shifts the next pass, of ``tokens`` tokens, by ``shift`` positions and keeps its queries."""
        self._shift, self._probe_tokens = shift, tokens
        self._probes[shift] = {}

    def measure(self) -> None:
        """Fits the rotary embeddings to the probes; later passes are summed."""
        plain, shifted = self._probes.pop(0), self._probes
        for number, queries in plain.items():
            self.measured[number] = gather.rotary_of_layer(queries, {s: x[number] for s, x in shifted.items()})
        self._probes, self._probing, self._shift = {}, False, 0

    def shifted(self, positions: Tensor) -> Tensor:
        """Adds the probe's shift to positions, int [tokens], or [3, tokens] with three equal rows."""
        positions = positions + self._shift
        self.positions = positions if positions.ndim == 1 else positions[0]
        return positions

    def take(self, number: int, query: Tensor, key: Tensor, count: int) -> None:
        """Adds the inputs of layer ``number`` for the first ``count`` tokens of the pass.

        query [tokens, num_heads * dim] and key [tokens, num_kv_heads * dim], flat or by head.
        """
        layer = self.layers[number]
        query, key = (x.reshape(len(x), -1, layer.dim)[:count] for x in (query, key))
        if self._probing:
            if self._shift in self._probes and count == self._probe_tokens:
                self._probes[self._shift].setdefault(number, query.flatten(0, 1).float().clone())
            return
        if number not in self.sums:
            rotary = self.measured[number].rotary
            self.sums[number] = gather.LayerSums(layer.num_kv_heads, layer.dim, rotary, query.device)
        self.sums[number].add(query, key, self.positions[:count])

    def statistics(self, number: int) -> LayerStatistics:
        """The statistics of the heads that this process holds of a layer."""
        layer, sums = self.layers[number], self.sums[number]
        return LayerStatistics(
            sums.query_moment(), layer.value_dim, rotary=sums.rotary, sliding_window=layer.sliding_window,
            key_mean=sums.key_mean(), first_key=sums.first_key(),
        )  # fmt: skip

    def collect(self, rank: int, ranks: int) -> bytes:
        """This process's sums by layer, as bytes; ``ranks`` processes share the heads of each layer."""
        layers = {}
        for number, sums in self.sums.items():
            own = self.statistics(number)
            layers[number] = {
                **{name: getattr(own, name) for name in (*_BY_HEAD, "value_dim", "sliding_window")},
                "planes": sums.rotary.planes,
                "frequencies": sums.rotary.frequencies,
                "max_positions": self.measured[number].max_positions,
            }
        file = BytesIO()
        torch.save({"rank": rank, "ranks": ranks, "layers": layers}, file)
        return file.getvalue()


@dataclass(frozen=True)
class ListeningPlan:
    """The tokens that an engine reads and generates while its processes listen."""

    config: Any  # the text model's
    probe: list[int]
    shifts: tuple[int, ...]  # positions by which the probe is shifted, 0 first
    first: list[int]  # first token of each fragment, from which the model continues
    fragment: int  # tokens of each fragment, the first included
    seeds: list[int]  # sampling seed of each fragment
    declared: int
    seed: int

    @classmethod
    def of(cls, config: Any, longest: int, samples: tuple[int, int], seed: int) -> ListeningPlan:
        """The plan for a text configuration in an engine that accepts prompts of up to ``longest`` tokens."""
        declared = int(getattr(config, "max_position_embeddings", None) or longest)
        generator = torch.Generator().manual_seed(seed)
        probe = torch.randint(config.vocab_size, (gather.PROBE_TOKENS,), generator=generator).tolist()
        windows, tokens = samples
        length = min(FRAGMENT, tokens, longest)
        rows = -(-windows * tokens // length)
        first = torch.randint(config.vocab_size, (rows,), generator=generator).tolist()
        if isinstance(begin := getattr(config, "bos_token_id", None), int):
            first = [begin] * rows
        seeds = [seed * 100_003 + row for row in range(rows)]
        return cls(config, probe, (0, *gather.probe_shifts(declared)), first, length, seeds, declared, seed)

    def calibrate(
        self, engine: str, total_heads: int, max_positions: int | None, progress: Progress, *, ask: Callable[..., Any],
        read: Callable[[], Any], say: Callable[[], Any], collect: Callable[[], Iterable[bytes]],
    ) -> Calibration:  # fmt: skip
        """Runs the probe and the fragments in an engine, and merges the sums of its processes.

        Args:
            engine: the name to record as the source.
            total_heads: KV heads per layer, over all ranks.
            max_positions: the longest context that the statistics must cover; None: the model's.
            progress: called with a description of each stage.
            ask: calls the named method of the listener in every process.
            read: runs the probe through the engine.
            say: generates every fragment from its first token.
            collect: returns the results of ``QueryListener.collect`` in all processes.
        """
        progress("measuring positions", 1, STEPS)
        for shift in self.shifts:
            ask("probe", shift=shift)
            read()
        ask("measure")
        progress("sampling", 2, STEPS)
        say()
        progress("collecting", 3, STEPS)
        layers, measured = merge_ranks(collect(), total_heads)
        held = gather.common_range(measured, max_positions or self.declared, self.declared, self.fragment)
        read_tokens = len(self.first) * self.fragment
        source = f"{read_tokens} token ids sampled from the model in {engine}, seed {self.seed}"
        progress("calibrated", STEPS, STEPS)
        return Calibration(ModelIdentity.of(self.config), layers, source, held)


def refuse_fixed(fixed: Mapping[str, Any], given: Mapping[str, Any]) -> None:
    """Raises if ``given`` has engine options that calibration sets itself."""
    if clash := sorted(set(fixed) & set(given)):
        raise InputError(f"calibration sets {', '.join(clash)} itself; leave it out of the engine's options")


def merge_ranks(
    parts: Iterable[bytes], total_heads: int
) -> tuple[dict[int, LayerStatistics], dict[int, gather.MeasuredRotary]]:
    """Statistics of whole layers from the results of ``QueryListener.collect`` on tensor- and pipeline-parallel ranks.

    With fewer heads than ranks, several ranks hold copies of a head and return the same sums.
    """
    layers: dict[int, LayerStatistics] = {}
    measured: dict[int, gather.MeasuredRotary] = {}
    for part in (torch.load(BytesIO(data), weights_only=True) for data in parts):
        for number, own in part["layers"].items():
            held = len(own["query_moment"])
            total = total_heads if total_heads < part["ranks"] else held * part["ranks"]  # layers may differ
            if number not in layers:
                rotary = Rotary(own["planes"], own["frequencies"])
                whole = {name: own[name].new_zeros(total, *own[name].shape[1:]) for name in _BY_HEAD}
                layers[number] = LayerStatistics(
                    value_dim=own["value_dim"], rotary=rotary, sliding_window=own["sliding_window"], **whole
                )
                measured[number] = gather.MeasuredRotary(rotary, own["max_positions"])
            heads = rank_heads(total, held, part["rank"], part["ranks"])
            for name in _BY_HEAD:
                getattr(layers[number], name)[heads] = own[name]
    return dict(sorted(layers.items())), measured
