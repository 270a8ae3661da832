"""A model small enough for commands to load instantly."""

from __future__ import annotations

from functools import cache

import pytest
import torch
import typer.testing

from slimkv.lab import models

# Building the app's commands takes a tenth of a second. Hundreds of tests invoke the app, so build them only once.
typer.testing._get_command = cache(typer.testing._get_command)


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory):
    """Folder of a Llama with random weights and SmolLM2's tokenizer."""
    transformers = pytest.importorskip("transformers")
    target = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
        vocab_size=49152, head_dim=32, max_position_embeddings=1024, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(target)
    source = models.folder(models.DEFAULT)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        if (source / name).is_file():
            (target / name).write_bytes((source / name).read_bytes())
    return target
