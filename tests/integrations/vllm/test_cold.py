"""A cold tier under vLLM's own attention: blocks come back from host memory and files; damaged files are never used."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

pytest.importorskip("vllm")

import torch
import transformers
from engines import refusals, run_engine, slimkv
from prompts import run

pytestmark = [pytest.mark.vllm, pytest.mark.slow]


def prompt(seed: int, length: int) -> list[int]:
    return torch.randint(3, 500, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


PROMPTS = [prompt(1, 301), prompt(2, 333), prompt(3, 170)]
WHOLE = sum((len(p) - 1) // 32 * 32 for p in PROMPTS)  # tokens in whole blocks; at least one token must be computed


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A small Llama with 4 query and 2 KV heads of size 64, with random weights large enough to avoid near ties."""
    config = transformers.LlamaConfig(
        hidden_size=256, intermediate_size=512, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
        head_dim=64, vocab_size=512, max_position_embeddings=1024, initializer_range=0.1, tie_word_embeddings=False,
        eos_token_id=None,
    )  # fmt: skip
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("llama")
    transformers.LlamaForCausalLM(config).save_pretrained(path)
    return str(path)


def cold(folder: str, format: object, tier: Path | None = None, **extra):
    """Engine arguments: stock attention, a host tier of 64 MiB in chunks of one block, and a file tier in ``tier``."""
    extra = {
        "spec_name": "SlimKVOffloadingSpec", "spec_module_path": "slimkv.integrations.vllm.cold", "slimkv": format,
        "cpu_bytes_to_use": 64 << 20, "blocks_per_chunk": 1, **extra,
    }  # fmt: skip
    if extra["blocks_per_chunk"] is None:
        del extra["blocks_per_chunk"]
    if tier is not None:
        extra["secondary_tiers"] = [{"type": "fs", "root_dir": str(tier)}]
    transfer = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}
    return {"model": folder, "skip_tokenizer_init": True, "kv_transfer_config": transfer}


def hits(result, name: str) -> float:
    return result["counters"][name]["vllm:external_prefix_cache_hits"]


def damage(paths: list[Path], source: random.Random) -> None:
    """Damages files: flips a bit, truncates, or replaces the contents by those of another file."""
    for path in paths:
        data = bytearray(path.read_bytes())
        kind = source.randrange(3)
        if kind == 0:
            data[source.randrange(len(data))] ^= 1 << source.randrange(8)
        elif kind == 1:
            del data[source.randrange(len(data)) :]
        else:
            data = bytearray(paths[source.randrange(len(paths))].read_bytes()) + b"x"
        path.write_bytes(data)


def test_blocks_come_back_from_host_memory_and_from_files(folder, tmp_path):
    """Lossless blocks give the tokens of an engine without the tier, even after a restart and with damaged files."""
    tier = tmp_path / "tier"
    twice = [run("first", PROMPTS), run("again", PROMPTS, reset=True)]
    stock = run_engine({"model": folder, "skip_tokenizer_init": True}, [run("first", PROMPTS)])
    writer = run_engine(cold(folder, "raw", tier), twice)
    assert writer["tokens"]["first"] == writer["tokens"]["again"] == stock["tokens"]["first"]
    assert hits(writer, "first") == 0
    assert hits(writer, "again") == WHOLE
    files = sorted(tier.rglob("*.bin"))
    assert len(files) == WHOLE // 32
    assert not list(tier.rglob(".*"))  # no unfinished files

    spoilt = random.Random(0).sample(files, 6)
    damage(spoilt, random.Random(1))
    reader = run_engine(cold(folder, "raw", tier), [*twice, run("third", PROMPTS, reset=True)])
    assert all(tokens == stock["tokens"]["first"] for tokens in reader["tokens"].values())
    assert 0 < hits(reader, "first") < WHOLE, "what follows a damaged block is computed"
    assert hits(reader, "third") - hits(reader, "again") == WHOLE
    assert sorted(tier.rglob("*.bin")) == files, "a removed file is written again"


def test_packed_blocks_answer_alike(folder, tmp_path):
    """k8v8, with two layers in other formats, keeps the first tokens of most prompts. Chunks have 128 tokens."""
    settings = {"format": "k8v8", "layers": {"1": "k6v6", "-1": "raw"}}
    packed = cold(folder, settings, blocks_per_chunk=None)
    result = run_engine(packed, [run("first", PROMPTS), run("again", PROMPTS, reset=True)])
    assert hits(result, "again") == sum(len(p) // 128 * 128 for p in PROMPTS)
    first, again = result["tokens"]["first"], result["tokens"]["again"]
    assert sum(a[:4] == b[:4] for a, b in zip(first, again, strict=True)) >= 2


@pytest.mark.extended
def test_ranks_have_their_own_blocks(folder):
    """Two ranks with one KV head each, the scheduler in a separate process, and chunks of two blocks."""
    alone = run_engine({"model": folder, "skip_tokenizer_init": True}, [run("first", PROMPTS)])
    result = run_engine(
        {**cold(folder, "raw", blocks_per_chunk=2), "tensor_parallel_size": 2},
        [run("first", PROMPTS), run("again", PROMPTS, reset=True)],
        VLLM_ENABLE_V1_MULTIPROCESSING="1",
    )
    assert hits(result, "again") == sum((len(p) - 1) // 64 * 64 for p in PROMPTS)
    assert result["tokens"]["first"] == result["tokens"]["again"] == alone["tokens"]["first"]


def test_windows_have_groups_of_their_own(tmp_path):
    """gpt-oss: sliding layers form a separate cache group, and their blocks come back, too."""
    from test_hybrids import gpt_oss

    torch.manual_seed(0)
    gpt_oss().save_pretrained(tmp_path)
    runs = [run("first", PROMPTS), run("again", PROMPTS, reset=True)]
    result = run_engine(cold(str(tmp_path), "raw"), runs)
    assert hits(result, "again") > 256
    assert result["tokens"]["first"] == result["tokens"]["again"]


def test_what_the_tier_cannot_pack_is_refused(folder, tmp_path):
    with_tier = cold(folder, "k4v4")["kv_transfer_config"]["kv_connector_extra_config"]

    def transfer(**changes):
        fields = {k: v for k, v in {**with_tier, **changes}.items() if v is not None}
        return {
            "kv_transfer_config": {
                "kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config": fields,
            }
        }  # fmt: skip

    said = refusals(
        {"model": folder, "skip_tokenizer_init": True},
        {
            "no format": transfer(slimkv=None),
            "unknown format": transfer(slimkv="k9v9"),
            "packed already": {**transfer(), **slimkv("k4v4")},
            "another tier": transfer(secondary_tiers=[{"type": "obj"}]),
            "too small": transfer(cpu_bytes_to_use=10),
            "canonical": transfer(canonical_layout=True),
        },
    )
    wanted = {
        "no format": "put 'slimkv' into kv_connector_extra_config",
        "unknown format": "k9v9",
        "packed already": "already has slimkv's packed pages",
        "another tier": "it does not know {'type': 'obj'}",
        "too small": "give the cold tier more",
        "canonical": "canonical_layout is a layout",
    }
    missing = {name: said[name] for name, text in wanted.items() if text not in said[name]}
    assert not missing
