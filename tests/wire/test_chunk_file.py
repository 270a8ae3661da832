"""Chunk files: a load returns what was stored, or nothing. For random faults, see tests/test_store_faults.py."""

from __future__ import annotations

import os
import random
import time
from pathlib import Path

import pytest

from slimkv.wire.chunk_file import STALE_SECONDS, TRAILER_BYTES, load_file, remove_unfinished, store_file

SIZE = 5000
MARK = "ab" * 32


def chunk(seed: int, size: int = SIZE) -> memoryview:
    return memoryview(bytearray(random.Random(seed).randbytes(size)))


def load(path: Path, key: bytes, mark: str = MARK, size: int = SIZE) -> bytes | None:
    """The bytes that a cold tier gets; None is a miss."""
    into = memoryview(bytearray(size))
    try:
        load_file(str(path), into, key, mark)
    except OSError:
        return None
    return bytes(into)


def test_a_chunk_comes_back(tmp_path):
    path = tmp_path / "a" / "b" / "chunk.bin"
    store_file(str(path), chunk(1), b"key", MARK)
    assert load(path, b"key") == bytes(chunk(1))
    assert path.stat().st_size == SIZE + TRAILER_BYTES
    store_file(str(path), chunk(2), b"key", MARK)  # it exists already: the first chunk stays
    assert load(path, b"key") == bytes(chunk(1))


@pytest.mark.parametrize("other", [(b"other", MARK), (b"key", "cd" * 32)], ids=["renamed", "another cache's"])
def test_another_chunk_is_a_miss(tmp_path, other):
    path = tmp_path / "chunk.bin"
    store_file(str(path), chunk(1), b"key", MARK)
    assert load(path, *other) is None
    assert not path.exists()


def test_a_writer_that_is_killed_leaves_what_is_taken_away_later(tmp_path, monkeypatch):
    path = tmp_path / "chunk.bin"
    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", lambda *names: os._exit(0))  # killed before the file gets its final name
        child = os.fork()
        if child == 0:
            store_file(str(path), chunk(1), b"key", MARK)
        os.waitpid(child, 0)
    left = list(tmp_path.iterdir())
    assert len(left) == 1
    remove_unfinished(tmp_path)
    assert list(tmp_path.iterdir()) == left  # it may still have a writer
    os.utime(left[0], (0, time.time() - STALE_SECONDS - 1))
    remove_unfinished(tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_failed_write_leaves_nothing(tmp_path, monkeypatch):
    def full(*names):
        raise OSError(28, "No space left on device")

    path = tmp_path / "chunk.bin"
    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", full)
        with pytest.raises(OSError, match="No space"):
            store_file(str(path), chunk(1), b"key", MARK)
    assert not list(tmp_path.iterdir())
    assert load(path, b"key") is None
