"""Uses of caches and models besides generation: copies, pickles, threads, nested contexts, unusual arguments."""

from __future__ import annotations

import copy
import io
import pickle
import threading
import warnings

import pytest
import torch
import transformers
from tiny import LOSSLESS, SHAPE, generate, padded, tiny, tokens
from transformers import DynamicCache

import slimkv
from slimkv.errors import InputError, UnsupportedError
from slimkv.integrations.transformers import compat, slimkv_attention

KINDS = ["llama", "gemma3"]
CHECKS = "reference"  # this backend refuses NaN; kernels mark the token instead


def saved(cache):
    """The cache after ``torch.save`` and ``torch.load``."""
    buffer = io.BytesIO()
    torch.save(cache, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


COPIES = {"deepcopy": copy.deepcopy, "pickle": lambda x: pickle.loads(pickle.dumps(x)), "torch.save": saved}


@torch.no_grad()
def read(model, cache, ids, fused=True):
    """Logits of one forward pass with ``cache``."""
    if not fused:
        return model(ids, past_key_values=cache).logits
    with slimkv.attention(model):
        return model(ids, past_key_values=cache).logits


# -- copies ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", COPIES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("window", [{}, {"sink_tokens": 4, "recent_tokens": 8}], ids=["plain", "sink and recent"])
def test_a_copy_goes_its_own_way(way, kind, window):
    """Reuse of a prompt: one prefill, and a copy of the cache per question."""
    model, prompt = tiny(kind), tokens(1, 40)
    cache = slimkv.SlimKVCache(model.config, "k6v6", block_size=16, **window)
    read(model, cache, prompt)
    questions = [tokens(1, 5, seed) for seed in (1, 2)]
    expected = []
    for question in questions:
        fresh = slimkv.SlimKVCache(model.config, "k6v6", block_size=16, **window)
        read(model, fresh, prompt)
        expected.append(read(model, fresh, question))
    for question, logits in zip(questions, expected, strict=True):
        twin = COPIES[way](cache)
        assert type(twin) is type(cache)
        torch.testing.assert_close(read(model, twin, question), logits, rtol=0, atol=0)
        assert cache.get_seq_length() == 40
        assert twin.get_seq_length() == 45


@pytest.mark.parametrize("way", COPIES)
@pytest.mark.parametrize("used", [False, True], ids=["new", "reset"])
def test_copies_of_an_empty_cache_share_nothing(way, used):
    model = tiny("llama")
    cache = slimkv.SlimKVCache(model.config, LOSSLESS)
    if used:
        read(model, cache, tokens(3, 20))
        cache.reset()
    twin = COPIES[way](cache)
    for number, one in enumerate((cache, twin)):
        ids = tokens(number + 1, 20, seed=number)
        expected = read(model, DynamicCache(config=model.config), ids, fused=False)
        torch.testing.assert_close(read(model, one, ids), expected, rtol=0, atol=1e-4)
    assert (cache.size().batch, twin.size().batch) == (1, 2)


def test_codecs_are_shared_by_copies():
    model = tiny("llama")
    cache = slimkv.SlimKVCache(model.config, "k4v4")
    read(model, cache, tokens(1, 20))
    twin = copy.deepcopy(cache)
    assert twin.layers[0].pool.codec is cache.layers[0].pool.codec
    assert twin.layers[0].pool.pages.data_ptr() != cache.layers[0].pool.pages.data_ptr()


def test_iteration_gives_decoded_tensors():
    model, ids = tiny("gemma3"), tokens(2, 30)
    cache, stock = slimkv.SlimKVCache(model.config, LOSSLESS), DynamicCache(config=model.config)
    for one in (cache, stock):
        read(model, one, ids, fused=False)
    for ours, theirs in zip(cache, stock, strict=True):
        assert type(ours[0]) is torch.Tensor
        for a, b in zip(ours, theirs, strict=True):
            assert (a is None and b is None) or torch.equal(a, b)


# -- modes of torch --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("fused", [False, True])
def test_prefill_in_inference_mode_then_generate(kind, fused):
    model, (ids, mask) = tiny(kind), padded(40)
    expected = generate(model, ids, mask, DynamicCache(config=model.config), new=6)
    cache = slimkv.SlimKVCache(model.config, LOSSLESS, block_size=16)
    context = slimkv.attention(model) if fused else warnings.catch_warnings()
    with context:
        with torch.inference_mode():
            positions = (mask.cumsum(-1) - 1).clamp(min=0)
            model(ids[:, :30], attention_mask=mask[:, :30], position_ids=positions[:, :30], past_key_values=cache)
        actual = generate(model, ids, mask, cache, new=6)
        cache.reorder_cache(torch.tensor([2, 1, 0]))
    assert torch.equal(actual.sequences, expected.sequences)


def test_gradients_are_refused_not_dropped():
    model, ids = tiny("llama"), tokens(1, 12)
    for options in ({}, {"recent_tokens": 4}):
        cache = slimkv.SlimKVCache(model.config, LOSSLESS, **options)
        with pytest.raises(UnsupportedError, match="no_grad"):
            model(ids, past_key_values=cache)
        assert cache.get_seq_length() == 0
    for parameter in model.parameters():  # without gradients there is nothing to refuse
        parameter.requires_grad_(False)
    model(ids, past_key_values=cache)


@pytest.mark.parametrize("window", [{}, {"sink_tokens": 4, "recent_tokens": 8}], ids=["plain", "sink and recent"])
def test_autocast_does_not_reach_codec_and_attention(window):
    """Autocast multiplies float32 in bfloat16; pages and attention on them are the same as without it."""
    model = tiny("gpt_oss")
    query, found = torch.randn(1, 4, 1, 32), []
    key, value = torch.randn(1, 2, 60, 32) + 2, torch.randn(1, 2, 60, 32)
    for enabled in (False, True):
        cache = slimkv.SlimKVCache(model.config, "k4v4", fresh="auto" if window else "codes", **window)
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled), slimkv.attention(model) as counts:
            cache.update(key, value, 1)
            states = cache.update(key[:, :, :1], value[:, :, :1], 1)
            found.append(
                slimkv_attention(model.model.layers[1].self_attn, query, *states, None, s_aux=torch.ones(4))[0]
            )
        found.append(cache.layers[1].pool.pages)
        assert counts.fused == 1
    assert torch.equal(found[0], found[2])
    assert torch.equal(found[1], found[3])


@pytest.mark.tail  # importing the compiler takes ten seconds
def test_a_compiled_forward_gives_the_same_answer():
    """torch.compile has a graph break at the cache, and the answer equals that of the plain model."""
    model, ids = tiny("llama"), tokens(1, 12)
    compiled = torch.compile(model, backend="eager")
    cache, stock = (slimkv.SlimKVCache(model.config, LOSSLESS), DynamicCache(config=model.config))
    with torch.no_grad(), slimkv.attention(model):
        for step in (ids, tokens(1, 1, 1), tokens(1, 1, 2)):
            actual = compiled(step, past_key_values=cache).logits
            expected = model(step, past_key_values=stock).logits
            torch.testing.assert_close(actual, expected, rtol=0, atol=1e-4)
    assert not cache.is_compileable


def test_static_caches_are_not_mixed_in():
    model = slimkv.enable(tiny("llama"), "k4v4")
    with pytest.raises(UnsupportedError, match="cache_implementation='static'"):
        model.generate(tokens(1, 8), cache_implementation="static", max_new_tokens=2)


# -- contexts and threads --------------------------------------------------------------------------------------------


def test_contexts_nest_and_count_their_own():
    model, ids = tiny("llama", attention="eager"), tokens(1, 12)
    cache = slimkv.SlimKVCache(model.config, LOSSLESS, fresh="codes")
    with slimkv.attention(model) as outer:
        read(model, cache, ids)
        assert model.config._attn_implementation == "slimkv"
        with slimkv.attention(model) as inner, torch.no_grad():
            model(ids, past_key_values=cache)
        assert model.config._attn_implementation == "slimkv"
    assert model.config._attn_implementation == "eager"
    assert (outer.fused, inner.fused) == (6, 3)


def test_contexts_may_end_in_any_order():
    model = tiny("llama")
    first, second = slimkv.attention(model), slimkv.attention(model)
    first.__enter__(), second.__enter__()
    first.__exit__(None, None, None)
    assert model.config._attn_implementation == "slimkv"
    second.__exit__(None, None, None)
    assert model.config._attn_implementation == "sdpa"


def test_an_attention_chosen_meanwhile_is_kept():
    model = slimkv.enable(tiny("llama"), LOSSLESS)
    with slimkv.attention(model):
        model.set_attn_implementation("eager")
    slimkv.disable(model)
    assert model.config._attn_implementation == "eager"


@pytest.mark.parametrize("kind", ["llama", "persimmon"])
@pytest.mark.parametrize("asked", ["argument", "config"])
def test_attention_probabilities_are_returned_however_they_are_asked_for(kind, asked):
    """Some classes do not pass the argument on to their attention, and none passes the config's setting."""
    model = tiny("llama", attention="eager")
    if kind == "persimmon":
        config = transformers.PersimmonConfig(**{**SHAPE, "head_dim": 16}, attn_implementation="eager")
        model = transformers.PersimmonForCausalLM(config).eval()
    model.config.output_attentions = asked == "config"
    arguments, ids, found = {"output_attentions": True} if asked == "argument" else {}, tokens(1, 12), []
    for cache in (DynamicCache(config=model.config), slimkv.SlimKVCache(model.config, LOSSLESS)):
        with torch.no_grad(), slimkv.attention(model):
            model(ids, past_key_values=cache)
            found.append(model(ids[:, :1], past_key_values=cache, **arguments).attentions)
    assert len(found[0]) == 3
    torch.testing.assert_close(found[1], found[0])


def test_models_do_not_count_for_one_another():
    one, other, ids = tiny("llama"), tiny("llama"), tokens(1, 12)
    with slimkv.attention(one) as counts, slimkv.attention(other) as others:
        read(one, slimkv.SlimKVCache(one.config, LOSSLESS, fresh="codes"), ids)
    assert (counts.fused, others.fused) == (3, 0)


def test_a_thread_per_request():
    model, count, errors = tiny("llama"), 4, []
    expected = [generate(model, tokens(1, 20, i), None, DynamicCache(config=model.config), new=6) for i in range(count)]
    fused = [0] * count
    start = threading.Barrier(count)

    def request(i: int) -> None:
        try:
            start.wait()
            with slimkv.attention(model) as counts:
                out = generate(model, tokens(1, 20, i), None, slimkv.SlimKVCache(model.config, LOSSLESS), new=6)
            fused[i] = counts.fused
            assert torch.equal(out.sequences, expected[i].sequences)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=request, args=(i,)) for i in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert fused == [3 * 5] * count
    assert model.config._attn_implementation == "sdpa"


def test_a_thread_that_generates_for_the_one_that_opened_the_context():
    model, ids = tiny("llama"), tokens(1, 20)
    cache = slimkv.SlimKVCache(model.config, LOSSLESS)
    with slimkv.attention(model) as counts:
        thread = threading.Thread(target=generate, args=(model, ids, None, cache), kwargs={"new": 4})
        thread.start()
        thread.join()
    assert counts.fused == 3 * 3


# -- arguments -------------------------------------------------------------------------------------------------------


def filled(batch: int = 3):
    """A model, and a packed and a stock cache with the same tokens."""
    model = tiny("llama")
    caches = slimkv.SlimKVCache(model.config, LOSSLESS), DynamicCache(config=model.config)
    for cache in caches:
        read(model, cache, tokens(batch, 20), fused=False)
    return model, *caches


@pytest.mark.parametrize("given", [(2, 0), [2, 0], torch.tensor([2, 0]), (True, False, True), [-1, 0]])
def test_sequences_are_chosen_by_any_sequence(given):
    model, cache, stock = filled()
    cache.batch_select_indices(given)
    stock.batch_select_indices(torch.tensor(given) if not isinstance(given, torch.Tensor) else given)
    step = tokens(2, 1)
    torch.testing.assert_close(read(model, cache, step), read(model, stock, step, fused=False), rtol=0, atol=1e-4)


@pytest.mark.parametrize("given", [None, "all", [0.5], [[0, 1]], [3], [-4], [True]])
def test_sequences_that_do_not_exist(given):
    _, cache, _ = filled()
    with pytest.raises(InputError, match=r"sequences|booleans"):
        cache.batch_select_indices(given)
    assert cache.size().batch == 3


def test_arguments_of_the_wrong_kind():
    _, cache, _ = filled()
    for config in (None, {}, {"hidden_size": 64}, "llama", 3):
        with pytest.raises(InputError, match="a model or its config"):
            slimkv.SlimKVCache(config)
    for repeats in (0, -1, 1.5, None):
        with pytest.raises(InputError, match="repeated"):
            cache.batch_repeat_interleave(repeats)
    with pytest.raises(InputError, match="layers 0 to 2"):
        cache.update(torch.zeros(3, 2, 1, 32), torch.zeros(3, 2, 1, 32), 7)
    with pytest.raises(InputError, match="takes a model that generates"):
        slimkv.enable(torch.nn.Linear(2, 2))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layer", [0, 2])
def test_after_refused_numbers_the_cache_is_as_before(kind, layer):
    model = tiny(kind)
    cache, twin = (slimkv.SlimKVCache(model.config, "k4v4", block_size=16, backend=CHECKS) for _ in range(2))
    for one in (cache, twin):
        read(model, one, tokens(2, 40))
    bad = torch.full((2, 2, 1, 32), float("nan"))
    for number in range(layer):
        cache.update(torch.randn(2, 2, 1, 32), torch.randn(2, 2, 1, 32), number)
    with pytest.raises(slimkv.SlimKVError, match="NaN"):
        cache.update(bad, bad, layer)
    assert [x.get_seq_length() for x in cache.layers] == [40] * 3
    for step in (tokens(2, 1), tokens(2, 12)):
        torch.testing.assert_close(read(model, cache, step), read(model, twin, step), rtol=0, atol=0)


def test_what_cannot_be_taken_back_must_be_reset():
    model = tiny("llama")
    cache = slimkv.SlimKVCache(model.config, "k4v4", recent_tokens=4, backend=CHECKS)
    read(model, cache, tokens(1, 20))
    cache.update(torch.randn(1, 2, 8, 32), torch.randn(1, 2, 8, 32), 0)
    bad = torch.full((1, 2, 8, 32), float("nan"))
    with pytest.raises(slimkv.SlimKVError, match="NaN"):
        cache.update(bad, bad, 1)
    with pytest.raises(InputError, match="reset the cache"):
        read(model, cache, tokens(1, 1))
    cache.reset()
    read(model, cache, tokens(1, 20))


@pytest.mark.parametrize(("format", "width"), [("krawbf16vrawbf16", 2), ("krawfp16vrawfp16", 2), ("raw", 4)])
def test_a_raw_dtype_that_is_named_is_kept(format, width):
    model = tiny("llama")  # float32
    cache = slimkv.SlimKVCache(model.config, format)
    read(model, cache, tokens(1, 64))
    assert cache.size().allocated_bytes == 3 * 2 * 2 * 64 * 32 * width  # layers, K and V, heads, tokens, dims


def test_a_cache_that_packs_nothing_says_so():
    model = tiny("qwen3_next")
    config = copy.deepcopy(model.config)
    config.layer_types = ["linear_attention"] * 3
    with pytest.warns(UserWarning, match="nothing is packed: .*linear_attention"):
        slimkv.SlimKVCache(config, "k4v4")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        slimkv.SlimKVCache(model.config, "k4v4")
        slimkv.SlimKVCache(config, "raw")  # stock layers were requested: no warning


# -- encoder-decoder models ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["BartForConditionalGeneration", "T5ForConditionalGeneration"])
def test_encoder_decoder_caches_as_one_would_pass_them(name):
    """Passed directly or in an ``EncoderDecoderCache``, self-attention is packed and cross-attention is not."""
    from architectures import build
    from outcomes import generate as answer
    from outcomes import stock_answer
    from transformers import EncoderDecoderCache

    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = build(name)
        inputs, tokens_of, logits = stock_answer(model)
        direct = slimkv.SlimKVCache(model.config, LOSSLESS)
        wrapped = EncoderDecoderCache(slimkv.SlimKVCache(model.config, LOSSLESS), DynamicCache())
        for cache in (direct, wrapped):
            found = answer(model, inputs, cache)
            assert torch.equal(found[0], tokens_of)
            assert torch.equal(found[1], logits)
            own = cache.self_attention_cache
            assert all(layer.tokens for layer in own.packed_layers)
            assert type(cache.cross_attention_cache) is DynamicCache
            assert cache.cross_attention_cache.get_seq_length() == inputs["input_ids"].shape[1]
        twin = copy.deepcopy(direct)
        twin.batch_select_indices([0, 2])
        twin.crop(-1)
        assert (twin.get_seq_length(), direct.get_seq_length()) == (direct.get_seq_length() - 1, 19)
        assert twin.cross_attention_cache.layers[0].keys.shape[0] == 2
        assert len(next(iter(direct))) == 6
        direct.reset()
        assert torch.equal(answer(model, inputs, direct)[0], tokens_of)


@pytest.mark.parametrize("name", ["WhisperForCausalLM", "BlipForConditionalGeneration"])
def test_decoders_that_attend_an_encoder_although_their_config_denies_it(name):
    """A draft model of Whisper, and captions of BLIP: cross-attention is kept apart from self-attention."""
    from architectures import build
    from transformers.modeling_outputs import BaseModelOutput

    model, generator = build(name), torch.Generator().manual_seed(1)
    if name == "WhisperForCausalLM":
        states = torch.randn(2, 16, model.config.d_model, generator=generator)
        inputs = {"input_ids": tokens(2, 5), "encoder_outputs": BaseModelOutput(states)}
    else:
        size = model.config.vision_config.image_size
        inputs = {"pixel_values": torch.randn(2, 3, size, size, generator=generator)}
    expected = model.generate(**inputs, max_new_tokens=6, do_sample=False)
    slimkv.enable(model, LOSSLESS)
    assert torch.equal(model.generate(**inputs, max_new_tokens=6, do_sample=False), expected)


def test_a_layer_without_arguments_is_an_error(monkeypatch):
    """Surplus arguments belong to layers that share another layer's cache. Too few would leave layers uncached."""
    found = compat.get_layer_types_and_kwargs
    model = tiny("llama")
    for extra, fits in ((1, True), (-1, False)):
        changed = lambda text, extra=extra: (found(text)[0], ([{}] * 9)[: len(found(text)[0]) + extra])  # noqa: E731
        monkeypatch.setattr(compat, "get_layer_types_and_kwargs", changed)
        if fits:
            assert len(compat.layer_kinds(model.config)) == 3
        else:
            with pytest.raises(ValueError, match="zip"):
                compat.layer_kinds(model.config)
