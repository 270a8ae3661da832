"""The attention backend without an engine: sizes, layouts, steps, refusals."""

from __future__ import annotations

import math
from contextlib import nullcontext
from queue import Queue
from types import SimpleNamespace

import numpy as np
import pytest
import torch

pytest.importorskip("vllm")

from vllm.config import CacheConfig, VllmConfig, set_current_vllm_config
from vllm.v1.attention.backend import AttentionCGSupport, CommonAttentionMetadata
from vllm.v1.kv_cache_interface import (
    CrossAttentionSpec,
    FullAttentionSpec,
    MambaSpec,
    SinkFullAttentionSpec,
    SlidingWindowSpec,
)
from vllm.v1.worker.utils import select_common_block_size

from slimkv import ops
from slimkv.calibration.learned_offset import LayerOffset
from slimkv.codec import Codec
from slimkv.codec.key_offset import offset_of_keys
from slimkv.codec.query_aware import query_aware_matrix
from slimkv.errors import InputError, UnsupportedError
from slimkv.integrations.serving.layer import ServedLayer, warm_guard
from slimkv.integrations.serving.versions import check_tested
from slimkv.integrations.vllm import compat
from slimkv.integrations.vllm.backend import SlimKVBackend
from slimkv.integrations.vllm.context_parallel import DCPConfig
from slimkv.integrations.vllm.impl import SlimKVImpl
from slimkv.integrations.vllm.metadata import SlimKVMetadataBuilder
from slimkv.integrations.vllm.page_sizes import backend_for_spec, slot_bytes
from slimkv.integrations.vllm.warmup import compile_ahead, kernel_block, profile_run
from slimkv.ops import PackedKV, Rounding
from slimkv.ops.warmup import LayerKind, Step
from slimkv.spec import CodecSpec, PageLayout

pytestmark = pytest.mark.vllm


def full(block_size=64, heads=8, dim=128, kind=FullAttentionSpec, **more):
    return kind(block_size=block_size, num_kv_heads=heads, head_size=dim, dtype=torch.bfloat16, **more)


def packed(format, spec):
    return backend_for_spec(SlimKVBackend, CodecSpec.parse(format, spec.head_size)).customize_spec(spec)


@pytest.mark.parametrize(
    "format", ["k1v1", "k2v2", "turboquant_k3v4_nc", "k4v4", "k5v3", "turboquant_k8v4", "fp8", "raw"]
)
@pytest.mark.parametrize("dim", [16, 64, 80, 128, 256])
@pytest.mark.parametrize("block_size", [16, 64, 128])
def test_a_page_has_the_bytes_of_the_layout(format, dim, block_size):
    spec = full(block_size, 3, dim)
    layout = PageLayout(CodecSpec.parse(format, dim), block_size)
    assert packed(format, spec).page_size_bytes == layout.pool_bytes(1, 3)
    assert packed(format, spec).dtype == torch.uint8


def test_blocks_are_small_enough_for_prefix_hits():
    assert [SlimKVBackend.get_preferred_block_size(n) for n in (16, 64, 128, 48)] == [32, 64, 128, 32]


def test_four_bits_take_132_bytes():
    assert slot_bytes(CodecSpec.parse("k4v4", 128)) == 132
    assert full().page_size_bytes / packed("k4v4", full()).page_size_bytes == pytest.approx(512 / 132)


def test_a_spec_is_packed_once_and_only_where_slimkv_knows_the_layer():
    once = packed("k4v4", full())
    assert packed("k2v2", once) == once
    cross = full(kind=CrossAttentionSpec)
    assert packed("k4v4", cross) == cross, "left to vLLM's own backend"
    with pytest.raises(UnsupportedError, match="SinkFullAttentionSpec"):
        packed("k4v4", full(kind=SinkFullAttentionSpec, sink_len=4))
    with pytest.raises(UnsupportedError, match="process_weights_after_loading"):
        SlimKVBackend.customize_spec(full())


def test_a_window_is_kept():
    spec = packed("k4v4", full(kind=SlidingWindowSpec, sliding_window=512, block_size=1))
    assert (spec.sliding_window, spec.page_size_bytes) == (512, 8 * 132)


def test_layers_with_one_format_share_a_class():
    spec = CodecSpec.parse("k4v4", 128)
    assert backend_for_spec(SlimKVBackend, spec) is backend_for_spec(SlimKVBackend, CodecSpec.parse("k4v4", 128))
    assert (
        backend_for_spec(SlimKVBackend, spec).full_cls_name()
        != backend_for_spec(SlimKVBackend, CodecSpec.parse("k3v3", 128)).full_cls_name()
    )


@pytest.mark.parametrize("name", ["LBHNC", "BLHNC", "LHBNC", "BHLNC"])
def test_views_of_every_accepted_layout_are_pages(name):
    """Two layers of five blocks in one buffer: pages are contiguous, aligned, and do not overlap."""
    from vllm.v1.kv_cache_interface import KVCacheLayout, compute_layout_strides

    layout = KVCacheLayout[name]
    assert layout in SlimKVBackend.supported_kv_cache_layouts()
    spec = packed("k4v4", full(32, 3, 64))
    strides = compute_layout_strides(spec, 5, 2, layout)
    raw = torch.zeros(2 * 5 * spec.page_size_bytes, dtype=torch.uint8)
    views = torch.as_strided(raw, (2, 5, 3, 32, 68), strides)
    for layer in range(2):
        pages = views[layer].view(5, 3, 32 * 68)
        assert all(stride % 16 == 0 for stride in pages.stride()[:2])
        pages += 1
    assert bool((raw == 1).all())


def test_a_state_space_models_pages_fit_attentions():
    """In hybrids, vLLM enlarges attention blocks to the size of the state, and splits them into blocks for kernels."""
    from vllm.v1.core.kv_cache_utils import get_kv_cache_config_from_groups, get_kv_cache_groups
    from vllm.v1.kv_cache_interface import KVCacheLayout, create_kv_cache_views

    per_token = 2 * slot_bytes(CodecSpec.parse("k4v4", 64))
    state_bytes = 4 * 50_000
    block = 16 * math.ceil(state_bytes / (16 * per_token))
    attention = packed("k4v4", full(block, 2, 64))
    state = MambaSpec(
        block_size=block, shapes=((50_000,),), dtypes=(torch.float32,), page_size_padded=attention.page_size_bytes
    )
    config = VllmConfig(cache_config=CacheConfig(block_size=block))
    config.cache_config.kv_cache_layout = "LBHNC"
    groups = get_kv_cache_groups(config, {"a0": attention, "m0": state, "m1": state, "a1": attention})
    cache = get_kv_cache_config_from_groups(config, groups, 50 * attention.page_size_bytes)
    assert cache.num_blocks * 2 * attention.page_size_bytes <= 50 * attention.page_size_bytes
    assert cache.num_blocks >= 24
    tensor = next(t for t in cache.kv_cache_tensors if any("a0" in layer for layer in t.layers))
    raw = torch.zeros(tensor.size, dtype=torch.int8)
    (view, *_) = create_kv_cache_views(raw, attention, cache.num_blocks, KVCacheLayout.LBHNC, tensor, 16)
    assert view.shape == (cache.num_blocks * block // 16, 2, 16, 68)
    assert view.dtype == torch.uint8
    assert view.view(view.shape[0], 2, -1).stride()[1] == 16 * 68


# -- steps -------------------------------------------------------------------------------------------------------------


def step(query_lens, seq_lens, few=1, padded=0, sharing=None, prompts=None, causal=True):
    """The metadata of a step with these requests. Every table has ``padded`` additional rows."""
    starts = torch.tensor([0, *np.cumsum(query_lens)], dtype=torch.int32)
    count = len(query_lens)
    common = CommonAttentionMetadata(
        query_start_loc=torch.cat([starts, starts[-1:].expand(padded)]), query_start_loc_cpu=starts.clone(),
        seq_lens=torch.tensor([*seq_lens, *[0] * padded], dtype=torch.int32), num_reqs=count,
        num_actual_tokens=int(starts[-1]), max_query_len=max(query_lens), max_seq_len=max(seq_lens),
        block_table_tensor=torch.arange((count + padded) * 4, dtype=torch.int32).view(-1, 4),
        slot_mapping=torch.zeros(int(starts[-1]), dtype=torch.int64), causal=causal,
        is_prefilling=None if prompts is None else torch.tensor(prompts),
    )  # fmt: skip
    builder = object.__new__(SlimKVMetadataBuilder)
    builder._stock, builder.reorder_batch_threshold, builder._sharing = None, few, sharing
    builder._matrix_index, builder._deterministic = None, prompts is not None
    return builder.build(0, common)


def test_a_uniform_step_is_one_part():
    (part,) = step([1, 1, 1], [5, 9, 2]).parts
    assert (part.rows, part.batch.max_query_len, part.batch.max_seq_len) == (slice(0, 3), 1, 9)
    (part,) = step([4, 4], [9, 9], few=4).parts
    assert part.batch.cu_seqlens_q.tolist() == [0, 4, 8]
    (part,) = step([30, 20], [30, 40], padded=3).parts
    assert part.batch.seq_lens.tolist() == [30, 40]
    assert (part.batch.max_query_len, part.batch.min_query_len) == (30, 20)


def test_a_mixed_step_is_two():
    decodes, rest = step([1, 1, 7, 1, 20], [5, 9, 7, 3, 40], padded=2).parts
    assert (decodes.rows, decodes.batch.max_query_len) == (slice(0, 2), 1)
    assert decodes.batch.cu_seqlens_q.tolist() == [0, 1, 2]
    assert (rest.rows, rest.batch.max_query_len, rest.batch.min_query_len) == (slice(2, 30), 20, 1)
    assert rest.batch.cu_seqlens_q.tolist() == [0, 7, 8, 28]
    assert rest.batch.seq_lens.tolist() == [7, 3, 40]
    assert rest.batch.block_table[:, 0].tolist() == [8, 12, 16]


def test_prompts_and_answers_are_parts_of_their_own():
    """The rest of a cached prompt is a prefill, even a single token, so that a hit gives the output of a miss."""
    parts = step([1, 1, 1, 7, 20], [5, 9, 65, 7, 40], prompts=[False, False, True, True, True]).parts
    assert [(p.rows, p.prompt) for p in parts] == [(slice(0, 2), False), (slice(2, 30), True)]
    assert parts[1].batch.cu_seqlens_q.tolist() == [0, 1, 8, 28]
    assert (parts[1].batch.max_query_len, parts[1].batch.min_query_len) == (20, 1)
    assert parts[1].batch.seq_lens.tolist() == [65, 7, 40]
    mixed = step([4, 1, 4], [5, 65, 9], few=4, prompts=[False, True, False]).parts
    assert [(p.rows, p.prompt) for p in mixed] == [(slice(0, 4), False), (slice(4, 5), True), (slice(5, 9), False)]
    assert step([1, 1], [5, 9]).parts[0].prompt is None


def test_steps_are_causal_or_wholly_both_ways():
    assert step([4, 4], [9, 9], few=4).causal
    assert not step([4, 4], [9, 9], few=4, causal=False).causal, "a drafter of blocks"
    for refused in ({"causal": torch.tensor([True, False])}, {"causal": False, "sharing": DCPConfig(2, 1, 1)}):
        with pytest.raises(UnsupportedError, match="mixes the two"):
            step([4, 4], [9, 9], few=4, **refused)


def test_ranks_that_share_tokens_know_what_they_hold():
    decodes, rest = step([1, 1, 40], [101, 8, 40], sharing=DCPConfig(ranks=2, rank=1, interleave=1)).parts
    assert decodes.shard.context_lens.tolist() == [50, 3]
    assert rest.shard.context_lens.tolist() == [0]
    assert rest.shard.new_lens.tolist() == [40]
    assert decodes.shard.new_slots.tolist() == [0, 64]
    assert step([1], [5]).parts[0].shard is None


def test_graphs_hold_uniform_batches(monkeypatch):
    alone, shared = (VllmConfig(additional_config={"slimkv": {}}) for _ in range(2))
    assert SlimKVMetadataBuilder.get_cudagraph_support(alone, full()) == AttentionCGSupport.UNIFORM_BATCH
    shared.parallel_config.decode_context_parallel_size = 2
    group = type("Group", (), {"world_size": 2, "rank_in_group": 0})()
    monkeypatch.setattr(compat, "get_dcp_group", lambda: group)
    assert SlimKVMetadataBuilder.get_cudagraph_support(shared, full()) == AttentionCGSupport.NEVER
    exact = VllmConfig(additional_config={"slimkv": {"deterministic": True}})
    assert SlimKVMetadataBuilder.get_cudagraph_support(exact, full()) == AttentionCGSupport.NEVER
    config = type("Config", (), {"speculative_config": type("S", (), {"num_speculative_tokens": 3})()})()
    assert SlimKVMetadataBuilder.get_varlen_cudagraph_max_query_len(config, full()) == 4


@pytest.mark.parametrize("centred", [False, True])
def test_a_layer_stores_with_its_matrices(centred):
    """Without matrices it rounds to the nearest centroid. Centred keys use the layer's offset."""
    settings = {"format": "k4v4", "calibration": "auto"}
    with set_current_vllm_config(VllmConfig(additional_config={"slimkv": settings})):
        layer = SlimKVImpl(num_heads=4, head_size=64, scale=0.125, num_kv_heads=2)
    layer._spec, layer._number = CodecSpec.parse("k4v4", 64), 0
    generator = torch.Generator().manual_seed(0)
    offset = torch.randn(2, 64, generator=generator).bfloat16() if centred else None
    key, value = torch.randn(2, 16, 2, 64, generator=generator)
    queries = torch.randn(2, 256, 64, generator=generator) * torch.logspace(0, -2, 64)
    codec, layout, slots = Codec(layer._spec), PageLayout(layer._spec, 16), torch.arange(16)
    for matrices in (query_aware_matrix(queries.mT @ queries, codec.key_rotation), None):
        layer._layer = ServedLayer(codec, matrices, LayerOffset(2, codec, offset) if centred else None)
        got, want = torch.zeros(2, 1, 2, layout.page_bytes, dtype=torch.uint8)
        layer.do_kv_cache_update(None, key, value, got.view(1, 2, 16, -1), slots)
        rounding = None if matrices is None else Rounding(matrices)
        ops.store_kv(key, value, PackedKV(want, codec, layout, offset), slots, rounding)
        assert torch.equal(got, want)


def test_a_layer_learns_its_offset_from_the_first_tokens_it_stores():
    """It ignores steps that store nothing, or only into the null block (warm-up of a draft model)."""
    with set_current_vllm_config(VllmConfig(additional_config={"slimkv": {"format": "k4v4"}})):
        layer = SlimKVImpl(num_heads=4, head_size=64, scale=0.125, num_kv_heads=2)
    layer._spec, layer._number = CodecSpec.parse("k4v4", 64), 0
    learnt = LayerOffset(2, Codec(layer._spec))
    layer._layer = ServedLayer(Codec(layer._spec), offset=learnt)
    layout = PageLayout(layer._spec, 16)
    pages = torch.zeros(3, 2, layout.page_bytes, dtype=torch.uint8).view(3, 2, 16, -1)
    key, other, value = torch.randn(3, 16, 2, 64) + 3
    for slots in (torch.full((16,), -1), torch.arange(16)):
        layer.do_kv_cache_update(None, other, value, pages, slots)
        assert not learnt.known
    layer.do_kv_cache_update(None, key, value, pages, torch.arange(16, 32))
    assert learnt.known
    expected = offset_of_keys(key.mean(0), key[0], Codec(layer._spec))
    torch.testing.assert_close(learnt.tensor, expected)
    layer.do_kv_cache_update(None, other, value, pages, torch.arange(32, 48))
    torch.testing.assert_close(learnt.tensor, expected)


def test_a_layer_reads_another_layers_pages_with_that_layers_offset():
    """It has no keys and values of its own (Gemma 3n)."""
    config = VllmConfig(additional_config={"slimkv": {"format": "k4v4"}})
    how = {"num_heads": 4, "head_size": 64, "scale": 0.125, "num_kv_heads": 2}
    with set_current_vllm_config(config):
        owner, reader = SlimKVImpl(**how), SlimKVImpl(**how, kv_sharing_target_layer_name="layers.3.attn")
    codec = Codec(CodecSpec.parse("k4v4", 64))
    key, value = torch.randn(2, 20, 2, 64) + 2
    owner._layer = ServedLayer(codec, offset=LayerOffset(2, codec, key.mean(0)))
    reader._model = SimpleNamespace(matrices=lambda *_: None)  # no calibration
    config.compilation_config.static_forward_context["layers.3.attn"] = SimpleNamespace(impl=owner)
    for layer in (owner, reader):
        layer._spec, layer._guard, layer._variants = codec.spec, None, {}
        layer._options = layer._options_of(codec.spec)
    pages = torch.zeros(4, 2, 16, PageLayout(codec.spec, 16).page_bytes // 16, dtype=torch.uint8)
    owner.do_kv_cache_update(None, key, value, pages, torch.arange(20))
    query = torch.randn(20, 4, 64)
    want, got = torch.zeros(2, 20, 4, 64)
    owner.forward(None, query, key, value, pages, step([20], [20]), want)
    reader.forward(None, query, None, None, pages, step([20], [20]), got)
    assert torch.equal(got, want)
    assert bool(want.any())


# -- refusals ----------------------------------------------------------------------------------------------------------


def impl(**how):
    config = VllmConfig(additional_config={"slimkv": {"format": "k4v4"}})
    arguments = {"num_heads": 4, "head_size": 64, "scale": 0.125, "num_kv_heads": 2, **how}
    with set_current_vllm_config(config):
        return SlimKVImpl(**arguments)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"alibi_slopes": [0.1] * 4}, "ALiBi"),
        ({"kv_cache_dtype": "fp8"}, "kv_cache_dtype must be left at auto, not 'fp8'"),
        ({"head_size": 72}, "not 72"),
        ({"head_size": 576}, "not 576"),
        ({"chunk_lookback": 3}, "chunk_lookback"),
    ],
)
def test_what_a_model_asks_and_slimkv_does_not_do(how, message):
    with pytest.raises((UnsupportedError, InputError), match=message):
        impl(**how)


@pytest.mark.parametrize(
    ("chunk", "fast_prefill", "message"),
    [
        (64, False, "attention in chunks"),
        (None, True, "--kv-sharing-fast-prefill"),
        (64, True, "attention in chunks, --kv"),
    ],
)
def test_deterministic_attention_needs_to_know_prompts(chunk, fast_prefill, message):
    """In these cases vLLM rebuilds the metadata of a step without marking requests in prefill."""
    settings = {"slimkv": {"deterministic": True}}
    config = VllmConfig(cache_config=CacheConfig(kv_sharing_fast_prefill=fast_prefill), additional_config=settings)
    with set_current_vllm_config(config):
        layer = SlimKVImpl(num_heads=4, head_size=64, scale=0.125, num_kv_heads=2)
    module = SimpleNamespace(impl=layer, attention_chunk_size=chunk)
    config.compilation_config.static_forward_context["model.layers.0.attn"] = module
    with pytest.raises(UnsupportedError, match=f"deterministic attention does not support {message}"):
        layer.process_weights_after_loading(torch.float32)


@pytest.mark.parametrize("version", ["0.27.1", "0.31.2", "0.33.0", "dev"])
def test_an_untested_vllm_is_refused(version, monkeypatch):
    monkeypatch.setattr("vllm.__version__", version)
    with pytest.raises(UnsupportedError, match=f"tested with vLLM 0.32 and runs in no other release; {version}"):
        check_tested("vLLM", "vllm", compat.TESTED)


@pytest.mark.parametrize("version", ["0.32.0rc1", "0.32.4+cu130"])
def test_a_build_of_the_tested_release_is_accepted(version, monkeypatch):
    monkeypatch.setattr("vllm.__version__", version)
    assert check_tested("vLLM", "vllm", compat.TESTED) == version


def test_kernels_are_compiled_while_vllm_loads_weights(monkeypatch):
    """A thread compiles, once per kind of layer, the steps that will run, for the block size that vLLM will choose."""
    asked = Queue()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr("slimkv.integrations.vllm.warmup.start_compiling", lambda *given: asked.put(given))
    monkeypatch.setattr("slimkv.integrations.vllm.warmup.warm_guard", lambda kind: asked.put(kind))
    config = SimpleNamespace(
        scheduler_config=SimpleNamespace(max_num_batched_tokens=512), speculative_config=None,
        model_config=SimpleNamespace(max_model_len=4096), cache_config=CacheConfig(),
    )  # fmt: skip
    thread = compile_ahead(("a kind", "of layer"), lambda device: [device], config)
    assert compile_ahead(("a kind", "of layer"), lambda device: [device], config) is None
    thread.join(10)
    device, steps = asked.get(timeout=1)
    assert device == torch.device("cuda", 3)
    assert steps[0] == Step(1, 512, 4096)
    assert {1, 33} <= {step.queries for step in steps}
    assert asked.get(timeout=1) == device
    assert asked.empty()
    assert kernel_block(config, 32) == 32, "vLLM's default, which the backend's preference will replace"
    for of_hybrids, cut in ((528, 16), (544, 32), (1152, 128)):
        config.cache_config.block_size = of_hybrids
        assert kernel_block(config, 32) == cut == select_common_block_size(of_hybrids, [SlimKVBackend])
    config.cache_config = CacheConfig(block_size=16)
    assert kernel_block(config, 32) == 16


def test_kinds_of_layers_before_they_are_named():
    """One kind per format in the model."""
    config = VllmConfig(additional_config={"slimkv": {"format": "k4v4", "layers": {"0": "fp8", "3": "raw"}}})
    text, config.cache_config = SimpleNamespace(num_hidden_layers=4), CacheConfig()
    config.model_config = SimpleNamespace(
        dtype=torch.bfloat16, hf_text_config=text, max_model_len=64, model="", is_mm_prefix_lm=False
    )
    with set_current_vllm_config(config):
        made = SlimKVImpl(4, 64, 0.125, 2, sliding_window=8)
        kinds = list(made._kinds(torch.device("cpu")))
    assert [kind.codec.spec.format for kind in kinds] == ["fp8", "k4v4", "krawbf16vrawbf16"]
    assert [kind.key_offset is None for kind in kinds] == [False, False, True]
    assert {(kind.layout.block_size, kind.num_heads, kind.options.sliding_window) for kind in kinds} == {(32, 4, 8)}
    for kind in kinds:
        warm_guard(kind)


def test_each_kind_of_step_runs_before_serving(monkeypatch):
    """Drafts, cached prompts, decoding and the guard's gather run once. The largest prefill runs again if it grows."""
    ran = []
    monkeypatch.setattr("slimkv.integrations.vllm.warmup.run_steps", lambda _, steps: ran.extend(steps))
    monkeypatch.setattr("slimkv.integrations.vllm.warmup.warm_guard", lambda kind: ran.append(Step(0, 0, 0)))
    spec = CodecSpec.parse("k4v4", 128, seed=77)
    codec = SimpleNamespace(spec=spec, device=torch.device("cuda"))
    kind = LayerKind(codec, PageLayout(spec, 64), 32, 8, torch.bfloat16, ops.AttendOptions())
    config = SimpleNamespace(
        cache_config=CacheConfig(block_size=48), model_config=SimpleNamespace(max_model_len=4096),
        speculative_config=SimpleNamespace(num_speculative_tokens=4),
    )  # fmt: skip
    assert kernel_block(config) == 16
    profile_run(kind, 512, config)
    assert ran[0] == Step(1, 512, 4096)
    assert {0, 1, 5, 33} <= {step.queries for step in ran}
    count = len(ran)
    profile_run(kind, 512, config)
    profile_run(kind, 1024, config)
    assert ran[count:] == [Step(1, 1024, 4096)]
