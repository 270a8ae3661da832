"""A ``SlimKVCache`` as a prompt-cache file and back: one sequence, its pages, and the tokens they belong to."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from slimkv.arguments import describe
from slimkv.cache import PagedPool
from slimkv.calibration.identity import parameter_digest, weights_digest
from slimkv.codec.pack import page_tables
from slimkv.errors import InputError, UnsupportedError
from slimkv.formats import RAW, RAW_LATENT
from slimkv.integrations.transformers.choices import attends_encoder, config_of
from slimkv.integrations.transformers.compat import DYNAMIC_LAYER_TYPE_MAPPING, caches_latents, layer_kinds
from slimkv.integrations.transformers.layers import PackedLayer
from slimkv.integrations.transformers.sliding import PackedSlidingLayer
from slimkv.integrations.transformers.stateful_layers import PackedIndexedLayer
from slimkv.spec import parse_spec
from slimkv.wire import Fingerprint, LayerFingerprint, LayerPages, PromptCache
from slimkv.wire.model import model_fields
from slimkv.wire.prompt_file import first_needed

if TYPE_CHECKING:
    from slimkv.integrations.transformers.cache import SlimKVCache

WRITER = "transformers"
_MEDIA = re.compile(r"(image|video|audio|media).*_token_(id|index)")  # tokens that stand for another input
_KINDS = tuple(
    kind for kind in ("full_attention", "sliding_attention", "indexed_attention") if kind in DYNAMIC_LAYER_TYPE_MAPPING
)
_STOCK = tuple(DYNAMIC_LAYER_TYPE_MAPPING[kind] for kind in _KINDS)


def model_weights(model: Any) -> str:
    """The digest of a model's weights: of its files, or of its parameters if there are no files."""
    config = getattr(model, "config", model)
    changed = getattr(model, "_hf_peft_config_loaded", False) or not hasattr(config, "_name_or_path")
    digest = None if changed else weights_digest(config._name_or_path)
    if digest is not None:
        return digest
    if not isinstance(model, torch.nn.Module):
        raise InputError(
            "the configuration does not name the folder of its weights, which identifies the model of the cache: give "
            "the model itself"
        )
    return parameter_digest(model.named_parameters())


def _fingerprint(layers: Sequence[LayerFingerprint], block_size: int, seed: int, dtype: str, model: Any) -> Fingerprint:
    return Fingerprint.of(
        layers, block_size=block_size, seed=seed, dtype=dtype, model=model_fields(config_of(model), WRITER),
        weights=model_weights(model),
    )  # fmt: skip


def save_prompt(cache: SlimKVCache, path: str | Path, model: Any, input_ids: Any) -> Path:
    """Writes the cached part of ``input_ids`` to a file; see ``SlimKVCache.save``."""
    count = cache.get_seq_length()
    tokens = _one_sequence(input_ids)
    if count == 0 or len(tokens) < count:
        raise InputError(f"the cache holds {count} tokens, input_ids has {len(tokens)}: give all cached tokens")
    config = config_of(model)
    names = [f"the {name} {x}" for name, x in vars(config).items() if _MEDIA.fullmatch(name) and x in tokens[:count]]
    if names or attends_encoder(config):
        raise UnsupportedError(
            f"{f'input_ids has {names[0]}' if names else 'the model attends to an encoder'}: keys and values depend on "
            "more than tokens, by which prompt-cache files are found; save a prompt of text alone, or copy the cache "
            "(copy.deepcopy, pickle)"
        )
    layers: dict[int, LayerPages] = {}
    marks = []
    dtype = None
    for number, (layer, (kind, _)) in enumerate(zip(cache.layers, layer_kinds(config), strict=True)):
        if kind not in _KINDS:
            raise UnsupportedError(f"layer {number} has {kind}; prompt-cache files hold {' and '.join(_KINDS)} only")
        lossless = RAW_LATENT if caches_latents(config) else RAW
        mark, pages, dtype = _layer_pages(number, layer, count, cache.block_size, cache.settings.seed, lossless)
        marks.append(mark)
        layers[number] = pages
    fingerprint = _fingerprint(marks, cache.block_size, cache.settings.seed, _name(dtype), model)
    return PromptCache(fingerprint, tuple(tokens[:count]), layers).save(path, WRITER)


def _one_sequence(input_ids: Any) -> list[int]:
    try:
        ids = torch.as_tensor(input_ids)
    except (TypeError, ValueError, RuntimeError) as error:
        raise InputError(f"input_ids must be token numbers, not {describe(input_ids)}") from error
    if ids.dim() == 2 and ids.shape[0] == 1:
        ids = ids[0]
    if ids.dim() != 1 or ids.is_floating_point() or ids.is_complex() or ids.is_meta:
        raise InputError(
            f"input_ids is {describe(ids)}, with shape {list(ids.shape)}: a file holds one sequence; keep one with "
            "cache.batch_select_indices"
        )
    return ids.tolist()


def _name(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


def _layer_pages(
    number: int, layer: Any, count: int, block_size: int, seed: int, lossless: str
) -> tuple[LayerFingerprint, LayerPages, torch.dtype]:
    """The contents of a layer as pages. A stock layer is stored in the format ``lossless``; missing tokens of the first
    and last block are zeros.
    """
    if type(layer) in (PackedLayer, PackedSlidingLayer, PackedIndexedLayer):
        if not layer.is_initialized or layer.tables.batch != 1 or any(layer.tables.pads):
            raise InputError(
                "a file holds one sequence without padding; use cache.batch_select_indices to keep one that has none"
            )
        first = layer.tables.kept_from
        rows = [j % layer.tables.rows for j in range(first // block_size, -(-count // block_size))]
        pages, layout, offset = layer.pool.pages[rows].cpu(), layer.pool.layout, layer.pool.key_offset
        heads, dtype, window = layer.num_kv_heads, layer.dtype, layer.window
    elif type(layer) in _STOCK:
        if not layer.is_initialized or layer.keys.shape[0] != 1:
            raise InputError("a file holds one sequence; use cache.batch_select_indices to keep one")
        heads, dtype = layer.keys.shape[1], layer.keys.dtype
        window = getattr(layer, "sliding_window", None)
        first = count - layer.keys.shape[2]
        spec = parse_spec(lossless, layer.keys.shape[-1], layer.values.shape[-1], seed=seed).with_raw_dtype(
            _name(dtype)
        )
        pool = PagedPool(spec, -(-count // block_size) - first // block_size, heads, block_size)
        slots = torch.arange(first, count) - first // block_size * block_size
        pool.store(_rows(layer.keys), _rows(layer.values), slots)
        pages, layout, offset = pool.pages, pool.layout, None
    else:
        raise UnsupportedError(
            f"layer {number} is a {type(layer).__name__}, whose state a prompt-cache file does not hold; files are for "
            "full, sliding and indexed attention without sink or recent tokens"
        )
    offsets = page_tables(layout, pages.device).byte_offsets
    pages[0][:, offsets[: first % block_size].flatten()] = 0
    pages[-1][:, offsets[block_size - -count % block_size :].flatten()] = 0
    index = _index_pages(layer, heads, dtype, count, block_size)
    pages = torch.cat([pages, index], 2) if index.numel() else pages
    mark = LayerFingerprint.of(
        number, layout.spec, heads, _name(dtype), window, offset, index_bytes=index.shape[2] // block_size
    )
    return mark, LayerPages(pages, first, offset), dtype


def _index_pages(layer: Any, heads: int, dtype: torch.dtype, count: int, block_size: int) -> Tensor:
    """The keys of a layer's indexer as bytes, uint8 [blocks, 1, block_size * bytes]; empty without an indexer."""
    keys = getattr(layer, "indexer_keys", None)
    if keys is None:
        return torch.empty(0, 1, 0, dtype=torch.uint8)
    if layer.indexer_position_ids is not None or keys.dtype != dtype or heads != 1:
        raise UnsupportedError(
            "prompt-cache files hold the keys of an indexer beside latents, in the model's dtype and without positions "
            "of their own; keep this cache in memory"
        )
    rows = keys.new_zeros(-(-count // block_size) * block_size, keys.shape[-1])
    rows[:count] = keys[0]
    return rows.cpu().view(torch.uint8).view(-1, 1, block_size * keys.shape[-1] * keys.element_size())


def _rows(states: Tensor) -> Tensor:
    """[1, heads, tokens, dim] -> [tokens, heads, dim] on the CPU."""
    return states[0].transpose(0, 1).contiguous().cpu()


def load_prompt(
    cache_class: type[SlimKVCache], path: str | Path, model: Any, input_ids: Any, fields: dict[str, Any]
) -> SlimKVCache:
    """A cache with the file's formats, filled with its pages; see ``SlimKVCache.load``."""
    prompt = PromptCache.load(path)
    mark = prompt.fingerprint
    dtype = _name(getattr(model, "dtype", None) or mark.dtype)
    mark.check_same(_fingerprint(mark.layers, mark.block_size, mark.seed, dtype, model), str(path))
    count = _usable(prompt, input_ids, path)
    formats = {layer.number: layer.format for layer in mark.layers}
    cache = cache_class(
        model, layers={n: _as_asked(x, mark.dtype) for n, x in formats.items()}, seed=mark.seed,
        block_size=mark.block_size, offsets=_offsets(prompt), center_keys=bool(_offsets(prompt)), **fields,
    )  # fmt: skip
    device = getattr(model, "device", torch.device("cpu"))
    for number, layer in enumerate(mark.layers):
        _fill(cache.layers[number], layer, prompt, count, device)
    return cache


def _offsets(prompt: PromptCache) -> dict[int, Tensor]:
    """The key offsets by layer, which later tokens use as well."""
    return {number: x.key_offset for number, x in prompt.layers.items() if x.key_offset is not None}


def _as_asked(format: str, dtype: str) -> str:
    """The format to request: ``raw`` for pages in the model's own dtype, which become stock layers."""
    lossless = [parse_spec(name, 16).with_raw_dtype(dtype).canonical_format for name in (RAW, RAW_LATENT)]
    return RAW if format in lossless else format


def _usable(prompt: PromptCache, input_ids: Any, path: str | Path) -> int:
    """The number of tokens that ``input_ids`` shares with the file; its last token is always recomputed."""
    count = len(prompt.tokens)
    if input_ids is None:
        return count
    tokens = _one_sequence(input_ids)
    count = min(count, len(tokens) - 1)
    shared = next((i for i in range(count) if tokens[i] != prompt.tokens[i]), count)
    for layer in prompt.fingerprint.layers:
        if prompt.layers[layer.number].first_token > first_needed(layer, shared):
            raise InputError(
                f"{path} shares {shared} tokens with input_ids, but its sliding layer {layer.number} has kept only the "
                f"window of all {len(prompt.tokens)}: use the whole prompt, or write a file of the part that is shared"
            )
    if shared == 0:
        raise InputError(f"{path} shares no tokens with input_ids: its prompt begins differently")
    return shared


def _fill(layer: Any, mark: LayerFingerprint, prompt: PromptCache, count: int, device: torch.device) -> None:
    """Loads the first ``count`` tokens of a file into a layer."""
    size, held = prompt.fingerprint.block_size, prompt.layers[mark.number]
    dtype = getattr(torch, prompt.fingerprint.dtype)
    pages, index = held.pages.split([held.pages.shape[2] - size * mark.index_bytes, size * mark.index_bytes], 2)
    if mark.index_bytes:
        layer.update_indexer(index.reshape(-1, mark.index_bytes).view(dtype)[None, :count].to(device))
    if isinstance(layer, PackedLayer):
        empty = [
            torch.empty(1, mark.num_kv_heads, 0, d, dtype=dtype, device=device) for d in (mark.key_dim, mark.value_dim)
        ]
        layer.lazy_initialization(*empty)
        layer.tables.advance(0, count, needs_past=False)
        layer.tokens = count
        blocks = range(layer.tables.kept_from // size, -(-count // size))
        begin = held.first_token // size
        source = pages[blocks.start - begin : blocks.stop - begin].to(layer.pool.pages.device)
        layer.pool.pages[[j % layer.tables.rows for j in blocks]] = source
        return
    pool = PagedPool(mark.spec(prompt.fingerprint.seed), pages.shape[0], mark.num_kv_heads, size)
    pool.pages.copy_(pages)
    first = held.first_token if mark.window is None else max(held.first_token, count - mark.window + 1)
    slots = torch.arange(first, count) - held.first_token // size * size
    states = [x.transpose(0, 1)[None].to(device) for x in pool.gather(slots, dtype)]
    layer.update(*states)
    if hasattr(layer, "cumulative_length"):
        layer.cumulative_length = count
