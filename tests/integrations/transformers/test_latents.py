"""Models that cache latents: one latent and one rope part per token instead of keys and values per head."""

from __future__ import annotations

import copy

import pytest
import torch
import transformers
from tiny import LOSSLESS_LATENT
from transformers import DynamicCache

import slimkv
from slimkv.errors import SlimKVError
from slimkv.formats import is_latent_format
from slimkv.integrations.transformers.compat import VERSION, caches_latents
from slimkv.wire.prompt_file import read_header

SIZES = {
    "hidden_size": 64, "intermediate_size": 64, "moe_intermediate_size": 32, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 4, "kv_lora_rank": 128, "qk_rope_head_dim": 32,
    "qk_nope_head_dim": 16, "v_head_dim": 16, "n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2,
    "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "vocab_size": 128, "max_position_embeddings": 256,
    "initializer_range": 0.2, "eos_token_id": None, "pad_token_id": 0,
}  # fmt: skip
IDS = torch.randint(1, 128, (2, 40), generator=torch.Generator().manual_seed(3))


@pytest.fixture(params=["deepseek_v2", "deepseek_v3", "glm4_moe_lite"])
def model(request):
    config = transformers.AutoConfig.for_model(request.param, **SIZES, q_lora_rank=None)
    torch.manual_seed(1)
    return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


@torch.no_grad()
def answer(model, cache, new=8):
    mask = torch.ones_like(IDS)
    mask[0, :5] = 0
    out = model.generate(
        IDS, attention_mask=mask, past_key_values=cache, max_new_tokens=new, do_sample=False, output_logits=True,
        return_dict_in_generate=True,
    )  # fmt: skip
    return out.sequences, torch.stack(out.logits)


@pytest.mark.parametrize("fresh", ["codes", "raw"])
def test_lossless_pages_give_the_stock_answer(model, fresh):
    tokens, logits = answer(model, DynamicCache(config=model.config))
    cache = slimkv.SlimKVCache(model, LOSSLESS_LATENT, fresh=fresh, block_size=16)
    ours, our_logits = answer(model, cache)
    assert len(cache.packed_layers) == 2
    assert torch.equal(ours, tokens)
    torch.testing.assert_close(our_logits, logits, rtol=0, atol=2e-4 * float(logits.abs().max()))


def test_the_default_is_four_bits_with_the_rope_part_as_it_is(model):
    cache = slimkv.SlimKVCache(model)
    answer(model, cache)
    assert {layer.format for layer in cache.packed_layers} == {"c4"}
    spec = cache.packed_layers[0].pool.layout.spec
    assert (spec.key.bits, spec.value.bits, spec.key_dim, spec.value_dim) == (4, 32, 128, 32)


def test_memory_and_closeness(model):
    """The size is that of the pages, and more bits reduce the error."""
    stock = answer(model, DynamicCache(config=model.config))[1]
    errors = []
    for format in ("c8r8", "c6r8", "c3r8"):
        cache = slimkv.SlimKVCache(model, format, fresh="codes", block_size=16)
        errors.append(float((answer(model, cache)[1][0] - stock[0]).norm() / stock[0].norm()))
        spec = cache.packed_layers[0].pool.layout.spec
        per_token = (128 * spec.key.bits + 32 * 8) // 8 + 4
        layer = cache.packed_layers[0]
        assert layer.nbytes == layer.pool.pages.shape[0] * 16 * per_token
    assert errors[0] < errors[1] < errors[2]
    assert errors[0] < 0.03


def test_layers_of_their_own_formats_and_stock_ones(model):
    cache = slimkv.SlimKVCache(model, "c6r8", layers={0: "raw"})
    answer(model, cache)
    assert [getattr(layer, "format", "stock") for layer in cache.layers] == ["stock", "c6r8"]


def test_decoding_in_one_go_or_token_by_token(model):
    """If new tokens are read as codes, too, splitting the prompt does not change the result."""
    whole, pieces = (slimkv.SlimKVCache(model, "c4", fresh="codes", block_size=16) for _ in range(2))
    with torch.no_grad():
        last = model(IDS, past_key_values=whole).logits[:, -1]
        for part in IDS.split([7, 1, 20, 12], dim=1):
            again = model(part, past_key_values=pieces).logits[:, -1]
    torch.testing.assert_close(again, last, rtol=0, atol=1e-4 * float(last.abs().max()))
    copied = copy.deepcopy(pieces)
    copied.crop(-3)
    assert copied.get_seq_length() == pieces.get_seq_length() - 3


def saved_and_loaded(model, format, folder):
    """Saves and loads the cache of one prompt, compares logits, and returns the file's fingerprint."""
    model.save_pretrained(folder / "model")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32).eval()
    cache = slimkv.SlimKVCache(model, format, block_size=16)
    with torch.no_grad():
        model(IDS[:1], past_key_values=cache)
        file = cache.save(folder / "prompt.safetensors", model, IDS[:1])
        again = slimkv.SlimKVCache.load(file, model)
        next_token = torch.tensor([[5]])
        ours, theirs = (model(next_token, past_key_values=x).logits for x in (cache, again))
    assert len(again.packed_layers) == len(cache.packed_layers) == (0 if format == "raw" else 2)
    assert torch.equal(ours, theirs)
    return read_header(file).fingerprint


@pytest.mark.parametrize("format", ["c4", "c4r8", "raw"])
def test_a_prompt_cache_file_of_latents(model, tmp_path, format):
    """Packed and stock layers. Other engines can read the file only if they order rope parts alike."""
    mark = saved_and_loaded(model, format, tmp_path)
    assert all(is_latent_format(layer.format) for layer in mark.layers)
    own = None if model.config.model_type == "deepseek_v2" else "transformers"
    assert dict(mark.model).get("latents_of") == own


@pytest.mark.skipif(VERSION < (5, 19), reason="models with an indexer cache K and V")
@pytest.mark.parametrize("format", ["c4", "raw"])
@pytest.mark.parametrize("kind", ["deepseek_v32", "glm_moe_dsa"])
def test_a_prompt_cache_file_of_sparse_latents_holds_the_keys_of_the_indexer(kind, format, tmp_path):
    sparse = {"q_lora_rank": 32, "index_topk": 8, "index_n_heads": 2, "index_head_dim": 32}
    config = transformers.AutoConfig.for_model(kind, **SIZES, **sparse)
    torch.manual_seed(1)
    mark = saved_and_loaded(
        transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32), format, tmp_path
    )
    assert [layer.index_bytes for layer in mark.layers] == [32 * 4, 32 * 4]


def test_formats_of_the_other_kind_are_refused(model):
    assert caches_latents(model.config)
    with pytest.raises(SlimKVError, match="'k4v4' is for K and V, but this model caches latents: use 'c4'"):
        slimkv.SlimKVCache(model, "k4v4")
    with pytest.raises(SlimKVError, match="'fp8' is for K and V"):
        slimkv.SlimKVCache(model, "c4", layers={1: "fp8"})
    plain = transformers.LlamaConfig(
        hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2
    )
    with pytest.raises(SlimKVError, match="'c4' is for latents, but this model caches K and V: use 'k4v4'"):
        slimkv.SlimKVCache(plain, "c4")
