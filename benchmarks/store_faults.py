"""Injects faults into stores: damaged, truncated or swapped files, killed writers, full disks.

    python benchmarks/store_faults.py --count 1000

A reader must get exactly the bytes that were stored, or a miss, and no fault may raise an unexpected error. Otherwise
the exit code is 1.
"""

from __future__ import annotations

import argparse
import os
import random
import resource
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from slimkv.errors import SlimKVError
from slimkv.spec import CodecSpec
from slimkv.wire import Fingerprint, LayerFingerprint, LayerPages, PromptCache
from slimkv.wire.chunk_file import load_file, store_file
from slimkv.wire.store import PromptStore

ENTRIES, CHUNK_BYTES, TOKENS = 6, 40_000, 64


class Chunks:
    """A store of a cold tier's chunks."""

    def __init__(self, folder: Path) -> None:
        self.folder, self._mark = folder, "ab" * 32

    def _place(self, entry: int) -> tuple[str, bytes]:
        return str(self.folder / f"{entry}.bin"), str(entry).encode()

    def truth(self, entry: int) -> bytes:
        """The correct bytes of an entry."""
        return random.Random(entry).randbytes(CHUNK_BYTES)

    def save(self, entry: int) -> None:
        """Stores an entry unless it exists."""
        path, key = self._place(entry)
        store_file(path, memoryview(self.truth(entry)), key, self._mark)

    def load(self, entry: int) -> bytes | None:
        """The bytes found for an entry, or None for a miss."""
        into = memoryview(bytearray(CHUNK_BYTES))
        path, key = self._place(entry)
        try:
            load_file(path, into, key, self._mark)
        except OSError:
            return None
        return bytes(into)


class Prompts:
    """A store of prompt-cache files, found by their leading tokens. It has the same methods as ``Chunks``."""

    def __init__(self, folder: Path) -> None:
        layers = [LayerFingerprint.of(n, CodecSpec.parse("k4v4", 32), 2, "float32") for n in range(2)]
        self._mark = Fingerprint.of(layers, block_size=16, seed=1, dtype="float32", model={}, weights="ab" * 32)
        self.folder, self._store = folder, PromptStore(folder, self._mark)
        self._prompts = [self._make(entry) for entry in range(ENTRIES)]

    def _make(self, entry: int) -> PromptCache:
        source, tokens = torch.Generator().manual_seed(entry), tuple(range(100 * entry, 100 * entry + TOKENS))
        layers = {}
        for layer in self._mark.layers:
            shape = TOKENS // 16, layer.num_kv_heads, layer.layout(1, 16).page_bytes
            layers[layer.number] = LayerPages(torch.randint(0, 256, shape, dtype=torch.uint8, generator=source), 0)
        return PromptCache(self._mark, tokens, layers)

    @staticmethod
    def _bytes(prompt: PromptCache) -> bytes:
        return b"".join(prompt.layers[n].pages.numpy().tobytes() for n in sorted(prompt.layers))

    def truth(self, entry: int) -> bytes:  # noqa: D102
        return self._bytes(self._prompts[entry])

    def save(self, entry: int) -> None:  # noqa: D102
        prompt = self._prompts[entry]
        if self._store.find(prompt.tokens) is None:
            self._store.path_of(prompt.tokens).unlink(missing_ok=True)
            self._store.save(prompt, "faults")

    def load(self, entry: int) -> bytes | None:  # noqa: D102
        try:
            match = self._store.find(self._prompts[entry].tokens)
            return None if match is None else self._bytes(PromptCache.load(match.header.path))
        except (SlimKVError, OSError):
            return None


Store = Chunks | Prompts  # entries are numbered from 0
Fault = Callable[[Store, random.Random], None]


@dataclass(frozen=True)
class FaultReport:
    """The number of faults by kind, and what readers got in total."""

    faults: dict[str, int]
    right: int
    missed: int
    wrong: int
    broken: tuple[str, ...]  # unexpected errors of readers and writers

    @property
    def passed(self) -> bool:
        """Whether readers got correct bytes, never wrong ones, and nothing broke."""
        return self.wrong == 0 and not self.broken and self.right > 0


def inject_faults(count: int, folder: Path, seed: int = 0) -> FaultReport:
    """Injects ``count`` faults into stores in ``folder``, cycling through the kinds; reads every entry after each."""
    source, faults, got = random.Random(seed), Counter[str](), Counter[str]()
    broken: list[str] = []
    stores: list[Store] = [Chunks(folder / "chunks"), Prompts(folder / "prompts")]
    changes = {"flip": _flip, "cut": _cut, "grow": _grow, "lose a page": _lose_a_page}
    kinds: dict[str, Fault] = {name: partial(_rewrite, change) for name, change in changes.items()}
    kinds |= {"mix": _mix, "kill": _kill, "full": _full}
    for i in range(count):
        store, fault = stores[i % len(stores)], list(kinds)[i // len(stores) % len(kinds)]
        faults[f"{type(store).__name__.lower()}: {fault}"] += 1
        try:
            for entry in range(ENTRIES):
                store.save(entry)
            kinds[fault](store, source)
            for entry in range(ENTRIES):
                found = store.load(entry)
                got["missed" if found is None else "right" if found == store.truth(entry) else "wrong"] += 1
        except Exception as error:  # any error here would crash a server
            broken.append(f"{fault}: {error!r}")
    return FaultReport(dict(sorted(faults.items())), got["right"], got["missed"], got["wrong"], tuple(broken))


def _files(store: Store) -> list[Path]:
    return sorted(p for p in store.folder.iterdir() if p.suffix in (".bin", ".safetensors"))


def _flip(data: bytearray, source: random.Random) -> None:
    data[source.randrange(len(data))] ^= 1 << source.randrange(8)


def _cut(data: bytearray, source: random.Random) -> None:
    del data[source.randrange(len(data)) :]


def _grow(data: bytearray, source: random.Random) -> None:
    data.extend(source.randbytes(source.randint(1, 4096)))


def _lose_a_page(data: bytearray, source: random.Random) -> None:
    """Zeroes one 4 KiB page, as if it had never reached the disk."""
    start = source.randrange(len(data)) // 4096 * 4096
    data[start : start + 4096] = bytes(len(data[start : start + 4096]))


def _rewrite(change: Callable[[bytearray, random.Random], None], store: Store, source: random.Random) -> None:
    """Changes one random file in place."""
    path = source.choice(_files(store))
    data = bytearray(path.read_bytes())
    change(data, source)
    path.write_bytes(data)


def _mix(store: Store, source: random.Random) -> None:
    """Overwrites one file with the contents of another."""
    files = _files(store)
    a, b = source.sample(files, 2)
    b.write_bytes(a.read_bytes())


def _remove_some(store: Store, source: random.Random) -> None:
    for path in source.sample(_files(store), ENTRIES // 2):
        path.unlink()


def _kill(store: Store, source: random.Random) -> None:
    """Kills a writer at a random moment."""
    _remove_some(store, source)
    after = source.uniform(0.0, 0.01)
    child = os.fork()
    if child == 0:
        with suppress(BaseException):
            while True:
                for entry in range(ENTRIES):
                    store.save(entry)
                _remove_some(store, source)
        os._exit(1)
    time.sleep(after)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)


@contextmanager
def _file_limit(size: int) -> Iterator[None]:
    """Limits files to ``size`` bytes, so that larger writes fail half-way, as on a full disk."""
    before, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


def _full(store: Store, source: random.Random) -> None:
    _remove_some(store, source)
    with _file_limit(source.randrange(8000)):
        for entry in range(ENTRIES):
            with suppress(OSError, SlimKVError):
                store.save(entry)


def main() -> None:
    """Injects faults into stores in a temporary folder and prints what readers got."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=28, help="number of faults")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        report = inject_faults(given.count, Path(folder), given.seed)
    for fault, times in report.faults.items():
        print(f"{times:5} {fault}")
    print(f"{report.right} right, {report.missed} missed, {report.wrong} wrong, {len(report.broken)} broken")
    if not report.passed:
        sys.exit("; ".join(report.broken[:3]) or "a reader got wrong bytes, or none at all")


if __name__ == "__main__":
    main()
