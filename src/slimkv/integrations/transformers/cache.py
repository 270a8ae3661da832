"""``SlimKVCache``: a transformers cache whose layers are packed."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from slimkv.calibration import Calibration
from slimkv.config import CALIBRATED, DEFAULT_FORMAT, KVCacheConfig
from slimkv.errors import InputError
from slimkv.integrations.transformers.calibration.cached import find_calibration
from slimkv.integrations.transformers.calibration.matrix_index import MatrixIndex
from slimkv.integrations.transformers.compat import DYNAMIC_LAYER_TYPE_MAPPING, Cache, layer_kinds
from slimkv.integrations.transformers.layers import LayerSettings, PackedLayer, PackedSlidingLayer
from slimkv.integrations.transformers.plugin import register
from slimkv.integrations.transformers.prompt_cache import load_prompt, save_prompt
from slimkv.integrations.transformers.sink_recent import SinkRecentLayer
from slimkv.integrations.transformers.tables import SequenceTables
from slimkv.spec import BF16_BYTES, CodecSpec, PageLayout

RAW = "raw"


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
        format: a format for all layers (``k4v4``, ``k5v4``, ``fp8``, ...), or a whole ``KVCacheConfig``.
        block_size: tokens per block: 16, 32, 64 or 128.
        offloading, offload_only_non_sliding: as in ``DynamicCache``: pages wait in CPU memory while not in use.
        fields: the other fields of ``KVCacheConfig``. ``raw`` layers are stock layers. ``fresh="auto"`` is ``raw``: a
            forward pass of more than 8 new tokens attends those tokens raw, and only later passes read their codes.
            ``calibration="auto"`` is made when this model is first seen, which runs it once (so it needs the model, not
            its config), and kept on disk.
    """

    def __init__(
        self,
        config: Any,
        format: str | KVCacheConfig = DEFAULT_FORMAT,
        *,
        block_size: int = 64,
        offloading: bool = False,
        offload_only_non_sliding: bool = True,
        **fields: Any,
    ) -> None:
        self.settings = _settings(format, fields)
        self.block_size = block_size
        register()
        self._tables: dict[tuple[torch.device, int | None, bool], SequenceTables] = {}
        model = config if isinstance(config, torch.nn.Module) else None
        config = config.config if model is not None else config
        known = find_calibration(self.settings.calibration, config, model)
        kinds = layer_kinds(config)
        formats = _formats(self.settings, known, len(kinds))
        _check_formats(config, formats, block_size)
        fresh_raw = self.settings.reads_fresh_raw(shared_pages=False)
        index = MatrixIndex(known) if known is not None else None
        plain = LayerSettings(self.settings, block_size, fresh_raw, self._tables_for(False), known, index)
        windowed = LayerSettings(self.settings, block_size, fresh_raw, self._tables_for(True), known, index)
        layers: list[Any] = []
        for number, ((kind, arguments), name) in enumerate(zip(kinds, formats, strict=True)):
            if name == RAW or kind not in ("full_attention", "sliding_attention", "chunked_attention"):
                layers.append(DYNAMIC_LAYER_TYPE_MAPPING[kind](**arguments))
            elif kind != "full_attention":
                chunked = kind == "chunked_attention"
                layers.append(PackedSlidingLayer(name, plain, arguments["sliding_window"], chunked, number))
            elif self.settings.sink_tokens or self.settings.recent_tokens:
                layers.append(SinkRecentLayer(name, windowed, number))
            else:
                layers.append(PackedLayer(name, plain, number))
        super().__init__(layers=layers, offloading=offloading, offload_only_non_sliding=offload_only_non_sliding)

    def _tables_for(self, windowed: bool) -> Any:
        def tables(batch: int, device: torch.device, window: int | None) -> SequenceTables:
            key = (device, window, windowed)
            if key not in self._tables:
                size = next(x.settings.block_size for x in self.layers if isinstance(x, PackedLayer))
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
                    numbers = batch * layer.num_kv_heads * kept * (spec.key_dim + spec.value_dim)
                    plain += BF16_BYTES * numbers
            else:
                held = [x for x in vars(layer).values() if isinstance(x, Tensor) and x.is_floating_point()]
                allocated += sum(x.numel() * x.element_size() for x in held)
                plain += sum(x.numel() * BF16_BYTES for x in held)
        return CacheSize(allocated, plain, tokens, batch)

    # -- files ---------------------------------------------------------------------------------------------------------

    def save(self, path: str | Path, model: Any, input_ids: Any) -> Path:
        """Writes the cache of one sequence to a prompt-cache file, which other processes and engines can load.

        Args:
            path: where; the file is there as a whole or not at all.
            model: the model that filled the cache (or its config, where that names the folder of the weights).
            input_ids: the tokens, [tokens] or [1, tokens]; those beyond ``get_seq_length()`` are not in the cache.
        """
        return save_prompt(self, path, model, input_ids)

    @classmethod
    def load(cls, path: str | Path, model: Any, input_ids: Any = None, **fields: Any) -> SlimKVCache:
        """The cache in a prompt-cache file, with the formats, seed and block size it was written with.

        Args:
            path: the file. One that is damaged, or was written for another model, is refused.
            model: the model that is going to read the cache.
            input_ids: the whole prompt that follows. Only the tokens it shares with the file are loaded, at most all
                but its last one. Without it the caller must see to it that the prompt begins with the file's tokens.
            fields: further arguments of ``SlimKVCache``, such as ``calibration`` or ``offloading``.
        """
        return load_prompt(cls, path, model, input_ids, fields)

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
                members = [x for x in self.layers if isinstance(x, SinkRecentLayer) and x.is_initialized]
                held = next(x.packed_to_remove(tokens) for x in members if x.tables is tables)
            tables.crop(held)
        super().crop(tokens_to_remove)


def _settings(format: object, fields: dict[str, Any]) -> KVCacheConfig:
    """The cache's configuration from what ``SlimKVCache`` was given."""
    if not isinstance(format, KVCacheConfig):
        return KVCacheConfig.parse({"format": format, **fields})
    if fields:
        raise InputError(f"{', '.join(fields)}: give them inside the KVCacheConfig, or a format and fields, not both")
    return format


def _formats(settings: KVCacheConfig, calibration: Calibration | None, num_layers: int) -> list[str]:
    """One format per layer."""
    formats = settings.layer_formats(num_layers)
    if CALIBRATED not in formats:
        return formats
    if calibration is None or calibration.formats is None:
        raise InputError(
            f"format={CALIBRATED!r} takes the widths from a calibration made for a budget: run slimkv calibrate with "
            "--budget or --profile, and give the file as calibration"
        )
    chosen = calibration.formats
    return [chosen.get(i, RAW) if name == CALIBRATED else name for i, name in enumerate(formats)]


def _check_formats(config: Any, formats: list[str], block_size: int) -> None:
    """Impossible sizes fail here, not in the first forward pass."""
    text = config.get_text_config(decoder=True)
    head_dim = getattr(text, "head_dim", None)
    if head_dim is None and getattr(text, "hidden_size", None) and getattr(text, "num_attention_heads", None):
        head_dim = text.hidden_size // text.num_attention_heads
    if getattr(text, "kv_lora_rank", None) is not None or not isinstance(head_dim, int):
        head_dim = 64  # sizes differ between K and V, or by layer: checked when they are seen
    for format in dict.fromkeys(formats):
        PageLayout(CodecSpec.parse(format, head_dim), block_size)
