"""Prefill in one engine, decode in another: NIXL transfers packed pages; a peer with another format is refused."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")
pytest.importorskip("nixl", reason="make test-vllm-extended installs it")

from engines import BASE, environment, slimkv
from mla_models import deepseek_v2, saved
from peers import Peer, all_ready
from test_stores import make, prompt

from slimkv.lab.soak.server import free_port
from slimkv.spec import CodecSpec, LatentSpec, PageLayout

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.extended]

SCRIPT = Path(__file__).with_name("transfer_peer.py")
LAYERS, HEADS, DIM = 3, 2, 64
PROMPT = prompt(1, 301)
BLOCKS = -(-len(PROMPT) // BASE["block_size"])
FOR_A_PEER = dict.fromkeys(("remote_engine_id", "remote_block_ids", "remote_host", "remote_port"))
FOR_A_PEER |= {"do_remote_decode": True, "do_remote_prefill": False}


class TransferPeer(Peer):
    """An engine that transfers its pages through host memory."""

    def __init__(self, folder: str, log: Path, arguments: dict[str, Any]) -> None:
        transfer = {"kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_buffer_device": "cpu"}
        engine = {**BASE, "model": folder, "skip_tokenizer_init": True, "kv_transfer_config": transfer, **arguments}
        own = {"VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1", "VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port())}
        super().__init__(SCRIPT, engine, environment(**own, VLLM_ENABLE_V1_MULTIPROCESSING="0"), log)

    def ask(self, max_tokens: int, transfer: dict[str, Any] | None = None) -> dict[str, Any]:
        return super().ask(prompt=PROMPT, max_tokens=max_tokens, transfer=transfer)


def started_peers(folder: str, logs: Path, formats: dict[str, str], **arguments: Any):
    return all_ready(
        {name: TransferPeer(folder, logs / name, {**slimkv(x), **arguments}) for name, x in formats.items()}
    )


@pytest.fixture(scope="module")
def peers(tmp_path_factory):
    folder = make(tmp_path_factory.mktemp("llama"), 0)
    kinds = {"prefill": "k4v4", "decode": "k4v4", "other": "k5v3"}  # k5v3 pages have the size of k4v4 pages
    with started_peers(folder, tmp_path_factory.mktemp("logs"), kinds) as started:
        yield started


def test_packed_pages_travel(peers):
    """The second engine gives the first one's tokens without computing the prompt. Exactly the blocks' bytes move."""
    alone = peers["prefill"].ask(12)["tokens"]
    handed = peers["prefill"].ask(1, FOR_A_PEER)
    got = peers["decode"].ask(12, handed["transfer"])
    assert got["tokens"] == alone
    assert got["vllm:external_prefix_cache_hits"] == len(PROMPT)
    page = PageLayout(CodecSpec.parse("k4v4", DIM), BASE["block_size"]).page_bytes
    assert got["vllm:nixl_bytes_transferred"] == BLOCKS * LAYERS * HEADS * page
    assert got["vllm:nixl_bytes_transferred"] < 2 * 2 * BLOCKS * BASE["block_size"] * LAYERS * HEADS * DIM / 3.7  # bf16


def test_a_peer_of_another_format_is_refused(peers):
    """The refusal comes before any byte is read, and names both formats."""
    handed = peers["prefill"].ask(1, FOR_A_PEER)
    got = peers["other"].ask(2, handed["transfer"])
    assert got["vllm:nixl_bytes_transferred"] == 0
    assert (got["reason"], got["tokens"]) == ("error", [])  # vLLM's default if pages did not arrive
    said = peers["other"].said
    assert re.search("hash mismatch. Local: .*slimkv k5v3, .*Remote: .*slimkv k4v4, ", said), said


def test_packed_latents_travel(tmp_path):
    """One page per layer and block, regardless of the number of heads."""
    block, spec = 16, LatentSpec.parse("c4").with_raw_dtype("float32")
    how = {"block_size": block, "max_num_batched_tokens": 1024}
    folder = saved(deepseek_v2, tmp_path / "model")
    with started_peers(folder, tmp_path, {"prefill": "c4", "decode": "c4"}, **how) as peers:
        alone = peers["prefill"].ask(12)["tokens"]
        got = peers["decode"].ask(12, peers["prefill"].ask(1, FOR_A_PEER)["transfer"])
    assert got["tokens"] == alone
    assert got["vllm:external_prefix_cache_hits"] == len(PROMPT)
    assert got["vllm:nixl_bytes_transferred"] == -(-len(PROMPT) // block) * 3 * PageLayout(spec, block).page_bytes
