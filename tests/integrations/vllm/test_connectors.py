"""Which connectors may carry packed pages, and other checks at startup. No engine runs here."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

pytest.importorskip("vllm")

from slimkv.errors import InputError, UnsupportedError
from slimkv.integrations.vllm import compat, prompt_pages, refusals
from slimkv.integrations.vllm.backend import SlimKVBackend
from slimkv.integrations.vllm.compat import CONNECTORS, CROSS_LAYER_LAYOUT, FOLDER_KEYS, Rule
from slimkv.integrations.vllm.connectors import (
    check_connectors,
    check_fingerprints,
    engine_fingerprint,
    wants_cross_layer_blocks,
)
from slimkv.integrations.vllm.mla.backend import SlimKVMLABackend
from slimkv.integrations.vllm.page_sizes import backend_for_spec
from slimkv.integrations.vllm.prompt_pages import Load, PromptPages, Save
from slimkv.spec import CodecSpec, LatentSpec, page_layout
from slimkv.wire import Fingerprint
from slimkv.wire.prompt_file import read_header

pytestmark = pytest.mark.vllm


def attention(format: str = "k4v4", heads: int = 2, window: int | None = None, offset: Tensor | None = None):
    spec = CodecSpec.parse(format, 64).with_raw_dtype("float32")
    return SimpleNamespace(
        attn_backend=SimpleNamespace(codec_spec=spec), num_kv_heads=heads, kv_sharing_target_layer_name=None,
        impl=SimpleNamespace(sliding_window=window, whole_key_offset=lambda: offset),
    )  # fmt: skip


def latents(rows: bool = False):
    """A layer of packed latents, with ``rows`` for sparse attention."""
    spec = LatentSpec.parse("c4", 128, 32).with_raw_dtype("float32")
    return SimpleNamespace(
        attn_backend=SimpleNamespace(codec_spec=spec), num_kv_heads=1, kv_sharing_target_layer_name=None,
        impl=SimpleNamespace(sliding_window=None, whole_key_offset=lambda: None, token_rows=rows),
    )  # fmt: skip


def indexer():
    """The cache of an indexer, described as by vLLM's own layer."""
    from vllm.v1.kv_cache_interface import MLAAttentionSpec, SparseCacheRole

    spec = MLAAttentionSpec(
        block_size=16, num_kv_heads=1, head_size=132, dtype=torch.uint8, cache_role=SparseCacheRole.INDEXER
    )
    return SimpleNamespace(get_kv_cache_spec=lambda config: spec)


def sparse_engine(name: str, **extra):
    """Two layers with sparse latents. The second attends to the tokens picked by the first one's indexer."""
    layers = {f"model.layers.{i}.self_attn.attn": latents(rows=True) for i in range(2)}
    made = engine(name, {**layers, "model.layers.0.self_attn.indexer.k_cache": indexer()}, **extra)
    fields = {"model_type": "deepseek_v32", "kv_lora_rank": 128}
    made.model_config.hf_text_config = SimpleNamespace(index_topk=8, to_dict=lambda: fields)
    made.cache_config.block_size = 16
    return made


def engine(name: str | None = None, layers=None, ranks: int = 1, **extra):
    """The part of an engine's configuration that the checks read."""
    transfer = SimpleNamespace(kv_connector=name, kv_connector_extra_config=extra) if name else None
    layers = layers or {f"model.layers.{i}.self_attn.attn": attention() for i in range(2)}
    return SimpleNamespace(
        kv_transfer_config=transfer,
        model_config=SimpleNamespace(
            is_mm_prefix_lm=False, is_hybrid=False, is_encoder_decoder=False, max_model_len=4096, dtype="torch.float32",
            model="nowhere", hf_text_config={"model_type": "llama"}, get_total_num_kv_heads=lambda: 2,
        ),
        cache_config=SimpleNamespace(block_size=64, enable_prefix_caching=True, prefix_match_unit=None),
        parallel_config=SimpleNamespace(
            tensor_parallel_size=ranks, pipeline_parallel_size=1, decode_context_parallel_size=1
        ),
        additional_config={"slimkv": "k4v4"}, compilation_config=SimpleNamespace(static_forward_context=layers),
    )  # fmt: skip


def test_the_list_names_connectors_that_exist():
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    assert CONNECTORS.keys() - KVConnectorFactory._registry.keys() == {"SlimKVPromptConnector"}
    assert {n for n, (rule, _) in CONNECTORS.items() if rule is Rule.FOLDER} == FOLDER_KEYS.keys()
    assert all(why for rule, why in CONNECTORS.values() if rule is Rule.REFUSED)


def test_no_connector_and_host_memory_need_nothing():
    for name in (None, "OffloadingConnector", "SimpleCPUOffloadConnector"):
        check_connectors(engine(name))
        check_fingerprints(engine(name), 64)


@pytest.mark.parametrize("name", [n for n, (rule, _) in CONNECTORS.items() if rule is Rule.REFUSED])
def test_refused_connectors_say_why(name):
    with pytest.raises(UnsupportedError, match=f"{name} cannot carry slimkv's packed pages: it"):
        check_connectors(engine(name))


def test_an_unknown_connector_is_refused_unless_the_user_vouches_for_it():
    with pytest.raises(UnsupportedError, match=r'(?s)does not know the KV connector Mine.*"slimkv_unchecked": true'):
        check_connectors(engine("Mine"))
    with pytest.raises(UnsupportedError, match="does not know"):
        check_connectors(engine("Mine", slimkv_unchecked="no"))
    check_connectors(engine("Mine", slimkv_unchecked=True))


def test_the_children_of_a_multi_connector_are_checked():
    good = {"kv_connector": "OffloadingConnector"}
    bad = {"kv_connector": "LMCacheConnectorV1", "kv_connector_extra_config": {}}
    check_connectors(engine("MultiConnector", connectors=[good, good]))
    with pytest.raises(UnsupportedError, match="LMCacheConnectorV1"):
        check_connectors(engine("MultiConnector", connectors=[good, bad]))
    nested = {"kv_connector": "MultiConnector", "kv_connector_extra_config": {"connectors": [bad]}}
    with pytest.raises(UnsupportedError, match="LMCacheConnectorV1"):
        check_connectors(engine("MultiConnector", connectors=[nested]))


def test_connectors_of_sparse_latents_move_the_keys_of_indexers_too():
    for name in ("OffloadingConnector", "SimpleCPUOffloadConnector", "NixlConnector", "SlimKVPromptConnector"):
        check_connectors(sparse_engine(name, shared_storage_path="x"))
    for name in ("ExampleConnector", "MooncakeConnector", "MooncakeStoreConnector", "LMCacheMPConnector"):
        with pytest.raises(UnsupportedError, match=rf"{name} is not known to move the cache of an indexer.*NixlConn"):
            check_connectors(sparse_engine(name, shared_storage_path="x"))
    check_connectors(sparse_engine("Mine", slimkv_unchecked=True))
    assert not wants_cross_layer_blocks(sparse_engine("OffloadingConnector"))


def test_latents_have_one_fingerprint_on_every_rank():
    """A latent is shared by all heads. The fingerprint records token rows and the bytes of an indexer's keys."""
    layers = {"model.layers.0.self_attn.attn": latents()}
    alone, both = (engine_fingerprint(engine("X", layers, n, slimkv_weights="a"), 64) for n in (1, 2))
    assert alone == both
    (layer,) = alone.layers
    assert (layer.num_kv_heads, layer.format, layer.token_rows, layer.index_bytes) == (1, "c4rrawfp32", False, 0)
    sparse = engine_fingerprint(sparse_engine("X", slimkv_weights="a"), 16)
    assert [(x.token_rows, x.index_bytes) for x in sparse.layers] == [(True, 132), (True, 0)]
    assert dict(sparse.model)["latents_of"] == "vLLM"


def test_a_prompt_file_holds_latents_and_the_keys_of_their_indexer(tmp_path, monkeypatch):
    """One worker saves, another one loads the same bytes into other blocks."""
    monkeypatch.setattr(prompt_pages, "tensor_parallel_rank", lambda: (0, 1))
    config = sparse_engine("SlimKVPromptConnector", slimkv_weights="a", shared_storage_path=str(tmp_path))
    size = page_layout(latents(True).attn_backend.codec_spec, 16, True).page_bytes // 16

    def worker(fill: bool):
        sizes = {"model.layers.0.self_attn.indexer.k_cache": 132}
        sizes |= {f"model.layers.{i}.self_attn.attn": size for i in range(2)}
        made = PromptPages(config, tmp_path)
        caches = {
            name: torch.randint(0, 256 if fill else 1, (6, 1, 16, n), dtype=torch.uint8) for name, n in sizes.items()
        }
        made.register(caches)
        return made, caches

    (writer, written), (reader, read) = worker(True), worker(False)
    writer.save(Save(tuple(range(48)), (4, 1, 3)))
    writer.writer.shutdown(wait=True)
    (path,) = tmp_path.glob("*.safetensors")
    reader.load(Load(str(path), 1, (5, 0), read_header(path).block_hashes[2]))
    assert not reader.failed
    for name, cache in written.items():
        assert torch.equal(read[name][[5, 0]], cache[[1, 3]])
        assert not read[name][[1, 2, 3, 4]].any()
    with pytest.raises(UnsupportedError, match=r"these layers have others: draft\.attn"):
        reader.register({**read, "draft.attn": torch.zeros(6, 1, 16, 8)})


def test_options_that_take_pages_apart_are_refused():
    with pytest.raises(UnsupportedError, match="canonical_layout"):
        check_connectors(engine("OffloadingConnector", canonical_layout=True))
    for extra in ({}, {"shared_storage_path": None}, {"shared_storage_path": 5}):
        with pytest.raises(InputError, match="'shared_storage_path'"):
            check_connectors(engine("ExampleConnector", **extra))


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"save_min_token": 5}, "no setting 'save_min_token'; did you mean 'save_min_tokens'"),
        *(({"save_min_tokens": x}, "save_min_tokens must be a number of tokens") for x in ("4k", None, -1, 0.5, True)),
    ],
)
def test_options_of_prompt_files_are_checked(extra, message):
    check_connectors(engine("SlimKVPromptConnector", shared_storage_path="x", save_min_tokens=4096, slimkv_weights="a"))
    with pytest.raises(InputError, match=message):
        check_connectors(engine("SlimKVPromptConnector", shared_storage_path="x", **extra))


def test_a_folder_is_marked_and_kept_to_its_fingerprint(tmp_path):
    ours = {"shared_storage_path": str(tmp_path / "store"), "slimkv_weights": "a"}
    check_fingerprints(engine("ExampleConnector", **ours), 64)
    check_fingerprints(engine("ExampleConnector", **ours), 64)
    centred = {
        name: attention(offset=torch.ones(2, 64, dtype=torch.bfloat16))
        for name in ("model.layers.0.attn", "model.layers.1.attn")
    }
    for other, block, message in [
        (engine("ExampleConnector", **ours), 32, "block size is 64, not 32"),
        (engine("ExampleConnector", **{**ours, "slimkv_weights": "b"}), 64, "weights are"),
        (engine("ExampleConnector", {"model.layers.0.attn": attention()}, **ours), 64, "layers with packed pages"),
        (engine("ExampleConnector", centred, **ours), 64, "key_offset of layer 0 is none, not"),
    ]:
        with pytest.raises(InputError, match=message):
            check_fingerprints(other, block)


def test_tiers_that_outlive_the_engine_carry_the_fingerprint(tmp_path):
    tier = {"type": "fs", "root_dir": str(tmp_path / "tier")}
    tiering = {"spec_name": "TieringOffloadingSpec", "secondary_tiers": [tier], "slimkv_weights": "a"}
    check_fingerprints(engine("OffloadingConnector", **tiering), 64)
    with pytest.raises(InputError, match="block size is 64, not 16"):
        check_fingerprints(engine("OffloadingConnector", **tiering), 16)
    remote = {**tiering, "secondary_tiers": [tier, {"type": "obj", "bucket": "b"}]}
    with pytest.raises(InputError, match="slimkv_fingerprint"):
        check_fingerprints(engine("OffloadingConnector", **remote), 64)


@pytest.mark.parametrize("name", ["MooncakeConnector", "LMCacheMPConnector"])
def test_peers_must_state_the_fingerprint(name):
    bare = engine(name, slimkv_weights="a")
    own = engine_fingerprint(bare, 64).hash
    with pytest.raises(InputError, match=f'"slimkv_fingerprint": "{own}"'):
        check_fingerprints(bare, 64)
    check_fingerprints(engine(name, slimkv_weights="a", slimkv_fingerprint=own), 64)
    with pytest.raises(InputError, match=f"slimkv_fingerprint is other, but this engine's fingerprint is {own}"):
        check_fingerprints(engine(name, slimkv_weights="a", slimkv_fingerprint="other"), 64)


def test_nixl_compares_fingerprints(monkeypatch):
    """vLLM's own hash ignores formats and offsets. slimkv adds its fingerprint, so that peers refuse different ones."""
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl import base_worker

    monkeypatch.setattr(compat, "_stated", {})
    monkeypatch.setattr(base_worker, "compute_nixl_compatibility_hash", lambda config, backend: backend)

    def stated(layer, ranks: int = 1) -> str:
        config = engine("NixlConnector", {"model.layers.0.self_attn.attn": layer}, ranks, slimkv_weights="a")
        config.kv_transfer_config.engine_id = str(len(compat._stated))
        check_connectors(config)
        check_fingerprints(config, 64)
        return base_worker.compute_nixl_compatibility_hash(config, "CUSTOM")

    first = stated(attention())
    assert first.startswith("CUSTOM, slimkv k4v4, 1 ranks, fingerprint ")
    assert stated(attention()) == first
    others = attention("k5v3"), attention(offset=torch.ones(2, 64, dtype=torch.bfloat16)), attention(window=128)
    assert len({first, stated(attention(heads=1), ranks=2), *map(stated, others)}) == 5
    stock = engine("NixlConnector")
    stock.kv_transfer_config.engine_id = "another"
    assert base_worker.compute_nixl_compatibility_hash(stock, "FLASH_ATTN") == "FLASH_ATTN"
    for off in (False, 0, None, ""):
        with pytest.raises(InputError, match="enforce_handshake_compat must stay on"):
            check_connectors(engine("NixlConnector", enforce_handshake_compat=off))


def test_weights_that_nobody_knows_are_refused():
    with pytest.raises(InputError, match="nowhere contains no weight files"):
        engine_fingerprint(engine("NixlConnector"), 64)


def test_ranks_have_one_fingerprint():
    """Two ranks with one head each have the same pages as one rank with two heads."""
    whole = engine_fingerprint(engine("NixlConnector", slimkv_weights="a"), 64)
    half = {f"model.layers.{i}.self_attn.attn": attention(heads=1) for i in range(2)}
    assert engine_fingerprint(engine("NixlConnector", half, ranks=2, slimkv_weights="a"), 64) == whole
    assert isinstance(whole, Fingerprint)
    odd = {"model.layers.0.attn": attention(heads=2)}
    with pytest.raises(UnsupportedError, match="run without tensor parallelism"):
        engine_fingerprint(engine("NixlConnector", odd, ranks=2, slimkv_weights="a"), 64)
    split = engine("NixlConnector", slimkv_weights="a")
    split.parallel_config.pipeline_parallel_size = 2
    with pytest.raises(UnsupportedError, match="pipeline"):
        engine_fingerprint(split, 64)
    twins = {"model.layers.0.attn": attention(), "draft.layers.0.attn": attention()}
    with pytest.raises(UnsupportedError, match=r"layer number 0, and so has model\.layers\.0\.attn"):
        engine_fingerprint(engine("NixlConnector", twins, slimkv_weights="a"), 64)


def test_native_offload_gets_blocks_of_all_layers_side_by_side(monkeypatch):
    monkeypatch.delenv("VLLM_KV_CACHE_LAYOUT", raising=False)
    assert wants_cross_layer_blocks(engine("OffloadingConnector"))
    multi = engine("MultiConnector", connectors=[{"kv_connector": "OffloadingConnector"}])
    assert wants_cross_layer_blocks(multi)
    assert not wants_cross_layer_blocks(engine())
    assert not wants_cross_layer_blocks(engine("NixlConnector"))
    both = [{"kv_connector": "OffloadingConnector"}, {"kv_connector": "ExampleConnector"}]
    assert not wants_cross_layer_blocks(engine("MultiConnector", connectors=both)), "that one writes into a copy"
    hybrid, large = engine("OffloadingConnector"), engine("OffloadingConnector")
    hybrid.model_config.is_hybrid = True
    large.cache_config.block_size = 256  # split into several kernel blocks
    assert not wants_cross_layer_blocks(hybrid)
    assert not wants_cross_layer_blocks(large)
    monkeypatch.setenv("VLLM_KV_CACHE_LAYOUT", "LBHNC")
    assert not wants_cross_layer_blocks(engine("OffloadingConnector")), "the user has chosen"


def test_the_backend_then_accepts_that_layout_only():
    spec = CodecSpec.parse("k4v4", 64)
    names = [x.name for x in backend_for_spec(SlimKVBackend, spec).supported_kv_cache_layouts()]
    assert names[0] == "LBHNC"
    assert len(names) == 4
    packed = backend_for_spec(SlimKVBackend, spec, cross_layer_blocks=True)
    assert packed.supported_kv_cache_layouts() == (CROSS_LAYER_LAYOUT,)


def test_vllm_offloads_such_a_block_as_one_piece():
    """vLLM's own registration copies a block once per layer if layers are separate, and once if they are adjacent."""
    import torch
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading import worker as offloading
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec

    layers, blocks, heads, tokens, size = 4, 6, 2, 64, 68
    spec = FullAttentionSpec(
        block_size=tokens, num_kv_heads=heads, head_size=64, dtype=torch.uint8, state_content_bytes=size
    )
    names = [f"model.layers.{i}.attn" for i in range(layers)]
    pages = torch.zeros(layers * blocks * heads * tokens * size, dtype=torch.uint8)
    together = pages.view(layers, blocks, heads, tokens, size), pages.view(blocks, layers, heads, tokens, size)
    views = ([together[0][i] for i in range(layers)], [together[1][:, i] for i in range(layers)])
    pieces = []
    for view in views:
        group = KVCacheGroupSpec(layer_names=names, kv_cache_spec=spec)
        config = KVCacheConfig(num_blocks=blocks, kv_cache_tensors=[], kv_cache_groups=[group])
        made = offloading.OffloadingConnectorWorker.__new__(offloading.OffloadingConnectorWorker)
        made.kv_cache_config, made.vllm_config = config, None
        made._init_worker = lambda found: pieces.append(found)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(offloading, "derive_canonical_mappings", lambda *a: {})
            made.register_kv_caches(dict(zip(names, view, strict=True)))
    page = heads * tokens * size
    assert [[t.page_size_bytes for t in p.tensors] for p in pieces] == [[page] * layers, [layers * page]]
    assert [len(p.group_data_refs[0]) for p in pieces] == [layers, 1], "copies for one block"


def test_attention_both_ways_among_image_tokens_is_refused():
    from vllm.config import ModelConfig

    assert hasattr(ModelConfig, "is_mm_prefix_lm"), "what vLLM calls it"
    gemma = engine()
    gemma.model_config.is_mm_prefix_lm = True
    with pytest.raises(UnsupportedError, match=r"(?s)tokens of an image attend to one another.*text only"):
        refusals.check_engine(gemma)


@pytest.mark.parametrize(
    ("method", "drafter", "message"),
    [
        *((method, "llama", None) for method in refusals.DRAFTERS),
        ("mtp", "gemma4_mtp", "drafter gemma4_mtp reads the cache of the model it drafts for"),
        ("extract_hidden_states", "llama", "speculative method 'extract_hidden_states'"),
        ("tomorrows", "llama", "speculative method 'tomorrows'"),
    ],
)
def test_drafters(method, drafter, message):
    speculating = engine()
    model = SimpleNamespace(hf_config=SimpleNamespace(model_type=drafter))
    speculating.speculative_config = SimpleNamespace(method=method, draft_model_config=model)
    if message is None:
        refusals.check_engine(speculating)
        return
    with pytest.raises(UnsupportedError, match=message):
        refusals.check_engine(speculating)


def test_every_speculative_method_of_vllm_is_known():
    """vLLM maps all other names of MTP to ``mtp``."""
    from typing import get_args

    from vllm.config import speculative

    methods = {x for given in get_args(speculative.SpeculativeMethod) for x in get_args(given) or [given]}
    methods = {x for given in methods for x in get_args(given) or [given]}
    mtp = set(get_args(speculative.MTPModelTypes)) - {"mtp"}
    assert methods - mtp == {*refusals.DRAFTERS, "extract_hidden_states"}
    assert mtp >= set(refusals.SHARING_DRAFTERS)


@pytest.mark.parametrize("option", ["enable_adaptive_verification", "tomorrows_tree"])
def test_options_of_speculation_without_bounds_on_the_host_are_refused(option):
    """Adaptive verification drops drafts on the device, so the lengths on the host are not those of the step."""
    speculating = engine()
    speculating.speculative_config = SimpleNamespace(method="dspark", draft_model_config=None, **{option: True})
    with pytest.raises(UnsupportedError, match=f"verification of drafts does not support {option}; leave it out"):
        refusals.check_engine(speculating)


def test_every_option_of_speculation_in_vllm_is_known():
    from vllm.config import SpeculativeConfig

    assert set(SpeculativeConfig.__dataclass_fields__) == refusals.DRAFTING | {"enable_adaptive_verification"}
    backend = {x.supports_device_cpu_query_lens_mismatch() for x in (SlimKVBackend, SlimKVMLABackend)}
    assert backend == {False}, "what vLLM asks before it drops drafts on the device"


def test_connectors_are_checked_when_the_first_layer_is_made():
    with pytest.raises(UnsupportedError, match="LMCacheConnectorV1"):
        refusals.check_engine(engine("LMCacheConnectorV1"))


@pytest.mark.parametrize(
    ("block", "caching", "unit", "longest", "said"),
    [
        (64, True, None, 4096, None),
        (1024, True, None, 4096, None),
        (2112, True, None, 4096, "prompts that share fewer tokens share nothing"),
        (2112, True, None, 2048, "never hits"),
        (2112, True, 64, 4096, None),
        (2112, False, None, 4096, None),
    ],
)
def test_a_notice_where_blocks_make_prefix_caching_useless(block, caching, unit, longest, said):
    hybrid = engine()
    hybrid.cache_config = SimpleNamespace(block_size=block, enable_prefix_caching=caching, prefix_match_unit=unit)
    hybrid.model_config.max_model_len = longest
    notice = refusals.prefix_caching_notice(hybrid)
    if said is None:
        assert notice is None
    else:
        assert said in notice
        assert f"a block has {block} tokens" in notice
        assert "--prefix-match-unit 64" in notice
