"""``SlimKVLatentBackend`` on handmade batches: absorbed and expanded attention must agree."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("sglang")

from plans import make_batch
from sglang.srt.layers.radix_attention import RadixAttention

from slimkv import ops
from slimkv.config import KVCacheConfig
from slimkv.errors import UnsupportedError
from slimkv.integrations.serving.model import ServedModel
from slimkv.integrations.sglang import refusals
from slimkv.integrations.sglang.mla import backend as latent_backend
from slimkv.integrations.sglang.mla.folding import FoldedProjections
from slimkv.integrations.sglang.mla.pool import SlimKVLatentPool
from slimkv.integrations.sglang.mla.prefill import _torch_attention, attend_prefill, plan_prefill
from slimkv.integrations.sglang.pool import bind
from slimkv.integrations.sglang.sizing import CachePlan, LayerPages
from slimkv.spec import LatentSpec, page_layout

pytestmark = pytest.mark.sglang

HEADS, RANK, ROPE, NOPE, VALUE, PAGE = 4, 128, 32, 16, 24, 16
REQUESTS, POSITIONS = 3, 96
SCALE = (NOPE + ROPE) ** -0.5


class Attention(torch.nn.Module):
    """The part of SGLang's ``DeepseekV2AttentionMLA`` that the backend uses."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer_id, self.num_local_heads = 0, HEADS
        self.qk_nope_head_dim, self.v_head_dim, self.use_deep_gemm_bmm = NOPE, VALUE, False
        self.rotary_emb = None
        self.attn_mqa = RadixAttention(HEADS, RANK + ROPE, SCALE, 1, 0, v_head_dim=RANK)
        self.attn_mha = RadixAttention(HEADS, NOPE + ROPE, SCALE, HEADS, 0, v_head_dim=VALUE)
        self.weight = torch.nn.Parameter(torch.randn(HEADS * (NOPE + VALUE), RANK) / RANK**0.5, requires_grad=False)
        self.absorb()

    def absorb(self) -> None:
        """Makes absorbed projections as SGLang does after loading weights; in place after the first time."""
        key, value = self.weight.unflatten(0, (HEADS, -1)).split([NOPE, VALUE], dim=1)
        made = {"w_kc": key.clone(), "w_vc": value.transpose(1, 2).clone()}
        for name, x in made.items():
            known = getattr(self, name, None)
            setattr(self, name, x if known is None else known.copy_(x))

    def kv_b_proj(self, latent):
        return latent @ self.weight.T, None

    def _concat_and_cast_mha_k(self, nope, rope, batch):
        return torch.cat([nope, rope.expand(-1, HEADS, -1)], -1)


@pytest.fixture
def made(monkeypatch):
    """A function that makes a backend with one layer, the layer's module, and the slots of each request's tokens."""
    Attention.kv_b_proj.parameters = lambda: []
    monkeypatch.setattr(latent_backend, "DeepseekV2AttentionMLA", Attention)

    def make(format: str = "craw", **config):
        module = Attention()
        layers = (LayerPages(0, page_layout(LatentSpec.parse(format, RANK, ROPE).with_raw_dtype("float32"), PAGE), 1),)
        model = ServedModel(KVCacheConfig(format, **config), "", None, 2048, lambda: (0, 1), random_weights=True)
        plan = CachePlan(model, PAGE, {None: layers})
        pool = bind(plan, (), SlimKVLatentPool)(
            REQUESTS * POSITIONS, page_size=PAGE, dtype=torch.float32, kv_lora_rank=RANK, qk_rope_head_dim=ROPE,
            layer_num=1, device="cpu", enable_memory_saver=False,
        )  # fmt: skip
        order = torch.randperm(REQUESTS * POSITIONS // PAGE) + 1
        slots = (order[:, None] * PAGE + torch.arange(PAGE)).view(REQUESTS, POSITIONS).int()
        runner = SimpleNamespace(
            is_draft_worker=False, model=torch.nn.Sequential(module), device="cpu", page_size=PAGE,
            token_to_kv_pool=pool, req_to_token_pool=SimpleNamespace(req_to_token=slots), dtype=torch.float32,
            server_args=SimpleNamespace(
                speculative_num_draft_tokens=None, speculative_draft_attention_backend="torch_native"
            ),
        )  # fmt: skip
        return latent_backend.SlimKVLatentBackend(runner), module, slots

    return make


def numbers(seed: int, *shape: int):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def token_numbers(seed: int, count: int):
    """Queries, latents and rope parts."""
    shapes = (count, HEADS, NOPE + ROPE), (count, RANK), (count, 1, ROPE)
    return [numbers(seed + i, *shape) for i, shape in enumerate(shapes)]


def make_step(backend, slots, mode, requests, before, new, capacity=1 << 20):
    where = torch.cat([slots[r, b : b + n] for r, b, n in zip(requests, before, new, strict=True)]).long()
    counted = before if mode == "TARGET_VERIFY" else [b + n for b, n in zip(before, new, strict=True)]
    batch = make_batch(mode, requests, counted, new, where)
    batch.extend_prefix_lens_cpu, batch.get_max_chunk_capacity = before, lambda: capacity
    backend.init_forward_metadata(batch)
    return batch


def prefill(backend, module, batch, seed):
    """Prefill with expanded keys and values, as SGLang calls it: [tokens, heads, VALUE]."""
    count = batch.out_cache_loc.shape[0]
    q, latent, rope = token_numbers(seed, count)
    query, key, value = backend.prepare_prefill_qkv(
        q=q.clone(), q_pe=q[..., NOPE:], kv_a=latent, k_pe=rope, positions=None, layer=module, forward_batch=batch
    )
    out = backend.forward_extend(
        query.view(count, -1), key, value, module.attn_mha, batch, save_kv_cache=False, key_value_num_tokens=None
    )
    return out.view(count, HEADS, VALUE)


def absorbed(backend, module, batch, seed, save=True):
    """Attention of the same tokens with absorbed queries."""
    count = batch.out_cache_loc.shape[0]
    q, latent, rope = token_numbers(seed, count)
    query = torch.einsum("thd,hdr->thr", q[..., :NOPE], module.w_kc)
    out = backend.forward_extend(
        query, latent[:, None], latent[:, None], module.attn_mqa, batch, save, q_rope=q[..., NOPE:], k_rope=rope
    )
    return torch.einsum("thr,hrv->thv", out.view(count, HEADS, RANK), module.w_vc)


@pytest.mark.parametrize(("format", "fresh"), [("craw", "auto"), ("c4", "codes"), ("c6r8", "codes")])
@pytest.mark.parametrize("capacity", [16, 48, 1 << 20])
def test_expanded_and_absorbed_attention_agree(made, format, fresh, capacity):
    """The second chunk of a prompt is run both ways. New tokens are read from codes, so both see the same latents."""
    backend, module, slots = made(format, fresh=fresh)
    prefill(backend, module, make_step(backend, slots, "EXTEND", [0, 2], [0, 0], [70, 21]), 10)
    batch = make_step(backend, slots, "EXTEND", [2, 0], [21, 70], [5, 9], capacity)
    expected = prefill(backend, module, batch, 20)
    found = absorbed(backend, module, batch, 20, save=False)
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=2e-4)


def test_fresh_tokens_may_be_seen_raw(made):
    """Prefill then equals that of an unquantised cache, as long as nothing was cached before."""
    results = []
    for format, fresh in (("craw", "auto"), ("c3r8", "raw"), ("c3r8", "codes")):
        backend, module, slots = made(format, fresh=fresh)
        results.append(prefill(backend, module, make_step(backend, slots, "EXTEND", [1], [0], [40]), 5))
    torch.testing.assert_close(results[1], results[0], atol=1e-6, rtol=1e-5)
    assert (results[2] - results[0]).abs().max() > 0.01


@pytest.mark.parametrize(("mode", "new"), [("DECODE", 1), ("TARGET_VERIFY", 4)])
def test_a_graphs_step_gives_what_the_eager_one_gives(made, mode, new):
    backend, module, slots = made("c4")
    prefill(backend, module, make_step(backend, slots, "EXTEND", [0, 2], [0, 0], [40, 21]), 10)
    eager = absorbed(backend, module, make_step(backend, slots, mode, [0, 2], [40, 21], [new, new]), 30)
    backend.init_cuda_graph_state(4, 4 * new)
    batch = make_step(backend, slots, mode, [0, 2], [40, 21], [new, new])
    backend.init_forward_metadata_out_graph(batch, in_capture=True)
    backend.init_forward_metadata_in_graph(batch)
    torch.testing.assert_close(absorbed(backend, module, batch, 30), eager, atol=1e-6, rtol=1e-5)


def test_padding_gives_zeros(made):
    backend, module, slots = made("c4")
    batch = make_step(backend, slots, "EXTEND", [0], [0], [4])
    batch.out_cache_loc = torch.cat([batch.out_cache_loc, torch.zeros(2, dtype=torch.int64)])
    out = prefill(backend, module, batch, 1)
    assert out[:4].any()
    assert not out[4:].any()
    assert not absorbed(backend, module, batch, 1)[4:].any()


def test_new_weights_are_folded_again(made):
    """When a trainer sends weights, SGLang fills the absorbed projections in place: graphs hold their addresses."""
    backend, module, slots = made("c4")
    rotation = ops.latent_rotation(backend.token_to_kv_pool.packed(0).codec)
    address = module.w_kc.data_ptr()
    key = module.weight.unflatten(0, (HEADS, -1))[:, :NOPE]
    torch.testing.assert_close(module.w_kc, key @ rotation)
    make_step(backend, slots, "DECODE", [0], [3], [1])
    torch.testing.assert_close(module.w_kc, key @ rotation)
    module.weight.copy_(2 * module.weight)
    module.absorb()
    make_step(backend, slots, "DECODE", [0], [3], [1])
    torch.testing.assert_close(module.w_kc, key @ rotation)  # `key` is a view of the weight
    assert module.w_kc.data_ptr() == address


def test_projections_that_are_views_of_a_weight_get_memory_of_their_own():
    weight = torch.randn(1, 8, 16)
    projection = torch.nn.Linear(16, 8, bias=False)
    projection.weight = torch.nn.Parameter(weight[0], requires_grad=False)
    module = SimpleNamespace(
        w_kc=projection.weight.view(1, 8, 16), w_vc=torch.randn(1, 16, 4), use_deep_gemm_bmm=False, kv_b_proj=projection
    )
    before = projection.weight.clone()
    assert FoldedProjections(module, torch.randn(16, 16)).rotated
    assert torch.equal(projection.weight, before)


def test_projections_in_eight_bits_are_not_folded():
    module = SimpleNamespace(
        w_kc=torch.zeros(1, 8, 16, dtype=torch.float8_e4m3fn), w_vc=torch.zeros(1, 16, 8, dtype=torch.float8_e4m3fn),
        use_deep_gemm_bmm=False,
    )  # fmt: skip
    assert not FoldedProjections(module, torch.eye(16)).rotated


def test_chunks_have_every_cached_token_once():
    table = torch.arange(1, 13, dtype=torch.int32).view(3, 4)
    step = SimpleNamespace(block_table=table)
    plan = plan_prefill([2, 1, 3], [50, 0, 17], step, PAGE, 3 * PAGE)
    assert plan.queries[0].tolist() == [0, 2, 3, 6]
    assert [chunk.keys[1] for chunk in plan.chunks] == [16, 16, 16, 2]
    assert [chunk.keys[0].tolist() for chunk in plan.chunks][:2] == [[0, 16, 16, 32], [0, 16, 16, 17]]
    found = sorted(torch.cat([chunk.slots for chunk in plan.chunks]).tolist())
    expected = [*range(PAGE, PAGE + 50), *range(9 * PAGE, 9 * PAGE + 17)]
    assert found == expected


def test_prefill_calls_flash_attention_with_its_lengths():
    """Checks FlashAttention's arguments with a stand-in that also returns log-sum-exps as [heads, tokens]."""
    asked = []

    def flash(q, k, v, cu_seqlens_q, cu_seqlens_k, causal, return_softmax_lse, **others):
        asked.append((cu_seqlens_k.tolist(), causal, others["max_seqlen_k"]))
        assert return_softmax_lse
        out, lse = _torch_attention(
            q, k, v, (cu_seqlens_q, 2), (cu_seqlens_k, 4), others["softmax_scale"], causal=causal
        )
        return out, lse.T.contiguous(), None

    step = SimpleNamespace(block_table=torch.tensor([[0], [1]], dtype=torch.int32))
    plan = plan_prefill([2, 1], [4, 0], step, PAGE, PAGE)
    query, fresh = numbers(0, 3, 2, 8), (numbers(1, 3, 2, 8), numbers(2, 3, 2, 4))
    cached = numbers(3, 4, 2, 8), numbers(4, 4, 2, 4)
    both = [attend_prefill(query, fresh, plan, lambda slots: cached, 0.3, how) for how in (flash, None)]
    assert torch.equal(both[0], both[1])
    assert asked == [([0, 2, 3], True, 2), ([0, 4, 4], False, 4)]


def test_latents_keep_their_bytes_when_tokens_move(made):
    backend, module, slots = made("c4r8")
    pool = backend.token_to_kv_pool
    prefill(backend, module, make_step(backend, slots, "EXTEND", [0], [0], [20]), 3)
    latent, rope = pool.gather(0, slots[0, :20].long(), torch.float32)
    assert latent.shape == (20, RANK)
    assert rope.shape == (20, ROPE)
    pool.move_kv_cache(slots[1, :20].long(), slots[0, :20].long())
    moved = pool.gather(0, slots[1, :20].long(), torch.float32)
    assert torch.equal(moved[0], latent)
    assert torch.equal(moved[1], rope)
    copied = pool.get_cpu_copy(slots[0, :20].long())
    pool.load_cpu_copy(copied, slots[2, :20].long())
    assert torch.equal(pool.gather(0, slots[2, :20].long(), torch.float32)[0], latent)
    with pytest.raises(UnsupportedError, match="cached tensors of layer 0"):
        pool.get_key_buffer(0)


def test_another_kind_of_attention_is_refused_by_its_layer(made):
    made()
    model = torch.nn.Sequential(RadixAttention(2, 64, 1.0, 1, 5))
    with pytest.raises(UnsupportedError, match="layer 5 of this model has another"):
        latent_backend._attention_modules(model)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architectures": ["DeepseekV32ForCausalLM"], "index_topk": 2048}, "sparse latent attention"),
        ({"llama_4_scaling": {"beta": 0.1}}, "llama_4_scaling"),
        ({"is_hybrid_swa": True}, "sliding windows"),
        ({"enable_lora": True}, "--enable-lora"),
        ({"qk_rope_head_dim": 0}, "without a rope part"),
    ],
)
def test_models_that_are_refused(change, message, monkeypatch):
    from transformers import PretrainedConfig

    own = {"is_hybrid_swa": False, "qk_rope_head_dim": 64, "enable_lora": False} | change
    named = {k: v for k, v in change.items() if k in ("architectures", "index_topk", "llama_4_scaling")}
    kvc = SimpleNamespace(
        use_mla_backend=True, is_hybrid_swa=own["is_hybrid_swa"], server_args=None, post_capture_kv_active=False,
        model_config=SimpleNamespace(
            hf_config=PretrainedConfig(**{"architectures": ["DeepseekV3ForCausalLM"], **named}),
            qk_rope_head_dim=own["qk_rope_head_dim"], is_encoder_decoder=False,
        ),
    )  # fmt: skip
    monkeypatch.setattr(refusals.compat, "full_attention_layers", lambda kvc: None)
    monkeypatch.setattr(refusals.compat, "server_options", lambda args: SimpleNamespace(enable_lora=own["enable_lora"]))
    with pytest.raises(UnsupportedError, match=message):
        refusals.check_model(kvc, KVCacheConfig("c4"))


def test_linear_attention_beside_latents_is_refused(monkeypatch):
    kvc = SimpleNamespace(
        use_mla_backend=True, is_hybrid_swa=False,
        model_config=SimpleNamespace(
            hf_config=SimpleNamespace(architectures=["KimiLinearForCausalLM"]), qk_rope_head_dim=64
        ),
    )  # fmt: skip
    monkeypatch.setattr(refusals.compat, "full_attention_layers", lambda kvc: [0, 3])
    with pytest.raises(UnsupportedError, match="Kimi-Linear"):
        refusals.check_model(kvc, KVCacheConfig("c4"))


def test_a_drafts_layers_attend_as_their_own_backend_does(made, monkeypatch):
    from slimkv.integrations.sglang.mla import compat

    backend, module, slots = made()
    handler = compat.AttentionBackendRegistry.get_handler("slimkv")
    monkeypatch.setitem(compat.AttentionBackendRegistry._handlers, "torch_native", lambda attention, batch: "its own")
    batch = make_step(backend, slots, "EXTEND", [0], [0], [4])
    batch.forward_mode.is_extend_without_speculative = lambda: True
    for current, method in ((backend, compat.AttnForwardMethod.MHA), (object(), "its own")):
        monkeypatch.setattr(compat, "get_attn_backend", lambda current=current: current)
        module.current_attention_backend = "slimkv"
        assert handler(module, batch) == method
    assert module.current_attention_backend == "torch_native"


def test_prefill_of_latents_is_captured_only_where_asked(tmp_path, monkeypatch):
    """SGLang's server arguments, resolved for a model with latents."""
    from engines import BASE
    from mla_models import deepseek_v2
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import ServerArgs

    from slimkv.integrations.sglang.compat import server_options

    monkeypatch.setenv("SGLANG_USE_CPU_ENGINE", "1")
    load_plugins()
    config = deepseek_v2().config
    config.architectures = ["DeepseekV2ForCausalLM"]
    config.save_pretrained(tmp_path)
    for asked, found in ((None, "disabled"), ("breakable", "breakable")):
        own = {"attention_backend": "slimkv", "disable_cuda_graph": False, "cuda_graph_backend_prefill": asked}
        args = ServerArgs(model_path=str(tmp_path), **{**BASE, "page_size": 32, **own})
        args.resolve_once()
        assert server_options(args).cuda_graph_config.prefill.backend == found
