"""Metrics that slimkv adds to those of vLLM."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

pytest.importorskip("vllm")

import torch
from prometheus_client import REGISTRY

from slimkv.errors import InputError
from slimkv.integrations.vllm.metrics import CacheMetrics, bytes_per_token
from slimkv.integrations.vllm.model import layer_spec, served_model

pytestmark = pytest.mark.vllm


def config_of(settings: dict, **model) -> SimpleNamespace:
    text = SimpleNamespace(num_hidden_layers=4, kv_lora_rank=512, qk_rope_head_dim=64)
    fields = {"is_hybrid": False, "is_attention_free": False, "use_mla": False, **model}
    sizes = {"get_total_num_kv_heads": lambda: 2, "get_head_size": lambda: 128}
    return SimpleNamespace(
        model_config=SimpleNamespace(
            hf_text_config=text, dtype=torch.bfloat16, model="served", max_model_len=1024, **sizes, **fields
        ),
        load_config=SimpleNamespace(load_format="auto"),
        cache_config=SimpleNamespace(num_gpu_blocks=100, block_size=64, kv_cache_size_tokens=6400),
        additional_config=settings,
    )


def value(name: str, engine: str) -> float | None:
    return REGISTRY.get_sample_value(f"slimkv:{name}", {"engine": engine})


def test_bytes_per_token():
    assert bytes_per_token(config_of({"slimkv": "k4v4"})) == (4 * 2 * 132, 4 * 2 * 512)
    mixed = {"slimkv": {"format": "k4v4", "layers": {"0": "fp8"}}}
    assert bytes_per_token(config_of(mixed)) == (2 * (260 + 3 * 132), 4 * 2 * 512)
    assert bytes_per_token(config_of({"slimkv": "c4"}, use_mla=True)) == (4 * 386, 4 * 1152)
    assert bytes_per_token(config_of({"slimkv": "k4v4"}, is_hybrid=True)) is None
    sharing = config_of({"slimkv": "k4v4"})
    sharing.model_config.hf_text_config.num_kv_shared_layers = 1
    assert bytes_per_token(sharing) == (3 * 2 * 132, 3 * 2 * 512), "the last layer has no cache"


def test_a_draft_models_layers_are_not_the_models():
    """``layers`` applies to a draft model neither in the engine's configuration nor in the draft model's own."""
    config = config_of({"slimkv": {"format": "k6v6", "layers": {"3": "fp8"}}})
    dims, name = (128, 128), "draft_model.model.layers.3.self_attn.attn"

    def spec_of(config, name):
        spec, number = layer_spec(served_model(config), config, name, dims, torch.bfloat16)
        return spec.format, number

    assert spec_of(config, "model.layers.3.self_attn.attn") == ("fp8", 3)
    assert spec_of(config, name) == ("k6v6", None)
    draft = config_of({"slimkv": {"format": "k6v6", "layers": {"3": "fp8"}}})
    draft.model_config.hf_text_config.num_hidden_layers = 2
    draft.speculative_config = SimpleNamespace(
        draft_model_config=draft.model_config, target_model_config=config.model_config
    )
    assert spec_of(draft, "draft_model.model.layers.1.self_attn.attn") == ("k6v6", 1)
    draft.speculative_config.target_model_config = draft.model_config  # as for n-gram drafts, which have no model
    with pytest.raises(InputError, match="the model has layers 0 to 1"):
        spec_of(draft, "model.layers.1.self_attn.attn")


def test_gauges_follow_the_cache():
    metrics = CacheMetrics(config_of({"slimkv": "k4v4"}), 7)
    metrics.log_engine_initialized()
    assert value("kv_cache_capacity_tokens", "7") == 6400
    assert value("kv_cache_capacity_bytes", "7") == 6400 * value("kv_cache_bytes_per_token", "7") == 6400 * 1056
    metrics.record(SimpleNamespace(kv_cache_usage=0.25), None)
    assert value("kv_cache_used_tokens", "7") == 1600


def test_an_engine_without_slimkv_has_none():
    metrics = CacheMetrics(config_of({}), 8)
    metrics.log_engine_initialized()
    metrics.record(SimpleNamespace(kv_cache_usage=0.25), None)
    assert value("kv_cache_capacity_tokens", "8") is None
    assert value("kv_cache_used_tokens", "8") is None
