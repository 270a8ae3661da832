"""Files of one chunk of packed blocks each, checked to the last bit: the disk behind an engine's host memory.

A file is the bytes of the chunk and a trailer: a digest of them, of which chunk they are and of what they mean (the
fingerprint). A file that was cut, altered, renamed or written by another cache is removed and its chunk is a miss. A
file has its name only once it is whole, so that a full disk or a killed process leaves none that is not.
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
STALE_SECONDS = 3600.0  # an unfinished file of that age has no writer any more


def trailer(chunk: memoryview, key: bytes, fingerprint: str) -> bytes:
    """The footer after the bytes of a chunk."""
    digest = hashlib.blake2b(key, digest_size=DIGEST_BYTES, person=b"slimkv cold")
    digest.update(fingerprint.encode())
    digest.update(chunk)
    return MAGIC + digest.digest()


def store_file(path: str, chunk: memoryview, key: bytes, fingerprint: str) -> None:
    """Writes a chunk unless it is there; raises ``OSError`` where the disk does not take it, and leaves nothing."""
    if os.path.exists(path):
        return
    with whole_file(Path(path)) as unfinished, open(unfinished, "wb", buffering=0) as file:
        for part in (chunk, memoryview(trailer(chunk, key, fingerprint))):
            while part:
                part = part[file.write(part) :]


def load_file(path: str, chunk: memoryview, key: bytes, fingerprint: str) -> None:
    """Reads a chunk; raises ``OSError`` where the file is not whole and this cache's, and removes it."""
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
        raise OSError(f"{path} is damaged or another cache's; it was removed")


def remove_unfinished(folder: str | Path) -> None:
    """Takes away what killed writers of ``whole_file`` left in ``folder``, once none can be at it any more."""
    for path in Path(folder).rglob(".*.bin.*"):
        with suppress(OSError):
            if time.time() - path.stat().st_mtime > STALE_SECONDS:
                path.unlink()
