"""The description of its pages that an engine sends before a transfer, tested without an engine."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import transformers

pytest.importorskip("sglang")

from plans import HEADS, make_plan, make_pool
from row_exact import tiny_model

from slimkv.errors import InputError, UnsupportedError
from slimkv.integrations.sglang import refusals, transfer
from slimkv.integrations.sglang.pool import bind

pytestmark = pytest.mark.sglang


@pytest.fixture
def stated(tmp_path, monkeypatch):
    """A function from formats to the cache dtype name that the engine sends to its peers."""
    folder = tiny_model(tmp_path / "model")
    config = transformers.AutoConfig.from_pretrained(folder)

    def stated(formats, page_size=16, transfers=True, name=folder, ranks=1):
        monkeypatch.setattr(transfer, "attention_tp", lambda: (0, ranks))
        plan = make_plan(formats, page_size)
        plan = replace(plan, model=replace(plan.model, name=name, config=config), transfers=transfers)
        model_config = SimpleNamespace(get_total_num_kv_heads=lambda: HEADS)
        runner = SimpleNamespace(
            dtype=torch.float32, use_mla_backend=False, model_config=model_config, kv_cache_dtype_str="auto"
        )
        transfer.state_in_handshake(runner, plan)
        return runner.kv_cache_dtype_str

    return stated


def test_the_name_of_the_cache_says_what_its_bytes_mean(stated):
    name = stated(["k4v4", "k4v4"])
    assert name.startswith("slimkv k4v4, 1 ranks, fingerprint ")
    assert name == stated(["k4v4", "k4v4"])
    others = [
        stated(["k5v3", "k5v3"]),
        stated(["k4v4", "k5v3"]),
        stated(["k4v4"] * 2, 32),
        stated(["k4v4"] * 2, ranks=2),
    ]
    assert len({name, *others}) == 5
    assert stated(["k4v4", "k4v4"], transfers=False) == "auto"


def test_weights_that_nobody_knows_do_not_travel(stated, tmp_path):
    with pytest.raises(InputError, match="contains no weight files"):
        stated(["k4v4"], name=str(tmp_path))


def test_keys_that_travel_are_centred_by_a_calibration_alone():
    """Two engines would learn different offsets from their first prompts."""
    plan = make_plan(["k4v4"])
    assert make_pool(["k4v4"]).served[0].offset is not None
    travelling = bind(replace(plan, transfers=True), ())(
        64, page_size=16, dtype=torch.float32, head_num=HEADS, head_dim=64, layer_num=1, device="cpu",
        enable_memory_saver=False,
    )  # fmt: skip
    assert travelling.served[0].offset is None


@pytest.mark.parametrize(("windowed", "linear"), [(True, None), (False, [1, 3])])
def test_models_with_several_pools_do_not_travel(windowed, linear, monkeypatch):
    kvc = SimpleNamespace(
        use_mla_backend=False, kv_cache_dtype=torch.bfloat16, is_hybrid_swa=windowed,
        model_config=SimpleNamespace(is_encoder_decoder=False),
        server_args=SimpleNamespace(disaggregation_mode="decode"), post_capture_kv_active=False,
    )  # fmt: skip
    monkeypatch.setattr(refusals.compat, "server_options", lambda args: args)
    monkeypatch.setattr(refusals.compat, "full_attention_layers", lambda kvc: linear)
    with pytest.raises(UnsupportedError, match="leave out --disaggregation-mode"):
        refusals.check_model(kvc, None)
    kvc.server_args.disaggregation_mode = "null"
    refusals.check_model(kvc, None)
