"""Encoders have no KV cache, so with slimkv enabled they run on vLLM's own backend."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

pytest.importorskip("vllm")

from engines import LIMIT_SECONDS, environment, slimkv
from prompts import model_folder

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

BERT = {
    "architectures": ["BertModel"], "model_type": "bert", "hidden_size": 128, "intermediate_size": 256,
    "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 49152, "max_position_embeddings": 128,
    "type_vocab_size": 2, "hidden_act": "gelu", "layer_norm_eps": 1e-12, "pad_token_id": 0,
}  # fmt: skip
SCRIPT = """
import json, sys
from vllm import LLM
llm = LLM(**json.loads(sys.argv[1]))
out = llm.embed([{"prompt_token_ids": [5, 6, 7, 8]}, {"prompt_token_ids": [9, 6]}], use_tqdm=False)
layers = llm.llm_engine.vllm_config.compilation_config.static_forward_context.values()
print("RESULT", json.dumps([[o.outputs.embedding for o in out], [type(x.impl).__name__ for x in layers]]))
"""


def embed(folder, **how):
    arguments = {
        "model": str(folder), "tokenizer": model_folder(), "runner": "pooling", "load_format": "dummy",
        "enforce_eager": True, "dtype": "float32", "seed": 0, **how,
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, json.dumps(arguments)],
        env=environment(VLLM_ENABLE_V1_MULTIPROCESSING="0"), capture_output=True, text=True,
        timeout=LIMIT_SECONDS, check=False,
    )  # fmt: skip
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    assert lines, done.stdout + done.stderr
    return json.loads(lines[0].removeprefix("RESULT "))


def test_an_encoder_gives_the_stock_embeddings(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(BERT))
    ours, our_layers = embed(tmp_path, **slimkv("k4v4"))
    theirs, their_layers = embed(tmp_path)
    assert set(our_layers) == {"SlimKVImpl"}
    assert set(their_layers) == {"CPUAttentionBackendImpl"}
    assert ours == theirs
