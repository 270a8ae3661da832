"""How many tokens fit: bytes of a model's KV cache for each format and kind of layer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slimkv.arguments import describe
from slimkv.errors import InputError, SpecError, UnsupportedError
from slimkv.formats import format_of_kind
from slimkv.paths import read_json
from slimkv.recurrent_state import StateShape, aligned_block_size, state_shape
from slimkv.spec import CodecSpec, PageLayout, parse_spec
from slimkv.spec import parse_size as parse_size

FULL, SLIDING, LATENT, NO_KV = "full", "sliding", "latent", "no_kv"
_STATE = "state"  # a recurrent or convolution state instead of K and V
INDEXER = "indexer"  # keys of sparse attention's indexer, which are never packed; key_dim is their size in bytes
BASELINE = "raw"
DEFAULT_FORMATS = ("raw", "fp8", "k4v4", "k3v3", "k2v2")
DEFAULT_LATENT_FORMATS = ("raw", "c8r8", "c6r8", "c4", "c4r8")
USEFUL_MATCH = 1024  # tokens; prompts seldom share larger blocks
# Alignment of a hybrid model's blocks in vLLM, in tokens: with slimkv and without.
_BLOCK_ALIGNMENT, _STOCK_ALIGNMENT = 64, 16
_KIND_OF_TYPE = {
    **dict.fromkeys(("full_attention", "attention", "full", "global", "indexed_attention"), FULL),
    **dict.fromkeys(("sliding_attention", "sliding", "local", "chunked_attention"), SLIDING),
    **dict.fromkeys(("linear_attention", "mamba", "mamba2", "recurrent", "conv"), _STATE),
    **dict.fromkeys(("mlp", "moe"), NO_KV),
}
_HEADS = ("num_attention_heads", "n_head")
_KV_HEADS = ("num_key_value_heads", "num_kv_heads", "multi_query_group_num", "num_attention_groups")
# Fields of models whose caches differ from what the fields read here describe.
_UNCOUNTED = {
    "compress_ratios": "sparse attention on compressed tokens", "is_encoder_decoder": "cross-attention",
    "cross_attention_layers": "cross-attention", "use_cla": "layers that share caches",
    "block_configs": "layers of different sizes", "num_key_value_heads_per_layer": "layers of different sizes",
    "swa_num_key_value_heads": "sliding layers of another size",
}  # fmt: skip
# Fields of models with several kinds of layers.
_MIXED = (
    "attn_type_list", "linear_attn_config", "block_types", "full_attn_idxs", "layer_group_size", "hybrid_layer_pattern",
    "mixer_types", "attention_chunk_size", "linear_num_key_heads", "linear_num_heads", "mamba_d_state",
    "ssm_state_size", "mamba_step", "conv_L_cache",
)  # fmt: skip
_NOT_LISTED = (
    "model type {model!r} with {field} has several kinds of layers, and the configuration does not list them: give a "
    "config.json with layer_types, as AutoConfig.from_pretrained(MODEL).save_pretrained(DIR) writes it"
)
# The defaults of transformers for configurations with a window and without a list of layers.
_PERIODS = {"gemma2": 2, "gpt_oss": 2, "cohere2": 4, "olmo3": 4, "gemma3n_text": 5, "gemma3_text": 6, "gemma4_text": 6}
_ALL_SLIDING = (
    "kyutai_speech_to_text", "ministral", "mistral", "mixtral", "moshi", "phi3", "phimoe", "starcoder2",
    "voxtral_realtime_text",
)  # fmt: skip


@dataclass(frozen=True)
class LayerGroup:
    """Layers of the same size."""

    kind: str  # full, sliding, latent, no_kv, indexer
    layers: int
    num_kv_heads: int
    key_dim: int  # the size of a latent in latent layers
    value_dim: int  # the size of the rope part in latent layers
    window: int | None = None  # window of a sliding layer


@dataclass(frozen=True)
class ModelShape:
    """The shape of a model's cache."""

    name: str
    groups: tuple[LayerGroup, ...]
    state: StateShape | None = None  # recurrent states of a hybrid model
    latent: bool = False  # whether the model caches latents (MLA) instead of K and V


@dataclass(frozen=True)
class GroupPlan:
    """One group of layers under one format."""

    kind: str
    layers: int
    num_kv_heads: int
    window: int | None
    bytes_per_token: float  # all layers of the group, while the window is not full
    bytes_at_window: int | None  # maximum bytes per sequence in these layers; None if they grow with its length


@dataclass(frozen=True)
class FormatPlan:
    """The whole model under one format."""

    format: str
    bits_per_number: float
    bytes_per_token: float
    ratio_to_bf16: float
    tokens_per_sequence: int | None  # None: no layer grows, so any length fits; 0: no token fits
    total_tokens: int | None
    tokens_ratio_to_bf16: float | None
    groups: tuple[GroupPlan, ...]
    hybrid_block_size: int | None = None  # block size of a hybrid model in vLLM


@dataclass(frozen=True)
class Plan:
    """The result of ``slimkv plan``."""

    model: str
    memory_bytes: int
    sequences: int
    block_size: int
    formats: tuple[FormatPlan, ...]
    state_bytes_per_sequence: int = 0  # recurrent states of a hybrid model, independent of the length


def read_config(path: Path) -> ModelShape:
    """The cache shape of a model, from its transformers ``config.json`` or the folder with that file."""
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        raise InputError(f"there is no file {file}; give the config.json of a model or its folder")
    config = read_json(file)
    if not isinstance(config, dict):
        raise InputError(f"{file} contains a {type(config).__name__}, not a model configuration")
    return shape_of(config)


def shape_of(config: Mapping[str, Any]) -> ModelShape:
    """The cache shape of a model, from its configuration as a mapping. Raises for caches that it cannot count."""
    name = str(config.get("_name_or_path") or config.get("model_type") or "model")
    for nested in ("text_config", "llm_config", "language_config"):
        if isinstance(config.get(nested), Mapping):
            config = {**config, **config[nested]}
    if uncounted := next((field for field in _UNCOUNTED if config.get(field)), None):
        raise UnsupportedError(f"{name} has {_UNCOUNTED[uncounted]} ({uncounted}), which this plan cannot count")
    latent = bool(config.get("kv_lora_rank"))
    if config.get("index_topk") and not latent:
        raise UnsupportedError(f"{name} has sparse attention on K and V (index_topk), which this plan cannot count")
    layers = _number(config, "num_hidden_layers", "n_layer", "num_layers")
    if config.get("model_type") == "longcat_flash" and not config.get("num_hidden_layers"):
        layers *= 2  # two attentions per layer
    shared = _number(config, "num_kv_shared_layers") if config.get("num_kv_shared_layers") else 0
    types = _layer_types(config, layers)
    if len(types) != layers or shared >= layers:
        raise InputError(
            f"{name} has {layers} layers but its configuration lists {len(types)} layer types, {shared} of them "
            "sharing the caches of earlier layers"
        )
    # falcon_h1 has attention and a state side by side in every layer.
    states = layers if config.get("model_type") == "falcon_h1" else types.count((_STATE, None))
    types = [(NO_KV, None) if kind == _STATE else (kind, window) for kind, window in types]
    types = types[: layers - shared] + [(NO_KV, None)] * shared  # the last layers share the caches of earlier layers
    own = {int(i): {**config, **fields} for i, fields in (config.get("per_layer_config") or {}).items()}
    found = Counter((kind, window, _sizes(own.get(i, config), kind)) for i, (kind, window) in enumerate(types))
    groups = [
        LayerGroup(LATENT if latent and kind == FULL else kind, count, *sizes, window)
        for (kind, window, sizes), count in sorted(found.items(), key=lambda item: str(item[0]))
    ]
    if config.get("index_topk"):
        groups.append(LayerGroup(INDEXER, _indexers(config, layers), 1, _indexer_bytes(config), 0))
    return ModelShape(name, tuple(groups), state_shape(config, states), latent)


def _sizes(config: Mapping[str, Any], kind: str) -> tuple[int, int, int]:
    """(KV heads, key size, value size) of a layer."""
    if kind == NO_KV:
        return 0, 0, 0
    if config.get("kv_lora_rank"):
        return 1, _number(config, "kv_lora_rank"), _number(config, "qk_rope_head_dim")
    heads, num_kv_heads = _number(config, *_HEADS), 1
    one = config.get("multi_query") and not config.get("new_decoder_architecture")  # Falcon: one KV head
    if config.get("num_key_value_heads") is not None or not one:
        num_kv_heads = _number(config, *_KV_HEADS, *_HEADS)
    dims: tuple[str, ...] = ("head_dim", "attention_head_dim", "kv_channels")
    if kind == FULL and config.get("global_head_dim"):  # Gemma 4
        dims = ("global_head_dim",)
        if config.get("attention_k_eq_v"):
            num_kv_heads = _number(config, "num_global_key_value_heads", "num_key_value_heads")
    if any(config.get(name) is not None for name in dims):
        dim = _number(config, *dims)
    else:
        dim, rest = divmod(_number(config, "hidden_size", "n_embd"), heads)
        if rest:
            raise InputError(f"the configuration has no head_dim, and {heads} heads do not divide its hidden size")
    return num_kv_heads, dim, _number(config, "v_head_dim") if config.get("v_head_dim") else dim


def _indexers(config: Mapping[str, Any], layers: int) -> int:
    """The number of layers that select tokens; the other layers reuse the selection of the layer before them."""
    if pattern := config.get("index_topk_pattern"):
        return layers - str(pattern)[:layers].count("S")
    every, first = config.get("index_topk_freq") or 1, config.get("index_skip_topk_offset", 2)
    return sum(max(i - first + 1, 0) % every == 0 for i in range(layers))


def _indexer_bytes(config: Mapping[str, Any]) -> int:
    """Bytes per token of an indexer: a key in fp8, with a float32 scale for every 128 values."""
    dim = _number(config, "index_head_dim")
    return dim + 4 * -(-dim // 128)


def _number(config: Mapping[str, Any], *names: str) -> int:
    """The first of these fields that the configuration has."""
    for name in names:
        value = config.get(name)
        if value is None:
            continue
        if not isinstance(value, int) or value < 1:
            raise InputError(
                f"the configuration has {name}={describe(value)}; this plan needs one integer of 1 or more"
            )
        return int(value)
    raise InputError(
        f"the configuration has no {' or '.join(names)}; give --layers, --num-kv-heads and --head-dim instead"
    )


def _layer_types(config: Mapping[str, Any], layers: int) -> list[tuple[str, int | None]]:
    """(kind, window) of every layer."""
    if listed := config.get("layer_types") or config.get("layers_block_type"):
        if not isinstance(listed, list | tuple):
            raise InputError(f"layer_types must list the type of each layer, not {describe(listed)}")
        return [_kind(str(format), config) for format in listed]
    if pattern := config.get("hybrid_override_pattern"):  # Nemotron-H
        types = {"*": "attention", "M": "mamba", "-": "mlp", "E": "moe"}
        return [_kind(types.get(mark, mark), config) for mark in pattern]
    if period := config.get("attn_layer_period"):  # Jamba
        offset = config.get("attn_layer_offset") or 0
        return [(FULL, None) if i % period == offset else (_STATE, None) for i in range(layers)]
    if every := config.get("full_attention_interval"):  # Qwen3-Next
        return [(_STATE, None) if (i + 1) % every else (FULL, None) for i in range(layers)]
    if attending := config.get("attn_layer_indices"):  # Bamba
        return [(FULL, None) if i in attending else (_STATE, None) for i in range(layers)]
    model = str(config.get("model_type"))
    mixed = next((field for field in _MIXED if config.get(field)), None)
    if mixed is not None and model != "falcon_h1":
        raise UnsupportedError(_NOT_LISTED.format(model=model, field=mixed))
    window = config.get("sliding_window") or config.get("attention_window_size")
    if not window or config.get("use_sliding_window") is False:
        return [(FULL, None)] * layers
    sliding = _kind("sliding_attention", config)
    if config.get("sliding_window_pattern") or model in _PERIODS:  # the last layer of each period is full
        every = _number({"sliding_window_pattern": _PERIODS.get(model), **config}, "sliding_window_pattern")
        return [sliding if (i + 1) % every else (FULL, None) for i in range(layers)]
    if config.get("use_sliding_window") and config.get("max_window_layers") is not None:  # Qwen 2: the first are full
        first = int(config["max_window_layers"])
        return [(FULL, None) if i < first else sliding for i in range(layers)]
    if model not in _ALL_SLIDING:
        raise UnsupportedError(_NOT_LISTED.format(model=model, field="sliding_window"))
    return [sliding] * layers


def _kind(format: str, config: Mapping[str, Any]) -> tuple[str, int | None]:
    if format not in _KIND_OF_TYPE or (format == "indexed_attention" and not config.get("index_topk")):
        raise UnsupportedError(f"layer type {format!r} is unknown; known are {', '.join(_KIND_OF_TYPE)}")
    kind = _KIND_OF_TYPE[format]
    if kind != SLIDING:
        return kind, None
    fields = ("attention_chunk_size",) if format == "chunked_attention" else ("sliding_window", "attention_window_size")
    if not any(config.get(field) for field in fields):
        raise InputError(f"the configuration has {format} layers but no window size ({' or '.join(fields)})")
    return kind, _number(config, *fields)


def window_blocks(window: int, block_size: int) -> int:
    """The largest number of blocks that a window of ``window`` tokens overlaps."""
    return (window - 1 + block_size - 1) // block_size + 1


def _layouts(shape: ModelShape, format: str, block_size: int) -> list[tuple[LayerGroup, PageLayout]]:
    """The groups whose tensors are stored in the format, each with its layout."""
    packed = [group for group in shape.groups if group.kind not in (NO_KV, INDEXER)]
    return [(group, PageLayout(_spec(shape, group, format), block_size)) for group in packed]


def _spec(shape: ModelShape, group: LayerGroup, format: str) -> CodecSpec:
    """The spec of a group's layers; raises if the format is for K and V and the model caches latents, or vice versa."""
    return parse_spec(format_of_kind(format, shape.latent), group.key_dim, group.value_dim)


def sequence_bytes(shape: ModelShape, format: str, tokens: int, block_size: int) -> int:
    """Bytes of the pages of a sequence of ``tokens`` tokens, in all layers."""
    pages = 0
    for group, layout in _layouts(shape, format, block_size):
        blocks = layout.blocks_for(tokens)
        if group.window is not None:
            blocks = min(blocks, window_blocks(group.window, block_size))
        pages += layout.pool_bytes(blocks, group.num_kv_heads) * group.layers
    indexed = sum(group.layers * group.key_dim for group in shape.groups if group.kind == INDEXER)
    return pages + indexed * -(-tokens // block_size) * block_size


def _tokens_that_fit(shape: ModelShape, format: str, budget: int, block_size: int) -> int | None:
    """The longest sequence within ``budget`` bytes; None if no layer grows and any length fits."""
    layouts = _layouts(shape, format, block_size)
    if all(g.window is not None for g, _ in layouts):
        longest = max((g.window or 0 for g, _ in layouts), default=0) + 2 * block_size
        if sequence_bytes(shape, format, longest, block_size) <= budget:
            return None
    low, high = 0, 1
    while sequence_bytes(shape, format, high * block_size, block_size) <= budget:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        fits = sequence_bytes(shape, format, middle * block_size, block_size) <= budget
        low, high = (middle, high) if fits else (low, middle)
    return low * block_size


def make_plan(
    shape: ModelShape, formats: Sequence[str] | None, memory: int, *, sequences: int = 1, block_size: int = 16
) -> Plan:
    """Bytes and tokens of every format, compared with the bf16 cache (``raw``).

    ``formats``: None selects typical formats for K and V or for latents.
    """
    if formats is None:
        formats = DEFAULT_LATENT_FORMATS if shape.latent else DEFAULT_FORMATS
    if sequences < 1:
        raise InputError(f"sequences must be at least 1, not {sequences}")
    if not formats:
        raise SpecError("formats is empty; give at least one, such as 'k4v4', or None for a selection")
    states = shape.state.sequence_bytes if shape.state is not None else 0
    each = max(memory // sequences - states, 0)
    base_bytes = sum(group.bytes_per_token for group in _group_plans(shape, BASELINE, block_size))
    base_tokens = _tokens_that_fit(shape, BASELINE, each, block_size)
    plans = []
    for format in formats:
        layouts, groups = _layouts(shape, format, block_size), _group_plans(shape, format, block_size)
        tokens = _tokens_that_fit(shape, format, each, block_size)
        per_token = sum(group.bytes_per_token for group in groups)
        plans.append(
            FormatPlan(
                format=format,
                bits_per_number=layouts[0][1].spec.bits_per_number if layouts else 0.0,
                bytes_per_token=per_token,
                ratio_to_bf16=base_bytes / per_token if per_token else 1.0,
                tokens_per_sequence=tokens,
                total_tokens=None if tokens is None else tokens * sequences,
                tokens_ratio_to_bf16=tokens / base_tokens if tokens is not None and base_tokens else None,
                groups=groups,
                hybrid_block_size=_hybrid_block(shape, format),
            )
        )
    return Plan(shape.name, memory, sequences, block_size, tuple(plans), states)


def _hybrid_block(shape: ModelShape, format: str) -> int | None:
    layouts = _layouts(shape, format, _BLOCK_ALIGNMENT)
    if shape.state is None or shape.latent or not layouts:  # latents have other alignments
        return None
    group, layout = layouts[0]
    alignment = _STOCK_ALIGNMENT if format == BASELINE else _BLOCK_ALIGNMENT
    return aligned_block_size(shape.state.layer_bytes, layout.bytes_per_token * group.num_kv_heads, alignment)


def _group_plans(shape: ModelShape, format: str, block_size: int) -> tuple[GroupPlan, ...]:
    return tuple(_group_plan(shape, group, format, block_size) for group in shape.groups)


def _group_plan(shape: ModelShape, group: LayerGroup, format: str, block_size: int) -> GroupPlan:
    if group.kind == NO_KV:
        return GroupPlan(group.kind, group.layers, 0, None, 0.0, 0)
    if group.kind == INDEXER:
        return GroupPlan(group.kind, group.layers, 1, None, float(group.layers * group.key_dim), None)
    layout = PageLayout(_spec(shape, group, format), block_size)
    most = None
    if group.window is not None:
        most = layout.pool_bytes(window_blocks(group.window, block_size), group.num_kv_heads) * group.layers
    per_token = layout.bytes_per_token * group.num_kv_heads * group.layers
    return GroupPlan(group.kind, group.layers, group.num_kv_heads, group.window, per_token, most)
