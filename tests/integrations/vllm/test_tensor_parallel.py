"""Two ranks on a CPU: each holds the pages of its own KV heads."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm")

import torch
from engines import run_engine, slimkv
from prompts import run

pytestmark = [pytest.mark.vllm, pytest.mark.slow]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A small Llama with 4 query and 2 KV heads of size 64, with random weights large enough to avoid near ties."""
    import transformers

    folder = tmp_path_factory.mktemp("llama")
    config = transformers.LlamaConfig(
        hidden_size=256, intermediate_size=512, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
        head_dim=64, vocab_size=512, max_position_embeddings=1024, initializer_range=0.1, tie_word_embeddings=False,
    )  # fmt: skip
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return str(folder)


def test_two_ranks_give_what_one_gives(folder, tmp_path):
    prompts = [[(7 * i + 3 * j * j) % 500 + 3 for j in range(20 + 30 * i)] for i in range(5)]
    base = {"model": folder, "skip_tokenizer_init": True, **slimkv("k4v4")}
    # Key offsets are learnt from one first prompt, since the scheduling of several prompts depends on their arrival.
    runs = [run("first", prompts[:1], 1), run("a", prompts, 12)]
    kept = {"XDG_CACHE_HOME": str(tmp_path)}  # do not use offsets learnt in other tests
    alone = run_engine(base, runs, **kept)
    both = run_engine({**base, "tensor_parallel_size": 2}, runs, VLLM_ENABLE_V1_MULTIPROCESSING="1", **kept)
    assert both["tokens"] == alone["tokens"]
    assert both["blocks"] == pytest.approx(2 * alone["blocks"], rel=0.01), "half the heads, half the bytes"


def test_each_rank_rounds_by_its_own_heads(folder, tmp_path):
    """With a calibration, ranks must use the matrices of their own heads."""
    import transformers

    from slimkv.integrations.transformers.calibration.collect import gather_calibration

    model = transformers.LlamaForCausalLM.from_pretrained(folder).eval()
    windows = torch.randint(3, 500, (2, 128), generator=torch.Generator().manual_seed(0))
    file = tmp_path / "calibration.safetensors"
    gather_calibration(model, windows, source="random token ids", costs=False).save(file)
    prompts = [[(5 * i + 7 * j * j) % 500 + 3 for j in range(40 + 30 * i)] for i in range(5)]
    runs = [run("a", prompts, 12)]
    base = {"model": folder, "skip_tokenizer_init": True}
    calibrated = {**base, **slimkv("k2v4", calibration=str(file))}
    alone = run_engine(calibrated, runs)
    both = run_engine({**calibrated, "tensor_parallel_size": 2}, runs, VLLM_ENABLE_V1_MULTIPROCESSING="1")
    plain = run_engine({**base, **slimkv("k2v4")}, runs)
    assert both["tokens"] == alone["tokens"]
    assert plain["tokens"] != alone["tokens"], "two-bit keys show how they were rounded"
