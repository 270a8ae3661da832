"""SGLang's OpenAI server with slimkv, queried over HTTP as users do."""

from __future__ import annotations

import signal
import sys

import pytest

pytest.importorskip("sglang")
pytest.importorskip("openai")

import openai
from engines import environment, override_args
from prompts import model_folder

from server_process import running
from slimkv.lab.soak.server import free_port

pytestmark = [pytest.mark.sglang, pytest.mark.slow]


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """Runs ``python -m sglang.launch_server`` as documented; yields its address and its log."""
    port = free_port()
    log = tmp_path_factory.mktemp("server") / "log"
    command = [
        sys.executable, "-m", "sglang.launch_server", "--model-path", model_folder(), "--port", str(port), "--host",
        "127.0.0.1", "--served-model-name", "smollm2", "--context-length", "1024", "--device", "cpu", "--dtype",
        "float32", "--attention-backend", "slimkv", "--page-size", "64", "--max-total-tokens", "4096",
        "--json-model-override-args", override_args("k4v4"), "--skip-server-warmup",
    ]  # fmt: skip
    with running(command, environment(), port, log, signal.SIGTERM) as address:
        yield address, log


def test_streaming_gives_what_a_whole_answer_gives(server):
    address, _ = server
    client = openai.OpenAI(base_url=address, api_key="none")
    asked = {
        "model": "smollm2", "max_tokens": 16, "temperature": 0, "seed": 0,
        "messages": [{"role": "user", "content": "Name the three primary colours."}],
    }  # fmt: skip
    whole = client.chat.completions.create(**asked).choices[0].message.content
    pieces = [
        c.choices[0].delta.content or "" for c in client.chat.completions.create(**asked, stream=True) if c.choices
    ]
    assert len([p for p in pieces if p]) > 5, "a stream, not one piece"
    assert "".join(pieces) == whole
    assert "red" in whole.lower()


def test_the_log_tells_the_size_of_the_cache(server):
    """SmolLM2: 30 layers with 3 KV heads of 68 bytes per token, for 4,096 tokens and one extra page."""
    _, log = server
    line = next(x for x in log.read_text().splitlines() if "KV Cache is allocated" in x)
    assert "dtype: torch.uint8, #tokens: 4096" in line
    size = float(line.split("K size:")[1].split("GB")[0])
    assert size == pytest.approx(30 * 3 * 68 * (4096 + 64) / 2**30, abs=0.006)
