"""The bytes per token reported to SGLang's configurators: plain, sliding-window and hybrid models, and draft models."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("sglang")

from engines import override_args
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

from slimkv.errors import InputError, SpecError, UnsupportedError
from slimkv.integrations.sglang import refusals, sizing
from slimkv.integrations.sglang.sizing import FULL, WINDOW

pytestmark = pytest.mark.sglang

K4V4 = 2 * 64 // 2 + 4  # bytes per token and KV head with 64 dimensions
BF16 = 2 * 64 * 2


class Model(SimpleNamespace):
    """Stands in for SGLang's model configuration, with 4 KV heads (2 in windowed layers)."""

    def get_num_kv_heads(self, ranks: int) -> int:
        return max(1, 4 // ranks)

    def get_swa_num_kv_heads(self, ranks: int) -> int:
        return max(1, 2 // ranks)


def make_kvc(settings: str | None = None, **others: Any) -> SimpleNamespace:
    model = Model(
        head_dim=64, v_head_dim=64, swa_head_dim=128, swa_v_head_dim=128, is_encoder_decoder=False, context_len=2048,
        hf_text_config=SimpleNamespace(num_hidden_layers=6), model_path="model",
    )  # fmt: skip
    info = {"start_layer": 0, "end_layer": 6, "num_effective_layers": 6}
    windows = {"full_attention_layer_ids": [1, 3, 5], "swa_attention_layer_ids": [0, 2, 4]}
    return SimpleNamespace(**{
        "server_args": SimpleNamespace(
            json_model_override_args=settings or override_args("k4v4"), load_format="auto",
        ),
        "model_config": model, "page_size": 64, "kv_cache_dtype": torch.bfloat16, "is_draft_worker": False,
        "is_hybrid_swa": False, "is_hybrid_swa_compress": False, "use_mla_backend": False,
        "post_capture_kv_active": False, "spec_algorithm": SpeculativeAlgorithm.NONE,
        "spec_aux_config": SimpleNamespace(eagle_draft_num_layers=None),
        "layer_info": SimpleNamespace(**info, **windows), **others,
    })  # fmt: skip


@pytest.fixture(autouse=True)
def switched_on(monkeypatch):
    """Simulates one rank with slimkv and without linear-attention layers. Other tests cover the checks of options."""
    monkeypatch.setattr(sizing, "is_chosen", lambda args: True)
    monkeypatch.setattr(sizing, "attention_tp", lambda: (0, 1))
    monkeypatch.setattr(sizing, "full_attention_layers", lambda kvc: None)
    monkeypatch.setattr(refusals, "check_options", lambda args: None)
    monkeypatch.setattr(refusals, "check_parallelism", lambda: None)
    monkeypatch.setattr(refusals.compat, "full_attention_layers", lambda kvc: None)
    monkeypatch.setattr(refusals.compat, "server_options", lambda args: args)


def stock(*args: Any) -> int:
    """Stands in for SGLang's own computation."""
    return 12345


def test_a_token_in_all_layers():
    assert sizing.cell_size(stock, None, make_kvc(), 6) == 6 * 4 * K4V4


def test_ranks_share_the_heads(monkeypatch):
    monkeypatch.setattr(sizing, "attention_tp", lambda: (1, 2))
    assert sizing.cell_size(stock, None, make_kvc(), 6) == 6 * 2 * K4V4


def test_layers_have_formats_of_their_own():
    kvc = make_kvc(override_args("k4v4", layers={"0": "raw", "-1": "fp8"}))
    assert sizing.cell_size(stock, None, kvc, 6) == 4 * (4 * K4V4 + BF16 + 2 * 64 + 4)
    assert [pages.layout.spec.format for pages in sizing.plan_of(kvc).groups[None]][1:5] == ["k4v4"] * 4


def test_a_stage_of_a_pipeline_has_the_formats_of_its_own_layers():
    kvc = make_kvc(override_args("k4v4", layers={"0": "raw", "3": "raw"}))
    kvc.layer_info = SimpleNamespace(start_layer=3, end_layer=6, num_effective_layers=3)
    assert sizing.cell_size(stock, None, kvc, 3) == 4 * (BF16 + 2 * K4V4)
    assert list(sizing.plan_of(kvc).layers) == [3, 4, 5]


def test_only_attention_layers_of_hybrid_models_count(monkeypatch):
    monkeypatch.setattr(sizing, "full_attention_layers", lambda kvc: [3, 5])
    kvc = make_kvc(override_args("k4v4", layers={"5": "raw"}))
    assert sizing.cell_size(stock, None, kvc, 2) == 4 * (K4V4 + BF16)


@pytest.mark.parametrize("latent", [False, True])
def test_a_cache_that_the_checkpoint_declares_in_fp8_is_refused(latent, monkeypatch):
    """SGLang takes its dtype from kv_cache_scheme unless --kv-cache-dtype is given."""
    monkeypatch.setattr(refusals, "_check_latents", lambda kvc, config: None)
    kvc = make_kvc(kv_cache_dtype=torch.float8_e4m3fn, use_mla_backend=latent)
    with pytest.raises(UnsupportedError, match=r"declares a cache of torch.float8_e4m3fn.*add --kv-cache-dtype bf16"):
        sizing.plan_of(kvc)


def test_layers_that_sglang_counts_otherwise_are_refused():
    with pytest.raises(UnsupportedError, match="counts 7 layers with a cache, slimkv 6"):
        sizing.cell_size(stock, None, make_kvc(), 7)


def test_a_draft_is_counted_unpacked():
    """SGLang would assume the draft model's cache to be as small as the packed one, and overrun memory."""
    layers = SimpleNamespace(eagle_draft_num_layers=1, dflash_draft_num_layers=2)

    def cell_size(algorithm: SpeculativeAlgorithm, **known: int | None) -> int:
        kvc = make_kvc(spec_algorithm=algorithm, spec_aux_config=layers, **known)
        configurator = SimpleNamespace()
        sizing.default_init(lambda configurator, kvc: setattr(configurator, "_cell_size", 1), configurator, kvc)
        return configurator._cell_size

    assert cell_size(SpeculativeAlgorithm.EAGLE) == 4 * (6 * K4V4 + BF16)
    assert cell_size(SpeculativeAlgorithm.DFLASH, dflash_draft_cell_size_per_token=None) == 4 * (6 * K4V4 + 2 * BF16)
    assert cell_size(SpeculativeAlgorithm.DFLASH, dflash_draft_cell_size_per_token=99) == 1, "SGLang has added them"


def test_sliding_windows_have_bytes_of_their_own():
    """Windowed layers have 2 KV heads of 128 dimensions. The draft has one full and one windowed layer, unpacked."""
    kvc = make_kvc(is_hybrid_swa=True, is_hybrid_swa_compress=True)
    configurator = windowed(kvc, full_layers=3, drafts=1)
    assert sizing.full_cell_bytes(stock, configurator) == 3 * 4 * K4V4 + 1000
    assert sizing.window_cell_bytes(stock, configurator) == 3 * 2 * (128 + 4) + 2000
    sizing.recompute_cell_size(lambda configurator: None, configurator)
    assert configurator._cell_size == 0, "SGLang asks the methods above"


def test_models_of_nothing_but_windows():
    kvc = make_kvc(is_hybrid_swa=True, is_hybrid_swa_compress=True)
    kvc.layer_info.full_attention_layer_ids = []
    configurator = windowed(kvc, full_layers=0, drafts=0)

    def original(configurator: Any) -> None:
        configurator._cell_size = configurator._swa_per_token * configurator._swa_layers_num

    sizing.recompute_cell_size(original, configurator)
    assert configurator._cell_size == 3 * 2 * (128 + 4)


def test_windows_without_shapes_of_their_own_have_those_of_full_layers():
    plan = sizing.plan_of(make_kvc(is_hybrid_swa=True))
    assert plan.token_bytes(FULL) == plan.token_bytes(WINDOW) == 3 * 4 * K4V4


def windowed(kvc: Any, full_layers: int, drafts: int) -> Any:
    """Stands in for SGLang's configurator of a sliding-window model, after its ``__init__``."""
    configurator = SimpleNamespace(
        _full_per_token=1000, _swa_per_token=2000, _full_layers_num=full_layers, _swa_layers_num=3,
        _draft_full_layers_num=drafts, _draft_swa_layers_num=drafts, _cell_size=0,
    )  # fmt: skip
    sizing.windowed_init(lambda configurator, kvc: None, configurator, kvc)
    return configurator


def test_other_configurators_are_left_alone(monkeypatch):
    monkeypatch.setattr(sizing, "is_chosen", lambda args: False)
    assert sizing.cell_size(stock, None, make_kvc(), 6) == 12345
    configurator = windowed(make_kvc(is_hybrid_swa=True), 3, 0)
    assert sizing.full_cell_bytes(stock, configurator) == sizing.window_cell_bytes(stock, configurator) == 12345


def test_a_drafts_own_cache_is_left_alone():
    assert sizing.cell_size(stock, None, make_kvc(is_draft_worker=True), 6) == 12345


def test_a_cache_that_was_not_sized_is_refused():
    with pytest.raises(UnsupportedError, match="without asking slimkv"):
        sizing.sized_plan(make_kvc())


def latent_kvc(settings: str, **others: Any) -> SimpleNamespace:
    kvc = make_kvc(settings, use_mla_backend=True, **others)
    kvc.model_config.kv_lora_rank, kvc.model_config.qk_rope_head_dim = 512, 64
    kvc.model_config.hf_config = SimpleNamespace(architectures=["DeepseekV2ForCausalLM"])
    return kvc


def test_latents_are_held_by_every_rank(monkeypatch):
    """On each rank: 256 bytes of codes, a scale, and the rope part in bfloat16. Latents of a draft are unpacked."""
    monkeypatch.setattr(sizing, "attention_tp", lambda: (1, 4))
    kvc = latent_kvc(override_args("auto", layers={"0": "raw"}))
    assert sizing.cell_size(None, None, kvc, 6) == 5 * (256 + 2 + 128) + 1152
    assert sizing._unpacked_bytes(kvc) == 1152


def test_a_format_of_the_other_kind_is_refused():
    with pytest.raises(SpecError, match="'k4v4' is for K and V, but this model caches latents: use 'c4'"):
        sizing.plan_of(latent_kvc(override_args("k4v4")))
    with pytest.raises(SpecError, match="'c4' is for latents, but this model caches K and V"):
        sizing.plan_of(make_kvc(override_args("c4")))


def test_latents_are_not_calibrated():
    with pytest.raises(UnsupportedError, match="calibration"):
        sizing.plan_of(latent_kvc(override_args("c4", calibration="auto")))


def test_a_layer_the_model_does_not_have():
    with pytest.raises(InputError, match="layers names '9', but the model has layers 0 to 5"):
        sizing.plan_of(make_kvc(override_args("k4v4", layers={"9": "raw"})))
