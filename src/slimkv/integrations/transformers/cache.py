"""``SlimKVCache``: a transformers cache whose layers are packed."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from slimkv.arguments import describe, typed
from slimkv.config import AUTO, KVCacheConfig
from slimkv.errors import InputError, SlimKVError
from slimkv.integrations.transformers import choices, compat
from slimkv.integrations.transformers.calibration.cached import find_calibration
from slimkv.integrations.transformers.calibration.matrix_index import MatrixIndex
from slimkv.integrations.transformers.decoded_attention import exact
from slimkv.integrations.transformers.ladder import make_ladder, tier_formats
from slimkv.integrations.transformers.layer_settings import LayerSettings
from slimkv.integrations.transformers.layers import PackedLayer
from slimkv.integrations.transformers.lazy_kv import PackedStates
from slimkv.integrations.transformers.prompt_cache import load_prompt, save_prompt
from slimkv.integrations.transformers.size import CacheSize
from slimkv.integrations.transformers.sliding import PackedSlidingLayer
from slimkv.integrations.transformers.tables import TableSet
from slimkv.integrations.transformers.tiers import TieredLayer


class SlimKVCache(compat.Cache):
    """A packed cache for ``model.generate(past_key_values=cache)`` and for plain forward calls.

    Full-attention layers, and sliding or chunked ones, are packed; layers of other kinds (linear attention, state
    space) and layers whose format is ``raw`` are stock layers.

    Args:
        config: the model's config, or the model itself.
        format: a format for all layers (``k4v4``, ``k5v4``, ``fp8``, ...; ``c4``, ``c4r8``, ... where the model caches
            latents), or a whole ``KVCacheConfig``. ``auto`` is 4 bits: ``k4v4``, or ``c4`` for latents.
        block_size: tokens per block: 16, 32, 64 or 128.
        offloading, offload_only_non_sliding: as in ``DynamicCache``: pages are in CPU memory while not in use.
        offsets: the vectors subtracted from the keys of each layer before encoding, float [num_kv_heads, key_dim] by
            layer number. None: from the calibration; otherwise from a pass of 256 random ids, which runs once per model
            and is saved; otherwise, if only a config is given, from the first tokens of each layer.
        fields: the other fields of ``KVCacheConfig``. ``raw`` layers are stock layers. ``fresh="auto"`` is ``raw``: a
            forward pass of more than 8 new tokens attends to these unquantised, and only later passes read their codes.
            ``calibration="auto"`` calibrates the model on first use, which runs it (so it needs the model, not only its
            config), and saves the result. ``memory`` is for models with full attention in every layer; with left
            padding, attention then reads decoded keys and values.
    """

    encoder_decoder_class: ClassVar[type[SlimKVCache]]  # set in ``encoder_decoder``

    def __init__(
        self,
        config: Any,
        format: str | KVCacheConfig = AUTO,
        *,
        block_size: int = 64,
        offloading: bool = False,
        offload_only_non_sliding: bool = True,
        offsets: Mapping[int, Tensor] | None = None,
        **fields: Any,
    ) -> None:
        self.settings = choices.settings_of(format, fields)
        self.block_size = block_size
        self._tables = TableSet(block_size)
        self._broken: str | None = None
        model = config if isinstance(config, torch.nn.Module) else None
        config = choices.config_of(config)
        compat.refuse_without_cache(config, model)
        known = find_calibration(self.settings.calibration, config, model)
        kinds = compat.layer_kinds(config)
        formats = choices.formats_of(self.settings, known, len(kinds), compat.caches_latents(config))
        choices.check_formats(config, formats, block_size)
        index = MatrixIndex(known) if known is not None else None
        if self.settings.tiered:
            self._tables.ladder = make_ladder(self.settings, kinds, formats, block_size, offloading)
        seen: Mapping[int, Tensor] = {}
        if offsets is None:
            narrowest = [tier_formats(self.settings, name)[0] for name in formats]
            offsets, seen = {}, choices.seen_keys_of(model, self.settings, known, narrowest)
        guard = choices.guard_of(config, model, self.settings, known, formats)
        settings = LayerSettings(self.settings, block_size, self._tables, known, index, offsets, seen, guard)
        layers = [
            choices.make_layer(kind, arguments, name, settings, number)
            for number, ((kind, arguments), name) in enumerate(zip(kinds, formats, strict=True))
        ]
        if self.settings.deterministic:
            choices.check_deterministic(layers)
        compat.Cache.__init__(
            self, layers=layers, offloading=offloading, offload_only_non_sliding=offload_only_non_sliding
        )
        if not self.packed_layers and any(name not in choices.STOCK_FORMATS for name in formats):
            warnings.warn(
                f"nothing is packed: the layers of this model are {', '.join(sorted({kind for kind, _ in kinds}))}, "
                "which slimkv does not pack; the cache takes as much memory as the stock one",
                stacklevel=2,
            )

    def __new__(cls, config: Any, *args: Any, **kwargs: Any) -> SlimKVCache:
        """For an encoder-decoder model, a cache that also holds the stock cache of its cross-attention."""
        if cls is SlimKVCache and choices.attends_encoder(choices.config_of(config)):
            cls = cls.encoder_decoder_class
        return super().__new__(cls)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return compat.Cache.__new__, (type(self),), self.__dict__  # an empty instance, which pickle and copy fill

    def __repr__(self) -> str:
        formats = Counter(getattr(layer, "format", "stock") for layer in self.layers)
        layers = ", ".join(f"{count} layers {name}" for name, count in formats.items())
        return f"{type(self).__name__}({layers}: {self.size()})"

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Stores new keys and values of a layer; returns the tensors for its attention. On an error the whole forward
        pass is undone: the cache is as it was before.
        """
        if torch.compiler.is_compiling():
            return _outside_the_graph(self, key_states, value_states, layer_idx, *args, **kwargs)
        if self._broken is not None:
            raise InputError(self._broken)
        for name, x in (("key_states", key_states), ("value_states", value_states)):
            if not isinstance(x, Tensor) or x.ndim != 4:
                raise InputError(f"{name} must be a tensor [batch, num_kv_heads, tokens, dim], not {describe(x)}")
        if type(layer_idx) is not int:
            raise InputError(f"layer_idx must be a layer's number, not {describe(layer_idx)}")
        if not 0 <= layer_idx < len(self.layers):
            raise InputError(
                f"layer {layer_idx} was given keys and values, but by the config layers 0 to "
                f"{len(self.layers) - 1} have a cache"
            )
        try:
            with exact(key_states.device):
                key, value = compat.Cache.update(self, key_states, value_states, layer_idx, *args, **kwargs)
        except SlimKVError:
            self._take_back(self.layers[layer_idx])
            raise
        if isinstance(key, PackedStates):
            key.for_attention = True
        return key, value

    def _take_back(self, failed: Any) -> None:
        """Undoes the forward pass in which the layer ``failed`` has not stored anything yet."""
        if not isinstance(failed, PackedLayer) or not failed.is_initialized:
            return
        ahead = [x for x in self.layers if isinstance(x, compat.CacheLayerMixin) and x.get_seq_length() > failed.tokens]
        moved = isinstance(failed, TieredLayer) and (ahead or failed.ladder.tokens != failed.packed_tokens)
        if not all(type(x) in (PackedLayer, PackedSlidingLayer) for x in ahead) or moved:
            self._broken = "a forward pass failed after some layers had seen its tokens; reset the cache"
            return
        for layer in ahead:
            layer.crop(failed.tokens - layer.get_seq_length())
        for tables in self._tables:
            if not tables.exact:
                tables.crop(max(tables.tokens - failed.tokens, 0))

    def __iter__(self) -> Iterator[tuple[Tensor | None, ...]]:
        """Keys, values (decoded) and the window of every layer, as ``DynamicCache`` yields them."""
        for layer in self.layers:
            pair = [getattr(layer, name, None) for name in ("keys", "values")]
            key, value = (x.decoded() if isinstance(x, PackedStates) else x for x in pair)
            window = getattr(layer, "window", None)
            yield key, value, getattr(layer, "_sliding_window_tensor", None) if window is None else torch.tensor(window)

    @property
    def is_linear(self) -> list[bool]:
        """Whether each layer has linear attention and nothing else."""
        return [not isinstance(layer, compat.CacheLayerMixin) for layer in self.layers]

    @property
    def packed_layers(self) -> list[PackedLayer]:
        """The packed layers."""
        return [layer for layer in self.layers if isinstance(layer, PackedLayer)]

    @property
    def matrix_index(self) -> MatrixIndex | None:
        """The index that selects calibration matrices by position; None without a calibration."""
        return next((layer.settings.matrix_index for layer in self.packed_layers), None)

    @property
    def nbytes(self) -> int:
        """Bytes allocated for keys and values (and the states of other layer kinds), on any device."""
        return self.size().allocated_bytes

    def size(self) -> CacheSize:
        """Allocated bytes, and the bytes the same tokens take in bfloat16."""
        return CacheSize.of(self.layers)

    @typed
    def save(self, path: str | Path, model: Any, input_ids: Any) -> Path:
        """Writes the cache of one sequence to a prompt-cache file, which other processes and engines can load.

        Args:
            path: the file; it is written atomically.
            model: the model that filled the cache (or its config, if that names the folder of the weights).
            input_ids: the tokens, [tokens] or [1, tokens]; those beyond ``get_seq_length()`` are not in the cache.
        """
        return save_prompt(self, path, model, input_ids)

    @classmethod
    @typed
    def load(cls, path: str | Path, model: Any, input_ids: Any = None, **fields: Any) -> SlimKVCache:
        """The cache in a prompt-cache file, with the formats, seed and block size it was written with.

        Args:
            path: the file. A file that is damaged or was written for another model raises an error.
            model: the model that will read the cache.
            input_ids: the whole prompt that follows. Only the tokens it shares with the file are loaded, at most all
                but the last one of the prompt. Without it, the caller must ensure that the prompt begins with the
                file's tokens.
            fields: further arguments of ``SlimKVCache``, such as ``calibration`` or ``offloading``.
        """
        return load_prompt(cls, path, model, input_ids, fields)

    def reset(self) -> None:
        """Empties the cache and frees its memory."""
        compat.Cache.reset(self)
        self._tables.clear()
        self._broken = None

    def reorder_cache(self, beam_idx: Any) -> None:
        """Sequence ``beam_idx[i]`` becomes sequence i."""
        self._select("reorder_cache", self._indices(beam_idx))

    def batch_select_indices(self, indices: Any) -> None:
        """Keeps the sequences ``indices``: numbers, or a boolean per sequence, as a tensor or any sequence."""
        self._select("batch_select_indices", self._indices(indices))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeats every sequence ``repeats`` times."""
        if isinstance(repeats, bool) or not isinstance(repeats, int) or repeats < 1:
            raise InputError(f"sequences can be repeated 1 time or more, not {describe(repeats)} times")
        self._select("batch_repeat_interleave", repeats)

    def _select(self, method: str, given: Any) -> None:
        """Changes the batch with a method of ``Cache`` and its argument; keeps a memory budget if the batch grows."""
        for tables in self._tables:
            repeated = method == "batch_repeat_interleave"
            tables.select(torch.arange(tables.batch).repeat_interleave(given) if repeated else given)
        getattr(compat.Cache, method)(self, given)
        if (layer := self._tiered) is not None:
            try:
                layer.ladder.settle(layer.raw_tokens)
            except SlimKVError as error:
                self._broken = f"{error}; reset the cache"
                raise

    @property
    def _tiered(self) -> TieredLayer | None:
        """A layer in tiers that holds tokens; all such layers hold the same tokens."""
        return next((x for x in self.layers if isinstance(x, TieredLayer) and x.is_initialized), None)

    def _indices(self, given: Any) -> Tensor:
        """The sequence numbers that ``given`` selects: int64 [count]."""
        try:
            indices = torch.as_tensor(given)
        except (TypeError, ValueError, RuntimeError) as error:
            raise InputError(f"sequences are chosen by numbers or booleans, not {describe(given)}") from error
        if indices.dim() != 1 or indices.is_floating_point() or indices.is_complex() or indices.is_meta:
            raise InputError(f"sequences are chosen by a list of numbers or booleans, not {describe(given)}")
        batch = next((tables.batch for tables in self._tables), None)
        if indices.dtype == torch.bool:
            if batch is not None and len(indices) != batch:
                raise InputError(f"{len(indices)} booleans were given for {batch} sequences")
            return indices.nonzero().flatten()
        if batch is not None and indices.device.type == "cpu" and len(indices):
            if int(indices.min()) < -batch or int(indices.max()) >= batch:
                raise InputError(f"sequences {indices.tolist()} were asked for; the cache holds 0 to {batch - 1}")
            indices = torch.where(indices < 0, indices + batch, indices)
        return indices.long()

    def crop(self, tokens_to_remove: int) -> None:
        """Removes the last ``-tokens_to_remove`` tokens (0 or negative, as in transformers 5.22)."""
        if isinstance(tokens_to_remove, bool) or not isinstance(tokens_to_remove, int):
            raise InputError(f"tokens_to_remove must be 0 or a negative integer, not {describe(tokens_to_remove)}")
        if tokens_to_remove > 0:
            raise InputError(
                f"crop takes the number of tokens to remove as a negative number, not {tokens_to_remove}; "
                f"to keep {tokens_to_remove} tokens use crop({tokens_to_remove} - cache.get_seq_length())"
            )
        tokens = -tokens_to_remove
        for layer in self.packed_layers:
            layer.check_crop(tokens)
        for tables in self._tables:
            if not tables.exact:
                tables.crop(tokens)
        if (tiered := self._tiered) is not None:
            tiered.ladder.crop(max(tokens - tiered.tail_tokens, 0))
        compat.Cache.crop(self, tokens_to_remove)


@torch.compiler.disable
def _outside_the_graph(cache: SlimKVCache, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    """``update`` for a model that ``torch.compile`` is tracing: pages grow and tables change, so the graph breaks."""
    return cache.update(*args, **kwargs)
