"""Calibration files: incomplete ones, altered ones and those of another model are refused."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from slimkv.calibration import Calibration, ModelIdentity
from slimkv.calibration.statistics import pack_moments, unpack_moments
from slimkv.errors import CorruptDataError, InputError, UnsupportedError


@pytest.fixture
def path(calibration, tmp_path):
    calibration.with_formats({0: "k3v3", 1: "k4v4", 2: "k5v4"}, seed=7).save(tmp_path / "a" / "model.safetensors")
    return tmp_path / "a" / "model.safetensors"


def rewrite(path, change_header=None, change_tensors=None):
    with safe_open(path, "pt") as file:
        header, tensors = file.metadata(), {k: file.get_tensor(k) for k in file.keys()}  # noqa: SIM118
    if change_header:
        change_header(header)
    if change_tensors:
        change_tensors(tensors)
    save_file(tensors, path, metadata=header)


def test_what_is_saved_is_loaded(calibration, path):
    loaded = Calibration.load(path)
    assert (loaded.identity, loaded.source, loaded.seed) == (calibration.identity, "nothing", 7)
    assert loaded.formats == {0: "k3v3", 1: "k4v4", 2: "k5v4"}
    assert list(loaded.layers) == [0, 1, 2]
    for number, layer in calibration.layers.items():
        again = loaded.layers[number]
        scale = layer.query_moment.diagonal(dim1=-2, dim2=-1).mean()
        assert (again.query_moment - layer.query_moment).abs().max() < 2e-3 * scale
        assert torch.equal(again.query_moment, again.query_moment.mT)
        assert torch.equal(again.key_weight, layer.key_weight)
        assert again.value_dim == 32
    assert loaded.max_positions == 4096
    assert [p.name for p in path.parent.iterdir()] == ["model.safetensors"]


def test_statistics_without_costs_are_kept_as_such(calibration, tmp_path):
    from dataclasses import replace

    bare = {k: replace(v, key_weight=None, value_weight=None) for k, v in calibration.layers.items()}
    replace(calibration, layers=bare).save(tmp_path / "c")
    assert Calibration.load(tmp_path / "c").layers[0].key_weight is None


def test_packed_moments_take_a_triangle_of_half_precision():
    moments = torch.tensor([[[4.0, 1.0], [1.0, 2.0]], [[0.0, 0.0], [0.0, 0.0]]], dtype=torch.float64)
    packed, scale = pack_moments(moments)
    assert (packed.shape, packed.dtype, scale.tolist()) == ((2, 3), torch.float16, [3.0, 0.0])
    assert (unpack_moments(packed, scale) - moments).abs().max() < 2e-3
    with pytest.raises(InputError, match="not the triangle"):
        unpack_moments(torch.zeros(1, 5), torch.ones(1))


@pytest.mark.parametrize("keep", [0, 7, 200, -1])
def test_a_truncated_file_is_refused(path, keep):
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(CorruptDataError, match="not a complete calibration file"):
        Calibration.load(path)


def test_an_altered_number_is_refused(path):
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(data)
    with pytest.raises(CorruptDataError, match="altered: its checksum does not match"):
        Calibration.load(path)


def test_an_altered_header_is_refused(path):
    def change(header):
        about = json.loads(header["about"])
        about["formats"]["0"] = "k2v2"
        header["about"] = json.dumps(about)

    rewrite(path, change)
    with pytest.raises(CorruptDataError, match="altered"):
        Calibration.load(path)


def test_other_files_are_refused_by_name(path, tmp_path):
    rewrite(path, lambda header: header.update(version="99"))
    with pytest.raises(
        UnsupportedError, match="version 99; this slimkv reads version 3: make it again with slimkv calibrate MODEL"
    ):
        Calibration.load(path)
    save_file({"x": torch.zeros(1)}, tmp_path / "other", metadata={"format": "pt"})
    with pytest.raises(CorruptDataError, match="not a slimkv-calibration: its format is pt"):
        Calibration.load(tmp_path / "other")
    with pytest.raises(InputError, match="there is no calibration file"):
        Calibration.load(tmp_path / "missing")


def test_another_model_is_refused_and_the_difference_named(calibration, config):
    calibration.check_model(config)
    calibration.check_model({"text_config": config, "model_type": "llava"})
    calibration.check_model(SimpleNamespace(to_dict=lambda: {**config, "transformers_version": "6.0"}))
    with pytest.raises(InputError, match=r"num_key_value_heads is 4, the calibration has 2.*run slimkv calibrate"):
        calibration.check_model({**config, "num_key_value_heads": 4})
    assert ModelIdentity.of(config).hash != ModelIdentity.of({**config, "hidden_size": 128}).hash


def test_an_engine_may_write_out_what_a_configuration_leaves_to_its_default():
    short = {"model_type": "qwen2", "hidden_size": 1536, "num_attention_heads": 12, "num_hidden_layers": 28}
    written = {**short, "head_dim": 128, "num_key_value_heads": 12}
    ModelIdentity.of(short).check_same(ModelIdentity.of(written), "file")
    ModelIdentity.from_fields(written).check_same(ModelIdentity.of(short), "file")
    for other in ({"head_dim": 64}, {"num_key_value_heads": 2}):
        with pytest.raises(InputError, match=next(iter(other))):
            ModelIdentity.of(short).check_same(ModelIdentity.of({**written, **other}), "file")
