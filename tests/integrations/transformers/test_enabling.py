"""``enable``: ``generate`` with a packed cache, and its warnings and refusals."""

from __future__ import annotations

import contextlib
import gc
import warnings
import weakref

import pytest
import torch
import transformers
from tiny import LOSSLESS, SHAPE, generate, tiny, tokens
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache, GenerationConfig
from transformers.masking_utils import sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import slimkv
from slimkv.errors import InputError, UnsupportedError
from tail import sample


def test_enable_packs_what_generate_keeps():
    model, ids = tiny("llama"), tokens(1, 20)
    stock = model.generate(ids, max_new_tokens=6, do_sample=False)
    assert slimkv.enable(model, LOSSLESS, block_size=16) is model
    out = model.generate(ids, max_new_tokens=6, do_sample=False, return_dict_in_generate=True)
    assert torch.equal(out.sequences, stock)
    assert isinstance(out.past_key_values, slimkv.SlimKVCache)
    assert model.config._attn_implementation == "slimkv"
    for forbidden in ({"use_cache": False}, {"past_key_values": DynamicCache(config=model.config)}):
        out = model.generate(ids, max_new_tokens=6, do_sample=False, return_dict_in_generate=True, **forbidden)
        assert not isinstance(out.past_key_values, slimkv.SlimKVCache)
    with pytest.raises(UnsupportedError, match="generate_batch"):
        model.generate_batch([[5, 6, 7]])
    slimkv.enable(model, "k4v4", fused=False)  # enabling again changes the settings
    assert model.config._attn_implementation == "sdpa"
    out = model.generate(ids, max_new_tokens=6, do_sample=False, return_dict_in_generate=True)
    assert out.past_key_values.layers[0].format == "k4v4"
    assert slimkv.disable(slimkv.disable(model)) is model
    assert "generate" not in vars(model)
    assert torch.equal(model.generate(ids, max_new_tokens=6, do_sample=False), stock)


def test_enable_works_in_a_pipeline():
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, pipeline

    words = {f"w{i}": i for i in range(97)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w3"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="w0", unk_token="w3")
    model = tiny("llama")
    pipe = pipeline("text-generation", model=model, tokenizer=fast)
    arguments = {"max_new_tokens": 6, "do_sample": False}
    stock = pipe("w5 w9 w12 w44", **arguments)
    caches = []
    slimkv.enable(model, LOSSLESS)
    update = slimkv.SlimKVCache.update
    slimkv.SlimKVCache.update = lambda self, *args: (caches.append(self), update(self, *args))[1]
    try:
        assert pipe("w5 w9 w12 w44", **arguments) == stock
    finally:
        slimkv.SlimKVCache.update = update
    assert caches
    slimkv.disable(model)


def test_enable_refuses_at_once():
    with pytest.raises(slimkv.SlimKVError, match="k9v9"):
        slimkv.enable(tiny("llama"), "k9v9")


def test_enable_obeys_a_positional_generation_config():
    model, ids = slimkv.enable(tiny("llama"), "k4v4"), tokens(1, 20)
    settings = {"max_new_tokens": 4, "do_sample": False, "return_dict_in_generate": True}
    out = model.generate(ids, GenerationConfig(**settings))
    assert isinstance(out.past_key_values, slimkv.SlimKVCache)
    assert model.generate(ids, GenerationConfig(**settings, use_cache=False)).past_key_values is None
    with pytest.raises(UnsupportedError, match="cache_implementation='offloaded'"):
        model.generate(ids, GenerationConfig(**settings, cache_implementation="offloaded"))
    # Checkpoints of Gemma 2 and 3 have this value, which transformers ignores.
    model.generation_config.cache_implementation = "hybrid"
    assert isinstance(model.generate(ids, GenerationConfig(**settings)).past_key_values, slimkv.SlimKVCache)


def test_enable_warns_of_a_stock_cache():
    model, ids = slimkv.enable(tiny("llama"), "k4v4"), tokens(1, 20)
    with pytest.warns(UserWarning, match="passes a DynamicCache, which is not packed"):
        model.generate(ids, max_new_tokens=2, past_key_values=DynamicCache(config=model.config))


@pytest.mark.parametrize(
    "way", [{}, {"num_beams": 3}, {"prompt_lookup_num_tokens": 4}], ids=["greedy", "beams", "lookup"]
)
@pytest.mark.parametrize("prompt", [20, 40])
def test_a_cache_that_the_model_drops_is_filled_again(prompt, way):
    """After 30 tokens, Phi-3's RoPE switches to long factors: it recomputes all tokens in a new cache."""
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 8, "long_factor": [4.0] * 8}
    rope["original_max_position_embeddings"] = 30
    shape = {name: value for name, value in SHAPE.items() if name != "head_dim"}
    torch.manual_seed(0)
    config = transformers.Phi3Config(**shape, rope_parameters=rope, original_max_position_embeddings=30)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    ids = tokens(1, prompt // 2).repeat(1, 2)
    arguments = {"max_new_tokens": 20, "do_sample": False, "return_dict_in_generate": True, **way}
    expected = model.generate(ids, **arguments)
    slimkv.enable(model, LOSSLESS)
    out = model.generate(ids, **arguments)
    assert torch.equal(out.sequences, expected.sequences)
    assert isinstance(out.past_key_values, slimkv.SlimKVCache)
    assert out.past_key_values.get_seq_length() == expected.past_key_values.get_seq_length()
    slimkv.disable(model)
    assert "prepare_inputs_for_generation" not in vars(model)


def test_a_models_own_preparation_of_inputs_is_kept():
    model, seen = tiny("llama"), []
    of_class = model.prepare_inputs_for_generation

    def noting(input_ids, **kwargs):
        seen.append(kwargs.get("past_key_values"))
        return of_class(input_ids, **kwargs)

    model.prepare_inputs_for_generation = noting
    slimkv.enable(model, "k4v4")
    model.generate(tokens(1, 20), max_new_tokens=2, do_sample=False)
    assert all(isinstance(cache, slimkv.SlimKVCache) for cache in seen)
    assert len(seen) == 2
    assert slimkv.disable(model).prepare_inputs_for_generation is noting


def test_a_models_own_generate_gets_the_packed_cache():
    model, seen = tiny("llama"), []
    of_class = model.generate

    def noting(*args, of_class=of_class, **kwargs):
        seen.append(kwargs.get("past_key_values"))
        return of_class(*args, **kwargs)

    model.generate = noting
    slimkv.enable(model, "k4v4")
    out = model.generate(tokens(1, 20), max_new_tokens=4, do_sample=False)
    assert [type(cache) for cache in seen] == [slimkv.SlimKVCache]
    assert slimkv.status(model).size.tokens == out.shape[1] - 1
    assert slimkv.disable(model).generate is noting
    slimkv.enable(model, "k4v4")
    alive = weakref.ref(model)
    del model, of_class, noting
    gc.collect()
    assert alive() is None, "a model is not kept alive by what it was enabled with"


def test_what_wraps_generate_afterwards_stays():
    model, calls = slimkv.enable(tiny("llama"), "k4v4"), []
    of_slimkv = model.generate

    def counted(*args, **kwargs):
        calls.append(kwargs.get("past_key_values"))
        return of_slimkv(*args, **kwargs)

    model.generate = counted
    slimkv.enable(model, "k3v3")
    packed = model.generate(tokens(1, 20), max_new_tokens=4, do_sample=False)
    assert slimkv.status(model).formats == {"k3v3": 3}
    assert slimkv.status(model).size.tokens == packed.shape[1] - 1
    assert slimkv.disable(model).generate is counted
    model.generate(tokens(1, 20), max_new_tokens=4, do_sample=False)
    assert [type(cache) for cache in calls] == [slimkv.SlimKVCache, type(None)]
    assert not slimkv.status(model).enabled


def test_a_generate_that_takes_no_cache_is_refused():
    model = tiny("llama")
    model.generate = lambda input_ids: input_ids
    with pytest.raises(InputError, match=r"takes no past_key_values.*let it pass \*\*kwargs"):
        slimkv.enable(model, "k4v4")
    assert not slimkv.status(model).enabled


def test_enable_warns_of_a_cache_that_stays_empty():
    class Model(transformers.LlamaForCausalLM):
        def generate(self, *args, past_key_values=None, **kwargs):
            return super().generate(*args, **kwargs)

    model = slimkv.enable(Model(transformers.LlamaConfig(**SHAPE)), "k4v4")
    with pytest.warns(UserWarning, match="Model stored nothing in the packed cache"):
        model.generate(tokens(1, 20), max_new_tokens=2)


def test_enable_takes_the_wrapper_of_torch_compile():
    model, ids = tiny("llama"), tokens(1, 20)
    expected = model.generate(ids, max_new_tokens=4, do_sample=False)
    wrapper = torch.compile(model, backend="eager")
    assert slimkv.enable(wrapper, LOSSLESS) is wrapper
    assert torch.equal(wrapper.generate(ids, max_new_tokens=4, do_sample=False), expected)
    assert slimkv.status(wrapper).calls.fused > 0
    slimkv.disable(wrapper)
    assert not slimkv.status(model).enabled


@pytest.mark.parametrize("kind", sample(["gemma3", "llama", "gemma2", "gpt_oss"], 4))
def test_an_enabled_assistant_takes_back_its_draft(kind):
    """Every draft is rejected, even beyond the sliding windows (24 tokens), and the text stays the model's own."""
    model, assistant, ids = tiny(kind), tiny(kind), tokens(1, 40)
    assistant.lm_head.weight = torch.nn.Parameter(assistant.lm_head.weight.roll(1, 0))  # every draft is wrong
    expected = model.generate(ids, max_new_tokens=24, do_sample=False)
    slimkv.enable(assistant, LOSSLESS, block_size=16)
    crops, crop = [], slimkv.SlimKVCache.crop
    slimkv.SlimKVCache.crop = lambda self, count: (crops.append(count), crop(self, count))[1]
    try:
        out = model.generate(ids, max_new_tokens=24, do_sample=False, assistant_model=assistant)
    finally:
        slimkv.SlimKVCache.crop = crop
    assert torch.equal(out, expected)
    assert min(crops) < 0


@pytest.mark.parametrize("way", ["enable", "attention"])
def test_an_attention_function_of_the_user_keeps_running(way):
    calls = []

    def doubled(module, query, key, value, attention_mask, scaling=None, **kwargs):
        calls.append(type(key).__name__)
        return ALL_ATTENTION_FUNCTIONS["sdpa"](module, query, key, value, attention_mask, scaling=2 * scaling, **kwargs)

    AttentionInterface.register("doubled", doubled)
    AttentionMaskInterface.register("doubled", sdpa_mask)
    model, ids = tiny("llama", attention="doubled"), tokens(1, 20)
    expected = generate(model, ids, torch.ones_like(ids), DynamicCache(config=model.config), new=6)
    with contextlib.ExitStack() as stack:
        with pytest.warns(UserWarning, match=r"LlamaForCausalLM attends with 'doubled'.*on decoded keys and values"):
            slimkv.enable(model) if way == "enable" else stack.enter_context(slimkv.attention(model))
        calls.clear()
        cache = slimkv.SlimKVCache(model, LOSSLESS, fresh="codes")
        out = generate(model, ids, torch.ones_like(ids), cache, new=6)
    assert calls == 6 * 3 * ["PackedStates"]
    assert model.config._attn_implementation == "doubled"
    torch.testing.assert_close(torch.stack(out.logits), torch.stack(expected.logits), rtol=0, atol=0)
    with pytest.raises(UnsupportedError, match=r"attends with 'doubled'.*calibrate with attn_implementation"):
        slimkv.calibrate_model(model)


def test_status_says_what_is_packed_and_what_ran():
    model, ids = tiny("gemma3"), tokens(1, 130)
    assert str(slimkv.status(model)) == "slimkv is off: generate uses the stock cache"
    slimkv.enable(model, layers={1: "raw"})
    before = slimkv.status(model)
    assert (before.enabled, before.fused, before.formats, before.packed_layers) == (
        True,
        True,
        {"k4v4": 2, "stock": 1},
        2,
    )
    assert before.calls is before.size is None
    out = model.generate(ids, max_new_tokens=5, do_sample=False, return_dict_in_generate=True)
    after = slimkv.status(model)
    assert (after.calls.fused, after.calls.decoded, after.calls.plain) == (4 * 2, 0, 3 + 4)
    assert after.size == out.past_key_values.size()
    assert "2 of 3 layers are packed" in str(after)
    assert f"{after.size.allocated_bytes:,} bytes" in str(after)
    slimkv.enable(model, fused=False)
    model.generate(ids, max_new_tokens=5, do_sample=False)
    assert slimkv.status(model).calls.decoded == 4 * 3
    assert "gets decoded" in str(slimkv.status(model))
    assert not slimkv.status(slimkv.disable(model)).enabled
    with pytest.raises(slimkv.InputError, match="takes a model, not str"):
        slimkv.status("gpt2")


def test_a_cache_attended_decoded_says_so():
    gc.collect()  # models enabled by earlier tests count until they are deleted
    model, ids = tiny("llama"), tokens(1, 20)
    arguments = {"max_new_tokens": 3, "do_sample": False}
    cache = slimkv.SlimKVCache(model, "k4v4")
    with pytest.warns(UserWarning, match=r"attended through decoded keys and values: .*slimkv.attention\(model\)"):
        model.generate(ids, past_key_values=cache, **arguments)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cache.layers[0].keys.sum()  # reading a cache is not attention
        with slimkv.attention(model):
            model.generate(ids, past_key_values=slimkv.SlimKVCache(model, "k4v4"), **arguments)
        slimkv.enable(model, "k4v4", fused=False).generate(ids, **arguments)  # decoding was requested: no warning
        slimkv.disable(model)
        model.set_attn_implementation("slimkv")
        model.generate(ids, past_key_values=slimkv.SlimKVCache(model, "k4v4"), **arguments)


def test_enable_says_where_attention_is_decoded():
    config = transformers.BloomConfig(hidden_size=64, n_layer=2, n_head=2, vocab_size=97)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with pytest.warns(UserWarning, match="BloomForCausalLM does not use transformers' attention interface.*decoded"):
        slimkv.enable(model, "k4v4")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        slimkv.enable(model, "k4v4", fused=False)  # decoding was requested: no warning
        slimkv.enable(tiny("llama"), "k4v4")


def test_minimax_is_refused_for_its_cache_class():
    config = transformers.MiniMaxConfig(**SHAPE, num_local_experts=2, num_experts_per_tok=1)
    with pytest.raises(UnsupportedError, match="MiniMaxForCausalLM accepts only the cache class of its own"):
        slimkv.SlimKVCache(config, "k4v4")
