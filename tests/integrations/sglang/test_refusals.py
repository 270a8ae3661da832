"""Unsupported server arguments and layers raise errors that name them, when SGLang resolves its arguments."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("sglang")

from engines import BASE, override_args
from prompts import model_folder
from sglang.srt.layers.radix_attention import AttentionType, RadixAttention
from sglang.srt.plugins import load_plugins
from sglang.srt.server_args import ServerArgs

from slimkv.errors import InputError, SlimKVError, SpecError, UnsupportedError
from slimkv.integrations.sglang import plugin, refusals, settings, versions
from slimkv.integrations.sglang.compat import HookRegistry, server_options

pytestmark = pytest.mark.sglang


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch):
    monkeypatch.setenv("SGLANG_USE_CPU_ENGINE", "1")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    load_plugins()


def resolved(**arguments: Any) -> ServerArgs:
    args = ServerArgs(model_path=model_folder(), **{**BASE, "attention_backend": "slimkv", **arguments})
    args.resolve_once()
    return args


def test_pip_installed_the_plugin():
    """SGLang finds the entry point, the backend's name and every hook."""
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS

    assert "slimkv" in ATTENTION_BACKENDS
    assert set(plugin.TARGETS) <= HookRegistry._patched


def test_the_page_size_is_64_where_none_is_given():
    assert server_options(resolved(chunked_prefill_size=128)).page_size == 64
    assert server_options(resolved(page_size=16)).page_size == 16
    assert server_options(resolved(attention_backend="torch_native")).page_size == 1


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"page_size": 1}, InputError, "--page-size 1 does not fit"),
        ({"page_size": 48}, InputError, "--page-size 48 does not fit"),
        ({"kv_cache_dtype": "fp8_e4m3"}, InputError, "--kv-cache-dtype must be left at auto"),
        ({"attention_backend": "torch_native", "decode_attention_backend": "slimkv"}, InputError, "only slimkv"),
        ({"kv_canary": "log"}, UnsupportedError, "--kv-canary"),
        ({"json_model_override_args": override_args("k9v9")}, SpecError, "unknown format 'k9v9'"),
        ({"json_model_override_args": override_args(recent_tokens=64)}, UnsupportedError, "recent_tokens"),
        ({"json_model_override_args": '{"slimkv": [1]}'}, InputError, "a format name or a mapping"),
        *(
            ({"attention_backend": "torch_native", "json_model_override_args": given}, InputError, "not switched on")
            for given in (override_args(), '{"slimkv": "k4v4"}', '{"slimkv": {"colde": "k4v4"}}', '{"slimkv": null}')
        ),
    ],
)
def test_refused_while_arguments_are_resolved(arguments, error, message):
    with pytest.raises(error, match=message):
        resolved(**{"page_size": 32, **arguments})


@pytest.mark.parametrize("name", [*refusals._OPTIONS, *refusals._TRANSFER_OPTIONS])
def test_every_option_that_would_bypass_the_pages(name, monkeypatch):
    """The check is called directly, because SGLang itself refuses some of these options on a CPU."""
    options = SimpleNamespace(
        attention_backend="slimkv", prefill_attention_backend=None, decode_attention_backend=None, page_size=64,
        kv_cache_dtype="auto", disaggregation_mode="prefill" if name in refusals._TRANSFER_OPTIONS else "null",
        **{"speculative_algorithm": None, name: "something"},
    )  # fmt: skip
    monkeypatch.setattr(refusals.compat, "server_options", lambda args: options)
    with pytest.raises(UnsupportedError, match=refusals.flag(name)):
        refusals.check_options(None)
    setattr(options, name, {**refusals._OPTIONS, **refusals._TRANSFER_OPTIONS}[name][0][0])
    refusals.check_options(None)


@pytest.mark.parametrize(
    ("speculation", "message"),
    [
        ({"speculative_algorithm": "UNO"}, "--speculative-algorithm UNO"),
        ({"speculative_algorithm": "NGRAM"}, None),
        ({"speculative_algorithm": "NGRAM", "speculative_eagle_topk": 8}, "--speculative-ngram-max-bfs-breadth must"),
        ({"speculative_algorithm": "DFLASH"}, "--speculative-draft-attention-backend fa3"),
        ({"speculative_algorithm": "DSPARK", "speculative_draft_attention_backend": "fa3"}, None),
        ({"speculative_algorithm": "EAGLE", "speculative_eagle_topk": 4}, "--speculative-eagle-topk must be 1, not 4"),
        ({"speculative_algorithm": "EAGLE"}, "--speculative-draft-attention-backend fa3"),
        ({"speculative_algorithm": "EAGLE3", "speculative_draft_attention_backend": "slimkv"}, "its own cache"),
        ({"speculative_algorithm": "NEXTN", "speculative_draft_attention_backend": "fa3"}, None),
    ],
)
def test_speculation(speculation, message, monkeypatch):
    options = SimpleNamespace(
        attention_backend="slimkv", prefill_attention_backend=None, decode_attention_backend=None, page_size=64,
        kv_cache_dtype="auto",
        **{"speculative_eagle_topk": 1, "speculative_draft_attention_backend": None, **speculation},
    )  # fmt: skip
    monkeypatch.setattr(refusals.compat, "server_options", lambda args: options)
    if message is None:
        refusals.check_options(None)
        return
    with pytest.raises(SlimKVError, match=message):
        refusals.check_options(None)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"is_cross_attention": True}, "cross attention"),
        ({"attn_type": AttentionType.ENCODER_ONLY}, "attention of type encoder_only"),
        ({"attn_type": AttentionType.DECODER_BIDIRECTIONAL}, "attention of type decoder_bidirectional"),
        ({"use_irope": True}, "attention in chunks"),
        ({"pos_encoding_mode": "ALIBI"}, "position encoding inside attention"),
        ({"logit_cap": 30.0, "logit_capping_method": "sigmoid"}, "a soft cap by sigmoid"),
        ({"head_dim": 576}, "heads of 576"),
    ],
)
def test_layers_that_ask_for_more(change, message):
    plain = {"num_heads": 2, "head_dim": 64, "scaling": 1.0, "num_kv_heads": 1, "layer_id": 3}
    layer = RadixAttention(**{**plain, **change})
    with pytest.raises(UnsupportedError, match=f"layer 3 of this model, which has {message}"):
        refusals.check_layers(torch.nn.Sequential(layer))


def test_plain_layers_are_served():
    layer = RadixAttention(2, 64, 1.0, 1, 0, logit_cap=30.0, sliding_window_size=7)
    refusals.check_layers(torch.nn.Sequential(layer))


def test_sglangs_switch_sets_deterministic():
    """The radix cache stays on."""
    args = resolved(page_size=32, enable_deterministic_inference=True)
    assert settings.parse(args).deterministic
    assert not server_options(args).disable_radix_cache
    assert not settings.parse(resolved(page_size=32)).deterministic
    raw = override_args(fresh="raw")
    with pytest.raises(InputError, match=r"--enable-deterministic-inference sets deterministic; .*fresh must be one"):
        resolved(page_size=32, enable_deterministic_inference=True, json_model_override_args=raw)
    with pytest.raises(UnsupportedError, match="leave out --enable-mixed-chunk"):
        resolved(page_size=32, enable_deterministic_inference=True, enable_mixed_chunk=True)


def test_settings_come_from_the_model_override_args():
    config = settings.parse(resolved(page_size=32, json_model_override_args=override_args("k5v4", fresh="raw")))
    assert (config.format, config.fresh) == ("k5v4", "raw")
    assert settings.parse(SimpleNamespace(json_model_override_args="{}")).format == "auto"
    assert settings.parse(SimpleNamespace(json_model_override_args='{"slimkv": "k6v4"}')).format == "k6v4"


@pytest.mark.parametrize("version", ["0.5.22", "0.5.24"])
def test_another_release_is_refused_with_its_version(version, monkeypatch):
    monkeypatch.setattr("sglang.version.__version__", version)
    with pytest.raises(UnsupportedError, match=f"tested with SGLang 0.5.23 and runs in no other release; {version} is"):
        versions.installed_version()
