"""``SlimKVFileTier``: vLLM's file tier with the verified files of ``slimkv.wire.chunk_file``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from slimkv.integrations.vllm.cold.compat import FileSystemTierManager, TransferJob
from slimkv.integrations.vllm.compat import logger
from slimkv.wire.chunk_file import load_file, remove_unfinished, store_file


class SlimKVFileTier(FileSystemTierManager):
    """A folder of files with one fingerprint. Files are read and written in vLLM's I/O threads."""

    def __init__(self, *args: Any, fingerprint: str, root_dir: str, **kwargs: Any) -> None:
        super().__init__(*args, root_dir=root_dir, **kwargs)
        self._fingerprint = fingerprint
        remove_unfinished(root_dir)

    def _files(self, job: TransferJob) -> Sequence[tuple[str, memoryview, bytes]]:
        size, view = self._block_size, self._primary_kv_view.cast("B")
        return [
            (self.file_mapper.get_file_name(key), view[int(chunk) * size : (int(chunk) + 1) * size], bytes(key))
            for key, chunk in zip(job.keys, job.chunk_ids, strict=True)
        ]

    def submit_store(self, job_metadata: TransferJob) -> None:
        """Writes blocks from host memory to files. A block that cannot be written is a miss later."""
        files, job = self._files(job_metadata), job_metadata.job_id

        def task() -> None:
            for path, chunk, key in files:
                store_file(path, chunk, key, self._fingerprint)

        if self.events is not None:
            self._store_job_keys[job] = list(job_metadata.keys)
        self._job_block_counts[job] = len(files)
        self._pool.enqueue_store(job, 1, [task])

    def submit_load(self, job_metadata: TransferJob) -> None:
        """Reads files into host memory, up to the first damaged one."""
        files, job = self._files(job_metadata), job_metadata.job_id

        def task() -> None:
            for done, (path, chunk, key) in enumerate(files):
                try:
                    load_file(path, chunk, key, self._fingerprint)
                except OSError as error:
                    self._load_progress[job] = done  # earlier chunks are kept, the others are misses
                    logger.warning("slimkv: %s", error)
                    raise

        self._load_job_keys[job] = list(job_metadata.keys)
        self._job_block_counts[job] = len(files)
        self._pool.enqueue_load(job, 1, [task])
