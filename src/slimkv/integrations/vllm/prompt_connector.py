"""``SlimKVPromptConnector``: a KV connector that stores prompts in prompt-cache files and reuses them.

--kv-transfer-config '{"kv_connector": "SlimKVPromptConnector", "kv_role": "kv_both",
    "kv_connector_module_path": "slimkv.integrations.vllm.prompt_connector",
    "kv_connector_extra_config": {"shared_storage_path": "/var/cache/prompts"}}'

The scheduler's half looks up prompts by the chained hashes of their blocks and decides what is read and written; the
workers' half moves pages, each rank those of its own KV heads. Prompts with anything beside their tokens (images,
LoRA, embeddings, a cache salt) are left alone.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from slimkv.errors import InputError, SlimKVError, UnsupportedError
from slimkv.integrations.serving.model import rank_heads
from slimkv.integrations.vllm.compat import (
    FOLDER_KEYS,
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    logger,
    tensor_parallel_gather,
    tensor_parallel_rank,
)
from slimkv.integrations.vllm.connectors import WRITER, engine_fingerprint, indexer_layers, packed_layers
from slimkv.integrations.vllm.settings import EXAMPLE, wanted
from slimkv.wire import Fingerprint, LayerPages, PromptCache, PromptStore
from slimkv.wire.prompt_file import read_header, read_pages
from slimkv.wire.store import read_marker

NAME = "SlimKVPromptConnector"


@dataclass(frozen=True)
class Load:
    """Pages to read: the blocks of a file from ``first`` on go to ``block_ids``."""

    path: str
    first: int
    block_ids: tuple[int, ...]
    last_hash: str  # hash of the last block, as the scheduler saw it


@dataclass(frozen=True)
class Save:
    """Pages to write: ``tokens`` fill ``block_ids``."""

    tokens: tuple[int, ...]
    block_ids: tuple[int, ...]


@dataclass
class PromptMetadata(KVConnectorMetadata):
    """The workers' tasks in one step."""

    loads: list[Load] = field(default_factory=list)
    saves: list[Save] = field(default_factory=list)


@dataclass
class _Filling:
    """A prompt that is being computed and will be written."""

    tokens: tuple[int, ...]  # of whole blocks
    block_ids: list[int]


class SlimKVPromptConnector(KVConnectorBase_V1):
    """See the module docstring."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        if not wanted(vllm_config.additional_config):
            raise InputError(f"{NAME} moves slimkv's packed pages, and slimkv is not switched on; use {EXAMPLE}")
        if len(kv_cache_config.kv_cache_groups) != 1:
            raise UnsupportedError(
                f"{NAME} needs one table of blocks for all layers; this model has "
                f"{len(kv_cache_config.kv_cache_groups)} (hybrid models keep states that files do not hold)"
            )
        extra = self._kv_transfer_config.kv_connector_extra_config
        self._folder = Path(extra[FOLDER_KEYS[NAME]])
        self._least_tokens = int(extra.get("save_min_tokens", 0))
        self._writes = self._kv_transfer_config.is_kv_producer
        self._reads = self._kv_transfer_config.is_kv_consumer
        # One of the two, by the process this is in.
        self._scheduler: Any = _Scheduler(self) if role == KVConnectorRole.SCHEDULER else None
        self._worker: Any = _Worker(self) if role == KVConnectorRole.WORKER else None

    @property
    def requires_kv_delivery(self) -> bool:
        """This is a cache: prompts that are not written are recomputed."""
        return False

    # -- the scheduler's half ------------------------------------------------------------------------------------------

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """The number of tokens that a file has beyond the engine's own cache."""
        self._scheduler.watch(request)
        return self._scheduler.match(request, num_computed_tokens) if self._reads else 0, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Called when the request has its blocks."""
        self._scheduler.accept(request.request_id, num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        """The workers' tasks in this step."""
        return self._scheduler.plan(scheduler_output)

    # -- the workers' half ---------------------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, Tensor]) -> None:
        """uint8 [blocks, num_kv_heads, tokens, bytes] of every layer."""
        self._worker.register(kv_caches)

    def _tasks(self) -> PromptMetadata:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, PromptMetadata)
        return metadata

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Reads this step's files into their blocks."""
        for load in self._tasks().loads:
            self._worker.load(load)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing to wait for: ``start_load_kv`` loads synchronously."""

    def save_kv_layer(self, layer_name: str, kv_layer: Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """Nothing to do per layer: whole prompts are written after the step."""

    def wait_for_save(self) -> None:
        """Copies the pages of finished prompts and passes them to the thread that writes files."""
        for save in self._tasks().saves:
            self._worker.save(save)

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Blocks whose file was damaged; vLLM fails or recomputes them (``kv_load_failure_policy``)."""
        failed, self._worker.failed = self._worker.failed, set()
        return failed

    def shutdown(self) -> None:
        """Waits for files that are being written."""
        if self._worker is not None:
            self._worker.writer.shutdown(wait=True)


class _Scheduler:
    """The scheduler's half: which prompts are in files, and which will be written."""

    def __init__(self, connector: SlimKVPromptConnector) -> None:
        self._connector = connector
        self._store: PromptStore | None = None
        self._told: set[str] = set()  # rejected files that were logged
        self._matches: dict[str, tuple[str, int, str]] = {}  # request: path, tokens, hash of the last block
        self._loads: dict[str, tuple[str, int, int, str]] = {}  # request: path, from token, to token, hash
        self._filling: dict[str, _Filling] = {}

    @property
    def store(self) -> PromptStore:
        """The folder; the workers marked it when they loaded the model."""
        if self._store is None:
            folder = self._connector._folder
            self._store = PromptStore(folder, read_marker(folder))
        return self._store

    def match(self, request: Any, computed: int) -> int:
        if not _only_tokens(request) or len(request.prompt_token_ids) < 2:
            return 0
        found = self.store.find(request.prompt_token_ids[:-1])  # the last token is always computed, for its logits
        for name in self.store.refused.keys() - self._told:
            logger.error("slimkv: %s is not used: %s", name, self.store.refused[name])
        self._told = set(self.store.refused)
        if found is None or found.tokens <= computed:
            return 0
        last = found.header.block_hashes[found.tokens // self.store.fingerprint.block_size - 1]
        self._matches[request.request_id] = str(found.header.path), found.tokens, last
        return found.tokens - computed

    def accept(self, request_id: str, external: int) -> None:
        path, tokens, last = self._matches.pop(request_id, ("", 0, ""))
        if external > 0:
            self._loads[request_id] = path, tokens - external, tokens, last

    def watch(self, request: Any) -> None:
        """Registers a prompt that will be written."""
        if not self._connector._writes or request.request_id in self._filling or not _only_tokens(request):
            return
        size = self.store.fingerprint.block_size
        whole = len(request.prompt_token_ids) // size * size
        tokens = tuple(request.prompt_token_ids[:whole])
        if not whole or whole < self._connector._least_tokens:
            return
        found = self.store.find(tokens)
        if found is None or found.tokens < whole:
            self._filling[request.request_id] = _Filling(tokens, [])

    def plan(self, output: Any) -> PromptMetadata:
        metadata = PromptMetadata()
        for new in output.scheduled_new_reqs:
            self._step(metadata, output, new.req_id, new.num_computed_tokens, list(new.block_ids[0]), True)
        cached = output.scheduled_cached_reqs
        for i, request_id in enumerate(cached.req_ids):
            given = cached.new_block_ids[i]
            blocks = list(given[0]) if given is not None else []
            resumed = request_id in cached.resumed_req_ids
            self._step(metadata, output, request_id, cached.num_computed_tokens[i], blocks, resumed)
        for request_id in output.finished_req_ids:
            for held in (self._filling, self._matches, self._loads):
                held.pop(request_id, None)
        return metadata

    def _step(
        self, metadata: PromptMetadata, output: Any, request_id: str, computed: int, blocks: list[int], first: bool
    ) -> None:
        """One request in one step; ``blocks`` are all its blocks the ``first`` time, and further ones later."""
        size = self.store.fingerprint.block_size
        if request_id in self._loads:
            path, start, end, last = self._loads.pop(request_id)
            metadata.loads.append(Load(path, start // size, tuple(blocks[start // size : end // size]), last))
        filling = self._filling.get(request_id)
        if filling is None:
            return
        filling.block_ids = blocks if first else filling.block_ids + blocks
        if computed + output.num_scheduled_tokens[request_id] >= len(filling.tokens):
            del self._filling[request_id]
            metadata.saves.append(Save(filling.tokens, tuple(filling.block_ids[: len(filling.tokens) // size])))


def _only_tokens(request: Any) -> bool:
    """Whether a prompt's pages depend on its tokens alone."""
    others = ("lora_request", "mm_features", "prompt_embeds", "cache_salt")
    return bool(request.prompt_token_ids) and not any(_is_set(getattr(request, name, None)) for name in others)


def _is_set(value: Any) -> bool:
    return value is not None and (isinstance(value, Tensor) or bool(value))


class _Worker:
    """The pages of one rank."""

    def __init__(self, connector: SlimKVPromptConnector) -> None:
        self._connector = connector
        self.failed: set[int] = set()
        self.writer = ThreadPoolExecutor(1, thread_name_prefix="slimkv-prompts")
        self._pages: dict[int, list[Tensor]] = {}  # by layer: [blocks, num_kv_heads, bytes] of pages, indexer's keys
        self._offsets: dict[int, Tensor | None] = {}  # by layer: of keys, of all KV heads
        self.fingerprint: Fingerprint  # of this engine's pages, once they are registered

    def register(self, kv_caches: dict[str, Tensor]) -> None:
        config = self._connector._vllm_config
        packed, indexers = packed_layers(config), indexer_layers(config)
        if foreign := sorted(kv_caches.keys() - packed.keys() - indexers.keys()):
            raise UnsupportedError(
                f"{NAME} holds packed pages only; these layers have others: {', '.join(foreign[:4])}"
            )
        for name, cache in sorted(kv_caches.items(), key=lambda item: item[0] in indexers):  # those come second
            blocks, heads, tokens, size = cache.shape
            if tokens != config.cache_config.block_size:
                raise UnsupportedError(
                    f"{NAME} needs blocks that kernels read whole: blocks of {config.cache_config.block_size} tokens "
                    f"are cut into {tokens}; use --block-size {tokens}"
                )
            number = indexers[name][0] if name in indexers else packed[name][0]
            self._pages.setdefault(number, []).append(cache.view(blocks, heads, tokens * size))
            if name in packed:
                self._offsets[number] = packed[name][2].impl.whole_key_offset()
        self.fingerprint = engine_fingerprint(config, config.cache_config.block_size)
        self._store = PromptStore(self._connector._folder, self.fingerprint)  # raises for a folder of another cache

    def _heads(self, number: int) -> slice:
        """Which of a layer's KV heads this rank holds."""
        rank, ranks = tensor_parallel_rank()
        total = next(x.num_kv_heads for x in self.fingerprint.layers if x.number == number)
        return rank_heads(total, self._pages[number][0].shape[1], rank, ranks)

    def load(self, load: Load) -> None:
        """Reads a file into its blocks; a file that changed since the scheduler saw it is reported and not used."""
        try:
            header = read_header(load.path)
            header.fingerprint.check_same(self.fingerprint, load.path)
            last = load.first + len(load.block_ids)
            if len(header.block_hashes) < last or header.block_hashes[last - 1] != load.last_hash:
                raise InputError(f"{load.path} was replaced by another prompt's")
            heads = self._heads(next(iter(self._pages)))
            _, pages = read_pages(header, heads, list(self._pages))
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
        """Copies the pages now; the file is written during the next steps."""
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
                step = max(1, len(shards) // layer.num_kv_heads)  # ranks that replicate a head
                offset = self._offsets[layer.number]
                layers[layer.number] = LayerPages(torch.cat(shards[::step], 1), key_offset=offset)
            self._store.save(PromptCache(self.fingerprint, tokens, layers), WRITER)
        except Exception:
            logger.exception("slimkv: a prompt-cache file could not be written")
