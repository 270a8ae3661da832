"""Prefill in one engine, decode in another: NIXL transfers packed pages; a peer with another format is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("sglang")
pytest.importorskip("nixl", reason="make test-sglang-extended installs it")

from engines import BASE, PAGE, environment, plugin_path, run_engine, slimkv
from mla_models import LAYERS as LATENT_LAYERS
from mla_models import deepseek_v2, saved
from peers import Peer, all_ready
from prompts import run
from row_exact import tiny_model

from slimkv.lab.soak.server import free_port
from slimkv.spec import CodecSpec, LatentSpec, page_layout

pytestmark = [pytest.mark.sglang, pytest.mark.slow, pytest.mark.extended]

SCRIPT = Path(__file__).with_name("transfer_peer.py")
PROMPT = [(7 * j * j + j) % 500 + 3 for j in range(301)]  # four chunks
BLOCKS = -(-len(PROMPT) // PAGE)
LAYERS, HEADS, DIM = 3, 2, 32  # sizes of ``tiny_model``


class Pair:
    """One prefill engine, and decode engines that connect to its bootstrap port."""

    def __init__(self, model: str, formats: dict[str, str], folder: Path) -> None:
        self.port, self.bytes, self.room = free_port(), folder / "bytes", 0
        (folder / "plugin").mkdir()
        path = plugin_path(folder / "plugin", "nixl_cpu", "nixl_on_cpu:register")
        shared = environment(PYTHONPATH=path, TRANSFERRED=str(self.bytes))
        transfer = {
            "disaggregation_transfer_backend": "nixl", "disaggregation_bootstrap_port": self.port,
            "disable_overlap_schedule": True,  # with overlap, SGLang would create CUDA events even on a CPU
        }  # fmt: skip
        self.peers = {}
        for i, (name, format) in enumerate(formats.items()):
            own = {
                "disaggregation_mode": "prefill" if name == "prefill" else "decode", "port": 31000 + 100 * i,
                "nccl_port": 32000 + i, **slimkv(format),
            }  # fmt: skip
            self.peers[name] = Peer(SCRIPT, {**BASE, "model_path": model, **transfer, **own}, shared, folder / name)

    def send(self, name: str) -> None:
        """Sends the prompt to the prefill engine and to the decode engine ``name``."""
        self.room += 1
        more = {"bootstrap_host": "127.0.0.1", "bootstrap_port": self.port, "bootstrap_room": self.room}
        for peer in ("prefill", name):
            self.peers[peer].send(prompt=PROMPT, max_tokens=12, more=more)

    def moved(self) -> list[int]:
        """Bytes of each transfer, as counted by SGLang."""
        return [int(line) for line in self.bytes.read_text().split()]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("model"))


def alone(model: str, format: str, **settings: Any) -> list[int]:
    return run_engine({"model_path": model, **slimkv(format, **settings)}, [run("a", [PROMPT], 12)])["tokens"]["a"][0]


def test_packed_pages_travel_and_another_format_is_refused(model, tmp_path):
    """Exactly the pages' bytes move. ``k5v3`` has the size of ``k4v4``, so only the handshake tells them apart."""
    wanted = alone(model, "k4v4", center_keys=False)
    pair = Pair(model, {"prefill": "k4v4", "decode": "k4v4", "other": "k5v3"}, tmp_path)
    with all_ready(pair.peers) as peers:
        pair.send("decode")
        peers["prefill"].answer()
        assert json.loads(peers["decode"].answer())["tokens"] == wanted
        page = page_layout(CodecSpec.parse("k4v4", DIM), PAGE).page_bytes
        assert pair.moved() == [BLOCKS * LAYERS * HEADS * page]
        pair.send("other")
        with pytest.raises(AssertionError, match="the engine ended"):
            peers["other"].answer()
        said = peers["other"].log.read_text()
        assert "prefill server has kv_cache_dtype=slimkv k4v4, 1 ranks" in said
        assert "but decode server has kv_cache_dtype=slimkv k5v3, 1 ranks" in said
        assert len(pair.moved()) == 1


def test_packed_latents_travel(tmp_path):
    """One page per layer and block, regardless of the number of heads."""
    model = saved(deepseek_v2, tmp_path / "model")
    wanted = alone(model, "c4")
    pair = Pair(model, {"prefill": "c4", "decode": "c4"}, tmp_path)
    with all_ready(pair.peers) as peers:
        pair.send("decode")
        peers["prefill"].answer()
        assert json.loads(peers["decode"].answer())["tokens"] == wanted
    page = page_layout(LatentSpec.parse("c4").with_raw_dtype("float32"), PAGE).page_bytes
    assert pair.moved() == [BLOCKS * LATENT_LAYERS * page]
