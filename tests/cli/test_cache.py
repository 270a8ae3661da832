"""``slimkv cache info`` and ``verify`` on intact files, damaged files and files of another kind."""

from __future__ import annotations

import json

import pytest
import torch
from typer.testing import CliRunner

from slimkv.cli.app import app
from slimkv.spec import CodecSpec
from slimkv.wire import Fingerprint, LayerFingerprint, LayerPages, PromptCache


@pytest.fixture
def file(tmp_path):
    layers = [LayerFingerprint.of(i, CodecSpec.parse("k4v4", 32), 2, "bfloat16") for i in range(2)]
    mark = Fingerprint.of(
        layers, block_size=16, seed=1, dtype="bfloat16", model={"model_type": "llama"}, weights="0" * 64
    )
    page = layers[0].layout(1, 16).page_bytes
    pages = {i: LayerPages(torch.zeros(2, 2, page, dtype=torch.uint8)) for i in range(2)}
    return PromptCache(mark, tuple(range(20)), pages).save(tmp_path / "p.safetensors", "a test")


def run(*arguments):
    return CliRunner().invoke(app, ["cache", *map(str, arguments)])


def test_info_says_what_a_file_holds(file):
    facts = json.loads(run("info", file, "--json").stdout)
    assert (facts["tokens"], facts["formats"], facts["writer"]) == (20, {"k4v4": 2}, "a test")
    assert facts["bytes"] == file.stat().st_size
    assert "k4v4" in run("info", file).stdout


def test_verify_finds_a_flipped_bit(file):
    assert json.loads(run("verify", file, "--json").stdout)["whole"] is True
    assert "is whole" in run("verify", file).stdout
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    result = run("verify", file)
    assert result.exit_code == 2
    assert "altered" in result.output


@pytest.mark.parametrize("command", ["info", "verify"])
def test_other_files_are_refused(command, tmp_path):
    (tmp_path / "x").write_text("hello, this is no such file")
    for name in ("x", "absent"):
        result = run(command, tmp_path / name)
        assert result.exit_code == 2
        assert "error" in result.output
