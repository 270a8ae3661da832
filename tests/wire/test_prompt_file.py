"""Prompt-cache files: what is written is read, and anything else is refused."""

from __future__ import annotations

import json
import os
import random
import stat

import pytest
import torch
from made_prompts import fingerprint, layer, prompt
from safetensors.torch import load_file, save_file

from slimkv.errors import CorruptDataError, InputError, SlimKVError, UnsupportedError
from slimkv.wire import LayerPages, PromptCache
from slimkv.wire.prompt_file import block_hashes, read_header, read_pages, verify


@pytest.fixture
def saved(tmp_path):
    cache = prompt()
    return cache, cache.save(tmp_path / "prompt.safetensors", "a test")


def same(one: PromptCache, other: PromptCache) -> bool:
    pages = all(torch.equal(one.layers[n].pages, other.layers[n].pages) for n in one.layers)
    return pages and (one.fingerprint, one.tokens) == (other.fingerprint, other.tokens)


def test_what_is_written_is_read(saved):
    cache, path = saved
    assert same(PromptCache.load(path), cache)
    header = verify(path)
    assert (header.num_tokens, header.writer) == (40, "a test")
    assert len(header.block_hashes) == 3, "two whole blocks and a part of one"
    assert stat.S_IMODE(path.stat().st_mode) == 0o644
    assert os.listdir(path.parent) == [path.name], "nothing is left beside it"


def test_some_heads_and_layers_can_be_read(saved):
    cache, path = saved
    tokens, pages = read_pages(read_header(path), {1: slice(1, 2)})
    assert tokens == cache.tokens
    assert list(pages) == [1]
    assert torch.equal(pages[1], cache.layers[1].pages[:, 1:2])


def test_equal_caches_give_equal_files(saved, tmp_path):
    cache, path = saved
    assert cache.save(tmp_path / "again.safetensors", "a test").read_bytes() == path.read_bytes()


def test_any_flipped_bit_is_refused(saved):
    """The checksum covers every bit of the file: lengths, header, padding, checksum, data."""
    _, path = saved
    whole, source = path.read_bytes(), random.Random(0)
    header = 8 + int.from_bytes(whole[:8], "little")
    places = [source.randrange(8 * len(whole)) for _ in range(600)]
    places += [source.randrange(8 * header) for _ in range(400)]
    for place in places:
        flipped = bytearray(whole)
        flipped[place // 8] ^= 1 << place % 8
        path.write_bytes(flipped)
        with pytest.raises(SlimKVError):
            PromptCache.load(path)
    path.write_bytes(whole)
    PromptCache.load(path)


def test_a_truncated_or_extended_file_is_refused(saved):
    _, path = saved
    whole = path.read_bytes()
    for size in [0, 1, 7, 8, 9, 100, *range(200, len(whole), 997), len(whole) - 1]:
        path.write_bytes(whole[:size])
        with pytest.raises(CorruptDataError):
            PromptCache.load(path)
    path.write_bytes(whole + b"\0")
    with pytest.raises(CorruptDataError):
        PromptCache.load(path)


def test_other_files_are_refused(tmp_path):
    path = tmp_path / "x.safetensors"
    with pytest.raises(InputError, match="no prompt-cache file"):
        read_header(path)
    save_file({"a": torch.zeros(3)}, path)
    with pytest.raises(CorruptDataError, match="not a slimkv prompt cache"):
        read_header(path)
    save_file({"a": torch.zeros(3)}, path, metadata={"slimkv-prompt-cache": '{"version": 1}'})
    with pytest.raises(UnsupportedError, match="version 1"):
        read_header(path)
    for about in ('{"version": 2}', "[]", "x", '{"version": 2, "fingerprint": {"version": 3}}'):
        save_file({"a": torch.zeros(3)}, path, metadata={"slimkv-prompt-cache": about})
        with pytest.raises(CorruptDataError):
            read_header(path)


def test_tokens_must_belong_to_the_block_hashes(saved):
    """The file has other tokens and a recomputed checksum."""
    from slimkv.wire.prompt_file import _raw_header, _sign

    _, path = saved
    metadata = {"slimkv-prompt-cache": json.dumps(_raw_header(path)[1], sort_keys=True, separators=(",", ":"))}
    tensors = load_file(path)
    tensors["tokens"][0] += 1
    save_file(tensors, path, metadata=metadata)
    _sign(path)
    with pytest.raises(CorruptDataError, match="block hashes"):
        PromptCache.load(path)


def test_hashes_are_chained():
    mark = fingerprint()
    tokens = list(range(64))
    whole = block_hashes(mark, tokens)
    assert block_hashes(mark, tokens[:32]) == whole[:2]
    assert block_hashes(mark, [9, *tokens[1:]])[3] != whole[3], "a block's hash knows all tokens before it"
    assert block_hashes(fingerprint(seed=3), tokens)[0] != whole[0], "and what the bytes mean"


def test_pages_must_fit_the_fingerprint():
    cache = prompt()
    with pytest.raises(InputError, match="at least one token"):
        PromptCache(cache.fingerprint, (), cache.layers)
    with pytest.raises(InputError, match="exactly the layers"):
        PromptCache(cache.fingerprint, cache.tokens, {0: cache.layers[0]})
    with pytest.raises(InputError, match="layer 0 has pages"):
        PromptCache(cache.fingerprint, (*cache.tokens, *range(10)), cache.layers)
    with pytest.raises(InputError, match="layer 0 has pages"):
        PromptCache(cache.fingerprint, cache.tokens, {**cache.layers, 0: LayerPages(cache.layers[0].pages.int())})


def test_a_sliding_layer_keeps_what_its_window_needs(tmp_path):
    mark = fingerprint(layer(0), layer(1, window=17))
    with pytest.raises(InputError, match="lacks tokens before 25"):
        prompt(mark, 40, {1: 25})
    header = read_header(prompt(mark, 40, {1: 24}).save(tmp_path / "a.safetensors"))
    assert header.reusable_tokens(40) == 0, "after 32 tokens the window begins at 16, whose block is there but not it"
    header = read_header(prompt(mark, 48, {1: 32}).save(tmp_path / "b.safetensors"))
    assert header.reusable_tokens(100) == 48
    header = read_header(prompt(mark, 48).save(tmp_path / "c.safetensors"))
    assert [header.reusable_tokens(n) for n in (15, 16, 33, 48)] == [0, 16, 32, 48]


def test_an_interrupted_write_leaves_nothing(tmp_path, monkeypatch):
    def broken(*args, **kwargs):
        raise OSError("disk full")

    path = prompt().save(tmp_path / "a.safetensors")
    before = path.read_bytes()
    monkeypatch.setattr(os, "replace", broken)
    with pytest.raises(OSError, match="disk full"):
        prompt(seed=1).save(path)
    assert os.listdir(tmp_path) == ["a.safetensors"]
    assert path.read_bytes() == before
