"""Key offsets without a calibration: learnt from the first prompt of a layer, then fixed and saved.

The mean of sixteen tokens is nearly as good as that of 256 (docs/design/centring.md). Stored bytes depend on the
offset, so it may only change while a layer's pages are empty: it is learnt right before the first real tokens are
stored. Steps that store nothing (profiling, warm-up) do not set it, and neither does a captured CUDA graph, which
cannot wait for the result. The tensor is updated in place, so graphs captured earlier read the new values.

A learnt offset is saved under the digest of the model's files, one file per layer, format and tensor-parallel rank, so
that restarts and replicas agree. An offset from fewer than 16 tokens is not saved. The first process to write a file
wins; others keep their own offset until they restart.
"""

from __future__ import annotations

import hashlib
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

from slimkv.calibration import file
from slimkv.calibration.cache import files_key
from slimkv.codec import Codec
from slimkv.codec.key_offset import OFFSET_DTYPE, offset_of_keys
from slimkv.errors import InputError, SlimKVError
from slimkv.paths import cache_dir
from slimkv.spec import CodecSpec

FORMAT = "slimkv-key-offset"
MIN_TOKENS = 16  # offsets learnt from fewer tokens are not saved


def offset_digest(offset: Tensor | None) -> str:
    """32 hexadecimal digits that identify an offset bfloat16 [heads, dim]; empty for None."""
    if offset is None:
        return ""
    return hashlib.sha256(offset.detach().float().cpu().contiguous().numpy().tobytes()).hexdigest()[:32]


def is_capturing(device: torch.device) -> bool:
    """Whether a CUDA graph is being captured, so that nothing can be read back."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


class LayerOffset:
    """The key offset of one layer in one process: given, or learnt from the first prompt."""

    def __init__(self, num_kv_heads: int, codec: Codec, known: Tensor | None = None) -> None:
        self._codec, shape = codec, (num_kv_heads, codec.spec.key_dim)
        with torch.inference_mode(False):  # it outlives the forward pass that creates it
            self.tensor = torch.zeros(shape, dtype=OFFSET_DTYPE, device=codec.device)
            if known is not None:
                self.tensor.copy_(known)
        self.known = known is not None
        self.source = "given" if known is not None else "not yet learnt"
        self.file: Path | None = None  # where a learnt offset is saved

    @classmethod
    def kept(cls, path: Path | None, num_kv_heads: int, codec: Codec) -> LayerOffset:
        """The offset in the file ``path``; without that file, it is learnt and then saved there (None: not saved)."""
        known = read_offset(path, num_kv_heads, codec.spec.key_dim) if path is not None else None
        made = cls(num_kv_heads, codec, known)
        made.file = path
        if known is not None:
            made.source = f"kept in {path}"
        return made

    def provisional(self, key: Tensor) -> None:
        """Sets a provisional offset: the mean of a profiling step's keys [tokens, heads, dim].

        It stays only if tokens are stored before an offset could be learnt (see ``learn``).
        """
        if not self.known:
            self.tensor.copy_(key.float().mean(0))

    def learn(self, key: Tensor, stored: Tensor, pages: Tensor, first: Tensor | None = None) -> None:
        """Learns from the first tokens that are stored. Does nothing once the offset is known.

        Args:
            key: [tokens, heads, dim], before they are stored.
            stored: bool [tokens]: whether each is stored.
            pages: the layer's pages, all zeros before the first token is stored. If they are not, tokens were stored
                inside a captured graph, and the provisional offset stays.
            first: integer [], the number of tokens of the first request. If given, the offset is learnt from at most
                ``MIN_TOKENS`` tokens of that request, so it does not depend on the rest of the batch or on chunking. It
                is read back only when needed, because the capture of a graph cannot read it.
        """
        if self.known or is_capturing(key.device):
            return
        if first is not None:
            count = min(int(first), MIN_TOKENS)
            key, stored = key[:count], stored[:count]
        count = int(stored.sum())
        if count == 0:
            return
        if bool(pages.any()):  # reduces without a copy, which might not fit on the device
            self.source = "a profiling step"
        else:
            seen = key[stored].float()  # the first row is position 0: prompts are stored from their first token on
            self.tensor.copy_(offset_of_keys(seen.mean(0), seen[0], self._codec))
            self.source = f"the first prompt, {count} tokens"
            if self.file is not None and count >= MIN_TOKENS:
                write_offset(self.file, self.tensor)
        self.known = True


def kept_path(model: str, layer: int, spec: CodecSpec, rank: int = 0, ranks: int = 1) -> Path | None:
    """The path of the offset of a layer of ``model`` (a folder or a hub name) with keys stored as ``spec``.

    None if the model's files are unknown.
    """
    key = _files_key(model)
    if key is None:
        return None
    name = f"layer-{layer}-{spec.key.name}-{spec.seed}.safetensors"
    return cache_dir("offsets") / key / f"rank-{rank}-of-{ranks}" / name


@lru_cache(maxsize=8)
def _files_key(model: str) -> str | None:
    try:
        return files_key(model)
    except InputError:
        return None


def read_offset(path: Path, num_kv_heads: int, dim: int) -> Tensor | None:
    """The offset that ``write_offset`` wrote, bfloat16 [num_kv_heads, dim]; None without a valid file of that shape."""
    if not path.is_file():
        return None
    try:
        _, tensors = file.read(path, FORMAT)
        found = tensors["offset"]
    except (SlimKVError, KeyError):
        path.unlink(missing_ok=True)  # damaged or of another version: the offset is learnt again
        return None
    fits = found.shape == (num_kv_heads, dim) and bool(found.isfinite().all())
    return found.to(OFFSET_DTYPE) if fits else None


def write_offset(path: Path, offset: Tensor) -> None:
    """Saves an offset unless another process has saved one."""
    if not path.is_file():
        file.write(path, {}, {"offset": offset.detach().cpu().contiguous()}, FORMAT)
