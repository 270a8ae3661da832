"""The ``slimkv`` entry of vLLM's additional config. vLLM is not needed here."""

import re

import pytest

from slimkv.config import KVCacheConfig
from slimkv.errors import InputError, SlimKVError
from slimkv.integrations.vllm import plugin
from slimkv.integrations.vllm.settings import parse, wanted


def test_the_entry_is_the_one_configuration():
    assert parse({"slimkv": {}}) == KVCacheConfig()
    assert parse({"slimkv": "k3v3"}) == KVCacheConfig(format="k3v3")
    assert parse({"slimkv": {"format": "k5v3", "layers": {"-1": "raw"}}}) == KVCacheConfig("k5v3", {"-1": "raw"})


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"sink_tokens": 4}, "vLLM does not support sink_tokens=4; leave it at 0"),
        ({"recent_tokens": 64}, "vLLM does not support recent_tokens=64"),
        ({"memory": "1GiB"}, "vLLM does not support memory=1073741824"),
        ({"age": {"64": "k4v4"}}, "vLLM does not support age={64: 'k4v4'}"),
        ({"fromat": "k4v4"}, "did you mean 'format'?"),
    ],
)
def test_what_vllm_cannot_do_is_named(given, message):
    with pytest.raises(SlimKVError, match=re.escape(message)):
        parse({"slimkv": given})


@pytest.mark.parametrize("config", [None, {}, {"other": {}}, "slimkv"])
def test_without_an_entry(config):
    assert not wanted(config)
    with pytest.raises(InputError, match="has no 'slimkv' entry; use --attention-backend CUSTOM"):
        parse(config)


def test_an_entry_of_the_wrong_kind():
    with pytest.raises(InputError, match="a format name or a mapping of fields, not 4"):
        parse({"slimkv": 4})


def test_the_plugin_is_found_and_has_no_other_attributes():
    from importlib.metadata import entry_points

    (entry,) = [e for e in entry_points(group="vllm.general_plugins") if e.name == "slimkv"]
    assert entry.load() is plugin.register
    with pytest.raises(AttributeError, match="has no attribute 'FLASH_ATTN'"):
        _ = plugin.FLASH_ATTN
