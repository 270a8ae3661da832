"""Formats by age: assigns the tokens of a cache to tiers and moves them down as the cache fills."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor

from slimkv.config import RAW, RAW_LATENT, KVCacheConfig
from slimkv.errors import InputError, OutOfPagesError, UnsupportedError
from slimkv.formats import is_latent_format
from slimkv.integrations.transformers.compat import DynamicLayer, stock_layer
from slimkv.integrations.transformers.tables import SequenceTables, Step
from slimkv.spec import BF16_BYTES, PageLayout, parse_spec

if TYPE_CHECKING:
    from slimkv.integrations.transformers.tiers import TieredLayer

# The formats for a memory budget, finest first. Errors in keys cost more than errors in values: on SmolLM2 k8v6 has
# 0.55 times the KL divergence of k7v7, and k5v3 0.73 times that of k4v4. Larger steps would lose more than they save.
RUNGS = (RAW, "krawbf16vrawbf16", "k8v8", "k8v6", "k7v5", "k6v4", "k5v3", "k4v2", "k3v2", "k2v2")
KEY_WEIGHT = 8.0  # the cost of an error in keys, relative to an equal error in values
SINK_TOKENS = 16  # with a memory budget, this many first tokens stay raw,
SINK_SHARE = 1 / 16  # but they take no more than this share of the budget
# The cost of an error falls with a token's age to this power. On SmolLM2 at 4,096 tokens, 0.5 and 1 are similar: with
# equal bits for keys and values, their KL divergences are 0.81 and 0.88 of a single format's at 7.75 bits, and 0.36 and
# 0.28 at 4.25 bits. 2 is far worse.
AGE_POWER = 0.75


def tier_formats(config: KVCacheConfig, finest: str, dtype_bytes: int = BF16_BYTES) -> tuple[str, ...]:
    """The formats of a layer's tiers, oldest (narrowest) first, for a model dtype of ``dtype_bytes`` bytes."""
    if config.memory is None:
        return (*(config.age[age] for age in sorted(config.age, reverse=True)), finest)
    dtype = "bfloat16" if dtype_bytes == BF16_BYTES else "float32"
    bits = [parse_spec(name, 64).with_raw_dtype(dtype).bits_per_number for name in (finest, *RUNGS)]
    kept = {finest: bits[0]}
    for name, width in zip(RUNGS, bits[1:], strict=True):
        if width < min(kept.values()):
            kept[name] = width
    return tuple(reversed(kept))


@dataclass(frozen=True)
class Drop:
    """The change of a tier's pages when its first tokens leave: rows of blocks are freed, or single tokens move."""

    rows: int
    moved: tuple[Tensor, Tensor] | None = None  # slots, before and after, of the tokens that stay


@dataclass(frozen=True)
class Costs:
    """The bytes and the error of one row of blocks (a block of every sequence) in each tier, oldest tier first."""

    bytes: tuple[int, ...]  # in all layers, for one sequence
    error: tuple[float, ...]  # relative squared error, up to a factor
    raw_token: int  # bytes of a token in the model's dtype, in all layers


def costs_of(layouts: Sequence[PageLayout], heads: int, layers: int, raw_token: int) -> Costs:
    """The costs of ``layers`` identical layers."""
    formats = [(x.spec.key, x.spec.value) for x in layouts]
    return Costs(
        tuple(x.pool_bytes(1, heads) * layers for x in layouts),
        tuple(KEY_WEIGHT * 4.0**-key.bits + 4.0**-value.bits for key, value in formats),
        raw_token * layers,
    )


class Ladder:
    """The tiers of all layers of a cache: their tables, and the rule that moves tokens to the next tier.

    With ``age``, a token moves when that many newer tokens have followed. With ``memory``, while the cache would exceed
    the budget, the block that loses least precision per byte moves one tier down. A tier is drained from its oldest
    block, so tiers are ordered by age.
    """

    def __init__(self, config: KVCacheConfig, block_size: int, layers: int) -> None:
        self.config, self.block_size, self.layers = config, block_size, layers
        self.sink_tokens = config.sink_tokens
        self.formats: tuple[str, ...] = ()
        self.clear()

    def clear(self) -> None:
        """Removes all tokens."""
        self.tables: list[SequenceTables] = []  # one per tier
        self.members: list[TieredLayer] = []
        self.costs: Costs | None = None  # with a memory budget
        self._steps: tuple[int, list[tuple[int, Step]]] | None = None  # (new tokens, tables) of the last pass

    @property
    def tokens(self) -> int:
        """Tokens in all tiers."""
        return sum(x.tokens for x in self.tables)

    def start(self, formats: tuple[str, ...], tables: Callable[[int], SequenceTables], costs: Costs) -> None:
        """Sets formats, tables and sizes from the first layer; all other layers must have the same sizes."""
        if not self.tables:
            self.formats, self.tables = formats, [tables(i) for i in range(len(formats))]
            if self.config.memory is not None:
                self.costs = costs
                room = int(self._budget(0) * SINK_SHARE / costs.raw_token)
                self.sink_tokens = max(self.config.sink_tokens, min(SINK_TOKENS, room))
        elif self.costs is not None and self.costs != costs:
            raise InputError(
                f"memory={self.config.memory!r} needs layers with keys and values of one size; these differ: "
                f"{self.costs.raw_token:,} and {costs.raw_token:,} bytes per token in {self.layers} layers"
            )

    def _budget(self, raw: int) -> float:
        """Bytes per sequence left for tiers after ``raw`` first and last tokens in the model's dtype."""
        assert self.costs is not None
        return int(self.config.memory or 0) / self.tables[0].batch - raw * self.costs.raw_token

    def _lengths(self, tokens: int, raw: int) -> list[int]:
        """The number of tokens in each tier after a pass: ``tokens`` in total, not counting ``raw`` raw tokens."""
        lengths = [x.tokens for x in self.tables]
        lengths[-1] += tokens - sum(lengths)
        if self.costs is not None:
            return self._fitting(lengths, raw)
        for number, age in enumerate(sorted(self.config.age), 1):
            old = len(lengths) - number  # tokens of that age move from this tier to the previous one
            after = sum(lengths[old + 1 :]) + self.config.recent_tokens
            leaving = max(min(lengths[old] + after - age, lengths[old]), 0) // self.block_size * self.block_size
            lengths[old] -= leaving
            lengths[old - 1] += leaving
        return lengths

    def _fitting(self, lengths: list[int], raw: int) -> list[int]:
        costs, size, budget = self.costs, self.block_size, self._budget(raw)
        assert costs is not None
        while sum(-(-n // size) * each for n, each in zip(lengths, costs.bytes, strict=True)) > budget:
            best, least = 0, float("inf")
            age = 0
            for tier in range(len(lengths) - 1, 0, -1):
                age += lengths[tier]
                if lengths[tier]:
                    loss = (costs.error[tier - 1] - costs.error[tier]) / (costs.bytes[tier] - costs.bytes[tier - 1])
                    if (cost := loss * max(age - size / 2, 1) ** -AGE_POWER) < least:
                        best, least = tier, cost
            if not best:
                tokens = sum(lengths)
                raise OutOfPagesError(
                    f"memory={self.config.memory:,} bytes cannot hold {self.tables[0].batch} sequences of "
                    f"{tokens + raw:,} tokens, not even as {self.formats[0]}: give more memory, or fewer tokens"
                )
            leaving = min(size, lengths[best])
            lengths[best] -= leaving
            lengths[best - 1] += leaving
        return lengths

    def advance(self, held: int, new: int, raw: int) -> list[tuple[int, Step]]:
        """(tier, tables) for ``new`` tokens, oldest first, in a layer with ``held`` tokens in its tiers.

        ``raw``: the layer's tokens outside its tiers after the pass. The first call of a pass moves older tokens of all
        layers down.
        """
        if self._steps is not None and self._steps[0] == new and held + new == self.tokens:
            return self._steps[1]
        if held != self.tokens or any(0 < x.packed_tokens < self.tokens for x in self.members):
            raise InputError(
                f"a layer with {held} packed tokens received {new} more while other layers hold {self.tokens}; every "
                "layer of a cache must take part in every forward pass"
            )
        lengths = self._lengths(held + new, raw)
        self._demote(lengths)
        counts = [n - x.tokens for n, x in zip(lengths, self.tables, strict=True)]
        steps = [(i, self.tables[i].advance(self.tables[i].tokens, n, True)) for i, n in enumerate(counts) if n]
        self._steps = new, steps
        return steps

    def settle(self, raw: int) -> None:
        """Moves tokens down to stay within the budget after the batch has grown."""
        if self.tables:
            self._demote(self._lengths(self.tokens, raw))

    def _demote(self, lengths: list[int]) -> None:
        """Moves stored tokens between tiers, so that the new tokens then complete ``lengths``."""
        self._steps, first = None, 0
        for target, length in enumerate(lengths):
            tables = self.tables[target]
            for source in range(target + 1, len(lengths)):
                old = self.tables[source]
                count = min(length - tables.tokens, old.tokens)
                if count > 0:
                    slots, position = old.slots(0, count), first + tables.tokens
                    drop = self._drop(old, count)
                    step = tables.advance(tables.tokens, count, True)
                    for member in self.members:
                        member.demote(source, target, slots, step, position, drop)
            first += length

    def _drop(self, tables: SequenceTables, count: int) -> Drop:
        """Removes a tier's first ``count`` tokens. They end at a block boundary except after a crop."""
        rows, left = tables.rows, tables.tokens - count
        if left == 0 or count % self.block_size == 0:
            tables.drop(count)
            return Drop(rows - tables.rows)
        before = tables.slots(count, left).reshape(-1)
        tables.drop(count)
        return Drop(0, (before, tables.slots(0, left).reshape(-1)))

    def crop(self, tokens: int) -> None:
        """Removes the last ``tokens`` tokens."""
        self._steps = None
        for tables in reversed(self.tables):
            cut = min(tokens, tables.tokens)
            tables.crop(cut)
            tables.drop(0)
            tokens -= cut


def in_tiers(settings: KVCacheConfig, format: str) -> bool:
    """Whether a full-attention layer of ``format`` is stored in tiers."""
    return settings.tiered and (format not in (RAW, RAW_LATENT) or len(tier_formats(settings, format)) > 1)


def make_ladder(settings: KVCacheConfig, kinds: Any, formats: list[str], block_size: int, offloading: bool) -> Ladder:
    """The ladder that moves tokens between formats; raises for settings it does not support."""
    given = "memory" if settings.memory is not None else "age" if settings.age else None
    if given is not None:
        said = f"{given}={getattr(settings, given)!r}"
        if offloading:
            raise UnsupportedError(f"{said} re-encodes the tokens of all layers at once, which offloading=True forbids")
        if any(is_latent_format(name) for name in formats):
            raise UnsupportedError(f"{said} is for keys and values, but this model caches latents: choose one format")
    others = [
        (i, kind) for i, (kind, arguments) in enumerate(kinds) if type(stock_layer(kind, arguments)) is not DynamicLayer
    ]
    if settings.memory is not None and others:
        raise UnsupportedError(
            f"memory={settings.memory:,} is for models whose layers all have full attention; layer {others[0][0]} of "
            f"this one has {others[0][1]}: give formats with age, or choose one format"
        )
    return Ladder(settings, block_size, len(kinds))
