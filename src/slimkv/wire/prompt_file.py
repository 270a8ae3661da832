"""``PromptCache``: the pages of one prompt, and their safetensors file.

Tensors: ``tokens`` int64 [tokens] and, for every layer, ``layer.<number>.pages`` uint8 [blocks, num_kv_heads,
page_bytes] and, if keys are centred, ``layer.<number>.key_offset`` bfloat16 [num_kv_heads, key_dim]. Metadata: the
fingerprint, the first token of each layer's pages, a chained hash per block, and a checksum over the whole file,
computed with zeros in place of its own digits. Keys are stored after the rotary embedding, at positions 0, 1, 2, ...
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from slimkv.calibration.file import of_safetensors
from slimkv.calibration.learned_offset import offset_digest
from slimkv.codec.key_offset import OFFSET_DTYPE
from slimkv.errors import CorruptDataError, InputError, UnsupportedError
from slimkv.paths import whole_file
from slimkv.wire.fingerprint import Fingerprint, LayerFingerprint

_safetensors = partial(of_safetensors, files="prompt-cache files")
FORMAT, VERSION = "slimkv-prompt-cache", 2
_TOKENS = "tokens"
_CHECKSUM, _UNSIGNED = "sha256", "0" * 64
_MOST_HEADER_BYTES = 100 << 20  # the limit of safetensors


@dataclass(frozen=True)
class LayerPages:
    """A layer's pages, from the block that holds token ``first_token`` on."""

    pages: Tensor  # uint8 [blocks, num_kv_heads, page_bytes]
    first_token: int = 0  # a sliding layer may lack the tokens before its window
    key_offset: Tensor | None = None  # bfloat16 [num_kv_heads, key_dim] if keys are centred


@dataclass(frozen=True)
class PromptHeader:
    """The metadata of a file, read before its pages."""

    path: Path
    fingerprint: Fingerprint
    num_tokens: int
    first_tokens: Mapping[int, int]  # by layer
    block_hashes: tuple[str, ...]
    writer: str

    def reusable_tokens(self, shared: int) -> int:
        """How many of the first ``shared`` tokens all layers can serve, in whole blocks; 0 if a layer lacks tokens."""
        size = self.fingerprint.block_size
        tokens = min(shared, self.num_tokens) // size * size
        for layer in self.fingerprint.layers:
            if self.first_tokens[layer.number] > first_needed(layer, tokens):
                return 0
        return tokens


@dataclass(frozen=True)
class PromptCache:
    """The tokens of a prompt and the pages of every layer, for all KV heads of the model."""

    fingerprint: Fingerprint
    tokens: tuple[int, ...]
    layers: Mapping[int, LayerPages]

    def __post_init__(self) -> None:
        if not self.tokens:
            raise InputError("a prompt cache needs at least one token")
        if set(self.layers) != {layer.number for layer in self.fingerprint.layers}:
            raise InputError("a prompt cache needs the pages of exactly the layers in its fingerprint")
        for layer in self.fingerprint.layers:
            given = self.layers[layer.number]
            wanted = _pages_shape(self.fingerprint, layer, len(self.tokens), given.first_token)
            if given.pages.dtype != torch.uint8 or list(given.pages.shape) != wanted or given.first_token < 0:
                raise InputError(
                    f"layer {layer.number} has pages {given.pages.dtype} {list(given.pages.shape)} from token "
                    f"{given.first_token} on; {len(self.tokens)} tokens need uint8 {wanted}"
                )
            if offset_digest(given.key_offset) != layer.key_offset:
                raise InputError(f"the key offset of layer {layer.number} does not match the fingerprint")
            if given.first_token > first_needed(layer, len(self.tokens)):
                raise InputError(
                    f"layer {layer.number} lacks tokens before {given.first_token} that its attention reads"
                )

    @property
    def nbytes(self) -> int:
        """Bytes of all pages."""
        return sum(layer.pages.numel() for layer in self.layers.values())

    def save(self, path: str | Path, writer: str = "slimkv") -> Path:
        """Writes the file atomically: a reader sees all of it or none."""
        path = Path(path)
        if path.is_dir():
            raise InputError(f"{str(path)!r} is a folder; give the path of a file")
        about = {
            "version": VERSION,
            "fingerprint": json.loads(self.fingerprint.to_json()),
            "first_tokens": {str(n): x.first_token for n, x in sorted(self.layers.items())},
            "num_tokens": len(self.tokens),
            "block_hashes": list(block_hashes(self.fingerprint, self.tokens)),
            "writer": writer,
            _CHECKSUM: _UNSIGNED,
        }
        header = {FORMAT: json.dumps(about, sort_keys=True, separators=(",", ":"))}  # one entry, so the order is fixed
        tensors = {_name(n): x.pages.detach().cpu().contiguous() for n, x in self.layers.items()}
        for number, layer in self.layers.items():
            if layer.key_offset is not None:
                tensors[_offset_name(number)] = layer.key_offset.detach().cpu().contiguous()
        tensors[_TOKENS] = torch.tensor(self.tokens, dtype=torch.int64)
        with whole_file(path) as temporary:
            try:
                _safetensors("save_file")(tensors, temporary, metadata=header)
            except _safetensors("SafetensorError") as error:  # raised if the disk is full
                raise OSError(f"{path} could not be written: {error}") from error
            _sign(temporary)
        return path

    @classmethod
    def load(cls, path: str | Path) -> PromptCache:
        """Reads the whole file and verifies its checksum and the block hashes."""
        header = read_header(path)
        tokens, pages = read_pages(header)
        offsets = read_offsets(header)
        found = {n: LayerPages(x, header.first_tokens[n], offsets.get(n)) for n, x in pages.items()}
        return cls(header.fingerprint, tokens, found)


def first_needed(layer: LayerFingerprint, tokens: int) -> int:
    """The first position in a layer that the token after ``tokens`` tokens attends to."""
    return 0 if layer.window is None else max(0, tokens - layer.window + 1)


def _pages_shape(mark: Fingerprint, layer: LayerFingerprint, tokens: int, first_token: int) -> list[int]:
    """The shape [blocks, num_kv_heads, page_bytes] of the pages of tokens ``first_token`` to ``tokens``."""
    size = mark.block_size
    return [-(-tokens // size) - first_token // size, layer.num_kv_heads, layer.page_bytes(mark.seed, size)]


def _name(layer: int) -> str:
    return f"layer.{layer}.pages"


def _offset_name(layer: int) -> str:
    return f"layer.{layer}.key_offset"


def block_hashes(fingerprint: Fingerprint, tokens: Sequence[int]) -> tuple[str, ...]:
    """A sha256 per block, of the previous block's hash (the fingerprint's for the first one) and the block's tokens."""
    ids = np.asarray(tokens, dtype="<i8")
    last, out = bytes.fromhex(fingerprint.hash), []
    for start in range(0, len(ids), fingerprint.block_size):
        last = hashlib.sha256(last + ids[start : start + fingerprint.block_size].tobytes()).digest()
        out.append(last.hex())
    return tuple(out)


def read_header(path: str | Path) -> PromptHeader:
    """Reads the metadata of a file without verifying its checksum."""
    path = Path(path)
    if not path.is_file():
        raise InputError(f"there is no prompt-cache file {path}")
    about = _raw_header(path)[1]
    if about.get("version") != VERSION:
        raise UnsupportedError(
            f"{path} is a prompt cache of version {about.get('version')}; this slimkv reads version {VERSION}"
        )
    try:
        fingerprint = Fingerprint.from_json(json.dumps(about["fingerprint"]), str(path))
        header = PromptHeader(
            path,
            fingerprint,
            int(about["num_tokens"]),
            {int(n): int(first) for n, first in about["first_tokens"].items()},
            tuple(map(str, about["block_hashes"])),
            str(about["writer"]),
        )
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError, RecursionError) as error:
        if isinstance(error, InputError | CorruptDataError):
            raise
        raise CorruptDataError(f"{path} is not a complete prompt cache ({error!r}); write it again") from error
    if set(header.first_tokens) != {layer.number for layer in fingerprint.layers}:
        raise CorruptDataError(f"{path} does not list the layers of its fingerprint; write it again")
    return header


def verify(path: str | Path) -> PromptHeader:
    """Verifies the checksum of a file and the chained hashes of its tokens."""
    header = read_header(path)
    _check_sum(header.path)
    _read(header, {})
    return header


def read_pages(
    header: PromptHeader, heads: Mapping[int, slice] | None = None
) -> tuple[tuple[int, ...], dict[int, Tensor]]:
    """The tokens, and the pages [blocks, heads, page_bytes] by layer; with ``heads``, of these layers' KV heads."""
    _check_sum(header.path)
    wanted = {x.number: slice(None) for x in header.fingerprint.layers} if heads is None else heads
    tensors = _read(header, wanted)
    return tuple(tensors[_TOKENS].tolist()), {n: tensors[_name(n)] for n in wanted}


def read_offsets(header: PromptHeader) -> dict[int, Tensor]:
    """The key offsets bfloat16 [num_kv_heads, key_dim] of layers with centred keys, checked by their digests."""
    centred = [layer for layer in header.fingerprint.layers if layer.key_offset]
    tensors = _tensors(header.path, {_offset_name(layer.number): slice(None) for layer in centred})
    for layer, given in zip(centred, tensors, strict=True):
        wanted = (layer.num_kv_heads, layer.key_dim)
        if given.dtype != OFFSET_DTYPE or given.shape != wanted or offset_digest(given) != layer.key_offset:
            raise CorruptDataError(f"{header.path}: the key offset of layer {layer.number} was altered; write it again")
    return {layer.number: given for layer, given in zip(centred, tensors, strict=True)}


def _tensors(path: Path, heads: Mapping[str, slice]) -> list[Tensor]:
    """Tensors of a file by name, each sliced to its KV heads (dimension 1)."""
    try:
        with _safetensors("safe_open")(path, framework="pt") as file:
            return [
                file.get_tensor(name) if own == slice(None) else file.get_slice(name)[:, own]
                for name, own in heads.items()
            ]
    except (_safetensors("SafetensorError"), OSError, ValueError) as error:
        raise CorruptDataError(f"{path} is not a complete prompt cache ({error}); write it again") from error


def _read(header: PromptHeader, heads: Mapping[int, slice]) -> dict[str, Tensor]:
    """Tokens and pages of a file, each checked against the shape that the fingerprint requires."""
    names = {_TOKENS: slice(None), **{_name(n): own for n, own in heads.items()}}
    out = dict(zip(names, _tensors(header.path, names), strict=True))
    if out[_TOKENS].dtype != torch.int64 or out[_TOKENS].dim() != 1:
        raise CorruptDataError(
            f"{header.path}: its tokens are {out[_TOKENS].dtype} {list(out[_TOKENS].shape)}, not int64 [tokens]"
        )
    tokens = out[_TOKENS].tolist()
    if len(tokens) != header.num_tokens or block_hashes(header.fingerprint, tokens) != header.block_hashes:
        raise CorruptDataError(f"{header.path}: its tokens do not match its block hashes; write it again")
    for layer in header.fingerprint.layers:
        if layer.number not in heads:
            continue
        pages = out[_name(layer.number)]
        wanted = _pages_shape(header.fingerprint, layer, len(tokens), header.first_tokens[layer.number])
        wanted[1] = len(range(layer.num_kv_heads)[heads[layer.number]])
        if list(pages.shape) != wanted or pages.dtype != torch.uint8:
            raise CorruptDataError(f"{header.path}: layer {layer.number} has pages {list(pages.shape)}, not {wanted}")
    return out


def _raw_header(path: Path) -> tuple[bytes, dict[str, Any]]:
    """The bytes of a safetensors header including its length prefix, and its slimkv metadata."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(size - 8, _MOST_HEADER_BYTES):
            raise CorruptDataError(f"{path} is not a complete prompt cache (it is truncated or not a safetensors file)")
        text = file.read(length)
    try:
        said = json.loads(text)
        metadata = said.get("__metadata__") or {}
        if FORMAT not in metadata:
            raise CorruptDataError(f"{path} is a safetensors file, but not a slimkv prompt cache")
        about = json.loads(metadata[FORMAT])
        if not isinstance(about, dict):
            raise ValueError(f"{FORMAT} is a {type(about).__name__}")
    except (AttributeError, TypeError, ValueError, RecursionError) as error:  # RecursionError: deeply nested brackets
        raise CorruptDataError(f"{path} is not a complete prompt cache (its header is damaged: {error})") from error
    return length.to_bytes(8, "little") + text, about


def _digest(path: Path) -> tuple[str, str, int]:
    """The computed checksum, the one stored in the file, and its offset."""
    header, about = _raw_header(path)
    written = about.get(_CHECKSUM)
    before = f'\\"{_CHECKSUM}\\":\\"'.encode()
    if not isinstance(written, str) or len(written) != len(_UNSIGNED) or header.count(before + written.encode()) != 1:
        raise CorruptDataError(f"{path} has no checksum; write it again")
    where = header.index(before) + len(before)
    digest = hashlib.sha256(header[:where] + _UNSIGNED.encode() + header[where + len(written) :])
    with path.open("rb") as file:
        file.seek(len(header))
        while piece := file.read(1 << 22):
            digest.update(piece)
    return digest.hexdigest(), written, where


def _sign(path: Path) -> None:
    """Writes the checksum into the file."""
    digest, _, where = _digest(path)
    with path.open("r+b") as file:
        file.seek(where)
        file.write(digest.encode())
        file.flush()
        os.fsync(file.fileno())


def _check_sum(path: Path) -> None:
    digest, written, _ = _digest(path)
    if digest != written:
        raise CorruptDataError(f"{path} was altered or is incomplete: its checksum does not match; write it again")
