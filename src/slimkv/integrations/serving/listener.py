"""Calibration inside a serving engine: the sums that its processes collect, and how they are merged.

The engine generates text while a ``QueryListener`` in each process sums the queries and keys of its own layers and
heads, on the device. ``merge_ranks`` combines the sums of all processes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from slimkv.calibration.calibration import Calibration
from slimkv.calibration.gather import (
    PROBE_TOKENS,
    LayerSums,
    MeasuredRotary,
    common_range,
    probe_shifts,
    rotary_of_layer,
)  # fmt: skip
from slimkv.calibration.identity import ModelIdentity
from slimkv.calibration.rotary import Rotary
from slimkv.calibration.statistics import LayerStatistics
from slimkv.errors import InputError
from slimkv.integrations.serving.model import rank_heads

FRAGMENT = 128  # tokens that are sampled in a row
STEPS = 4  # reported as progress
SUMS = ("moment", "key_mean", "first_key")  # of the collected statistics: bytes of float64


@dataclass(frozen=True)
class ObservedLayer:
    """One attention layer as a process holds it."""

    num_kv_heads: int
    dim: int
    value_dim: int
    sliding_window: int | None


class QueryListener:
    """Collects the inputs of one process's attention layers. Results are plain numbers and bytes."""

    def __init__(self) -> None:
        self.layers: dict[int, ObservedLayer] = {}
        self.shift = 0  # positions by which the model's input is shifted
        self._probes: dict[int, dict[int, Tensor]] = {}
        self._measured: dict[int, MeasuredRotary] = {}
        self._sums: dict[int, LayerSums] = {}
        self._probing = True

    def probe(self, shift: int) -> None:
        """The next tokens are read ``shift`` positions later, and their queries are kept."""
        self.shift = shift
        self._probes[shift] = {}

    def measure(self) -> None:
        """Fits the rotary embeddings; from now on, inputs are summed."""
        plain, shifted = self._probes.pop(0), self._probes
        for number, queries in plain.items():
            self._measured[number] = rotary_of_layer(queries, {s: x[number] for s, x in shifted.items()})
        self._probes, self._probing, self.shift = {}, False, 0

    def take(self, number: int, query: Tensor, key: Tensor, positions: Tensor) -> None:
        """Takes the inputs of layer ``number`` for tokens at positions int [tokens].

        query [tokens, num_heads, dim], key [tokens, num_kv_heads, dim].
        """
        if self._probing:
            if self.shift in self._probes and query.shape[0] == PROBE_TOKENS:
                self._probes[self.shift][number] = query.flatten(0, 1).float().clone()
            return
        if number not in self._sums:
            layer, rotary = self.layers[number], self._measured[number].rotary
            self._sums[number] = LayerSums(layer.num_kv_heads, layer.dim, rotary, query.device)
        self._sums[number].add(query, key, positions)

    def collect(self, rank: int, ranks: int) -> dict[str, Any]:
        """This process's sums by layer; the layers' heads are divided over ``ranks`` processes."""
        layers = {}
        for number, sums in self._sums.items():
            layer, measured = self.layers[number], self._measured[number]
            layers[str(number)] = {
                "heads": sums.total.shape[0],
                "dim": sums.total.shape[-1],
                "value_dim": layer.value_dim,
                "moment": sums.query_moment().numpy().tobytes(),
                "key_mean": sums.key_mean().numpy().tobytes(),
                "first_key": sums.first_key().numpy().tobytes(),
                "planes": measured.rotary.planes.flatten().tolist(),
                "frequencies": measured.rotary.frequencies.tolist(),
                "max_positions": measured.max_positions,
                "sliding_window": layer.sliding_window,
            }
        return {"rank": rank, "ranks": ranks, "layers": layers}


@dataclass(frozen=True)
class ListeningPlan:
    """What an engine reads and generates while its processes listen."""

    probe: list[int]
    shifts: tuple[int, ...]  # of the probe, 0 first
    first: list[int]  # first token of each fragment, from which the model continues
    fragment: int  # tokens of each fragment, the first included
    seeds: list[int]  # sampling seed of each fragment
    declared: int
    seed: int

    @classmethod
    def of(cls, config: Any, longest: int, samples: tuple[int, int], seed: int) -> ListeningPlan:
        """For a text configuration in an engine that takes prompts up to ``longest``."""
        declared = int(getattr(config, "max_position_embeddings", None) or longest)
        generator = torch.Generator().manual_seed(seed)
        probe = torch.randint(config.vocab_size, (PROBE_TOKENS,), generator=generator).tolist()
        windows, tokens = samples
        length = min(FRAGMENT, tokens, longest)
        rows = -(-windows * tokens // length)
        begin = getattr(config, "bos_token_id", None)
        first = (
            [begin] * rows
            if isinstance(begin, int)
            else torch.randint(config.vocab_size, (rows,), generator=generator).tolist()
        )
        seeds = [seed * 100_003 + row for row in range(rows)]
        return cls(probe, (0, *probe_shifts(declared)), first, length, seeds, declared, seed)

    def listen(
        self, ask: Callable[..., Any], read: Callable[[], Any], say: Callable[[], Any],
        progress: Callable[[str, int, int], None],
    ) -> None:  # fmt: skip
        """Runs the probe and the fragments in an engine; its processes can be asked for their sums afterwards.

        Args:
            ask: calls a method of every process's listener by name.
            read: makes the engine read the probe.
            say: makes it continue from the first token of every fragment.
            progress: called with a description of each stage.
        """
        progress("measuring positions", 1, STEPS)
        for shift in self.shifts:
            ask("probe", shift=shift)
            read()
        ask("measure")
        progress("sampling", 2, STEPS)
        say()
        progress("collecting", 3, STEPS)

    def calibration(
        self, config: Any, parts: Iterable[dict[str, Any]], total_heads: int, max_positions: int | None, engine: str
    ) -> Calibration:
        """A calibration from the sums that the processes of ``engine`` collected."""
        layers, measured = merge_ranks(parts, total_heads)
        held = common_range(measured, max_positions or self.declared, self.declared, self.fragment)
        read = len(self.first) * self.fragment
        source = f"{read} token ids sampled from the model in {engine}, seed {self.seed}"
        return Calibration(ModelIdentity.of(config), layers, source, held)


def refuse_fixed(fixed: Mapping[str, Any], given: Mapping[str, Any]) -> None:
    """Raises if engine options are given that calibration sets itself."""
    if clash := sorted(set(fixed) & set(given)):
        raise InputError(f"calibration sets {', '.join(clash)} itself; leave it out of the engine's options")


def merge_ranks(
    parts: Iterable[dict[str, Any]], total_heads: int
) -> tuple[dict[int, LayerStatistics], dict[int, MeasuredRotary]]:
    """Statistics of whole layers from those of tensor- and pipeline-parallel ranks."""
    moments: dict[int, Tensor] = {}
    means: dict[int, tuple[Tensor, Tensor]] = {}  # of all keys, and of those at position 0
    counts: dict[int, Tensor] = {}
    layers: dict[int, LayerStatistics] = {}
    measured: dict[int, MeasuredRotary] = {}
    for part in parts:
        for name, given in part["layers"].items():
            number, dim, held = int(name), given["dim"], given["heads"]
            # With fewer heads than ranks, several ranks hold the same head. Layers may have different numbers of heads.
            total = total_heads if total_heads < part["ranks"] else held * part["ranks"]
            heads = rank_heads(total, held, part["rank"], part["ranks"])
            own = torch.frombuffer(bytearray(given["moment"]), dtype=torch.float64).view(held, dim, dim)
            if number not in moments:
                moments[number] = torch.zeros(total, dim, dim, dtype=torch.float64)
                means[number] = tuple(torch.zeros(total, dim, dtype=torch.float64) for _ in range(2))  # type: ignore[assignment]
                counts[number] = torch.zeros(total, 1, 1, dtype=torch.float64)
                planes = torch.tensor(given["planes"], dtype=torch.int64).view(-1, 2)
                rotary = Rotary(planes, torch.tensor(given["frequencies"], dtype=torch.float64))
                measured[number] = MeasuredRotary(rotary, given["max_positions"])
                layers[number] = LayerStatistics(
                    moments[number], given["value_dim"], rotary=rotary, sliding_window=given["sliding_window"],
                    key_mean=means[number][0], first_key=means[number][1],
                )  # fmt: skip
            moments[number][heads] += own
            for mean, field in zip(means[number], SUMS[1:], strict=True):
                mean[heads] += torch.frombuffer(bytearray(given[field]), dtype=torch.float64).view(held, dim)
            counts[number][heads] += 1
    for number, moment in moments.items():
        moment /= counts[number].clamp(min=1)
        for mean in means[number]:
            mean /= counts[number].clamp(min=1)[..., 0]
    return dict(sorted(layers.items())), measured
