"""Folders shared by several processes: a marker with the fingerprint of their contents, and prompt caches."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from slimkv.errors import CorruptDataError, InputError, SlimKVError
from slimkv.paths import write_whole
from slimkv.wire.fingerprint import Fingerprint
from slimkv.wire.prompt_file import PromptCache, PromptHeader, block_hashes, verify

MARKER = "slimkv-fingerprint.json"
SUFFIX = ".safetensors"


def check_marker(folder: str | Path, fingerprint: Fingerprint, *, self_describing: bool = False) -> None:
    """Raises unless the contents of ``folder`` have this fingerprint; marks a folder that is empty or does not exist.

    A folder with contents but without a marker raises an error, because the meaning of its bytes is unknown. If every
    file in it carries its own fingerprint (``self_describing``), it is marked instead.
    """
    folder = Path(folder)
    marker = folder / MARKER
    if not marker.exists():
        foreign = folder.is_dir() and any(not p.name.startswith(f".{MARKER}") for p in folder.iterdir())
        if foreign and not self_describing:
            raise InputError(
                f"{folder} contains files but no fingerprint ({MARKER}), so the meaning of their bytes is unknown: use "
                "an empty folder"
            )
        # The first process writes the marker; later ones compare their fingerprint with it.
        write_whole(marker, f"{fingerprint.to_json()}\n".encode(), overwrite=False)
    read_marker(folder).check_same(fingerprint, str(folder))


def read_marker(folder: str | Path) -> Fingerprint:
    """The fingerprint of the contents of ``folder``."""
    marker = Path(folder) / MARKER
    try:
        text = marker.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise CorruptDataError(f"{marker} cannot be read: {error}") from error
    return Fingerprint.from_json(text, str(marker))


@dataclass(frozen=True)
class Match:
    """A file that shares its first ``tokens`` tokens with a prompt, in whole blocks."""

    header: PromptHeader
    tokens: int


class PromptStore:
    """A folder of prompt-cache files with one fingerprint, indexed by their first tokens.

    Files that are damaged or belong to another cache are never matched; ``refused`` lists them with the reason.
    """

    def __init__(self, folder: str | Path, fingerprint: Fingerprint) -> None:
        self.folder = Path(folder)
        self.fingerprint = fingerprint
        self.refused: dict[str, str] = {}
        check_marker(self.folder, fingerprint, self_describing=True)
        self._seen: dict[str, tuple[int, int]] = {}  # name: size, time
        self._headers: dict[str, PromptHeader] = {}
        self._by_hash: dict[str, dict[str, int]] = {}  # hash of a block: file, number of blocks up to it

    def find(self, tokens: Sequence[int]) -> Match | None:
        """The file that shares the most whole blocks with ``tokens``, or None."""
        self.refresh()
        size = self.fingerprint.block_size
        hashes = block_hashes(self.fingerprint, tokens[: len(tokens) // size * size])
        for count in range(len(hashes), 0, -1):
            for name in self._by_hash.get(hashes[count - 1], {}):
                header = self._headers[name]
                if header.reusable_tokens(count * size) == count * size:
                    return Match(header, count * size)
        return None

    def path_of(self, tokens: Sequence[int]) -> Path:
        """The path of a prompt's file, named by the hash of its last block."""
        return self.folder / f"{block_hashes(self.fingerprint, tokens)[-1]}{SUFFIX}"

    def save(self, cache: PromptCache, writer: str) -> Path:
        """Writes a prompt's file unless it exists."""
        self.fingerprint.check_same(cache.fingerprint, "this prompt cache")
        path = self.path_of(cache.tokens)
        return path if path.exists() else cache.save(path, writer)

    def refresh(self) -> None:
        """Looks for new, removed and changed files; a new file is verified in full once."""
        present = {}
        for entry in os.scandir(self.folder):
            if entry.name.endswith(SUFFIX) and not entry.name.startswith("."):
                try:
                    status = entry.stat()
                except FileNotFoundError:
                    continue
                present[entry.name] = status.st_size, status.st_mtime_ns
        for name in [n for n, seen in self._seen.items() if present.get(n) != seen]:
            self._forget(name)
        for name in present.keys() - self._seen.keys():
            self._seen[name] = present[name]
            self._add(name)

    def _add(self, name: str) -> None:
        try:
            header = verify(self.folder / name)
            header.fingerprint.check_same(self.fingerprint, name)
        except SlimKVError as error:
            self.refused[name] = str(error)
            return
        self._headers[name] = header
        whole = header.num_tokens // self.fingerprint.block_size
        for count, value in enumerate(header.block_hashes[:whole], 1):
            self._by_hash.setdefault(value, {})[name] = count

    def _forget(self, name: str) -> None:
        self._seen.pop(name)
        self.refused.pop(name, None)
        header = self._headers.pop(name, None)
        for value in header.block_hashes if header is not None else ():
            self._by_hash.get(value, {}).pop(name, None)
