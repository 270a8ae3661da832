"""``SlimKVCache.save`` and ``load``: a cache is saved and loaded; files that do not fit are refused."""

from __future__ import annotations

import copy

import pytest
import torch
import transformers

from slimkv import SlimKVCache, attention
from slimkv.errors import CorruptDataError, InputError, UnsupportedError
from slimkv.wire import PromptCache

SIZES = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 128, "max_position_embeddings": 512,
}  # fmt: skip
IDS = torch.randint(3, 128, (1, 90), generator=torch.Generator().manual_seed(0))


def llama(seed: int = 0, **changes):
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(**{**SIZES, "initializer_range": 0.2, "eos_token_id": None, **changes})
    return transformers.LlamaForCausalLM(config).eval()


def gemma(seed: int = 0):
    """A model with sliding and full layers."""
    torch.manual_seed(seed)
    config = transformers.Gemma3TextConfig(
        **SIZES, sliding_window=40, layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        initializer_range=0.2, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    return transformers.Gemma3ForCausalLM(config).eval()


@pytest.fixture(scope="module")
def model():
    return llama()


@torch.no_grad()
def logits(model, cache, ids):
    with attention(model):
        return model(ids, past_key_values=cache).logits[0]


def filled(model, format="k4v4", tokens=70, **how):
    cache = SlimKVCache(model, format, block_size=16, **how)
    logits(model, cache, IDS[:, :tokens])
    return cache


@pytest.mark.parametrize("make", [llama, gemma])
@pytest.mark.parametrize("format", ["k4v4", "raw", "fp8"])
@pytest.mark.parametrize("tokens", [70, 64, 7])
def test_a_loaded_cache_goes_on_as_the_saved_one(make, format, tokens, tmp_path):
    model = make()
    cache = filled(model, format, tokens)
    path = cache.save(tmp_path / "p.safetensors", model, IDS)
    again = SlimKVCache.load(path, model)
    assert again.get_seq_length() == tokens
    assert [type(x) for x in again.layers] == [type(x) for x in cache.layers]
    rest = IDS[:, tokens:]
    assert torch.equal(logits(model, again, rest), logits(model, cache, rest))
    assert again.get_seq_length() == IDS.shape[1]


def test_mixed_formats_seed_and_block_size_come_back(model, tmp_path):
    cache = filled(model, layers={0: "raw", 2: "k5v3"}, seed=9)
    again = SlimKVCache.load(cache.save(tmp_path / "p", model, IDS), model)
    assert torch.equal(logits(model, again, IDS[:, 70:]), logits(model, cache, IDS[:, 70:]))
    assert [getattr(x, "format", "raw") for x in again.layers] == ["raw", "k4v4", "k5v3"]
    assert (again.block_size, again.settings.seed) == (16, 9)


def test_generate_goes_on_from_a_file(model, tmp_path):
    how = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    kept, path = filled(model, "raw", 60), filled(model, "raw", 60).save(tmp_path / "p", model, IDS)
    with attention(model):
        fresh = model.generate(IDS, past_key_values=kept, **how)
        loaded = model.generate(IDS, past_key_values=SlimKVCache.load(path, model, IDS), **how)
    assert loaded.tolist() == fresh.tolist()


def test_only_the_shared_tokens_are_loaded(model, tmp_path):
    path = filled(model).save(tmp_path / "p", model, IDS)
    other = IDS.clone()
    other[0, 37] += 1
    cache = SlimKVCache.load(path, model, other)
    assert cache.get_seq_length() == 37
    assert torch.equal(logits(model, cache, IDS[:, 37:50]), logits(model, _cropped(model, 37), IDS[:, 37:50]))
    assert SlimKVCache.load(path, model, IDS[:, :50]).get_seq_length() == 49, "the last token is computed"
    with pytest.raises(InputError, match="shares no tokens"):
        SlimKVCache.load(path, model, IDS[:, 1:])


def _cropped(model, tokens):
    cache = filled(model)
    cache.crop(tokens - 70)
    return cache


def test_a_window_that_is_gone_is_refused(tmp_path):
    model = gemma()
    path = filled(model).save(tmp_path / "p", model, IDS)
    with pytest.raises(InputError, match="sliding layer 0 has kept only the window"):
        SlimKVCache.load(path, model, IDS[:, :60])


def test_files_are_deterministic_and_hold_nothing_else(model, tmp_path):
    """Cropped tokens leave no bytes in the file."""
    one = filled(model).save(tmp_path / "a", model, IDS)
    cache = filled(model, tokens=75)
    cache.crop(-5)
    assert cache.save(tmp_path / "b", model, IDS[0]).read_bytes() == one.read_bytes()


def test_another_model_is_refused_by_name(model, tmp_path):
    path = filled(model).save(tmp_path / "p", model, IDS)
    for other, message in [
        (llama(seed=1), "weights are"),
        (llama(num_attention_heads=8), "model num_attention_heads is 4, not 8"),
        (llama(rope_parameters={"rope_type": "default", "rope_theta": 77.0}), "model rope is"),
        (llama().bfloat16(), "dtype is float32, not bfloat16"),
    ]:
        with pytest.raises(InputError, match=message):
            SlimKVCache.load(path, other)
    SlimKVCache.load(path, copy.deepcopy(model))


def test_a_model_is_known_by_the_files_it_came_from(model, tmp_path):
    model.save_pretrained(tmp_path / "model")
    loaded = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "model").eval()
    path = filled(loaded).save(tmp_path / "p", loaded, IDS)
    SlimKVCache.load(path, loaded.config)
    llama(seed=1).save_pretrained(tmp_path / "model")
    with pytest.raises(InputError, match="weights are"):
        SlimKVCache.load(path, loaded)
    with pytest.raises(InputError, match="give the model itself"):
        filled(model).save(tmp_path / "q", llama().config, IDS)


def test_what_a_file_cannot_hold_is_refused(model, tmp_path):
    with pytest.raises(InputError, match="holds 0 tokens"):
        SlimKVCache(model).save(tmp_path / "p", model, IDS)
    with pytest.raises(InputError, match="the cache holds 70 tokens, input_ids has 9"):
        filled(model).save(tmp_path / "p", model, IDS[:, :9])
    with pytest.raises(UnsupportedError, match="layer 0 is a TieredLayer"):
        filled(model, sink_tokens=4, recent_tokens=4).save(tmp_path / "p", model, IDS)
    pair = SlimKVCache(model, block_size=16)
    logits(model, pair, IDS[:, :20].repeat(2, 1))
    with pytest.raises(InputError, match="one sequence"):
        pair.save(tmp_path / "p", model, IDS)
    with pytest.raises(InputError, match=r"shape \[2, 90\]"):
        pair.save(tmp_path / "p", model, IDS.repeat(2, 1))
    assert not (tmp_path / "p").exists()


def test_keys_that_depend_on_more_than_the_tokens_are_refused(tmp_path):
    """A file is found by its tokens, and an encoder's input or an image is not among them."""
    sizes = {**SIZES, "encoder_layers": 1, "decoder_layers": 1, "d_model": 64}
    speech = transformers.BartForConditionalGeneration(transformers.BartConfig(**sizes)).eval()
    cache = SlimKVCache(speech, "raw")
    with torch.no_grad():
        speech(input_ids=IDS[:, :9], decoder_input_ids=IDS[:, :20], past_key_values=cache)
    with pytest.raises(UnsupportedError, match="the model attends to an encoder: keys and values depend on more"):
        cache.save(tmp_path / "p", speech, IDS[:, :20])
    vision = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    sees = transformers.LlavaForConditionalGeneration(
        transformers.LlavaConfig(
            text_config=transformers.LlamaConfig(**SIZES).to_dict(), image_token_id=127,
            vision_config={"model_type": "clip_vision_model", "image_size": 28, "patch_size": 14, **vision},
        )
    ).eval()  # fmt: skip
    cache = SlimKVCache(sees, "k4v4")
    ids = IDS.clamp(max=126)
    ids[:, 8:12] = 127
    with torch.no_grad():
        sees(input_ids=ids, pixel_values=torch.randn(1, 3, 28, 28), past_key_values=cache)
    with pytest.raises(UnsupportedError, match=r"input_ids has the image_token_i\w+ 127: keys and values depend on"):
        cache.save(tmp_path / "p", sees, ids)
    cache.crop(8 - ids.shape[1])
    assert SlimKVCache.load(cache.save(tmp_path / "p", sees, ids), sees).get_seq_length() == 8


def test_a_damaged_file_is_refused(model, tmp_path):
    path = filled(model).save(tmp_path / "p", model, IDS)
    whole = bytearray(path.read_bytes())
    whole[-100] ^= 4
    path.write_bytes(whole)
    with pytest.raises(CorruptDataError, match="altered"):
        SlimKVCache.load(path, model)


def test_the_file_says_what_it_holds(model, tmp_path):
    prompt = PromptCache.load(filled(model).save(tmp_path / "p", model, IDS))
    assert prompt.tokens == tuple(IDS[0, :70].tolist())
    assert {x.format for x in prompt.fingerprint.layers} == {"k4v4"}
    assert [x.pages.shape[0] for x in prompt.layers.values()] == [5, 5, 5]
