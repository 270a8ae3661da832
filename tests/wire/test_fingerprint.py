"""Fingerprints: they survive a round trip, and a comparison names every difference."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from made_prompts import MODEL, fingerprint, layer

from slimkv.calibration.identity import folder_digest, parameter_digest, weights_digest
from slimkv.errors import CorruptDataError, InputError
from slimkv.spec import CodecSpec, LatentSpec
from slimkv.wire import Fingerprint, LayerFingerprint
from slimkv.wire.model import model_fields


def test_a_fingerprint_survives_a_round_trip():
    mark = fingerprint(layer(3, "fp8", window=48), layer(1, "k3v2"))
    again = Fingerprint.from_json(mark.to_json(), "here")
    assert again == mark
    assert again.hash == mark.hash
    assert [x.number for x in again.layers] == [1, 3]


@pytest.mark.parametrize(
    ("other", "named"),
    [
        (fingerprint(layer(0), layer(1, "k4v4")), "format of layer 1 is k5v3, not k4v4"),
        (fingerprint(layer(0)), "layers with packed pages are 2"),
        (fingerprint(layer(0, heads=4), layer(1, "k5v3")), "num_kv_heads of layer 0 is 2, not 4"),
        (fingerprint(layer(0, dim=64), layer(1, "k5v3")), "key_dim of layer 0 is 32, not 64"),
        (fingerprint(layer(0, window=64), layer(1, "k5v3")), "window of layer 0 is None, not 64"),
        (
            fingerprint(replace(layer(0), key_offset="ab" * 16), layer(1, "k5v3")),
            f"key_offset of layer 0 is none, not {'ab' * 16}",
        ),
        (fingerprint(replace(layer(0), token_rows=True), layer(1, "k5v3")), "token_rows of layer 0 is False, not True"),
        (fingerprint(replace(layer(0), index_bytes=132), layer(1, "k5v3")), "index_bytes of layer 0 is 0, not 132"),
        (fingerprint(block_size=32), "block size is 16, not 32"),
        (fingerprint(seed=7), "seed is 81, not 7"),
        (fingerprint(dtype="bfloat16"), "dtype is float32, not bfloat16"),
        (fingerprint(weights="cd" * 32), "weights are abababababab, not cdcdcdcdcdcd"),
        (fingerprint(model={**MODEL, "hidden_size": 128}), "model hidden_size is 64, not 128"),
        (fingerprint(model={**MODEL, "rope": {"rope_theta": 5e5}}), "model rope is"),
        (replace(fingerprint(), layout_version=2), "layout version is 1, not 2"),
        (replace(fingerprint(), codebook="ef" * 32), "codebook is"),
    ],
)
def test_every_difference_is_refused_by_name(other, named):
    mark = fingerprint()
    mark.check_same(fingerprint(), "it")
    assert mark.hash != other.hash
    with pytest.raises(InputError, match=f"(?s)the store .*{named}"):
        mark.check_same(other, "the store")


def test_formats_are_compared_by_what_they_mean():
    spelled = [LayerFingerprint.of(0, CodecSpec.parse(x, 32), 2, "float32") for x in ("fp8", "kfp8vfp8")]
    assert spelled[0] == spelled[1]
    raw = LayerFingerprint.of(0, CodecSpec.parse("raw", 32), 2, "float32")
    assert raw == LayerFingerprint.of(0, CodecSpec.parse("krawfp32vrawfp32", 32), 2, "bfloat16")
    assert raw != LayerFingerprint.of(0, CodecSpec.parse("raw", 32), 2, "bfloat16")
    rounded = CodecSpec.parse("k4v4", 32, key_policy="unbiased")
    assert LayerFingerprint.of(0, rounded, 2, "float32") == layer(0)


def test_the_rotation_and_the_levels_are_part_of_it():
    assert fingerprint(seed=1).codebook != fingerprint(seed=2).codebook
    plain = layer(0, "fp8")
    assert fingerprint(plain, seed=1).codebook == fingerprint(plain, seed=2).codebook, "fp8 is not rotated"


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"version": 3}', '{"version": 3, "layers": 3}'])
def test_what_is_no_fingerprint_is_refused(text):
    with pytest.raises(CorruptDataError, match="here contains no slimkv fingerprint"):
        Fingerprint.from_json(text, "here")


@pytest.mark.parametrize("version", [2, 4])
def test_another_version_is_refused(version):
    with pytest.raises(InputError, match=f"version {version}"):
        Fingerprint.from_json(f'{{"version": {version}}}', "here")


def test_rope_in_any_spelling_is_one_rope():
    new = {"model_type": "llama", "rope_parameters": {"rope_theta": 1e4, "rope_type": "default"}}
    old = {"model_type": "llama", "rope_theta": 10000, "rope_scaling": {"type": "default"}}
    assert model_fields(new) == model_fields(old)
    assert model_fields(new) != model_fields({**old, "rope_theta": 500000})
    assert model_fields({"model_type": "x", "text_config": old})["rope"] == model_fields(old)["rope"]


def test_latents_belong_to_the_engine_that_orders_their_rope_part():
    """All engines order the rope part of DeepSeek V2 alike (vLLM only renames its YaRN), but not that of V3."""
    v2, v3 = ({"model_type": name, "kv_lora_rank": 512} for name in ("deepseek_v2", "deepseek_v3"))
    yarn = (
        {"rope_parameters": {"rope_type": "yarn", "factor": 4}},
        {"rope_parameters": {"rope_type": "deepseek_yarn", "factor": 4}},
    )
    assert model_fields({**v2, **yarn[0]}, "transformers") == model_fields({**v2, **yarn[1]}, "vLLM")
    assert model_fields(v3, "transformers")["latents_of"] == "transformers"
    assert model_fields(v3, "vLLM") != model_fields(v3, "transformers")
    assert "latents_of" not in model_fields({"model_type": "llama"}, "vLLM")


def test_latents_in_token_rows_with_the_keys_of_an_indexer():
    mark = LayerFingerprint.of(0, LatentSpec.parse("c4"), 1, "bfloat16", token_rows=True, index_bytes=132)
    assert mark.format == "c4rrawbf16"
    assert mark.layout(0, 64).token_rows
    assert mark.page_bytes(0, 64) == 64 * (386 + 132)
    again = Fingerprint.from_json(fingerprint(mark).to_json(), "here")
    assert again.layers == (mark,)
    with pytest.raises(CorruptDataError, match="token_rows 'x'"):
        Fingerprint.from_json(fingerprint(mark).to_json().replace("true", '"x"'), "here")


def test_another_checkpoint_gives_another_digest(tmp_path):
    (tmp_path / "a.safetensors").write_bytes(bytes(range(256)) * 4096)
    first = folder_digest(tmp_path)
    assert first == folder_digest(tmp_path) == weights_digest(str(tmp_path))
    (tmp_path / "a.safetensors").write_bytes(bytes(reversed(range(256))) * 4096)
    assert folder_digest(tmp_path) != first
    (tmp_path / "empty").mkdir()
    assert weights_digest(str(tmp_path / "empty")) is None
    with pytest.raises(InputError, match="no weight files"):
        folder_digest(tmp_path / "empty")


def test_weights_in_memory_have_a_digest():
    module = torch.nn.Linear(8, 8)
    first = parameter_digest(module.named_parameters())
    assert first == parameter_digest(module.named_parameters())
    with torch.no_grad():
        module.bias += 1
    assert parameter_digest(module.named_parameters()) != first
