"""``ColdWorker``: moves blocks between a rank's cache and host memory, encoding them on the way out and decoding them
on the way in.

Blocks move in pieces. On a GPU, one piece is encoded or decoded on one stream while another is copied on a second
stream. Both run beside the serving stream, and the host does not wait. On a CPU the same steps run in sequence.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from slimkv.integrations.serving.cold.band import BandCodec
from slimkv.integrations.vllm.cold import compat

PIECE_BYTES = 256 << 20  # bytes of K and V, in the model's dtype, that are encoded or decoded at a time


@dataclass
class _Job:
    id: int
    bytes: int
    started: Any  # events on a GPU, seconds on a CPU
    ended: Any


class _Direction:
    """Stores or loads, double-buffered."""

    def __init__(self, groups: Sequence[Sequence[BandCodec]], blocks: Sequence[int], device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self.groups, self.blocks, self.device = groups, blocks, device
        self._staging = [
            [[c.staging(n) for c in codecs] for codecs, n in zip(groups, blocks, strict=True)] for _ in "ab"
        ]
        self.codec: Any = torch.cuda.Stream(device) if self._cuda else None
        self.copy: Any = torch.cuda.Stream(device) if self._cuda else None
        self._free: list[Any] = [None, None]  # events after which a buffer may be filled again
        self._turn = 0
        self._jobs: deque[_Job] = deque()

    def warm(self) -> None:
        """Compiles the kernels before a request needs them."""
        for codecs, staging in zip(self.groups, self._staging[0], strict=True):
            for codec, pages in zip(codecs, staging, strict=True):
                codec.warm(pages)

    def on(self, stream: Any) -> Any:
        return torch.cuda.stream(stream) if self._cuda else nullcontext()

    def event(self, stream: Any, *, timing: bool = False) -> Any:
        """An event at the current point of ``stream``."""
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=timing)
        event.record(stream)
        return event

    def wait(self, stream: Any, event: Any) -> None:
        if self._cuda and event is not None:
            stream.wait_event(event)

    def buffers(self, group: int, filler: Any) -> tuple[list[Tensor], int]:
        """A buffer for each band; the stream ``filler`` waits until they are free."""
        self._turn ^= 1
        self.wait(filler, self._free[self._turn])
        return self._staging[self._turn][group], self._turn

    def release(self, turn: int, stream: Any) -> None:
        self._free[turn] = self.event(stream)

    def begin(self, first: Any) -> Any:
        """Makes both streams wait until the serving stream has written or zeroed the blocks; returns the start."""
        if self._cuda:
            now = torch.cuda.current_stream(self.device)
            self.codec.wait_stream(now)
            self.copy.wait_stream(now)
        return self.event(first, timing=True)

    def finish(self, job: int, size: int, started: Any, last: Any) -> None:
        self._jobs.append(_Job(job, size, started, self.event(last, timing=True)))

    def finished(self) -> Iterator[compat.TransferResult]:
        while self._jobs and (not self._cuda or self._jobs[0].ended.query()):
            job = self._jobs.popleft()
            took = job.started.elapsed_time(job.ended) / 1e3 if self._cuda else job.ended - job.started
            yield compat.TransferResult(job.id, True, job.bytes, took)

    def synchronize(self, jobs: set[int] | None = None) -> None:
        for job in self._jobs:
            if self._cuda and (jobs is None or job.id in jobs):
                job.ended.synchronize()


class ColdWorker(compat.OffloadingWorker):
    """The worker of one rank. ``groups``: the bands of each cache group; a host row holds blocks of one group."""

    def __init__(
        self,
        groups: Sequence[Sequence[BandCodec]],
        region: compat.SharedOffloadRegion,
        row_bytes: int,
        blocks_per_chunk: int,
    ) -> None:
        device = groups[0][0].device
        self._region, self._chunk = region, blocks_per_chunk
        if device.type == "cuda":
            compat.pin_mmap_region(region)
        rows = region.create_next_worker_view(row_bytes).view(torch.uint8)
        self._host = rows.unflatten(1, (blocks_per_chunk, -1))  # [chunks, blocks, bytes]
        hot_bytes = [codecs[0].tokens * sum(codec.token_bytes() for codec in codecs) for codecs in groups]
        blocks = [max(1, PIECE_BYTES // size) for size in hot_bytes]  # of a piece
        self._stores, self._loads = (_Direction(groups, blocks, device) for _ in range(2))
        if device.type == "cuda":
            self._stores.warm()

    def submit_store(self, job_id: int, src_spec: compat.GPULoadStoreSpec, dst_spec: Any) -> bool:
        """Starts copying blocks from the cache to host memory."""
        way = self._stores
        started, size = way.begin(way.codec), 0
        for group, first, blocks, chunks, subs in self._pieces(way, src_spec, dst_spec.block_ids):
            staging, turn = way.buffers(group, way.codec)
            with way.on(way.codec):
                on_device = self._device_ids(blocks)
                for codec, pages in zip(way.groups[group], staging, strict=True):
                    codec.encode(on_device, first, pages[: len(blocks) * codec.band.pages])
            way.wait(way.copy, way.event(way.codec))
            size += self._copy(way, group, staging, chunks, subs, out=True)
            way.release(turn, way.copy)
        way.finish(job_id, size, started, way.copy)
        return True

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: compat.GPULoadStoreSpec) -> bool:
        """Starts copying blocks from host memory to the cache."""
        way = self._loads
        started, size = way.begin(way.copy), 0
        for group, _, blocks, chunks, subs in self._pieces(way, dst_spec, src_spec.block_ids):
            staging, turn = way.buffers(group, way.copy)
            size += self._copy(way, group, staging, chunks, subs, out=False)
            way.wait(way.codec, way.event(way.copy))
            with way.on(way.codec):
                on_device = self._device_ids(blocks)
                for codec, pages in zip(way.groups[group], staging, strict=True):
                    codec.decode(pages[: len(blocks) * codec.band.pages], on_device)
            way.release(turn, way.codec)
        way.finish(job_id, size, started, way.codec)
        return True

    def _pieces(
        self, way: _Direction, cache: compat.GPULoadStoreSpec, chunks: np.ndarray
    ) -> Iterator[tuple[int, int, np.ndarray, np.ndarray, np.ndarray]]:
        """Yields (group, index of the first block in the prompt, block ids, their chunks, indices in the chunks)."""
        taken_blocks = taken_chunks = 0
        for group, (count, first) in enumerate(zip(cache.group_sizes, cache.block_indices, strict=True)):
            place = np.arange(count) + first % self._chunk
            mine = chunks[taken_chunks:]
            for start in range(0, count, way.blocks[group]):
                here = slice(start, min(start + way.blocks[group], count))
                blocks = cache.block_ids[taken_blocks + here.start : taken_blocks + here.stop]
                yield group, first + start, blocks, mine[place[here] // self._chunk], place[here] % self._chunk
            taken_blocks += count
            taken_chunks += -(-(count + first % self._chunk) // self._chunk) if count else 0

    def _device_ids(self, blocks: np.ndarray) -> Tensor:
        ids = torch.from_numpy(blocks.astype(np.int64))
        device = self._stores.device
        return ids.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else ids

    def _copy(
        self, way: _Direction, group: int, staging: list[Tensor], chunks: np.ndarray, subs: np.ndarray, *, out: bool
    ) -> int:
        """Copies a piece between its buffers and host memory; returns the number of bytes."""
        sources, targets, sizes = [], [], []
        for codec, pages in zip(way.groups[group], staging, strict=True):
            size, offset, n = codec.band.block_bytes, codec.band.offset, len(chunks)
            if not way._cuda:
                host, rows = self._host[:, :, offset : offset + size], pages.view(-1, size)
                c, s = torch.from_numpy(chunks.astype(np.int64)), torch.from_numpy(subs)
                if out:
                    host[c, s] = rows[:n]
                else:
                    rows[:n] = host[c, s]
            else:
                at_host = self._host.data_ptr() + chunks.astype(np.int64) * self._host.stride(0)
                at_host += subs * self._host.stride(1) + offset
                at_device = pages.data_ptr() + np.arange(n) * size
                sources.append(at_device if out else at_host)
                targets.append(at_host if out else at_device)
            sizes.append(np.full(n, size))
        if way._cuda:
            from vllm import _custom_ops

            pointers = [torch.from_numpy(np.concatenate(x).astype(np.int64)) for x in (sources, targets, sizes)]
            with way.on(way.copy):
                _custom_ops.swap_blocks_batch(*pointers, is_src_access_order_any=False)
        return int(sum(x.sum() for x in sizes))

    def get_finished(self) -> list[compat.TransferResult]:
        """The transfers that have finished since the last call."""
        return [*self._stores.finished(), *self._loads.finished()]

    def wait(self, job_ids: set[int]) -> None:
        """Waits for these jobs, whose blocks vLLM is about to reuse."""
        self._stores.synchronize(job_ids)
        self._loads.synchronize(job_ids)

    def shutdown(self) -> None:
        """Waits for running transfers and releases the host memory."""
        self._stores.synchronize()
        self._loads.synchronize()
        del self._host
        self._region.cleanup()
