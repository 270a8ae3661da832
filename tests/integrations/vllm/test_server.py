"""vLLM's OpenAI server with slimkv, queried over HTTP as users do."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("vllm")
pytest.importorskip("openai")

import openai
from servers import serving

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

CONFIG = json.dumps({"slimkv": {"format": "k4v4"}})


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """Runs ``vllm serve`` as documented; yields its address and its log."""
    with serving(tmp_path_factory.mktemp("server"), "--additional-config", CONFIG) as address_and_log:
        yield address_and_log


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
    """SmolLM2: 30 layers with 3 KV heads of 68 bytes per token, in 1 GiB."""
    _, log = server
    line = next(x for x in log.read_text().splitlines() if "KV cache size" in x)
    tokens = int(line.split("KV cache size:")[1].split("tokens")[0].replace(",", ""))
    assert tokens == pytest.approx(2**30 / (30 * 3 * 68), rel=0.01)
