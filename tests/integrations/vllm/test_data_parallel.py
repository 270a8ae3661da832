"""Two engines behind one address, each with its own cache."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor

import pytest

pytest.importorskip("vllm")
pytest.importorskip("openai")

import openai
from engines import LIMIT_SECONDS, run_engine, slimkv
from prompts import model_folder, ragged, run
from servers import serving

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.extended]


def test_two_engines_give_what_one_gives(tmp_path):
    prompts, tokens = ragged()[:6], 12
    alone = run_engine({"model": model_folder(), **slimkv("k4v4")}, [run("alone", prompts, tokens, one_by_one=True)])
    config = json.dumps(slimkv("k4v4")["additional_config"])
    options = ["--block-size", "32", "--max-num-batched-tokens", "96", "--data-parallel-size", "2"]
    with serving(tmp_path, "--additional-config", config, *options) as (address, log):
        client = openai.OpenAI(base_url=address, api_key="none", timeout=LIMIT_SECONDS)

        def ask(prompt):
            answer = client.completions.create(
                model="smollm2", prompt=prompt, max_tokens=tokens, temperature=0,
                extra_body={"ignore_eos": True, "return_token_ids": True},
            )  # fmt: skip
            return answer.choices[0].token_ids

        with ThreadPoolExecutor(len(prompts)) as pool:
            both = list(pool.map(ask, prompts))
        assert "EngineCore_DP1" in log.read_text(), "the second engine ran"
    assert both == alone["tokens"]["alone"]
