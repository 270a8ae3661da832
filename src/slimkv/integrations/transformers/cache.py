"""``SlimKVCache``: a transformers cache whose layers are packed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from slimkv.calibrate import Calibration
from slimkv.errors import InputError
from slimkv.integrations.transformers.auto import find_calibration
from slimkv.integrations.transformers.compat import DYNAMIC_LAYER_TYPE_MAPPING, Cache, layer_kinds
from slimkv.integrations.transformers.layers import LayerSettings, PackedLayer, PackedSlidingLayer
from slimkv.integrations.transformers.plugin import register
from slimkv.integrations.transformers.tables import SequenceTables
from slimkv.integrations.transformers.window import WindowedLayer, check_window
from slimkv.spec import BF16_BYTES, DEFAULT_SEED, CodecSpec, PageLayout

Formats = str | Mapping[int | str, str]
RAW = "raw"
CALIBRATED = "calibrated"


@dataclass(frozen=True)
class CacheSize:
    """What a cache occupies."""

    allocated_bytes: int  # keys and values of every layer, as allocated
    bf16_bytes: int  # the same tokens in bfloat16
    tokens: int  # positions, of one sequence
    batch: int

    @property
    def ratio(self) -> float:
        """Allocated bytes over bf16 bytes."""
        return self.allocated_bytes / self.bf16_bytes if self.bf16_bytes else 0.0


class SlimKVCache(Cache):
    """A packed cache for ``model.generate(past_key_values=cache)`` and for plain forward calls.

    Full-attention layers, and sliding or chunked ones, are packed; layers of other kinds (linear attention, state
    space) and layers whose format is ``raw`` are the stock ones.

    Args:
        config: the model's config, or the model itself.
        formats: a word for all layers (``k4v4``, ``k5v4``, ``k8v4``, ...) or one per layer:
            ``{0: "raw", -1: "raw", "default": "k4v4"}``; negative numbers count from the end. ``calibrated``: those
            that the calibration chose for a budget.
        strict: attention reads every key and value through the codec. By default a forward pass of more than 8 new
            tokens attends those tokens raw, as serving engines do, and only later passes read their codes.
        first, last: full-attention layers keep so many of the first and last tokens in the model's dtype.
        block_tokens: tokens per page: 16, 32, 64 or 128.
        impl: implementation of store and attend by name; by default the best for the device.
        seed: of the rotation.
        calibration: how keys are rounded: a file from ``slimkv calibrate`` (or a loaded ``Calibration``); ``auto``:
            made when this model is first seen, which runs it once, and kept on disk (needs the model, not its config);
            None: to the nearest level.
        offloading, offload_only_non_sliding: as in ``DynamicCache``: pages wait in CPU memory while not in use.
    """

    def __init__(
        self,
        config: Any,
        formats: Formats = "k4v4",
        *,
        strict: bool = False,
        first: int = 0,
        last: int = 0,
        block_tokens: int = 64,
        impl: str | None = None,
        seed: int = DEFAULT_SEED,
        calibration: Calibration | str | Path | None = None,
        offloading: bool = False,
        offload_only_non_sliding: bool = True,
    ) -> None:
        check_window(first, last, strict)
        register()
        self.strict = strict
        self._tables: dict[tuple[torch.device, int | None, bool], SequenceTables] = {}
        model = config if isinstance(config, torch.nn.Module) else None
        config = config.config if model is not None else config
        known = find_calibration(calibration, config, model)
        kinds = layer_kinds(config)
        words = layer_words(chosen_formats(known) if formats == CALIBRATED else formats, len(kinds))
        _check_words(config, words, block_tokens)
        plain = LayerSettings(block_tokens, strict, impl, self._tables_for(False), seed, known)
        windowed = LayerSettings(block_tokens, strict, impl, self._tables_for(True), seed, known)
        layers: list[Any] = []
        for number, ((kind, arguments), word) in enumerate(zip(kinds, words, strict=True)):
            if word == RAW or kind not in ("full_attention", "sliding_attention", "chunked_attention"):
                layers.append(DYNAMIC_LAYER_TYPE_MAPPING[kind](**arguments))
            elif kind != "full_attention":
                chunked = kind == "chunked_attention"
                layers.append(PackedSlidingLayer(word, plain, arguments["sliding_window"], chunked, number))
            elif first or last:
                layers.append(WindowedLayer(word, windowed, first, last, number))
            else:
                layers.append(PackedLayer(word, plain, number))
        super().__init__(layers=layers, offloading=offloading, offload_only_non_sliding=offload_only_non_sliding)

    def _tables_for(self, windowed: bool) -> Any:
        def tables(batch: int, device: torch.device, window: int | None) -> SequenceTables:
            key = (device, window, windowed)
            if key not in self._tables:
                size = next(x.settings.block_tokens for x in self.layers if isinstance(x, PackedLayer))
                self._tables[key] = SequenceTables(batch, size, device, window)
            found = self._tables[key]
            if found.batch != batch:
                raise InputError(f"layers of one cache were given batches of {found.batch} and {batch} sequences")
            return found

        return tables

    @property
    def packed_layers(self) -> list[PackedLayer]:
        """The layers that are packed."""
        return [layer for layer in self.layers if isinstance(layer, PackedLayer)]

    # -- size ----------------------------------------------------------------------------------------------------------

    @property
    def nbytes(self) -> int:
        """Bytes allocated for keys and values (and the states of other layer kinds), wherever they are."""
        return self.size().allocated_bytes

    def size(self) -> CacheSize:
        """Allocated bytes, and the bytes the same tokens take in bfloat16."""
        allocated = plain = tokens = batch = 0
        for layer in self.layers:
            if isinstance(layer, PackedLayer):
                if layer.is_initialized:
                    spec, kept = layer.pool.layout.spec, layer.tokens
                    if layer.window is not None:
                        kept = min(kept, layer.window - 1)
                    batch, tokens = layer.tables.batch, layer.tokens
                    allocated += layer.nbytes
                    numbers = batch * layer.kv_heads * kept * (spec.key_dim + spec.value_dim)
                    plain += BF16_BYTES * numbers
            else:
                held = [x for x in vars(layer).values() if isinstance(x, Tensor) and x.is_floating_point()]
                allocated += sum(x.numel() * x.element_size() for x in held)
                plain += sum(x.numel() * BF16_BYTES for x in held)
        return CacheSize(allocated, plain, tokens, batch)

    # -- what changes the batch or the past: the shared tables first, then what layers hold themselves -----------------

    def reset(self) -> None:
        """Empties the cache and frees its memory."""
        super().reset()
        self._tables.clear()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Sequence ``beam_idx[i]`` becomes sequence i."""
        self._select(beam_idx)
        super().reorder_cache(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeats every sequence ``repeats`` times."""
        for tables in self._tables.values():
            tables.select(torch.arange(tables.batch, device=tables.device).repeat_interleave(repeats))
        super().batch_repeat_interleave(repeats)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keeps the sequences ``indices`` (numbers, or a boolean mask)."""
        indices = indices.nonzero().flatten() if indices.dtype == torch.bool else indices
        self._select(indices)
        super().batch_select_indices(indices)

    def _select(self, index: Tensor) -> None:
        for tables in self._tables.values():
            tables.select(index)

    def crop(self, tokens_to_remove: int) -> None:
        """Forgets the last ``-tokens_to_remove`` tokens (0 or negative, as in transformers 5.22)."""
        if tokens_to_remove > 0:
            raise ValueError(
                f"crop takes the number of tokens to remove as a negative number, not {tokens_to_remove}; "
                f"to keep {tokens_to_remove} tokens use crop({tokens_to_remove} - cache.get_seq_length())"
            )
        tokens = -tokens_to_remove
        for layer in self.packed_layers:
            layer.check_crop(tokens)
        for (_, _, windowed), tables in self._tables.items():
            held = tokens
            if windowed:
                members = [x for x in self.layers if isinstance(x, WindowedLayer) and x.is_initialized]
                held = next(x.packed_to_remove(tokens) for x in members if x.tables is tables)
            tables.crop(held)
        super().crop(tokens_to_remove)


def chosen_formats(calibration: Calibration | None) -> Formats:
    """The formats that a calibration chose; raises if it chose none."""
    if calibration is None or calibration.formats is None:
        raise InputError(
            f"formats={CALIBRATED!r} takes the widths from a calibration made for a budget: run slimkv calibrate with "
            "--budget or --profile, and give the file as calibration"
        )
    formats: dict[int | str, str] = {"default": RAW}
    for number, word in calibration.formats.items():
        formats[number] = word
    return formats


def layer_words(formats: Formats, layers: int) -> list[str]:
    """One format word per layer."""
    if isinstance(formats, str):
        return [formats] * layers
    words = [formats.get("default")] * layers
    for where, word in formats.items():
        if where == "default":
            continue
        if not isinstance(where, int) or not -layers <= where < layers:
            raise InputError(f"formats name layer {where!r}; the model has layers 0 to {layers - 1}, and 'default'")
        words[where] = word
    missing = [i for i, word in enumerate(words) if word is None]
    if missing:
        raise InputError(f"no format for layer(s) {missing}; give one under 'default'")
    return [word for word in words if word is not None]


def _check_words(config: Any, words: list[str], block_tokens: int) -> None:
    """Unknown words and impossible sizes fail here, not in the first forward pass."""
    text = config.get_text_config(decoder=True)
    head_dim = getattr(text, "head_dim", None)
    if head_dim is None and getattr(text, "hidden_size", None) and getattr(text, "num_attention_heads", None):
        head_dim = text.hidden_size // text.num_attention_heads
    if getattr(text, "kv_lora_rank", None) is not None or not isinstance(head_dim, int):
        head_dim = 64  # sizes differ between K and V, or by layer: checked when they are seen
    for word in dict.fromkeys(words):
        PageLayout(CodecSpec.parse(word, head_dim), block_tokens)
