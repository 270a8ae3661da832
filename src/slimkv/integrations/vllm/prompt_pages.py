"""Moves pages of prompts between the blocks of one rank and prompt-cache files."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from slimkv.errors import InputError, SlimKVError, UnsupportedError
from slimkv.integrations.serving.model import rank_heads
from slimkv.integrations.vllm.compat import logger, tensor_parallel_gather, tensor_parallel_rank
from slimkv.integrations.vllm.connectors import PROMPTS, WRITER, engine_fingerprint, indexer_layers, packed_layers
from slimkv.wire import Fingerprint, LayerPages, PromptCache, PromptStore
from slimkv.wire.prompt_file import read_header, read_pages


@dataclass(frozen=True)
class Load:
    """A read: blocks of a file, starting with ``first``, into ``block_ids``."""

    path: str
    first: int
    block_ids: tuple[int, ...]
    last_hash: str  # hash of the last block, as the scheduler saw it


@dataclass(frozen=True)
class Save:
    """A write: the blocks ``block_ids``, which hold ``tokens``."""

    tokens: tuple[int, ...]
    block_ids: tuple[int, ...]


class PromptPages:
    """The pages of one rank, and the ``folder`` of files."""

    def __init__(self, vllm_config: Any, folder: Path) -> None:
        self._config, self._folder = vllm_config, folder
        self.failed: set[int] = set()
        self.writer = ThreadPoolExecutor(1, thread_name_prefix="slimkv-prompts")
        self._pages: dict[int, list[Tensor]] = {}  # by layer: pages, indexer's keys: [blocks, num_kv_heads, bytes]
        self._offsets: dict[int, Tensor | None] = {}  # key offsets by layer, for all KV heads
        self.fingerprint: Fingerprint  # set when pages are registered

    def register(self, kv_caches: dict[str, Tensor]) -> None:
        """Registers the caches, uint8 [blocks, num_kv_heads, tokens, bytes], of all layers."""
        config = self._config
        packed, indexers = packed_layers(config), indexer_layers(config)
        if foreign := sorted(kv_caches.keys() - packed.keys() - indexers.keys()):
            raise UnsupportedError(
                f"{PROMPTS} holds packed pages only; these layers have others: {', '.join(foreign[:4])}"
            )
        for name, cache in sorted(kv_caches.items(), key=lambda item: item[0] in indexers):  # indexers last
            blocks, heads, tokens, size = cache.shape
            if tokens != config.cache_config.block_size:
                raise UnsupportedError(
                    f"{PROMPTS} needs blocks that kernels read whole, and blocks of {config.cache_config.block_size} "
                    f"tokens are cut into {tokens}; use --block-size {tokens}"
                )
            number = indexers[name][0] if name in indexers else packed[name][0]
            self._pages.setdefault(number, []).append(cache.view(blocks, heads, tokens * size))
            if name in packed:
                self._offsets[number] = packed[name][2].impl.whole_key_offset()
        self.fingerprint = engine_fingerprint(config, config.cache_config.block_size)
        self._store = PromptStore(self._folder, self.fingerprint)  # raises for a folder of another cache

    def _heads(self, number: int) -> slice:
        """The KV heads of a layer that this rank holds."""
        rank, ranks = tensor_parallel_rank()
        total = next(x.num_kv_heads for x in self.fingerprint.layers if x.number == number)
        return rank_heads(total, self._pages[number][0].shape[1], rank, ranks)

    def load(self, load: Load) -> None:
        """Reads a file into its blocks. A file that changed since the scheduler saw it is reported and not used."""
        try:
            header = read_header(load.path)
            header.fingerprint.check_same(self.fingerprint, load.path)
            last = load.first + len(load.block_ids)
            if len(header.block_hashes) < last or header.block_hashes[last - 1] != load.last_hash:
                raise InputError(f"{load.path} was replaced by the file of another prompt")
            _, pages = read_pages(header, {number: self._heads(number) for number in self._pages})
            for number, targets in self._pages.items():
                begin = header.first_tokens[number] // self.fingerprint.block_size
                skip = max(0, begin - load.first)  # blocks before a sliding window are never read
                ids = torch.tensor(load.block_ids[skip:], device=targets[0].device)
                source = pages[number][load.first + skip - begin : last - begin].to(ids.device)
                for target, part in zip(targets, source.split([x.shape[2] for x in targets], dim=2), strict=True):
                    target[ids] = part
        except (SlimKVError, OSError) as error:
            logger.error("slimkv: a prompt-cache file cannot be used: %s", error)
            self.failed |= set(load.block_ids)

    def save(self, save: Save) -> None:
        """Copies the pages immediately; a thread writes the file during the next steps."""
        taken = {}
        for layer in self.fingerprint.layers:
            held = self._pages[layer.number]
            ids = torch.tensor(save.block_ids, device=held[0].device)
            pages = torch.cat([x[ids] for x in held], dim=2).cpu()
            taken[layer.number] = [pages] if layer.num_kv_heads == 1 else tensor_parallel_gather(pages)
        if tensor_parallel_rank()[0] == 0:
            self.writer.submit(self._write, save.tokens, taken)

    def _write(self, tokens: tuple[int, ...], taken: dict[int, list[Tensor]]) -> None:
        try:
            layers = {}
            for layer in self.fingerprint.layers:
                shards = taken[layer.number]
                step = max(1, len(shards) // layer.num_kv_heads)  # ranks per head, if they replicate it
                offset = self._offsets[layer.number]
                layers[layer.number] = LayerPages(torch.cat(shards[::step], 1), key_offset=offset)
            self._store.save(PromptCache(self.fingerprint, tokens, layers), WRITER)
        except Exception:
            logger.exception("slimkv: a prompt-cache file could not be written")
