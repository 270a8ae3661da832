"""The formats of a model's layers, and the bytes per token that SGLang's configurators use.

SGLang sizes the cache by the same plan that the pool allocates by, so the two agree.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from slimkv.config import KVCacheConfig
from slimkv.errors import UnsupportedError
from slimkv.integrations.serving.model import ServedModel
from slimkv.integrations.sglang import refusals, settings
from slimkv.integrations.sglang.compat import attention_tp, full_attention_layers, is_disaggregated
from slimkv.integrations.sglang.names import is_chosen
from slimkv.spec import PageLayout, page_layout

FULL, WINDOW = "Full", "SWA"  # SGLang's labels of the two pools of a sliding-window model


@dataclass(frozen=True)
class LayerPages:
    """The pages of one layer on this rank."""

    layer: int  # its number in the model
    layout: PageLayout
    num_kv_heads: int

    @property
    def row_bytes(self) -> int:
        """Bytes of one block: the pages of all heads."""
        return self.num_kv_heads * self.layout.page_bytes


@dataclass(frozen=True)
class CachePlan:
    """The pages of every layer of a model on this rank.

    ``groups``: one entry per pool that SGLang builds, by label: None, or ``Full`` and ``SWA``.
    """

    model: ServedModel
    page_size: int
    groups: dict[str | None, tuple[LayerPages, ...]]
    transfers: bool = False  # whether pages travel between a prefill and a decode engine

    @property
    def config(self) -> KVCacheConfig:
        """The configuration of the cache."""
        return self.model.settings

    def token_bytes(self, label: str | None) -> int:
        """Bytes per token in all layers of a pool."""
        block = sum(pages.row_bytes for pages in self.groups[label])
        assert block % self.page_size == 0, f"{block} bytes do not divide among {self.page_size} tokens"
        return block // self.page_size

    @cached_property
    def position_edges(self) -> tuple[int, ...] | None:
        """The ends of the calibration's position ranges; None without a calibration."""
        known = self.model.calibration
        return None if known is None else known.position_edges(self.model.max_positions)

    @cached_property
    def layers(self) -> dict[int, LayerPages]:
        """All pages by layer number."""
        return {pages.layer: pages for group in self.groups.values() for pages in group}


_Shape = tuple[int, int, int]  # KV heads, and the sizes of keys and values, or of latents and rope parts


def served_model(server_args: Any, model: Any, config: KVCacheConfig) -> ServedModel:
    """The model of SGLang's ``ModelConfig``, with the settings of its cache."""
    random_weights = str(server_args.load_format) == "dummy"
    return ServedModel(
        config, str(model.model_path), model.hf_text_config, model.context_len, attention_tp, random_weights
    )


def make_plan(kvc: Any) -> CachePlan:
    """The plan for SGLang's KV cache configurator; raises for models and options that slimkv cannot serve."""
    refusals.check_options(kvc.server_args)
    refusals.check_parallelism()
    config = settings.parse(kvc.server_args)
    refusals.check_model(kvc, config)
    if kvc.spec_algorithm.is_ngram():
        from slimkv.integrations.sglang import ngram

        ngram.install()
    model = served_model(kvc.server_args, kvc.model_config, config)

    def pages(layer: int, shape: _Shape) -> LayerPages:
        heads, key_dim, value_dim = shape
        spec = model.layer_spec(layer, key_dim, value_dim, str(kvc.kv_cache_dtype), latent=kvc.use_mla_backend)
        return LayerPages(layer, page_layout(spec, kvc.page_size), heads)

    groups = {
        label: tuple(pages(layer, shape) for layer in layers) for label, (layers, shape) in _geometry(kvc).items()
    }
    return CachePlan(model, kvc.page_size, groups, is_disaggregated(kvc.server_args))


def _geometry(kvc: Any) -> dict[str | None, tuple[list[int], _Shape]]:
    """The layers and shapes of each pool that SGLang is going to build."""
    model, (_, ranks), info = kvc.model_config, attention_tp(), kvc.layer_info
    layers = list(range(info.start_layer, info.start_layer + info.num_effective_layers))
    if kvc.use_mla_backend:  # every rank holds the latents, which all heads share
        return {None: (layers, (1, model.kv_lora_rank, model.qk_rope_head_dim))}
    heads = model.get_num_kv_heads(ranks)
    if kvc.is_hybrid_swa:
        if not kvc.is_hybrid_swa_compress:  # both pools then have the shape of the full layers
            full = window = (heads, model.head_dim, model.head_dim)
        else:
            full = (heads, model.head_dim, model.v_head_dim)
            window = (model.get_swa_num_kv_heads(ranks), model.swa_head_dim, model.swa_v_head_dim)
        return {FULL: (list(info.full_attention_layer_ids), full), WINDOW: (list(info.swa_attention_layer_ids), window)}
    hybrid = full_attention_layers(kvc)
    if hybrid is not None:
        return {None: (hybrid, (heads, model.head_dim, model.head_dim))}
    return {None: (layers, (heads, model.head_dim, model.v_head_dim))}


_plans: dict[int, tuple[Any, CachePlan]] = {}  # by id of the configurator, which is kept alive


def packs(kvc: Any) -> bool:
    """Whether slimkv packs this configurator's cache: it is the backend, and the cache is not a drafter's."""
    return not kvc.is_draft_worker and is_chosen(kvc.server_args)


def plan_of(kvc: Any) -> CachePlan:
    """The plan of a configurator; made once."""
    if id(kvc) not in _plans:
        _plans[id(kvc)] = kvc, make_plan(kvc)
    return _plans[id(kvc)][1]


def sized_plan(kvc: Any) -> CachePlan:
    """The plan by which SGLang sized the cache; raises if there is none."""
    if id(kvc) not in _plans:
        raise UnsupportedError(
            "SGLang sized its KV cache without asking slimkv for the bytes per token; slimkv does not know how this "
            "model or version sizes it"
        )
    return plan_of(kvc)


def cell_size(original: Callable[..., int], configurator: Any, kvc: Any, num_layers: int) -> int:
    """Wraps ``DefaultPoolConfigurator._compute_cell_size``: bytes of a token in all layers."""
    if not packs(kvc):
        return original(configurator, kvc, num_layers)
    plan = plan_of(kvc)
    if len(plan.groups[None]) != num_layers:
        raise UnsupportedError(
            f"SGLang counts {num_layers} layers with a cache, slimkv {len(plan.groups[None])}; "
            "use SGLang's own attention backend for this model"
        )
    return plan.token_bytes(None)


def default_init(original: Callable[..., None], configurator: Any, kvc: Any) -> None:
    """Wraps ``DefaultPoolConfigurator.__init__``: adds the bytes of a drafter's cache, which is not packed."""
    original(configurator, kvc)
    if packs(kvc) and _draft_layers(kvc):
        configurator._cell_size = plan_of(kvc).token_bytes(None) + _draft_layers(kvc) * _unpacked_bytes(kvc)


def _draft_layers(kvc: Any) -> int:
    """The layers of a drafter whose cache has as many tokens as the model's."""
    if kvc.spec_algorithm.is_dflash_family() and not kvc.dflash_draft_cell_size_per_token:
        return int(kvc.spec_aux_config.dflash_draft_num_layers or 0)  # else SGLang has added the drafter's bytes
    if not (kvc.spec_algorithm.is_eagle() or kvc.spec_algorithm.is_standalone()):
        return 0
    return int(kvc.spec_aux_config.eagle_draft_num_layers or 0)


def _unpacked_bytes(kvc: Any) -> int:
    """Bytes per token in one layer of a cache in the model's dtype."""
    model, (_, ranks) = kvc.model_config, attention_tp()
    if kvc.use_mla_backend:
        return (model.kv_lora_rank + model.qk_rope_head_dim) * kvc.kv_cache_dtype.itemsize
    return model.get_num_kv_heads(ranks) * (model.head_dim + model.v_head_dim) * kvc.kv_cache_dtype.itemsize


def windowed_init(original: Callable[..., None], configurator: Any, kvc: Any) -> None:
    """Wraps ``HybridSWAPoolConfigurator.__init__``: keeps the plan for the methods below."""
    configurator.slimkv_plan = plan_of(kvc) if packs(kvc) else None
    original(configurator, kvc)


def full_cell_bytes(original: Callable[..., int], configurator: Any) -> int:
    """Wraps ``HybridSWAPoolConfigurator._full_cell_bytes``: bytes per token, with a drafter's unpacked layers."""
    if configurator.slimkv_plan is None:
        return original(configurator)
    draft: int = configurator._full_per_token * configurator._draft_full_layers_num
    return configurator.slimkv_plan.token_bytes(FULL) + draft


def window_cell_bytes(original: Callable[..., int], configurator: Any) -> int:
    """Wraps ``HybridSWAPoolConfigurator._swa_cell_bytes``."""
    if configurator.slimkv_plan is None:
        return original(configurator)
    draft: int = configurator._swa_per_token * configurator._draft_swa_layers_num
    return configurator.slimkv_plan.token_bytes(WINDOW) + draft


def recompute_cell_size(original: Callable[..., None], configurator: Any) -> None:
    """Wraps ``HybridSWAPoolConfigurator._recompute_cell_size``: without full layers, it calls neither of the above."""
    original(configurator)
    plan = configurator.slimkv_plan
    if plan is not None and not plan.groups[FULL]:
        unpacked = configurator._swa_per_token * configurator._swa_layers_num
        configurator._cell_size += plan.token_bytes(WINDOW) - unpacked
