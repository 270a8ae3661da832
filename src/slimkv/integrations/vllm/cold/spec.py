"""``SlimKVOffloadingSpec``: vLLM's tiered offload with packed blocks in its host memory and files.

``kv_connector_extra_config``: ``slimkv`` (the fields of ``KVCacheConfig``, or a format's name), ``cpu_bytes_to_use``,
and the other options of vLLM's ``TieringOffloadingSpec``, with tiers of type ``fs``.

The workers know the layers; the scheduler only counts blocks. The workers start first, and rank 0 writes the size and
fingerprint of a block to a note in /dev/shm, where vLLM also shares host memory. The scheduler reads the note.
"""

from __future__ import annotations

import json
import os
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from slimkv.config import KVCacheConfig, unknown_setting
from slimkv.errors import InputError, UnsupportedError
from slimkv.integrations.serving.cold.band import Band, BandCodec, bands_of, block_bytes
from slimkv.integrations.serving.model import KEY, parse_cold_settings
from slimkv.integrations.vllm.cold import compat
from slimkv.integrations.vllm.cold.layers import HotCache, find_layers
from slimkv.integrations.vllm.cold.worker import ColdWorker
from slimkv.integrations.vllm.compat import layer_number, logger
from slimkv.integrations.vllm.connectors import WEIGHTS, all_heads, engine_weights
from slimkv.integrations.vllm.model import layer_offset, served_model
from slimkv.integrations.vllm.refusals import watch_weights
from slimkv.integrations.vllm.settings import BATCH_INVARIANT, batch_invariant
from slimkv.spec import LatentSpec
from slimkv.wire import Fingerprint, LayerFingerprint, check_marker
from slimkv.wire.model import model_fields

CHUNK_TOKENS = 128
NOTES = Path("/dev/shm")
_FILES = {"type": "SlimKVFileTier", "module_path": "slimkv.integrations.vllm.cold.files"}
EXAMPLE = '{"spec_name": "SlimKVOffloadingSpec", "spec_module_path": "slimkv.integrations.vllm.cold", "slimkv": "k4v4"}'


# Entries of the offloading connector's extra config: slimkv's and vLLM's.
_KNOWN = [
    KEY, WEIGHTS, "cpu_bytes_to_use", "secondary_tiers", "blocks_per_chunk", "block_size", "eviction_policy",
    "cache_policy_module_path", "backpressure", "offload_prompt_only", "self_describing_kv_events", "store_threshold",
    "max_tracker_size", "canonical_layout", "spec_name", "spec_module_path",
]  # fmt: skip


def cold_settings(extra_config: Any) -> KVCacheConfig:
    """The cold tier's settings from the offloading connector's extra config; raises for unknown entries."""
    for name in extra_config:
        if name not in _KNOWN:
            raise InputError(f"the cold tier: {unknown_setting(name, _KNOWN)}")
    if KEY not in extra_config:
        raise InputError(
            f"the cold tier's format is missing: put {KEY!r} into kv_connector_extra_config, as in {EXAMPLE}"
        )
    return parse_cold_settings(extra_config[KEY])


class SlimKVOffloadingSpec(compat.TieringOffloadingSpec):
    """In a worker it has vLLM's configuration and finds the layers; in the scheduler it reads the workers' note."""

    def __init__(self, config: Any) -> None:
        settings = cold_settings(config.extra_config)
        self._note = NOTES / f"slimkv_cold_{config.engine_id}.json"
        self._vllm_config = compat.get_current_vllm_config_or_none()
        self._cold_worker: ColdWorker | None = None
        _refuse(config)
        if self._vllm_config is not None:
            watch_weights(self._vllm_config, settings)
            self._model = served_model(self._vllm_config, settings)
            self._groups = [
                bands_of(find_layers(self._vllm_config, group.layer_names, self._model), group.tokens_per_block)
                for group in config.groups
            ]
            size = max(block_bytes(bands) for bands in self._groups)
            note: dict[str, Any] = {"block_bytes": size, "fingerprint": self._fingerprint(config)}
            if config.parallel.rank == 0:
                self._note.write_text(json.dumps(note))
        else:
            note = self._take_note()
        super().__init__(replace(
            config, cache=_cache(config), worker_kv_bytes_per_block=note["block_bytes"], replicated_layout=False,
            parallel=replace(config.parallel, is_parallelism_agnostic=False),
            extra_config={**config.extra_config, "secondary_tiers": self._tiers(config, note["fingerprint"])},
        ))  # fmt: skip
        if self.num_chunks == 0:
            raise InputError(
                f"cpu_bytes_to_use is {config.extra_config.get('cpu_bytes_to_use')}, and one packed block takes "
                f"{self.kv_bytes_per_chunk} bytes: give the cold tier more"
            )

    def _take_note(self) -> dict[str, Any]:
        try:
            note = json.loads(self._note.read_text())
        except OSError as error:
            raise UnsupportedError(
                f"the cold tier's scheduler finds no note from its workers ({self._note}): they must run on the same "
                "machine and share its /dev/shm"
            ) from error
        self._note.unlink()
        return note

    def _fingerprint(self, config: Any) -> str | None:
        """The fingerprint of the blocks, as JSON; None without files.

        It includes the hot cache's dtype, because fp8 rounds K and V.
        """
        if not config.extra_config.get("secondary_tiers"):
            return None
        bands = [band for bands in self._groups for band in bands]
        sizes = {band.layout.block_size for band in bands}
        if len(sizes) > 1:
            raise UnsupportedError(f"files of the cold tier hold pages of one size, not of {sorted(sizes)} tokens")
        engine, served = self._vllm_config, self._model
        dtype = str(engine.model_config.dtype).removeprefix("torch.")
        found = []
        for layer in (layer for band in bands for layer in band.layers):
            if (number := layer_number(layer.name)) is None:
                raise UnsupportedError(
                    f"{layer.name} has no layer number: its blocks cannot be told from others in files"
                )
            heads = 1 if isinstance(layer.spec, LatentSpec) else all_heads(engine, layer.module)
            offset = served.whole_offset(layer.number, layer.spec)
            window = getattr(layer.module, "sliding_window", None)
            found.append(LayerFingerprint.of(number, layer.spec, heads, dtype, window, offset))
        return Fingerprint.of(
            found, block_size=sizes.pop(), seed=served.settings.seed, dtype=dtype, weights=engine_weights(engine),
            model={**model_fields(engine.model_config.hf_text_config), "hot_cache": engine.cache_config.cache_dtype},
        ).to_json()  # fmt: skip

    def _tiers(self, config: Any, fingerprint: str | None) -> list[dict[str, Any]]:
        """vLLM's ``fs`` tiers, changed to ``SlimKVFileTier`` with a folder per fingerprint."""
        out = []
        for tier in config.extra_config.get("secondary_tiers") or ():
            assert fingerprint is not None
            known = Fingerprint.from_json(fingerprint, "the workers' note")
            folder = Path(tier["root_dir"]) / f"slimkv-{known.hash[:16]}"
            if self._vllm_config is None:
                check_marker(folder, known)
            out.append({**tier, **_FILES, "root_dir": str(folder), "fingerprint": known.hash})
        return out

    def get_manager(self) -> Any:
        """The scheduler's part. With files it also maps the host memory. All workers have mapped it by then, so the
        file is removed: a killed engine leaves nothing behind."""
        if not self.secondary_tier_configs:
            return compat.CPUOffloadingSpec.get_manager(self)  # without tiers to look up
        fresh = self._manager is None
        manager = super().get_manager()
        if fresh:
            os.unlink(self._scheduler_mmap.mmap_path)
            self._scheduler_mmap._creator = False
        return manager

    def get_worker(self, kv_caches: Any) -> compat.OffloadingWorker:
        """The worker of one rank."""
        if self._cold_worker is None:
            blocks = kv_caches.tensors[0].tensor.shape[0]
            groups = [[self._codec(band, blocks) for band in bands] for bands in self._groups]
            region = compat.SharedOffloadRegion(
                engine_id=self.config.engine_id, num_chunks=self.num_chunks, rank=self.config.parallel.rank,
                kv_bytes_per_chunk=self.kv_bytes_per_chunk, cpu_page_size=self.cpu_page_size_per_worker,
                barrier=None if self.secondary_tier_configs else compat.all_workers_barrier,
            )  # fmt: skip
            region._creator = False  # with files, the scheduler unlinks it
            self._cold_worker = ColdWorker(groups, region, self.cpu_page_size_per_worker, self.blocks_per_chunk)
            logger.info(
                "slimkv: the cold tier holds %d tokens in %.1f GiB of host memory.",
                self.num_chunks * self.blocks_per_chunk * max(self.tokens_per_block),
                self.num_chunks * self.kv_bytes_per_chunk / 2**30,
            )
        return self._cold_worker

    def _codec(self, band: Band, num_blocks: int) -> BandCodec:
        model, tokens = self._model, band.pages * band.layout.block_size
        dtype = self._vllm_config.model_config.dtype
        caches = [HotCache(layer, num_blocks, tokens, dtype) for layer in band.layers]
        offsets = [
            layer_offset(model, self._vllm_config, x.number, x.spec, x.num_kv_heads, caches[0].device)
            for x in band.layers
        ]
        return BandCodec(model, band, caches, offsets, dtype)


def _cache(config: Any) -> Any:
    """Sets the default chunk to 128 tokens: looking up a chunk of one block, vLLM's default, takes longer than copying
    it."""
    if {"blocks_per_chunk", "block_size"} & set(config.extra_config):
        return config.cache
    longest = max(group.tokens_per_block for group in config.groups)
    return replace(config.cache, blocks_per_chunk=max(1, CHUNK_TOKENS // longest))


def _refuse(config: Any) -> None:
    given, size = config.extra_config.get("cpu_bytes_to_use"), 0
    with suppress(TypeError, ValueError, OverflowError):
        size = int(given)
    if size < 1:
        raise InputError(f"cpu_bytes_to_use must be the cold tier's number of bytes, not {given!r}")
    if batch_invariant():
        raise UnsupportedError(
            f"the cold tier does not work with {BATCH_INVARIANT}=1: answers would depend on which blocks had left the "
            "cache; leave out one of them"
        )
    parallel = config.parallel
    for name, size in (
        ("pipeline", parallel.pp_size), ("decode context", parallel.dcp_size), ("prefill context", parallel.pcp_size)
    ):  # fmt: skip
        if size > 1:
            raise UnsupportedError(
                f"the cold tier does not run under {name} parallelism ({size}): use tensor parallelism"
            )
    tiers = config.extra_config.get("secondary_tiers") or []
    if not isinstance(tiers, list):
        raise InputError(f"secondary_tiers must be a list of tiers, not {tiers!r}")
    for tier in tiers:
        if not isinstance(tier, dict) or tier.get("type") != "fs" or not isinstance(tier.get("root_dir"), str):
            raise UnsupportedError(
                f"the cold tier writes packed blocks to files ({{'type': 'fs', 'root_dir': ...}}); it does not know "
                f"{tier!r}"
            )
    if config.canonical_layout:
        raise UnsupportedError("canonical_layout is a layout of vLLM's own blocks, not of packed ones: leave it out")
    if config.extra_config.get("store_threshold"):
        raise UnsupportedError("the cold tier has no store_threshold: leave it out")
