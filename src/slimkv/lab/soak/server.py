"""``vllm serve`` in a separate process, on the loopback interface and a free port; stopped with all its children."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from slimkv.lab import engine_process
from slimkv.lab.engine_process import EngineError, log_tail, require_engine
from slimkv.lab.soak.client import Client
from slimkv.lab.soak.settings import SoakSettings

LOOPBACK = "127.0.0.1"
_STOP_SECONDS = 60
_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_COMPUTE_NANS_IN_LOGITS": "1",  # counts requests whose logits have a NaN
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_SERVER_DEV_MODE": "1",  # resetting the prefix cache, sleep and wake-up over HTTP
}


@dataclass(frozen=True)
class Server:
    """A running server."""

    process: subprocess.Popen[bytes]
    client: Client
    log: Path
    can_sleep: bool
    platform: str

    def check_alive(self) -> None:
        """Raises with the end of the log if the process has ended."""
        if (code := self.process.poll()) is not None:
            raise EngineError(f"vllm serve ended with exit code {code}:\n{log_tail(self.log)}")


def platform_of_vllm() -> tuple[str, bool]:
    """The platform of the installed vLLM and whether it has sleep mode, determined in a separate process."""
    require_engine("vllm")
    code = (
        "from vllm.platforms import current_platform as p; "
        "print('platform:', p.device_type or 'cpu', int(p.is_sleep_mode_available()))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=300)
    for line in done.stdout.splitlines():
        if line.startswith("platform:"):
            _, name, sleeps = line.split()
            return name, sleeps == "1"
    raise EngineError(f"the installed vLLM cannot be imported:\n{(done.stdout + done.stderr)[-2000:]}")


def command(settings: SoakSettings, model: str, port: int, can_sleep: bool) -> list[str]:
    """The server's command line."""
    words = [
        sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", model, "--host", LOOPBACK, "--port", str(port),
        "--served-model-name", "soak", "--dtype", settings.dtype, "--max-model-len", str(settings.max_model_len),
        "--max-num-seqs", str(max(settings.concurrency, 2)), "--block-size", str(settings.block_size),
        "--num-gpu-blocks-override", str(settings.cache_tokens // settings.block_size), "--enforce-eager",
        "--seed", str(settings.seed), "--enable-prefix-caching",
    ]  # fmt: skip
    if settings.format != "stock":
        config = {"slimkv": {"format": settings.format}}
        words += ["--attention-backend", "CUSTOM", "--additional-config", json.dumps(config)]
    if can_sleep and settings.sleeps:
        words.append("--enable-sleep-mode")
    return words


def environment(folder: Path) -> dict[str, str]:
    """The server's environment. vLLM's CPU build is called vllm-cpu, but its command reads the version of vllm."""
    found = engine_process.environment(**_ENVIRONMENT)
    found.pop("TRITON_INTERPRET", None)
    try:
        metadata.version("vllm")
    except metadata.PackageNotFoundError:
        version = metadata.version("vllm-cpu")
        info = folder / f"vllm-{version}+cpu.dist-info"
        info.mkdir(exist_ok=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\n")
        found["PYTHONPATH"] = os.pathsep.join(filter(None, [str(folder), found.get("PYTHONPATH")]))
    return found


def free_port() -> int:
    """A free port on the loopback interface."""
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        return int(probe.getsockname()[1])


@contextmanager
def serving(settings: SoakSettings, model: str, folder: Path) -> Iterator[Server]:
    """A server that is ready; its log is ``folder/server.log``. It stops when the context ends."""
    platform, can_sleep = platform_of_vllm()
    port, log = free_port(), folder / "server.log"
    words = command(settings, model, port, can_sleep)
    with engine_process.running(words, log, environment(folder)) as process:
        server = Server(process, Client(LOOPBACK, port, settings.request_seconds), log, can_sleep, platform)
        try:
            _wait_until_ready(server, settings.start_seconds)
            yield server
        finally:
            process.send_signal(signal.SIGINT)
            with suppress(subprocess.TimeoutExpired):
                process.wait(_STOP_SECONDS)


def _wait_until_ready(server: Server, seconds: float) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        server.check_alive()
        if server.client.healthy():
            return
        time.sleep(0.5)
    raise EngineError(f"vllm serve was not ready after {seconds:g} s:\n{log_tail(server.log)}")
