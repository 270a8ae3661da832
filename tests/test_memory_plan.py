import json

import pytest

from slimkv import CodecSpec, PageLayout
from slimkv.cache import PagedPool
from slimkv.errors import InputError, SpecError, UnsupportedError
from slimkv.memory_plan import (
    FULL,
    INDEXER,
    LATENT,
    NO_KV,
    SLIDING,
    LayerGroup,
    ModelShape,
    make_plan,
    parse_size,
    read_config,
    sequence_bytes,
    shape_of,
    window_blocks,
)

LLAMA = {
    "model_type": "llama",
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "hidden_size": 4096,
}
QWEN3 = {
    **LLAMA,
    "model_type": "qwen3",
    "head_dim": 128,
    "hidden_size": 2560,
    "sliding_window": None,
    "use_sliding_window": False,
}
QWEN2 = {**LLAMA, "model_type": "qwen2", "sliding_window": 4096, "use_sliding_window": False, "max_window_layers": 28}
GEMMA3 = {
    "model_type": "gemma3",
    "vision_config": {"num_hidden_layers": 27, "num_attention_heads": 16, "hidden_size": 1152},
    "text_config": {
        "model_type": "gemma3_text",
        "num_hidden_layers": 6,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "hidden_size": 2560,
        "sliding_window": 1024,
        "layer_types": ["sliding_attention"] * 5 + ["full_attention"],
    },
}
GPT_OSS = {
    "model_type": "gpt_oss",
    "num_hidden_layers": 24,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "hidden_size": 2880,
    "sliding_window": 128,
    "layer_types": ["sliding_attention", "full_attention"] * 12,
}


def full(layers, heads, dim):
    return LayerGroup(FULL, layers, heads, dim, dim)


def test_llama_without_head_dim():
    assert shape_of(LLAMA).groups == (full(32, 8, 128),)


def test_qwen_ignores_a_window_that_is_switched_off():
    assert shape_of(QWEN3).groups == (full(32, 8, 128),)
    assert shape_of(QWEN2).groups == (full(32, 8, 128),)
    switched_on = shape_of({**QWEN2, "use_sliding_window": True})
    assert switched_on.groups == (full(28, 8, 128), LayerGroup(SLIDING, 4, 8, 128, 128, 4096))


def test_gemma_3_is_nested_and_mostly_sliding():
    assert shape_of(GEMMA3).groups == (full(1, 4, 256), LayerGroup(SLIDING, 5, 4, 256, 256, 1024))
    text = {**GEMMA3["text_config"], "sliding_window_pattern": 6}
    del text["layer_types"]
    assert shape_of(text).groups == shape_of(GEMMA3).groups


def test_gpt_oss_alternates():
    assert shape_of(GPT_OSS).groups == (full(12, 8, 64), LayerGroup(SLIDING, 12, 8, 64, 64, 128))


def test_mistral_slides_in_every_layer():
    assert shape_of({**LLAMA, "model_type": "mistral", "sliding_window": 4096}).groups == (
        LayerGroup(SLIDING, 32, 8, 128, 128, 4096),
    )


@pytest.mark.parametrize(
    "model", ["gemma2", "gpt_oss", "cohere2", "olmo3", "gemma3n_text", "gemma3_text", "gemma4_text"]
)
def test_layers_that_are_not_listed_are_those_of_transformers(model):
    config = pytest.importorskip("transformers").CONFIG_MAPPING[model]().to_dict()
    listed = shape_of(config)
    assert {group.kind for group in listed.groups} >= {FULL, SLIDING}
    del config["layer_types"]
    assert shape_of(config) == listed


def test_layers_of_their_own_size():
    """Gemma 4 has larger heads in full-attention layers. Both transformers' and the authors' fields are read."""
    sliding = {**LLAMA, "num_hidden_layers": 4, "head_dim": 256, "sliding_window": 512}
    sliding |= {"layer_types": ["sliding_attention", "full_attention"] * 2}
    wanted = (LayerGroup(FULL, 2, 2, 512, 512), LayerGroup(SLIDING, 2, 8, 256, 256, 512))
    own = {"head_dim": 512, "num_key_value_heads": 2}
    assert shape_of({**sliding, "per_layer_config": {"01": own, "03": own}}).groups == wanted
    authors = {"global_head_dim": 512, "num_global_key_value_heads": 2}
    assert shape_of({**sliding, **authors, "attention_k_eq_v": True}).groups == wanted
    assert shape_of({**sliding, **authors}).groups == (full(2, 8, 512), wanted[1])


def test_names_of_kv_heads():
    bare = {name: value for name, value in LLAMA.items() if name != "num_key_value_heads"}
    falcon = {**bare, "num_kv_heads": 4, "multi_query": True}
    assert shape_of(falcon).groups == (full(32, 1, 128),)
    assert shape_of({**falcon, "new_decoder_architecture": True}).groups == (full(32, 4, 128),)
    assert shape_of({**bare, "multi_query_group_num": 2, "kv_channels": 64}).groups == (full(32, 2, 64),)
    assert shape_of({**bare, "num_attention_groups": 1}).groups == (full(32, 1, 128),)
    assert shape_of({**LLAMA, "attention_head_dim": 224}).groups == (full(32, 8, 224),)


def test_two_attentions_in_a_layer():
    config = {"model_type": "longcat_flash", "num_layers": 28, "num_attention_heads": 64}
    assert shape_of({**config, "kv_lora_rank": 512, "qk_rope_head_dim": 64}).groups[0].layers == 56


def test_hybrids_hold_nothing_in_linear_layers():
    delta = {"linear_num_heads": 32, "linear_head_dim": 128, "linear_conv_kernel_dim": 4}
    mamba = {"mamba_expand": 2, "mamba_d_conv": 4, "mamba_d_state": 16}
    linear = {**LLAMA, **delta, "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 8}
    assert shape_of(linear).groups == (full(8, 8, 128), LayerGroup(NO_KV, 24, 0, 0, 0))
    assert shape_of({**LLAMA, **delta, "full_attention_interval": 4}) == shape_of(linear)
    bamba = {**LLAMA, **mamba, "attn_layer_indices": [9, 18, 27]}
    assert shape_of(bamba).groups == (full(3, 8, 128), LayerGroup(NO_KV, 29, 0, 0, 0))
    jamba = {**LLAMA, **mamba, "attn_layer_period": 8, "attn_layer_offset": 4}
    assert shape_of(jamba).groups == (full(4, 8, 128), LayerGroup(NO_KV, 28, 0, 0, 0))
    nemotron = {**LLAMA, **mamba, "num_hidden_layers": 5, "hybrid_override_pattern": "M-*M-"}
    assert shape_of(nemotron).groups == (full(1, 8, 128), LayerGroup(NO_KV, 4, 0, 0, 0))


def test_layers_that_share_a_cache_count_once():
    assert shape_of({**LLAMA, "num_kv_shared_layers": 12}).groups == (full(20, 8, 128), LayerGroup(NO_KV, 12, 0, 0, 0))


def test_chunked_layers_are_bounded_by_the_chunk():
    config = {
        **LLAMA,
        "num_hidden_layers": 2,
        "layer_types": ["chunked_attention", "full_attention"],
        "attention_chunk_size": 8192,
    }
    assert LayerGroup(SLIDING, 1, 8, 128, 128, 8192) in shape_of(config).groups


def test_latents_belong_to_all_heads():
    """DeepSeek-V2-Lite: 27 layers of 512 + 64 values per token, whatever the number of heads."""
    shape = shape_of({**LLAMA, "num_hidden_layers": 27, "kv_lora_rank": 512, "qk_rope_head_dim": 64})
    assert shape.groups == (LayerGroup(LATENT, 27, 1, 512, 64),)
    plan = make_plan(shape, None, 2**34)
    assert {row.format: row.bytes_per_token for row in plan.formats} == {
        "raw": 27 * 1152, "c8r8": 27 * 580, "c6r8": 27 * 452, "c4": 27 * 386, "c4r8": 27 * 324,
    }  # fmt: skip
    assert make_plan(shape, ["auto"], 2**34).formats[0].ratio_to_bf16 == pytest.approx(1152 / 386)
    with pytest.raises(SpecError, match="'k4v4' is for K and V, but this model caches latents: use 'c4'"):
        make_plan(shape, ["k4v4"], 2**34)
    with pytest.raises(SpecError, match="'c4' is for latents, but this model caches K and V: use 'k4v4'"):
        make_plan(shape_of(LLAMA), ["c4"], 2**34)


def test_an_indexer_keeps_what_no_format_packs():
    config = {**LLAMA, "num_hidden_layers": 61, "kv_lora_rank": 512, "qk_rope_head_dim": 64}
    config |= {"index_topk": 2048, "index_head_dim": 128}
    shape = shape_of(config)
    assert shape.groups == (LayerGroup(LATENT, 61, 1, 512, 64), LayerGroup(INDEXER, 61, 1, 132, 0))
    raw, packed = make_plan(shape, ["raw", "c4"], 2**34, block_size=64).formats
    assert packed.bytes_per_token == 61 * (386 + 132)
    assert raw.bytes_per_token == 61 * (1152 + 132)
    assert packed.tokens_per_sequence == 2**34 // (61 * (386 + 132) * 64) * 64
    assert [group.kind for group in packed.groups] == [LATENT, INDEXER]
    assert shape_of({**config, "index_topk_freq": 4}).groups[1].layers == 1 + 1 + 14  # layers 0, 1, 5, 9, ..., 57
    listed = {**config, "layer_types": ["indexed_attention"] * 61}
    assert shape_of(listed) == shape
    assert shape_of({**config, "index_topk_pattern": "FSSS" * 20}).groups[1].layers == 16


def test_gpt2_names_and_multi_query():
    old = {"n_layer": 12, "n_head": 12, "n_embd": 768}
    assert shape_of(old).groups == (full(12, 12, 64),)
    assert shape_of({**old, "multi_query": True}).groups == (full(12, 1, 64),)


@pytest.mark.parametrize(
    ("config", "error", "message"),
    [
        ({**LLAMA, "kv_lora_rank": 512}, InputError, "no qk_rope_head_dim"),
        (
            {**LLAMA, "model_type": "deepseek_v4", "compress_ratios": [4], "index_topk": 2048},
            UnsupportedError,
            "deepseek_v4 has sparse attention on compressed tokens",
        ),
        ({"num_attention_heads": 8}, InputError, "no num_hidden_layers"),
        ({**LLAMA, "layer_types": ["full_attention"]}, InputError, "32 layers but.*lists 1"),
        (
            {**LLAMA, "layer_types": ["telepathy"] * 32},
            UnsupportedError,
            "'telepathy' is unknown; known are full_attention",
        ),
        ({**LLAMA, "layer_types": ["sliding_attention"] * 32}, InputError, "no window size"),
        ({**LLAMA, "layer_types": 32}, InputError, "must list the type of each layer, not 32"),
        ({**LLAMA, "layer_types": ["indexed_attention"] * 32}, UnsupportedError, "'indexed_attention' is unknown"),
        ({**LLAMA, "index_topk": 2048}, UnsupportedError, "llama has sparse attention on K and V"),
        ({**LLAMA, "sliding_window": 4096}, UnsupportedError, "'llama' with sliding_window has several kinds"),
        ({**LLAMA, "sliding_window": [2047, None] * 16}, InputError, r"sliding_window=\[2047, None"),
        ({**LLAMA, "sliding_window": 4096, "sliding_window_pattern": "LLLG"}, InputError, "pattern='LLLG'"),
        ({**LLAMA, "attn_type_list": [0, 1] * 16}, UnsupportedError, "'llama' with attn_type_list has several kinds"),
        ({**LLAMA, "conv_L_cache": 3}, UnsupportedError, "with conv_L_cache has several kinds of layers"),
        ({**LLAMA, "mamba_d_state": 128}, UnsupportedError, "with mamba_d_state has several kinds of layers"),
        ({**LLAMA, "is_encoder_decoder": True}, UnsupportedError, "llama has cross-attention"),
        ({**LLAMA, "use_cla": True, "cla_share_factor": 2}, UnsupportedError, "layers that share caches"),
        ({**LLAMA, "block_configs": [{}] * 32}, UnsupportedError, "layers of different sizes"),
        ({**LLAMA, "num_key_value_heads": [8] * 32}, InputError, "needs one integer of 1 or more"),
        ({**LLAMA, "num_hidden_layers": "many"}, InputError, "num_hidden_layers='many'"),
        ({**LLAMA, "head_dim": 127.5}, InputError, "head_dim=127.5"),
        ({**LLAMA, "hidden_size": 4100}, InputError, "no head_dim, and 32 heads do not divide"),
        ({**LLAMA, "num_kv_shared_layers": 32}, InputError, "32 of them sharing the caches"),
    ],
)
def test_configurations_that_are_refused(config, error, message):
    with pytest.raises(error, match=message):
        shape_of(config)


def test_read_config_from_file_and_folder(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(GEMMA3))
    assert read_config(tmp_path) == read_config(tmp_path / "config.json") == shape_of(GEMMA3)
    with pytest.raises(InputError, match="there is no file"):
        read_config(tmp_path / "none.json")
    (tmp_path / "bad.json").write_text("{")
    with pytest.raises(InputError, match="is not JSON"):
        read_config(tmp_path / "bad.json")
    (tmp_path / "list.json").write_text("[]")
    with pytest.raises(InputError, match="contains a list"):
        read_config(tmp_path / "list.json")


def test_bytes_of_llama_at_4_bits():
    plan = make_plan(shape_of(LLAMA), ["k4v4", "raw"], 40 * 2**30)
    packed, raw = plan.formats
    assert packed.bytes_per_token == 32 * 8 * 132
    assert raw.bytes_per_token == 32 * 8 * 512
    assert packed.ratio_to_bf16 == 512 / 132
    assert raw.tokens_per_sequence == 40 * 2**30 // (32 * 8 * 512)
    assert packed.tokens_per_sequence == 40 * 2**30 // (32 * 8 * 132 * 16) * 16
    assert packed.bits_per_number == 4.125
    assert 3.87 < packed.tokens_ratio_to_bf16 < 3.88


@pytest.mark.parametrize(
    "shape", [shape_of(LLAMA), shape_of(GEMMA3), shape_of(GPT_OSS)], ids=["llama", "gemma3", "gpt-oss"]
)
@pytest.mark.parametrize("sequences", [1, 7])
@pytest.mark.parametrize("block", [16, 64])
def test_what_fits_fits_and_one_page_more_does_not(shape, sequences, block):
    memory = 3 * 2**30
    plan = make_plan(shape, ["k3v3"], memory, sequences=sequences, block_size=block).formats[0]
    assert plan.total_tokens == plan.tokens_per_sequence * sequences
    assert sequences * sequence_bytes(shape, "k3v3", plan.tokens_per_sequence, block) <= memory
    assert sequences * sequence_bytes(shape, "k3v3", plan.tokens_per_sequence + 1, block) > memory


@pytest.mark.parametrize(
    "format", ["k4v4", "k3v3", "k2v2", "k5v4", "turboquant_k8v4", "turboquant_3bit_nc", "fp8", "raw"]
)
@pytest.mark.parametrize(("dim", "block"), [(128, 16), (80, 32), (96, 64), (64, 128), (80, 1)])
def test_a_pool_allocates_what_the_plan_says(format, dim, block):
    spec = CodecSpec.parse(format, dim)
    pool = PagedPool(spec, blocks=5, num_kv_heads=3, block_size=block)
    shape = ModelShape("one layer", (full(1, 3, dim),))
    allocated = pool.pages.untyped_storage().nbytes()
    assert allocated == sequence_bytes(shape, format, 5 * block, block)
    assert allocated == PageLayout(spec, block).bytes_per_token * 5 * block * 3
    assert allocated <= 5 * 3 * (block * dim * (spec.key.bits + spec.value.bits) / 8 + 8 * block + 15)


def test_sliding_layers_stop_growing():
    shape = shape_of(GEMMA3)
    sliding = next(g for g in make_plan(shape, ["k4v4"], 2**30).formats[0].groups if g.kind == SLIDING)
    assert sliding.bytes_at_window == 5 * 4 * 65 * 16 * 260  # a window of 1,024 tokens can touch 65 blocks of 16
    longer, long = sequence_bytes(shape, "k4v4", 200_000, 16), sequence_bytes(shape, "k4v4", 100_000, 16)
    assert longer - long == 100_000 * 4 * 260


@pytest.mark.parametrize(
    ("window", "block", "blocks"), [(16, 16, 2), (17, 16, 2), (18, 16, 3), (1, 16, 1), (128, 1, 128)]
)
def test_blocks_a_window_touches(window, block, blocks):
    assert window_blocks(window, block) == blocks
    touched = {(start % block + window - 1) // block + 1 for start in range(block)}
    assert max(touched) == blocks


def test_a_model_without_growing_layers_takes_any_length_that_fits_once():
    shape = ModelShape("windowed", (LayerGroup(SLIDING, 2, 1, 64, 64, 128),))
    roomy = make_plan(shape, ["k4v4"], 2**30).formats[0]
    assert roomy.tokens_per_sequence is None
    assert roomy.total_tokens is None
    tight = make_plan(shape, ["k4v4"], 4 * 68 * 16).formats[0]
    assert tight.tokens_per_sequence == 32


def test_no_room_at_all():
    assert make_plan(shape_of(LLAMA), ["k4v4"], 1000).formats[0].tokens_per_sequence == 0


@pytest.mark.parametrize(
    ("text", "size"), [("40GiB", 40 * 2**30), ("1.5 gb", 1_500_000_000), ("123", 123), ("2kB", 2000)]
)
def test_sizes(text, size):
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "GiB", "4 parsecs", "-1GiB"])
def test_sizes_that_make_no_sense(text):
    with pytest.raises(InputError, match="cannot read the memory size"):
        parse_size(text)


def test_bad_arguments():
    with pytest.raises(InputError, match="at least 1, not 0"):
        make_plan(shape_of(LLAMA), ["k4v4"], 2**30, sequences=0)
    with pytest.raises(SpecError, match="unknown format 'int4'"):
        make_plan(shape_of(LLAMA), ["int4"], 2**30)
    with pytest.raises(SpecError, match="formats is empty"):
        make_plan(shape_of(LLAMA), [], 2**30)
    with pytest.raises(SpecError, match="head_dim 100"):
        make_plan(ModelShape("odd", (full(1, 1, 100),)), ["k4v4"], 2**30)
