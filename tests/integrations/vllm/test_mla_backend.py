"""The backend of latent attention without an engine: sizes, folded projections, slots of the context, refusals."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("vllm")

from vllm.config import VllmConfig
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.kv_cache_interface import FullAttentionSpec, MLAAttentionSpec

from slimkv import ops
from slimkv.codec import Codec
from slimkv.errors import SlimKVError, UnsupportedError
from slimkv.integrations.vllm.mla import compat
from slimkv.integrations.vllm.mla.backend import SlimKVMLABackend
from slimkv.integrations.vllm.mla.impl import FoldedProjections
from slimkv.integrations.vllm.mla.metadata import SlimKVMLAMetadataBuilder, chunk_slots
from slimkv.integrations.vllm.page_sizes import backend_for_spec, slot_bytes
from slimkv.integrations.vllm.refusals import check_latents
from slimkv.ops.latent.folding import fold_key_projection, fold_value_projection
from slimkv.spec import LatentSpec, page_layout

pytestmark = pytest.mark.vllm


def latents(block_size=64, **more):
    return MLAAttentionSpec(block_size=block_size, num_kv_heads=1, head_size=576, dtype=torch.bfloat16, **more)


@pytest.mark.parametrize(("format", "size"), [("c4", 386), ("c4r8", 324), ("c6r8", 452), ("craw", 1152), ("c3r4", 228)])
@pytest.mark.parametrize("block_size", [16, 64, 128])
def test_a_page_has_the_bytes_of_the_layout(format, size, block_size):
    spec = LatentSpec.parse(format)
    packed = backend_for_spec(SlimKVMLABackend, spec).customize_spec(latents(block_size))
    assert slot_bytes(spec) == size
    assert packed.page_size_bytes == size * block_size == page_layout(spec, block_size).page_bytes
    assert backend_for_spec(SlimKVMLABackend, spec).customize_spec(packed) == packed


def test_layers_it_does_not_know_are_refused():
    bound = backend_for_spec(SlimKVMLABackend, LatentSpec.parse("c4"))
    with pytest.raises(UnsupportedError, match="FullAttentionSpec"):
        bound.customize_spec(FullAttentionSpec(block_size=16, num_kv_heads=1, head_size=576, dtype=torch.bfloat16))
    with pytest.raises(UnsupportedError, match="process_weights_after_loading"):
        SlimKVMLABackend.customize_spec(latents())


def test_what_it_tells_vllm():
    assert SlimKVMLABackend.is_mla()
    assert not SlimKVMLABackend.is_sparse()
    assert SlimKVMLABackend.supports_head_size(576)
    assert not SlimKVMLABackend.supports_dcp()
    assert not SlimKVMLABackend.supports_pcp()
    assert [SlimKVMLABackend.get_preferred_block_size(n) for n in (16, 64, 128, 48)] == [64, 64, 128, 64]
    assert SlimKVMLAMetadataBuilder._cudagraph_support == AttentionCGSupport.UNIFORM_BATCH
    asked = {
        "head_size": 576, "dtype": torch.bfloat16, "kv_cache_dtype": "auto", "block_size": 64, "use_mla": True,
        "has_sink": False, "use_mm_prefix": False, "use_per_head_quant_scales": False, "device_capability": None,
        "attn_type": "decoder",
    }  # fmt: skip
    assert SlimKVMLABackend.validate_configuration(**asked, use_sparse=False) == []
    reasons = " ".join(SlimKVMLABackend.validate_configuration(**asked, use_sparse=True, use_dcp=True))
    assert "configuration has index_topk" in reasons
    assert "DCP not supported" in reasons
    assert "non-MLA not supported" in SlimKVMLABackend.validate_configuration(
        **{**asked, "use_mla": False}, use_sparse=False
    )


@pytest.mark.parametrize("format", ["c4", "cur4r8", "c6r8"])
def test_folded_projections_attend_as_the_plain_ones(format):
    """Decoding with folded projections and without rotations equals decoding with plain projections and rotations."""
    torch.manual_seed(0)
    heads, nope, value, tokens = 3, 24, 40, 50
    spec = LatentSpec.parse(format).with_raw_dtype("float32")
    codec, layout = Codec(spec), page_layout(spec, 16)
    kv = ops.PackedKV(torch.zeros(4, layout.page_bytes, dtype=torch.uint8), codec, layout)
    latent, rope = torch.randn(tokens, 512), torch.randn(tokens, 64)
    ops.store_latent(latent, rope, kv, torch.arange(tokens))
    w_uk, w_uv = torch.randn(heads, nope, 512) / 23, torch.randn(heads, 512, value) / 23
    query, query_rope = torch.randn(2, heads, nope), torch.randn(2, heads, 64)
    batch = ops.AttentionBatch.build([range(4)], [tokens], [2], 16, "cpu")

    def attend(w_uk, w_uv, rotated):
        absorbed = torch.einsum("qhp,hpl->qhl", query, w_uk)
        how = {"softmax_scale": 0.1, "query_is_rotated": rotated, "output_is_rotated": rotated}
        out = ops.attend_latent(absorbed, query_rope, kv, batch, **how)
        return torch.einsum("qhl,hlv->qhv", out, w_uv)

    rotation = ops.latent_rotation(codec)
    folded = fold_key_projection(w_uk, rotation), fold_value_projection(w_uv, rotation)
    torch.testing.assert_close(attend(*folded, True), attend(w_uk, w_uv, False), rtol=1e-4, atol=1e-4)


def test_weights_that_are_loaded_again_are_folded_again_in_place():
    """Prefill reads the weight of which the projections are views at first. That weight must not change."""
    rotation = ops.latent_rotation(Codec(LatentSpec.parse("c4")))
    shared = torch.randn(2 * (8 + 8), 512)

    def load(layer):  # like vLLM: creates views at first, copies into the existing tensors later
        k, v = shared.T.view(512, 2, 16).split([8, 8], dim=-1)
        for name, new in (("W_UV", v.transpose(0, 1)), ("W_UK_T", k.permute(1, 2, 0))):
            if hasattr(layer, name):
                getattr(layer, name).data.copy_(new)
            else:
                setattr(layer, name, torch.nn.Parameter(new, requires_grad=False))
        return k.permute(1, 2, 0).clone(), v.transpose(0, 1).clone()

    layer, folded, before = torch.nn.Module(), FoldedProjections(), shared.clone()
    for _ in range(3):
        plain_k, plain_v = load(layer)
        folded.fold(layer, rotation)
        torch.testing.assert_close(layer.W_UK_T.data, plain_k @ rotation)
        torch.testing.assert_close(layer.W_UV.data, rotation.T @ plain_v)
        assert torch.equal(shared, before)
        places = layer.W_UK_T.data_ptr(), layer.W_UV.data_ptr()
        before = shared.normal_().clone()
    load(layer)
    folded.fold(layer, rotation)
    assert (layer.W_UK_T.data_ptr(), layer.W_UV.data_ptr()) == places


def test_projections_in_other_weights_are_refused():
    layer = torch.nn.Module()
    layer.layer_name = "model.layers.0.self_attn"
    with pytest.raises(UnsupportedError, match=r"model.layers.0.self_attn into other weights than W_UK_T.*'craw'"):
        FoldedProjections().fold(layer, torch.eye(512))


def test_the_layer_tells_its_implementation_when_projections_are_ready(monkeypatch):
    told = []
    monkeypatch.setattr(compat.MLAAttention, "process_weights_after_loading", lambda self, dtype: told.append("layer"))
    compat.call_after_loading()
    compat.call_after_loading()  # the second call has no effect
    ours = SimpleNamespace(impl=SimpleNamespace(absorbed_weights_ready=lambda layer: told.append(layer)))
    compat.MLAAttention.process_weights_after_loading(ours, torch.bfloat16)
    compat.MLAAttention.process_weights_after_loading(SimpleNamespace(impl=None), torch.bfloat16)
    assert told == ["layer", ours, "layer"]


def test_nobody_else_writes_latents():
    """A compiler pass would write them unpacked, and layers of other classes might."""
    config = VllmConfig()
    config.compilation_config.pass_config.fuse_rope_kvcache_cat_mla = True
    compat.forbid_fused_cache_updates(config)
    assert config.compilation_config.pass_config.fuse_rope_kvcache_cat_mla is False

    class PaddedMLAAttention(compat.MLAAttention):
        pass

    with pytest.raises(UnsupportedError, match="not PaddedMLAAttention of this model"):
        compat.check_layer(PaddedMLAAttention.__new__(PaddedMLAAttention), SimpleNamespace(is_sparse=True))
    compat.check_layer(compat.MLAAttention.__new__(compat.MLAAttention), SimpleNamespace(is_sparse=False))


def test_slots_of_a_contexts_chunk():
    """Two requests: positions 14 to 18 of one, 0 to 2 of the other."""
    table = torch.tensor([[9, 4, 7], [2, 5, 0]], dtype=torch.int32)
    chunk = SimpleNamespace(
        token_to_seq=torch.tensor([0] * 5 + [1] * 3, dtype=torch.int32),
        cu_seq_lens=torch.tensor([0, 5, 8], dtype=torch.int32), starts=torch.tensor([14, 0], dtype=torch.int32),
    )  # fmt: skip
    assert chunk_slots(table, chunk, 16).tolist() == [9 * 16 + 14, 9 * 16 + 15, 64, 65, 66, 32, 33, 34]


def engine(settings="c4", hybrid=False, connector=None, **parallel):
    sizes = {"decode_context_parallel_size": 1, "prefill_context_parallel_size": 1, **parallel}
    return SimpleNamespace(
        additional_config={"slimkv": settings}, model_config=SimpleNamespace(is_hybrid=hybrid),
        parallel_config=SimpleNamespace(**sizes),
        kv_transfer_config=connector and SimpleNamespace(kv_connector=connector, kv_connector_extra_config={}),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("config", "arguments", "message"),
    [
        (engine(), {"arguments": {"indexer": object()}}, "configuration has index_topk"),
        (engine(), {"arguments": {"topk_indices_buffer": None}}, "sparse"),
        (
            engine(),
            {"arguments": {"sinks": 1}},
            "latent attention does not support the argument sinks; serve",
        ),
        (engine(), {"features": {"sliding windows": 8}}, "latent attention does not support sliding windows; serve"),
        (engine(), {"kv_cache_dtype": "fp8"}, "kv_cache_dtype must be left at auto, not 'fp8'"),
        (engine(hybrid=True), {}, "beside state-space or linear-attention layers"),
        (engine(decode_context_parallel_size=2), {}, "does not support decode context parallelism; use tensor"),
        (engine(prefill_context_parallel_size=2), {}, "does not support prefill context parallelism; use tensor"),
        (engine({"calibration": "auto"}), {}, "latent attention does not support calibration='auto'"),
    ],
)
def test_what_a_model_or_engine_asks_in_vain(config, arguments, message):
    given = {"kv_cache_dtype": "auto", "features": {}, "arguments": {}, **arguments}
    with pytest.raises(SlimKVError, match=message):
        check_latents(config, **given)
    check_latents(engine(connector="OffloadingConnector"), "auto", {}, {"kv_lora_rank": 512, "indexer": None})


def test_transfers_that_write_weights_in_place_are_refused():
    """They would not reach the folded projections."""
    for backend in ("nccl", "ipc", "sparse_nccl"):
        config = engine()
        config.weight_transfer_config = SimpleNamespace(backend=backend)
        if backend != "sparse_nccl":
            check_latents(config, "auto", {}, {})
            continue
        with pytest.raises(UnsupportedError, match="transfer by 'sparse_nccl' may not change: use nccl or ipc"):
            check_latents(config, "auto", {}, {})


def test_the_example_connector_needs_the_default_layout(monkeypatch):
    """The connector reshapes a layer's cache. If blocks of all layers are adjacent, that makes a copy."""
    monkeypatch.delenv("VLLM_KV_CACHE_LAYOUT", raising=False)
    check_latents(engine(connector="ExampleConnector"), "auto", {}, {})
    monkeypatch.setenv("VLLM_KV_CACHE_LAYOUT", "BLHNC")
    with pytest.raises(UnsupportedError, match="unset VLLM_KV_CACHE_LAYOUT"):
        check_latents(engine(connector="ExampleConnector"), "auto", {}, {})
