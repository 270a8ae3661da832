"""How queries depend on positions is measured for any model class, and calibrated caches round keys by position."""

from __future__ import annotations

import warnings
from dataclasses import replace

import pytest
import torch
import transformers
from tiny import SHAPE, generate, tiny, tokens

from slimkv import SlimKVCache, attention
from slimkv.calibration.positions import matrix_index, position_edges
from slimkv.calibration.rotary import Rotary
from slimkv.errors import UnsupportedError
from slimkv.integrations.transformers.calibration.collect import _Recorder, gather_calibration
from slimkv.integrations.transformers.plugin import observed_attention

LONG = {**SHAPE, "max_position_embeddings": 4096}
YARN = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 10000.0, "original_max_position_embeddings": 1024}
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 512,
}  # fmt: skip
DYNAMIC = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
LONGROPE = {
    "rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0] * 16, "long_factor": [4.0] * 16,
    "factor": 4.0, "original_max_position_embeddings": 1024,
}  # fmt: skip


def build(config) -> transformers.PreTrainedModel:
    torch.manual_seed(0)
    config._attn_implementation = "sdpa"
    return transformers.AutoModelForCausalLM.from_config(config).eval()


def llama(**rope) -> transformers.PreTrainedModel:
    return build(transformers.LlamaConfig(**LONG, rope_parameters=rope))


KINDS = {
    "halves": lambda: llama(rope_type="default", rope_theta=10000.0),
    "yarn": lambda: llama(**YARN),
    "llama3": lambda: llama(**LLAMA3),
    "dynamic": lambda: llama(**DYNAMIC),
    "interleaved": lambda: build(transformers.CohereConfig(**LONG)),
    "partial": lambda: build(
        transformers.StableLmConfig(**{k: v for k, v in LONG.items() if k != "head_dim"}, partial_rotary_factor=0.5)
    ),
    "sliding": lambda: tiny("gemma3"),
}


def queries_at(model, ids, shift: int) -> dict[int, torch.Tensor]:
    """Queries [tokens * heads, dim] of every layer, with positions moved by ``shift``."""
    recorder = _Recorder()
    recorder.probe(0, ids.shape[1])
    positions = torch.arange(ids.shape[1])[None] + shift
    with observed_attention(model, recorder.observe), torch.no_grad():
        model.base_model(ids, position_ids=positions, use_cache=False)
    return recorder._probes[0]


@pytest.mark.parametrize("kind", KINDS)
def test_queries_at_other_positions_follow_from_what_was_measured(kind):
    model = KINDS[kind]()
    made = gather_calibration(model, tokens(1, 64), costs=False)
    declared = model.config.max_position_embeddings
    assert made.max_positions == declared
    shift = declared // 2 + 77
    before, after = (queries_at(model, tokens(1, 24, seed=3), s) for s in (0, shift))
    for layer, known in made.layers.items():
        assert known.rotary.turns
        moved = known.rotary.turned(before[layer], torch.full((len(before[layer]),), shift))
        assert (moved - after[layer]).square().sum() < 1e-3 * after[layer].square().sum()
    if kind == "partial":
        assert len(made.layers[0].rotary.planes) == 4  # half of the 16 dimensions are rotated


def test_layers_without_rotary_have_one_matrix():
    made = gather_calibration(tiny("llama4"), tokens(1, 64), costs=False)
    assert [layer.rotary.turns for layer in made.layers.values()] == [True, False, True]
    assert made.max_positions == 512


def test_learned_positions_hold_as_far_as_was_read():
    sizes = {"n_embd": 64, "n_layer": 2, "n_head": 2, "n_positions": 512, "vocab_size": 97, "initializer_range": 0.3}
    made = gather_calibration(build(transformers.GPT2Config(**sizes, bos_token_id=1)), tokens(1, 96), costs=False)
    assert not any(layer.rotary.turns for layer in made.layers.values())
    assert made.max_positions == 96


def test_frequencies_that_change_with_the_length_hold_up_to_there():
    model = llama(**LONGROPE)
    made = gather_calibration(model, tokens(1, 64), costs=False)
    assert all(layer.rotary.turns for layer in made.layers.values())
    assert made.max_positions <= 1024 + 64
    with pytest.raises(UnsupportedError, match="dynamic rotary embedding"):
        gather_calibration(llama(**DYNAMIC), tokens(1, 64), max_positions=8192)


def test_a_longer_range_may_be_asked_for():
    made = gather_calibration(KINDS["halves"](), tokens(1, 64), costs=False, max_positions=100_000)
    assert made.max_positions == 100_000
    assert made.position_edges()[-1] >= 100_000
    assert made.position_edges(300) == (128, 256, 512)


@pytest.fixture(scope="module")
def model():
    return llama(rope_type="default", rope_theta=10000.0)


PLAIN = {"center_keys": False, "max_score_error": 0}  # the plain codec: no key offset, no fidelity guard


@pytest.fixture(scope="module")
def calibration(model):
    return gather_calibration(model, tokens(2, 96), costs=False)


@pytest.mark.parametrize("options", [{"fresh": "codes"}, {"sink_tokens": 4, "recent_tokens": 8}])
def test_keys_take_the_matrix_of_their_position(model, calibration, options):
    """A token is rounded with the matrix of its own position, however the context is split into passes."""
    ids = tokens(2, 300)
    cache = SlimKVCache(model.config, "k4v4", **PLAIN, calibration=calibration, **options)
    exact = transformers.DynamicCache(config=model.config)
    with torch.no_grad():
        for part in ids.split([100, 170, 1, 1, 28], 1):
            model(part, past_key_values=cache)
            model(part, past_key_values=exact)
    layer = cache.layers[0]  # the first layer's keys do not depend on earlier quantisation errors
    codec, keys = layer.pool.codec, exact.layers[0].keys
    matrices = calibration.query_aware_matrices(0, codec)
    index = matrix_index(torch.arange(300), calibration.position_edges())
    assert index.unique().tolist() == [0, 1, 2]
    got = layer.keys.decoded()
    packed = slice(options.get("sink_tokens", 0), 300 - options.get("recent_tokens", 0))
    for number in range(3):
        own = (index[packed] == number).nonzero().flatten() + packed.start
        encoded = codec.encode_key(keys[:, :, own], query_aware=matrices[number][:, None])
        assert torch.allclose(got[:, :, own], codec.decode_key(encoded), atol=1e-5), number


@pytest.mark.parametrize("fresh", ["codes", "raw"])
@pytest.mark.parametrize("given", [True, False])
def test_left_padding_counts_as_in_the_model(model, calibration, fresh, given):
    """The model's position ids select the matrices of keys. Ids given here skip the padding, the default ids do not."""
    ids, mask = tokens(2, 280), torch.ones(2, 280, dtype=torch.int64)
    mask[0, :140] = 0
    positions = (mask.cumsum(-1) - 1).clamp(min=0) if given else torch.arange(280).expand(2, -1)
    cache = SlimKVCache(
        model.config, "k4v4", center_keys=False, max_score_error=0, calibration=calibration, fresh=fresh
    )
    exact = transformers.DynamicCache(config=model.config)
    with torch.no_grad(), attention(model):
        for part in (slice(0, 276), slice(276, 280)):
            asked = {"position_ids": positions[:, part]} if given else {}
            model(input_ids=ids[:, part], attention_mask=mask[:, : part.stop], past_key_values=cache, **asked)
            model(input_ids=ids[:, part], attention_mask=mask[:, : part.stop], past_key_values=exact, **asked)
    layer = cache.layers[0]
    codec, keys, got = layer.pool.codec, exact.layers[0].keys, layer.keys.decoded()
    matrices = calibration.query_aware_matrices(0, codec)
    index = matrix_index(positions.reshape(-1), calibration.position_edges()).reshape(2, -1)
    for row, first in enumerate((140, 0)):
        for number in index[row, first:].unique().tolist():
            own = (index[row, first:] == number).nonzero().flatten() + first
            encoded = codec.encode_key(keys[row, :, own], query_aware=matrices[number][:, None])
            assert torch.allclose(got[row, :, own], codec.decode_key(encoded), atol=1e-5), (row, number)


def test_a_batch_with_padding_stores_the_bytes_of_each_alone(model, calibration):
    """In ``generate`` with left padding, a prompt has the same codes as without the batch."""
    ids, mask = tokens(2, 200), torch.ones(2, 200, dtype=torch.int64)
    mask[0, :90] = 0
    together, alone = (
        SlimKVCache(model.config, "k4v4", **PLAIN, calibration=calibration, fresh="codes") for _ in range(2)
    )
    with attention(model):
        generate(model, ids, mask, together, new=2)
        generate(model, ids[:1, 90:], mask[:1, 90:], alone, new=2)
    for layer, own in zip(together.layers, alone.layers, strict=True):
        got, want = (layer.keys.decoded()[0, :, 90:200], own.keys.decoded()[0, :, :110])
        assert (got != want).float().mean() < 0.01  # GEMM rounding depends on the batch and may change a few codes


def test_a_longer_context_is_warned_of_once(model, calibration):
    short = replace(calibration, max_positions=256, _matrices={}, _warned=[])
    cache = SlimKVCache(model.config, "k4v4", max_score_error=0, calibration=short)
    ids, mask = tokens(1, 250), torch.ones(1, 250, dtype=torch.int64)
    with pytest.warns(UserWarning, match=r"valid up to position 256.*slimkv calibrate MODEL --max-positions") as seen:
        generate(model, ids, mask, cache, new=24)
    assert len([w for w in seen if "is valid up to" in str(w.message)]) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", message="a packed cache is being attended through decoded")
        generate(
            model,
            ids,
            mask,
            SlimKVCache(model.config, "k4v4", **PLAIN, calibration=calibration),
            new=4,
        )


def test_ranges_grow_with_the_position():
    edges = position_edges(131072)
    assert edges[:5] == (128, 256, 512, 1024, 1536)
    assert edges[-1] == 131072
    assert len(edges) == 20
    index = matrix_index(torch.tensor([0, 127, 128, 8191, 8192, 10**6]), edges)
    assert index.tolist() == [0, 0, 1, 11, 12, 20 - 1]
    assert index.dtype == torch.int32
    assert not Rotary.none().turns
