"""The prompt store: a folder that several processes share, marked with a fingerprint and searched by tokens."""

from __future__ import annotations

from dataclasses import replace

import pytest
from made_prompts import fingerprint, layer, prompt, with_tokens

from slimkv.errors import CorruptDataError, InputError
from slimkv.wire import PromptStore, check_marker
from slimkv.wire.store import MARKER


def test_the_first_process_marks_an_empty_folder(tmp_path):
    folder = tmp_path / "new"
    check_marker(folder, fingerprint())
    check_marker(folder, fingerprint())
    with pytest.raises(InputError, match="seed is 81, not 7"):
        check_marker(folder, fingerprint(seed=7))
    with pytest.raises(InputError, match="layout version is 1, not 2"):
        check_marker(folder, replace(fingerprint(), layout_version=2))
    assert [p.name for p in folder.iterdir()] == [MARKER]


def test_contents_without_a_marker_are_refused(tmp_path):
    (tmp_path / "something").touch()
    with pytest.raises(InputError, match="contains files but no fingerprint"):
        check_marker(tmp_path, fingerprint())
    (tmp_path / MARKER).write_text("{")
    with pytest.raises(CorruptDataError, match="contains no slimkv fingerprint"):
        check_marker(tmp_path, fingerprint())


def test_the_longest_shared_prefix_is_found(tmp_path):
    store = PromptStore(tmp_path, fingerprint())
    assert store.find(range(100, 200)) is None
    short, long = prompt(tokens=32), prompt(tokens=70)
    store.save(short, "x")
    found = store.find(range(100, 200))
    assert found is not None
    assert found.tokens == 32
    assert store.save(long, "x") == store.save(long, "x")
    assert store.find(range(100, 200)).tokens == 64, "whole blocks only"
    assert store.find([*range(100, 150), 7, 7]).tokens == 48, "a part of a longer prompt"
    assert store.find([7, *range(101, 200)]) is None
    assert store.find(range(100, 115)) is None, "less than a block"
    other = PromptStore(tmp_path, fingerprint())
    assert other.find(range(100, 200)).header.path == store.path_of(long.tokens)


def test_damaged_and_foreign_files_are_never_matched(tmp_path):
    store = PromptStore(tmp_path, fingerprint())
    path = store.save(prompt(tokens=32), "x")
    prompt(fingerprint(seed=9), 48).save(tmp_path / "foreign.safetensors")
    assert store.find(range(100, 200)).tokens == 32
    assert "seed is 9, not 81" in store.refused["foreign.safetensors"]
    whole = path.read_bytes()
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    assert store.find(range(100, 200)) is None
    assert "checksum" in store.refused[path.name]
    path.unlink()
    store.save(prompt(tokens=32), "x")
    assert store.find(range(100, 200)).tokens == 32
    assert path.name not in store.refused


def test_a_prompt_of_another_cache_is_not_saved(tmp_path):
    store = PromptStore(tmp_path, fingerprint())
    with pytest.raises(InputError, match="seed"):
        store.save(prompt(fingerprint(seed=9)), "x")


def test_a_window_that_lost_its_blocks_is_no_match(tmp_path):
    mark = fingerprint(layer(0), layer(1, window=20))
    store = PromptStore(tmp_path, mark)
    store.save(prompt(mark, 48, {1: 29}), "x")
    assert store.find(range(100, 200)).tokens == 48
    assert store.find([*range(100, 140), 0]) is None, "at 32 tokens the sliding layer needs block 0"


def test_saving_and_finding_do_not_depend_on_the_type_of_tokens(tmp_path):
    store = PromptStore(tmp_path, fingerprint())
    store.save(with_tokens(prompt(tokens=32), tuple(range(32))), "x")
    assert store.find(tuple(range(32))).tokens == 32
