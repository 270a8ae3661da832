"""The backend of sparse latent attention without an engine, with vLLM's metadata and indices picked by the tests."""

from __future__ import annotations

import inspect
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("vllm")

from vllm.platforms.interface import DeviceCapability
from vllm.v1.attention.backend import AttentionCGSupport, CommonAttentionMetadata

from slimkv.config import KVCacheConfig
from slimkv.errors import UnsupportedError
from slimkv.integrations.vllm import plugin
from slimkv.integrations.vllm.mla import compat, sparse
from slimkv.integrations.vllm.mla.backend import SlimKVMLABackend
from slimkv.spec import LatentSpec, page_layout

pytestmark = pytest.mark.vllm
HEADS, BLOCK, TOPK = 3, 16, 12


def test_what_it_tells_vllm():
    backend = sparse.SlimKVSparseMLABackend
    asked = {
        "head_size": 576, "dtype": torch.bfloat16, "kv_cache_dtype": "auto", "block_size": 64, "use_mla": True,
        "has_sink": False, "use_mm_prefix": False, "use_per_head_quant_scales": False, "attn_type": "decoder",
        "device_capability": DeviceCapability(9, 0),
    }  # fmt: skip
    assert backend.is_sparse()
    assert backend.validate_configuration(**asked, use_sparse=True) == []
    assert backend.validate_configuration(**asked, use_sparse=False) != []
    blackwell = backend.validate_configuration(
        **{**asked, "device_capability": DeviceCapability(10, 0)}, use_sparse=True
    )
    assert "compute capability not supported" in blackwell
    assert sparse.SlimKVSparseMetadataBuilder._cudagraph_support == AttentionCGSupport.UNIFORM_BATCH


def test_a_model_with_an_indexer_gets_it():
    for config, expected in (({}, SlimKVMLABackend), ({"index_topk": 2048}, sparse.SlimKVSparseMLABackend)):
        model = SimpleNamespace(model_config=SimpleNamespace(hf_text_config=SimpleNamespace(**config)))
        assert plugin._backend(True, model) is expected


def layer(format: str, buffer: torch.Tensor) -> sparse.SlimKVSparseMLAImpl:
    impl = sparse.SlimKVSparseMLAImpl.__new__(sparse.SlimKVSparseMLAImpl)
    impl._spec = LatentSpec.parse(format).with_raw_dtype("float32")
    impl._settings = KVCacheConfig.parse(format)
    impl.kv_lora_rank, impl.qk_rope_head_dim, impl.scale = 512, 64, 0.1
    impl.init_topk_indices_buffer(None, buffer)
    return impl


def step_of(lens: list[int], queries: list[int], table: torch.Tensor, slots: torch.Tensor):
    """The metadata that the builder makes from vLLM's metadata of a step."""
    starts = torch.tensor([0, *queries]).cumsum(0).to(torch.int32)
    common = CommonAttentionMetadata(
        query_start_loc=starts, query_start_loc_cpu=starts, seq_lens=torch.tensor(lens, dtype=torch.int32),
        num_reqs=len(lens), num_actual_tokens=sum(queries), max_query_len=max(queries), max_seq_len=max(lens),
        block_table_tensor=table, slot_mapping=slots,
    )  # fmt: skip
    builder = sparse.SlimKVSparseMetadataBuilder.__new__(sparse.SlimKVSparseMetadataBuilder)
    builder.kv_cache_spec, builder._topk = SimpleNamespace(block_size=BLOCK), TOPK
    builder._requests = torch.full((64,), 99, dtype=torch.int32)
    builder._lengths, builder._starts = torch.full((64,), TOPK, dtype=torch.int32), torch.arange(65, dtype=torch.int32)
    return builder.build(0, common)


@pytest.mark.parametrize("format", ["craw", "c4", "c6r8"])
def test_queries_attend_what_was_picked(format, monkeypatch):
    """Equals dense attention on those tokens, for a prompt and a decoded token in one step, split and unsplit."""
    torch.manual_seed(0)
    lens, queries = [40, 37], [5, 1]
    table = torch.tensor([[4, 1, 6], [0, 5, 2]], dtype=torch.int32)
    tokens = [torch.randn(n, 576) for n in lens]
    slots = [table[i].long()[torch.arange(n) // BLOCK] * BLOCK + torch.arange(n) % BLOCK for i, n in enumerate(lens)]
    picks = torch.full((8, TOPK), -1, dtype=torch.int32)
    rows = [(i, n - q + j) for i, (n, q) in enumerate(zip(lens, queries, strict=True)) for j in range(q)]
    for row, (_, position) in enumerate(rows):
        picks[row, row % 3 :: 2] = torch.randperm(position + 1)[: len(picks[row, row % 3 :: 2])].to(torch.int32)
    impl = layer(format, picks)
    layout = page_layout(impl._spec, BLOCK, True)
    cache = torch.full((7, BLOCK, layout.page_bytes // BLOCK), 0xA5, dtype=torch.uint8)
    for of_request, where in zip(tokens, slots, strict=True):
        impl.do_kv_cache_update(of_request[:, :512], of_request[:, None, 512:], cache, where, "auto", torch.ones(1))
    step = step_of(lens, queries, table, torch.cat([s[-q:] for s, q in zip(slots, queries, strict=True)]))
    assert (step.num_decode_tokens, step.num_prefills, step.prefill) == (6, 0, None)
    assert step.req_id_per_token.tolist() == [0] * 5 + [1]
    query = torch.randn(6, HEADS, 512), torch.randn(6, HEADS, 64)
    out, lse = impl.forward_mqa(query, cache, step, None)
    assert lse is None
    monkeypatch.setattr(sparse, "QUERIES_AT_ONCE", 4)
    torch.testing.assert_close(impl.forward_mqa(query, cache, step, None)[0], out)

    kv = impl._packed(cache)
    for row, (request, _) in enumerate(rows):
        own = picks[row][picks[row] >= 0].long()
        latent, rope = sparse.ops.gather_latent(kv, slots[request][own], rotated=True)
        of_rope = kv.codec.rotate_value(query[1][row]) if impl._spec.value.rotated else query[1][row]
        scores = 0.1 * (query[0][row] @ latent.T + of_rope @ rope.T)
        torch.testing.assert_close(out[row], scores.softmax(-1) @ latent, atol=1e-4, rtol=1e-4)
        if format == "craw":
            assert torch.equal(latent, tokens[request][own, :512])


def test_slots_of_picked_positions():
    table = torch.tensor([[4, 1], [7, 0]], dtype=torch.int32)
    positions = torch.tensor([[17, -1, 3], [31, 0, -1]], dtype=torch.int32)
    slots = compat.global_slots(positions, torch.tensor([0, 1], dtype=torch.int32), table, 16)
    assert slots.tolist() == [[17, -1, 67], [15, 112, -1]]
    assert slots.dtype == torch.int32


def test_a_layer_that_would_write_unpacked_latents_hands_them_over():
    """As for DeepSeek V3.2 on CUDA: its fused norm kernel writes to the cache unless the cache is in host memory."""
    stored = []
    impl = SimpleNamespace(is_sparse=True, do_kv_cache_update=lambda *given: stored.append(given))

    class Fused:
        __module__ = compat.FUSED_SPARSE
        hisparse_cache = None

        def forward(self):
            written = None if self.hisparse_cache is not None else "unpacked"
            if self.hisparse_cache is not None:
                self.update_kv_cache("latent", "rope", "cache", "slots", "step", "auto", "scale")
            return written

    own = Fused()
    assert own.forward() == "unpacked"
    compat.check_layer(own, impl)
    assert own.forward() is None
    assert stored == [("latent", "rope", "cache", "slots", "auto", "scale")]
    with pytest.raises(UnsupportedError, match="not Fused of this model"):
        compat.check_layer(Fused(), SimpleNamespace(is_sparse=False))


def test_vllms_layer_has_the_path_that_is_used():
    from vllm.models.deepseek_v32.attention import DeepseekV32Attention

    stored = []
    own = DeepseekV32Attention.__new__(DeepseekV32Attention)
    torch.nn.Module.__init__(own)
    compat.check_layer(own, SimpleNamespace(is_sparse=True, do_kv_cache_update=lambda *given: stored.append(given)))
    own.update_kv_cache("latent", "rope", "cache", "slots", "step", "auto", "scale")
    assert stored == [("latent", "rope", "cache", "slots", "auto", "scale")]
    written = inspect.getsource(DeepseekV32Attention.forward)
    assert "mla_kv_cache = None if hisparse_cache is not None else self.kv_cache" in written
    assert not own._use_sparse_mha(None), "prompts are attended token by token too"


@pytest.mark.parametrize(
    ("settings", "attention", "message"),
    [
        ({"format": "c4", "fresh": "raw"}, {}, "reads every token from its codes"),
        ({"format": "c4"}, {"hisparse_config": object()}, "do not go to host memory"),
    ],
)
def test_what_is_refused(settings, attention, message, monkeypatch):
    def init(self, *arguments, **mla):
        self._settings = KVCacheConfig.parse(settings)
        self._config = SimpleNamespace(attention_config=SimpleNamespace(**attention))

    monkeypatch.setattr(sparse.SlimKVMLAImpl, "__init__", init)
    with pytest.raises(UnsupportedError, match=message):
        sparse.SlimKVSparseMLAImpl(topk_indices_buffer=torch.zeros(1, 8, dtype=torch.int32))


def test_formats_that_the_gpu_does_not_read(monkeypatch):
    impl = layer("c6r8", torch.zeros(1, 8, dtype=torch.int32))
    monkeypatch.setattr(sparse.SlimKVMLAImpl, "process_weights_after_loading", lambda self, dtype: None)
    impl.kv_b_proj = SimpleNamespace(parameters=lambda: iter([torch.empty(1, device="meta")]))
    with pytest.raises(UnsupportedError, match="sparse latent attention on a GPU: in token rows it reads 4-bit"):
        impl.process_weights_after_loading(torch.bfloat16)
    impl._spec = LatentSpec.parse("c4").with_raw_dtype("bfloat16")
    impl.process_weights_after_loading(torch.bfloat16)
