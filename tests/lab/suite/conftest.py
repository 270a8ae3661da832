"""Models that the suite measures in seconds."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from slimkv.lab import models


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory):
    """Folder of a Llama with random weights and SmolLM2's tokenizer."""
    transformers = pytest.importorskip("transformers")
    target = tmp_path_factory.mktemp("tiny")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
        vocab_size=49152, head_dim=32, max_position_embeddings=512, eos_token_id=0, pad_token_id=0,
        initializer_range=0.3,
    )  # fmt: skip
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(target)
    source = models.folder(models.DEFAULT)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        if (source / name).is_file():
            (target / name).write_bytes((source / name).read_bytes())
    return target


@pytest.fixture(scope="session")
def small() -> SimpleNamespace:
    """A two-layer Llama with random weights and a small vocabulary."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        head_dim=32, vocab_size=128, max_position_embeddings=2048, eos_token_id=None, pad_token_id=0,
        initializer_range=0.2,
    )  # fmt: skip
    return SimpleNamespace(model=transformers.AutoModelForCausalLM.from_config(config).eval())
