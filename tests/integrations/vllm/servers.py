"""``vllm serve`` in a separate process."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from engines import environment
from prompts import model_folder

from server_process import running
from slimkv.lab.soak.server import environment as server_environment
from slimkv.lab.soak.server import free_port


@contextmanager
def serving(folder: Path, *options: str, packed: bool = True, model: str | None = None) -> Iterator[tuple[str, Path]]:
    """Serves SmolLM2 or ``model`` in float32, which every CPU supports, and yields the address and the log.

    ``packed``: with slimkv's attention backend.
    """
    port, log, script = free_port(), folder / "log", Path(sys.executable).with_name("vllm")
    vllm = [str(script)] if script.exists() else [sys.executable, "-m", "vllm.entrypoints.cli.main"]
    command = [
        *vllm, "serve", model or model_folder(), "--port", str(port), "--host", "127.0.0.1", "--served-model-name",
        "smollm2", "--max-model-len", "1024", "--enforce-eager", "--dtype", "float32",
        *(("--attention-backend", "CUSTOM") if packed else ()), *options,
    ]  # fmt: skip
    path = server_environment(folder).get("PYTHONPATH")  # vLLM's CPU build under the name that the command expects
    with running(command, environment(**({"PYTHONPATH": path} if path else {})), port, log, signal.SIGINT) as address:
        yield address, log
