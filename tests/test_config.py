"""``KVCacheConfig``: its grammar, its error messages, and the queries that engines make."""

import re

import pytest

from slimkv.config import CALIBRATED, KVCacheConfig
from slimkv.errors import InputError, SlimKVError, UnsupportedError
from slimkv.spec import DEFAULT_SEED, CodecSpec, ScalePolicy


def test_defaults_and_short_form():
    assert KVCacheConfig.parse({}) == KVCacheConfig()
    assert KVCacheConfig.parse("k3v3") == KVCacheConfig(format="k3v3")
    config = KVCacheConfig("k5v5", seed=3)
    assert KVCacheConfig.parse(config) is config


def test_everything_at_once(tmp_path):
    file = tmp_path / "calibration.safetensors"
    file.write_bytes(b"")
    layers = {"7": "raw", "9-11": "k6v4", -1: "fp8"}
    found = KVCacheConfig.parse(
        {
            "format": "k5v3",
            "layers": layers,
            "fresh": "raw",
            "sink_tokens": 4,
            "recent_tokens": 64,
            "calibration": str(file),
            "key_policy": "unbiased",
            "value_policy": "plain",
            "seed": 7,
            "backend": "reference",
        }
    )
    assert (found.key_policy, found.value_policy) == (ScalePolicy.UNBIASED, ScalePolicy.PLAIN)
    assert dict(found.layers) == layers
    assert (found.sink_tokens, found.recent_tokens, found.seed, found.backend) == (4, 64, 7, "reference")
    assert list(KVCacheConfig().changed()) == []
    assert list(KVCacheConfig(seed=DEFAULT_SEED + 1, layers={0: "raw"}).changed()) == ["layers", "seed"]


def test_formats_by_layer():
    config = KVCacheConfig(layers={"0": "raw", "3-5": "k6v4", 4: "fp8", "-2--1": "raw", "-3": "k5v5", "9": "k3v3"})
    assert config.layer_formats(10) == [
        "raw", "k4v4", "k4v4", "k6v4", "fp8", "k6v4", "k4v4", "k5v5", "raw", "k3v3",
    ]  # fmt: skip
    assert config.format_of(None, 10) == config.format_of(12, 10) == "k4v4", "a drafter's own layers"
    assert KVCacheConfig(layers={"0--1": "k2v2"}).layer_formats(3) == ["k2v2"] * 3
    assert KVCacheConfig(layers={"default": "k5v5", 1: "raw"}).layer_formats(2) == ["k5v5", "raw"]


@pytest.mark.parametrize(
    ("layers", "count"), [({"9": "k3v3"}, 9), ({-9: "raw"}, 8), ({"4-8": "raw"}, 8), ({"3-2": "raw"}, 8)]
)
def test_layers_that_do_not_exist(layers, count):
    config = KVCacheConfig(layers=layers)
    with pytest.raises(InputError, match=re.escape(f"names {next(iter(layers))!r}, but the model has layers 0 to")):
        config.layer_formats(count)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"fromat": "k4v4"}, "slimkv has no setting 'fromat'; did you mean 'format'?"),
        ({"colour": "red"}, "slimkv has no setting 'colour'; known are format, layers"),
        ({"format": "k9v4"}, "unknown format 'k9v4'"),
        ({"format": "tq4"}, "unknown format 'tq4'; known are"),
        ({"format": 4}, "format must be a format name such as 'k4v4', not 4"),
        ({"format": {0: "raw"}}, "formats of single layers go into layers"),
        ({"format": CALIBRATED}, "needs a calibration made for a budget"),
        ({"layers": ["raw"]}, "layers must map layers to formats"),
        ({"layers": {"last": "raw"}}, "'last', which is neither a layer's number"),
        ({"layers": {True: "raw"}}, "True, which is neither a layer's number"),
        ({"layers": {"2": "k4"}}, "unknown format 'k4'"),
        ({"format": "k3v3", "layers": {"default": "k4v4"}}, "give one of them"),
        ({"fresh": "none"}, "fresh must be one of auto, codes, raw, not 'none'"),
        ({"prefill": "4bit"}, "prefill must be one of auto, 8bit, 16bit, not '4bit'"),
        ({"prefill": "8bit", "fresh": "raw"}, "reads every token as codes of one format"),
        ({"prefill": "8bit", "recent_tokens": 4}, "reads every token as codes of one format"),
        ({"sink_tokens": -1}, "sink_tokens must be an integer of 0 or more, not -1"),
        ({"recent_tokens": True}, "recent_tokens must be an integer of 0 or more, not True"),
        ({"fresh": "codes", "sink_tokens": 4}, "choose one"),
        ({"deterministic": 1}, "deterministic must be true or false, not 1"),
        ({"deterministic": True, "fresh": "raw"}, "fresh must be one of 'auto', 'codes', not 'raw'"),
        ({"deterministic": True, "prefill": "8bit"}, "prefill must be one of 'auto', '16bit', not '8bit'"),
        ({"deterministic": True, "recent_tokens": 4}, "recent_tokens must be one of 0, not 4"),
        ({"deterministic": True, "format": "c4"}, "not for latents, and the format is 'c4'"),
        ({"key_policy": "best"}, "unknown scale policy 'best'"),
        ({"calibration": "nowhere.safetensors"}, "calibration must be an existing file"),
        ({"calibration": 3}, "calibration must be an existing file"),
        ({"backend": "fast"}, "backend must be one of"),
    ],
)
def test_wrong_settings_are_named(given, message):
    with pytest.raises(SlimKVError, match=re.escape(message)):
        KVCacheConfig.parse(given)


def test_what_new_tokens_see():
    assert [KVCacheConfig(fresh=f).reads_fresh_raw(True) for f in ("auto", "codes", "raw")] == [False, False, True]
    assert [KVCacheConfig(fresh=f).reads_fresh_raw(False) for f in ("auto", "codes", "raw")] == [True, False, True]


def test_deterministic_reads_codes_in_sixteen_bits():
    config, spec = KVCacheConfig(deterministic=True), CodecSpec.parse("k4v4", 64)
    assert not config.reads_fresh_raw(shared_pages=False)
    assert config.prefill_of(spec, shared_pages=False) == "16bit"
    with pytest.raises(UnsupportedError, match="this model caches latents"):
        config.format_of(0, 4, latent=True)
    assert config.format_of(4, 4, latent=True) == "c4", "a drafter's layer decides nothing"


def test_an_engine_refuses_by_name():
    KVCacheConfig("k3v3").refuse("the engine", "sink_tokens")
    with pytest.raises(UnsupportedError, match="the engine does not support sink_tokens=4; leave it at 0"):
        KVCacheConfig(sink_tokens=4).refuse("the engine", "seed", "sink_tokens")


def test_something_else_altogether():
    with pytest.raises(InputError, match="a format name or a mapping of fields, not 4"):
        KVCacheConfig.parse(4)


def test_prefill_of_a_layer():
    k4v4, k5v4 = CodecSpec.parse("k4v4", 64), CodecSpec.parse("k5v4", 64)
    auto, eight = KVCacheConfig(), KVCacheConfig(prefill="8bit")
    assert auto.prefill_of(k4v4, shared_pages=True) == "16bit"  # a prefix-cache hit must give the result of a miss
    assert auto.prefill_of(k4v4, shared_pages=False) == "auto"
    assert eight.prefill_of(k4v4, shared_pages=True) == "8bit"
    assert not eight.reads_fresh_raw(shared_pages=False)
    with pytest.raises(UnsupportedError, match="prefill='8bit': 8-bit attention does not support key format 5"):
        eight.prefill_of(k5v4, shared_pages=False)


def test_its_repr_names_what_was_set():
    assert repr(KVCacheConfig()) == "KVCacheConfig()"
    assert repr(KVCacheConfig("k5v4", layers={0: "k8v8"}, seed=3)) == (
        "KVCacheConfig(format='k5v4', layers={0: 'k8v8'}, seed=3)"
    )
