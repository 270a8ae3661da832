"""Calibration inside vLLM: statistics agree with those from transformers, and engines can use the file."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("vllm")

import torch
from engines import LIMIT_SECONDS, environment, run_engine, slimkv
from observed import check_it_is_what_transformers_finds, write_llama

from slimkv.calibration import Calibration

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.extended]

OBSERVE = """
import sys
from slimkv.integrations.vllm.observe import gather_calibration
if __name__ == "__main__":
    made = gather_calibration(
        sys.argv[1], samples=(16, 128), skip_tokenizer_init=True, dtype="float32", max_model_len=512,
        tensor_parallel_size=int(sys.argv[3]),
    )
    made.save(sys.argv[2])
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    return write_llama(tmp_path_factory.mktemp("model"))


def observe(folder: str, target: Path, ranks: int) -> Calibration:
    script = target.with_suffix(".py")
    script.write_text(OBSERVE)
    done = subprocess.run(
        [sys.executable, str(script), folder, str(target), str(ranks)],
        env=environment(VLLM_ENABLE_V1_MULTIPROCESSING="1" if ranks > 1 else "0"), capture_output=True, text=True,
        timeout=LIMIT_SECONDS, check=False,
    )  # fmt: skip
    assert not done.returncode, done.stdout + done.stderr
    return Calibration.load(target)


@pytest.fixture(scope="module")
def observed(folder, tmp_path_factory) -> Calibration:
    return observe(folder, tmp_path_factory.mktemp("file") / "observed.safetensors", 1)


def test_it_finds_what_transformers_finds(folder, observed):
    check_it_is_what_transformers_finds(folder, observed)


def test_every_rank_sums_its_own_heads(folder, observed, tmp_path):
    both = observe(folder, tmp_path / "two.safetensors", 2)
    for number, layer in both.layers.items():
        want = observed.layers[number].query_moment
        assert layer.query_moment.shape == want.shape
        assert (layer.query_moment - want).norm() < 0.2 * want.norm()


def test_the_engine_takes_the_file_and_rounds_by_position(folder, observed):
    """Long prompts reach several ranges of positions, both in chunks and while decoding."""
    prompts = [[(5 * i + 7 * j * j) % 500 + 3 for j in range(100 + 150 * i)] for i in range(3)]
    runs = [{"name": "a", "prompts": prompts, "max_tokens": 12}]
    base = {"model": folder, "skip_tokenizer_init": True}
    calibrated = run_engine({**base, **slimkv("k2v4", calibration=observed.name)}, runs)
    again = run_engine({**base, **slimkv("k2v4", calibration=observed.name), "max_num_batched_tokens": 512}, runs)
    plain = run_engine({**base, **slimkv("k2v4")}, runs)
    assert plain["tokens"] != calibrated["tokens"], "two-bit keys show how they were rounded"
    assert again["tokens"] == calibrated["tokens"], "a token's codes depend on its position, not on its chunk"


def test_the_index_is_that_of_positions():
    from slimkv.integrations.vllm.metadata import MatrixIndex

    index = MatrixIndex((4, 8, 16), 32, torch.device("cpu"))
    starts = torch.tensor([0, 1, 4, 9], dtype=torch.int32)  # a decoded token, 3 tokens of a chunk, a whole prompt
    lengths = torch.tensor([12, 5, 5], dtype=torch.int32)
    first = index.fill(starts, lengths, 9)
    positions = [11, 2, 3, 4, 0, 1, 2, 3, 4]
    assert first[:9].tolist() == [sum(p >= edge for edge in (4, 8)) for p in positions]
    assert index.fill(starts[:2], lengths[:1], 1).data_ptr() == first.data_ptr(), "captured graphs keep its address"


def test_auto_says_what_to_run_and_takes_what_was_kept(folder, observed, tmp_path, monkeypatch):
    from types import SimpleNamespace

    import transformers

    from slimkv.calibration.cache import cached_path
    from slimkv.errors import InputError
    from slimkv.integrations.vllm.model import served_model

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    model = SimpleNamespace(
        model=folder, hf_text_config=transformers.AutoConfig.from_pretrained(folder), max_model_len=2048
    )
    config = SimpleNamespace(
        additional_config={"slimkv": {"calibration": "auto"}}, model_config=model,
        load_config=SimpleNamespace(load_format="auto"),
    )  # fmt: skip
    with pytest.raises(InputError, match=f"slimkv calibrate {folder}"):
        _ = served_model(config).calibration
    observed.save(cached_path(folder))
    assert served_model(config).calibration.layers.keys() == observed.layers.keys()
    model.max_model_len = 4096
    with pytest.warns(UserWarning, match="is valid up to position 2,048"):
        _ = served_model(config).calibration
