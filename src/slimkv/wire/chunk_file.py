"""One file per chunk of packed blocks, with a digest: the disk tier behind an engine's host memory.

A file contains the bytes of the chunk and a trailer: a digest of the bytes, the chunk's key and the fingerprint. A file
that was truncated, altered, renamed or written by another cache is removed, and its chunk is a miss. A file gets its
name when it is complete, so a full disk or a killed process leaves no partial file behind.
"""

from __future__ import annotations

import hashlib
import os
import time
from contextlib import suppress
from pathlib import Path

from slimkv.paths import whole_file

MAGIC = b"slimkv cold 1\n\0\0"
DIGEST_BYTES = 32
TRAILER_BYTES = len(MAGIC) + DIGEST_BYTES
STALE_SECONDS = 3600.0  # unfinished files older than this are abandoned


def trailer(chunk: memoryview, key: bytes, fingerprint: str) -> bytes:
    """The bytes that follow a chunk in its file."""
    digest = hashlib.blake2b(key, digest_size=DIGEST_BYTES, person=b"slimkv cold")
    digest.update(fingerprint.encode())
    digest.update(chunk)
    return MAGIC + digest.digest()


def store_file(path: str, chunk: memoryview, key: bytes, fingerprint: str) -> None:
    """Writes a chunk unless its file exists; raises ``OSError`` and leaves no file if writing fails."""
    if os.path.exists(path):
        return
    with whole_file(Path(path)) as unfinished, open(unfinished, "wb", buffering=0) as file:
        for part in (chunk, memoryview(trailer(chunk, key, fingerprint))):
            while part:
                part = part[file.write(part) :]


def load_file(path: str, chunk: memoryview, key: bytes, fingerprint: str) -> None:
    """Reads a chunk; raises ``OSError`` and removes the file if it is damaged or belongs to another cache."""
    with open(path, "rb", buffering=0) as file:
        whole = os.fstat(file.fileno()).st_size == len(chunk) + TRAILER_BYTES
        rest = chunk
        while whole and rest:
            count = file.readinto(rest)
            whole, rest = bool(count), rest[count:]
        whole = whole and file.read(TRAILER_BYTES) == trailer(chunk, key, fingerprint)
    if not whole:
        with suppress(OSError):
            os.unlink(path)
        raise OSError(f"{path} is damaged or belongs to another cache; it was removed")


def remove_unfinished(folder: str | Path) -> None:
    """Removes stale temporary files of ``whole_file`` that killed writers left in ``folder``."""
    for path in Path(folder).rglob(".*.bin.*"):
        with suppress(OSError):
            if time.time() - path.stat().st_mtime > STALE_SECONDS:
                path.unlink()
