"""The ``slimkv`` entry of vLLM's additional config; no vLLM needed."""

import re

import pytest

from slimkv.errors import InputError, SlimKVError
from slimkv.integrations.vllm.plugin import BACKEND, ON_CPU
from slimkv.integrations.vllm.settings import Settings, parse, wanted
from slimkv.spec import ScalePolicy


def settings(**given):
    return parse({"slimkv": given})


def test_defaults_and_short_form():
    assert settings() == Settings()
    assert parse({"slimkv": "k3v3"}) == settings(format="k3v3")


def test_everything_at_once(tmp_path):
    file = tmp_path / "calibration.json"
    file.write_text("{}")
    layers = {"7": "raw", "9-11": "k6v4", "-1": "fp8"}
    found = settings(
        format="k5v3", first_layers=2, last_layers=1, edge_format="fp8", layers=layers, fresh="raw",
        key_policy="unbiased", value_policy="plain", calibration=str(file), impl="reference",
    )  # fmt: skip
    ranges = ((7, 7, "raw"), (9, 11, "k6v4"), (-1, -1, "fp8"))
    policies = ScalePolicy.UNBIASED, ScalePolicy.PLAIN
    assert found == Settings("k5v3", 2, 1, "fp8", ranges, "raw", *policies, file, "reference")


def test_formats_by_layer():
    found = settings(first_layers=1, last_layers=2, layers={"3-5": "k6v4", "4": "k8v4", "-3": "k5v5", "9": "k3v3"})
    assert [found.format_of(i, 10) for i in range(10)] == [
        "raw", "k4v4", "k4v4", "k6v4", "k8v4", "k6v4", "k4v4", "k5v5", "raw", "k3v3",
    ]  # fmt: skip
    assert found.format_of(None, 10) == found.format_of(12, 10) == "k4v4", "a drafter's own layers"
    found.check_layers(10)
    with pytest.raises(InputError, match=r"layer 9 is to be stored as k3v3, but the model has layers 0 to 8"):
        found.check_layers(9)
    with pytest.raises(InputError, match="layer -9 is to be stored"):
        settings(layers={"-9": "raw"}).check_layers(8)
    with pytest.raises(InputError, match="first 3 and the last 3 layers are more than the model's 5"):
        settings(first_layers=3, last_layers=3).check_layers(5)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"fromat": "k4v4"}, "unknown setting 'fromat'; did you mean 'format'?"),
        ({"colour": "red"}, "unknown setting 'colour'"),
        ({"format": "k9v4"}, "unknown format 'k9v4'"),
        ({"format": 4}, "format must be a format word such as k4v4, not 4"),
        ({"first_layers": -1}, "first_layers must be a number of layers, not -1"),
        ({"last_layers": True}, "last_layers must be a number of layers, not True"),
        ({"layers": ["raw"]}, "layers must map layers to formats"),
        ({"layers": {"2-1": "raw"}}, "'2-1', which is neither a layer's number nor a range"),
        ({"layers": {"last": "raw"}}, "'last', which is neither"),
        ({"layers": {"2": "k4"}}, "unknown format 'k4'"),
        ({"fresh": "none"}, "fresh must be one of codes, raw, not 'none'"),
        ({"key_policy": "best"}, "unknown scale policy 'best'"),
        ({"calibration": "nowhere.json"}, "calibration must name an existing file, not 'nowhere.json'"),
        ({"impl": "fast"}, "impl must be one of"),
    ],
)
def test_wrong_settings_are_named(given, message):
    with pytest.raises(SlimKVError, match=re.escape(message)):
        settings(**given)


@pytest.mark.parametrize("config", [None, {}, {"other": {}}, "slimkv"])
def test_without_an_entry(config):
    assert not wanted(config)
    with pytest.raises(InputError, match="has no 'slimkv' entry; use --attention-backend CUSTOM"):
        parse(config)


def test_an_entry_of_the_wrong_kind():
    with pytest.raises(InputError, match="must be an object or a format word, not 4"):
        parse({"slimkv": 4})


def test_the_plugin_names_what_exists():
    """Read from the files, since importing them needs vLLM."""
    from importlib.metadata import entry_points
    from importlib.util import find_spec
    from pathlib import Path

    (entry,) = [e for e in entry_points(group="vllm.general_plugins") if e.name == "slimkv"]
    assert entry.value == "slimkv.integrations.vllm.plugin:register"
    for path in (BACKEND, ON_CPU):
        module, _, name = path.rpartition(".")
        assert name in Path(find_spec(module).origin).read_text()
