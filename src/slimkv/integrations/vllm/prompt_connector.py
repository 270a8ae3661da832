"""``SlimKVPromptConnector``: a KV connector that stores prompts in prompt-cache files and reuses them.

--kv-transfer-config '{"kv_connector": "SlimKVPromptConnector", "kv_role": "kv_both",
    "kv_connector_module_path": "slimkv.integrations.vllm.prompt_connector",
    "kv_connector_extra_config": {"shared_storage_path": "/var/cache/prompts"}}'

The scheduler's half looks up prompts by the chained hashes of their blocks and decides what to read and write. The
workers' half moves pages; each rank moves those of its own KV heads. Prompts with more than tokens (images, LoRA,
embeddings, a cache salt) are neither read nor written.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import Tensor

from slimkv.errors import InputError, UnsupportedError
from slimkv.integrations.vllm.compat import FOLDER_KEYS, KVConnectorBase_V1, KVConnectorMetadata, logger
from slimkv.integrations.vllm.connectors import LEAST_TOKENS, PROMPTS, check_connectors
from slimkv.integrations.vllm.prompt_pages import Load, PromptPages, Save
from slimkv.integrations.vllm.settings import EXAMPLE, wanted
from slimkv.wire import PromptStore
from slimkv.wire.store import read_marker


@dataclass
class PromptMetadata(KVConnectorMetadata):
    """The workers' tasks in one step."""

    loads: list[Load] = field(default_factory=list)
    saves: list[Save] = field(default_factory=list)


@dataclass
class _Filling:
    """A prompt that will be written once it is computed."""

    tokens: tuple[int, ...]  # in whole blocks
    block_ids: list[int]


class SlimKVPromptConnector(KVConnectorBase_V1):
    """See the module docstring."""

    requires_kv_delivery = False  # this is a cache: prompts that are not written are recomputed

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        if not wanted(vllm_config.additional_config):
            raise InputError(f"{PROMPTS} moves slimkv's packed pages, and slimkv is not switched on; use {EXAMPLE}")
        if len(kv_cache_config.kv_cache_groups) != 1:
            raise UnsupportedError(
                f"{PROMPTS} needs one table of blocks for all layers; this model has "
                f"{len(kv_cache_config.kv_cache_groups)} (hybrid models keep states that files do not hold)"
            )
        check_connectors(vllm_config)  # for the scheduler, which has no layers; in workers, the first layer calls it
        extra = self._kv_transfer_config.kv_connector_extra_config
        self._folder = Path(extra[FOLDER_KEYS[PROMPTS]])
        self._least_tokens = extra.get(LEAST_TOKENS, 0)
        self._writes = self._kv_transfer_config.is_kv_producer
        self._reads = self._kv_transfer_config.is_kv_consumer
        # State of the scheduler:
        self._told: set[str] = set()  # rejected files that have been logged
        self._matches: dict[str, tuple[str, int, str]] = {}  # request: path, tokens, hash of the last block
        self._loads: dict[str, tuple[str, int, int, str]] = {}  # request: path, from token, to token, hash
        self._filling: dict[str, _Filling] = {}

    @cached_property
    def _pages(self) -> PromptPages:
        """The pages of a worker."""
        return PromptPages(self._vllm_config, self._folder)

    @cached_property
    def _store(self) -> PromptStore:
        """The scheduler's view of the folder; the workers marked it when they loaded the model."""
        return PromptStore(self._folder, read_marker(self._folder))

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """The number of tokens that a file adds to those in the engine's own cache."""
        if not _only_tokens(request):
            return 0, False
        if self._writes and request.request_id not in self._filling:
            self._watch(request)
        return self._match(request, num_computed_tokens) if self._reads else 0, False

    def _watch(self, request: Any) -> None:
        """Registers a prompt to be written, unless a file already has it."""
        size = self._store.fingerprint.block_size
        whole = len(request.prompt_token_ids) // size * size
        if not whole or whole < self._least_tokens:
            return
        tokens = tuple(request.prompt_token_ids[:whole])
        found = self._store.find(tokens)
        if found is None or found.tokens < whole:
            self._filling[request.request_id] = _Filling(tokens, [])

    def _match(self, request: Any, computed: int) -> int:
        if len(request.prompt_token_ids) < 2:
            return 0
        store = self._store
        found = store.find(request.prompt_token_ids[:-1])  # the last token is always computed, for its logits
        for name in store.refused.keys() - self._told:
            logger.error("slimkv: %s is not used: %s", name, store.refused[name])
        self._told = set(store.refused)
        if found is None or found.tokens <= computed:
            return 0
        last = found.header.block_hashes[found.tokens // store.fingerprint.block_size - 1]
        self._matches[request.request_id] = str(found.header.path), found.tokens, last
        return found.tokens - computed

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Called when the request has its blocks."""
        path, tokens, last = self._matches.pop(request.request_id, ("", 0, ""))
        if num_external_tokens > 0:
            self._loads[request.request_id] = path, tokens - num_external_tokens, tokens, last

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        """The workers' tasks in this step."""
        output, metadata = scheduler_output, PromptMetadata()
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
        """Adds a request's tasks. ``blocks``: all its blocks the ``first`` time, and only new ones later."""
        size = self._store.fingerprint.block_size
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

    def register_kv_caches(self, kv_caches: dict[str, Tensor]) -> None:
        """Registers the caches, uint8 [blocks, num_kv_heads, tokens, bytes], of all layers."""
        self._pages.register(kv_caches)

    def _tasks(self) -> PromptMetadata:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, PromptMetadata)
        return metadata

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Reads this step's files into their blocks."""
        for load in self._tasks().loads:
            self._pages.load(load)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing to wait for: ``start_load_kv`` loads synchronously."""

    def save_kv_layer(self, layer_name: str, kv_layer: Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """Nothing to do per layer: whole prompts are written after the step."""

    def wait_for_save(self) -> None:
        """Copies the pages of finished prompts and hands them to the writer thread."""
        for save in self._tasks().saves:
            self._pages.save(save)

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Blocks that could not be loaded; vLLM fails or recomputes them (``kv_load_failure_policy``)."""
        failed, self._pages.failed = self._pages.failed, set()
        return failed

    def shutdown(self) -> None:
        """Waits until all files are written."""
        if "_pages" in vars(self):
            self._pages.writer.shutdown(wait=True)


def _only_tokens(request: Any) -> bool:
    """Whether a prompt's pages depend on its tokens alone."""
    others = (getattr(request, name, None) for name in ("lora_request", "mm_features", "prompt_embeds", "cache_salt"))
    return bool(request.prompt_token_ids) and not any(isinstance(x, Tensor) or bool(x) for x in others)
