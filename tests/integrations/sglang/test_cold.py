"""A cold tier under SGLang's own attention: pages go to host memory packed, and are decoded when they come back."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("sglang")

from engines import BASE, engine, run_engine
from engines import cold as cold_engine
from prompts import first_token_difference, model_folder, piece, run
from sglang.srt.mem_cache.pool_host.base import host_memory_budget_scope
from sglang.srt.plugins import load_plugins
from sglang.srt.server_args import ServerArgs

from slimkv.config import KVCacheConfig
from slimkv.errors import InputError, SlimKVError, UnsupportedError
from slimkv.integrations.serving.model import ServedModel
from slimkv.integrations.sglang import cold, host_pool, refusals, settings
from slimkv.integrations.sglang.cold import ColdHostPool, cold_host_pool
from slimkv.integrations.sglang.compat import MHATokenToKVPool, server_options
from slimkv.integrations.sglang.names import cold_settings

pytestmark = pytest.mark.sglang

TOKENS, HEADS, DIM, PAGES = 16, 2, 64, 12


def hot_pool(layers: int, kind: type = MHATokenToKVPool, seed: int = 0) -> Any:
    """SGLang's own cache with random tokens. Keys have a large mean in one dimension, as in real models."""
    pool = kind(
        PAGES * TOKENS, page_size=TOKENS, dtype=torch.float32, head_num=HEADS, head_dim=DIM, layer_num=layers,
        device="cpu", enable_memory_saver=False,
    )  # fmt: skip
    torch.manual_seed(seed)
    for k, v in zip(pool.k_buffer, pool.v_buffer, strict=True):
        k.normal_()[..., 3] += 30
        v.normal_()
    return pool


def cold_pool(pool: Any, format: str, ratio: float = 2.0, size: float = 0, **config: Any) -> ColdHostPool:
    """The host pool of a cold tier, with SGLang's settings for host memory. The model is just a number of layers."""
    memory = SimpleNamespace(hicache_ratio=ratio, hicache_size=size, hicache_mem_layout="layer_first")
    layers = SimpleNamespace(num_hidden_layers=pool.layer_num)
    model = ServedModel(KVCacheConfig(format, **config), "", layers, 2048, lambda: (0, 1), random_weights=True)
    with host_memory_budget_scope(1 << 30), pytest.MonkeyPatch.context() as patch:
        patch.setattr(host_pool, "get_memory", lambda: memory)
        patch.setattr(host_pool, "_get_allocator_type", lambda: "default")
        return cold_host_pool(pool, model, {"page_size": TOKENS})


def slots(*pages: int) -> torch.Tensor:
    return (torch.tensor(pages)[:, None] * TOKENS + torch.arange(TOKENS)).flatten()


def load(host: ColdHostPool, pool: Any, at_host: torch.Tensor, to: torch.Tensor) -> None:
    for layer in range(pool.layer_num):
        host.load_to_device_per_layer(pool, at_host, to, layer, "kernel")


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got - want).norm() / (want - want.mean(0)).norm())


@pytest.mark.parametrize(("format", "bound"), [("raw", 0), ("k8v8", 0.01), ("k4v4", 0.12), ("k2v2", 0.4)])
def test_pages_come_back(format, bound, monkeypatch):
    """Seven pages come back to other pages of the cache, in pieces of two pages. No other page changes."""
    pool = hot_pool(3)
    monkeypatch.setattr(cold, "PIECE_BYTES", 2 * TOKENS * 3 * HEADS * 2 * DIM * 4)
    host = cold_pool(pool, format)
    assert host._piece == 2
    wanted = [b.clone() for b in (*pool.k_buffer, *pool.v_buffer)]
    source, target = slots(1, 2, 9, 4, 5, 7, 3), slots(2, 12, 8, 1, 10, 11, 6)
    at_host = host.alloc(len(source))
    host.backup_from_device_all_layer(pool, at_host, source, "kernel")
    load(host, pool, at_host, target)
    others = slots(0, 3, 4, 5, 7, 9)
    for buffer, before in zip((*pool.k_buffer, *pool.v_buffer), wanted, strict=True):
        assert error(buffer[target].flatten(1), before[source].flatten(1)) <= bound
        assert torch.equal(buffer[others], before[others])


def test_a_band_comes_with_its_first_layer():
    """Twelve layers in two bands: a band is loaded with its first layer, before any of its layers attends."""
    pool = hot_pool(12)
    host = cold_pool(pool, "raw")
    source = slots(1, 2)
    at_host = host.alloc(len(source))
    host.backup_from_device_all_layer(pool, at_host, source, "kernel")
    before = [k.clone() for k in pool.k_buffer]
    for k in pool.k_buffer:
        k[source] = 0
    for layer in range(12):
        host.load_to_device_per_layer(pool, at_host, source, layer, "kernel")
        assert torch.equal(pool.k_buffer[layer], before[layer])
        assert bool(pool.k_buffer[-1][source].any()) == (layer >= 6)


def test_host_memory_holds_more_tokens():
    """For the same bytes, given as a size or as a ratio. The cache is float32 here, twice as large as bf16."""
    pool = hot_pool(2)
    hot = 2 * HEADS * 2 * DIM * 4  # bytes of a token
    for arguments in ({"ratio": 4.0}, {"size": 4.0 * PAGES * TOKENS * hot / 1e9}):
        host = cold_pool(pool, "k4v4", **arguments)
        assert host.kv_buffer.nbytes == host.size * host.size_per_token
        given = 4.0 * PAGES * TOKENS * hot
        assert given <= host.kv_buffer.nbytes + host.size_per_token * TOKENS
        assert host.kv_buffer.nbytes <= given + host.size_per_token * TOKENS, "and a page of padding"
        assert host.size / (4.0 * PAGES * TOKENS) >= 2 * 3.7


def test_what_it_does_not_know_is_refused():
    class OtherPool(MHATokenToKVPool):
        pass

    with pytest.raises(UnsupportedError, match="OtherPool"):
        cold_pool(hot_pool(2, OtherPool), "k4v4")
    with pytest.raises(UnsupportedError, match="one format"):
        cold_pool(hot_pool(2), "k4v4", layers={"1": "k8v8"})


def test_storage_backends_that_are_attached_later_are_refused():
    """Pages in storage would outlive the key offset that this process learnt."""
    host = cold_pool(hot_pool(1), "k4v4")
    for asked in (lambda: host.get_data_page(0), lambda: host.get_page_buffer_meta(slots(0))):
        with pytest.raises(UnsupportedError, match="storage"):
            asked()


def test_keys_that_would_be_lost_stop_the_engine():
    """Without centring, 2-bit codes cannot represent keys whose mean is far larger than their spread."""
    pool = hot_pool(1)
    host = cold_pool(pool, "k2v2", center_keys=False)
    with pytest.raises(InputError, match="would lose the keys of layer 0"):
        host.backup_from_device_all_layer(pool, host.alloc(TOKENS), slots(1), "kernel")


# -- settings ----------------------------------------------------------------------------------------------------------


def resolved(**arguments: Any) -> ServerArgs:
    args = ServerArgs(model_path=model_folder(), **{**BASE, **arguments})
    args.resolve_once()
    return args


@pytest.fixture
def on_cpu(monkeypatch):
    monkeypatch.setenv("SGLANG_USE_CPU_ENGINE", "1")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    load_plugins()


def test_settings(on_cpu):
    assert cold_settings(resolved()) is None
    args = resolved(**cold_engine({"format": "k8v8", "center_keys": False}))
    found = settings.cold(args)
    assert found is not None
    assert (found.format, found.center_keys) == ("k8v8", False)
    # SGLang's default page size of one token cannot be packed.
    assert server_options(resolved(**cold_engine(page_size=None, chunked_prefill_size=128))).page_size == 64


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (cold_engine(enable_hierarchical_cache=False), "add --enable-hierarchical-cache"),
        (cold_engine(page_size=1), "--page-size"),
        (cold_engine(hicache_mem_layout="page_first"), "--hicache-mem-layout"),
        (cold_engine(hicache_storage_backend="file"), "--hicache-storage-backend"),
        (cold_engine(kv_cache_dtype="fp8_e4m3"), "--kv-cache-dtype"),
        (cold_engine(attention_backend="slimkv"), "cold"),
        (cold_engine("k9v9"), "k9v9"),
        (cold_engine({"format": "k4v4", "recent_tokens": 64}), "recent_tokens"),
        (cold_engine({"fresh": "codes"}), "the cold tier does not support fresh"),
        (cold_engine({"deterministic": True}), "the cold tier does not support deterministic"),
        (
            cold_engine(json_model_override_args=json.dumps({"slimkv": {"cold": "k4v4", "format": "k4v4"}})),
            "format beside 'cold'",
        ),
    ],
)
def test_refused_arguments(on_cpu, arguments, message):
    with pytest.raises(SlimKVError, match=message):
        resolved(**arguments)


@pytest.mark.parametrize("name", refusals._COLD_OPTIONS)
def test_every_option_that_would_bypass_packed_host_memory(name, monkeypatch):
    """The check is called directly, because SGLang itself refuses some of these options on a CPU."""
    options = SimpleNamespace(**{name: rule[0][0] for name, rule in refusals._COLD_OPTIONS.items()})
    monkeypatch.setattr(refusals.compat, "server_options", lambda args: options)
    refusals.check_cold_options(None)
    setattr(options, name, "something")
    with pytest.raises(UnsupportedError, match=refusals.flag(name)):
        refusals.check_cold_options(None)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"use_mla_backend": True}, "latents"),
        ({"is_hybrid_swa": True}, "sliding windows"),
        ({"model_config": SimpleNamespace(is_encoder_decoder=True)}, "an encoder"),
        ({"kv_cache_dtype": torch.float8_e4m3fn}, "a cache of torch.float8_e4m3fn"),
        ({"post_capture_kv_active": True}, "after graphs are captured"),
    ],
)
def test_models_without_a_plain_cache_are_refused(change, message, monkeypatch):
    monkeypatch.setattr(refusals, "check_parallelism", lambda: None)
    monkeypatch.setattr(refusals.compat, "full_attention_layers", lambda kvc: None)
    plain = {
        "use_mla_backend": False, "is_hybrid_swa": False, "model_config": SimpleNamespace(is_encoder_decoder=False),
        "kv_cache_dtype": torch.bfloat16, "post_capture_kv_active": False,
    }  # fmt: skip
    refusals.check_cold_model(SimpleNamespace(**plain))
    with pytest.raises(UnsupportedError, match=f"{message}.*leave out 'cold'"):
        refusals.check_cold_model(SimpleNamespace(**{**plain, **change}))
    monkeypatch.setattr(refusals.compat, "full_attention_layers", lambda kvc: [0])
    with pytest.raises(UnsupportedError, match="linear-attention layers"):
        refusals.check_cold_model(SimpleNamespace(**plain))


# -- engines -----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(("format", "least", "most"), [("raw", 0, 0), ("k8v8", 1e-3, 0.12), ("k4v4", 0.03, 1.5)])
def test_evicted_pages_come_back_from_host_memory(format, least, most):
    """Six prompts run through a cache that holds three, so the first two are decoded from host memory.

    Their logprobs are compared with those from pages that were not evicted. A difference of at least ``least`` shows
    that pages were packed.
    """
    prompts = [piece(290 * i, 290) for i in range(6)]
    result = run_engine(
        engine(**cold_engine(format), hicache_ratio=4.0, max_total_tokens=1024),
        [
            run("first", prompts[:2], 8, one_by_one=True),
            run("hot", prompts[:2], 8, one_by_one=True, logprobs=20),
            run("others", prompts[2:], 8, one_by_one=True),
            run("cold", prompts[:2], 8, one_by_one=True, logprobs=20),
        ],
    )
    assert result["max_total_num_tokens"] == 1024
    assert result["cached"] == {"first": [0, 0], "hot": [288, 288], "others": [0, 0, 0, 0], "cold": [288, 288]}
    assert least <= first_token_difference(result, "hot", "cold") <= most
    if format == "raw":
        assert result["tokens"]["cold"] == result["tokens"]["hot"]
