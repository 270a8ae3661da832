"""A model that answers in milliseconds, and its tokenizer."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch


class Letters:
    """A byte tokenizer with the part of the interface that the evals use."""

    bos_token = eos_token = None
    bos_token_id = None
    eos_token_id = 0
    chat_template = None

    def __call__(self, text: str, return_tensors: str | None = None, **kwargs: Any) -> dict[str, Any]:
        ids = [1 + b % 127 for b in text.encode()]
        return {"input_ids": torch.tensor([ids]) if return_tensors else ids}

    def decode(self, ids: Any, **kwargs: Any) -> str:
        return "".join(chr(max(int(i) - 1, 32)) for i in ids)


@pytest.fixture(scope="session")
def small() -> SimpleNamespace:
    """A two-layer Llama with random weights whose tokens are bytes."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        head_dim=32, vocab_size=128, max_position_embeddings=2048, eos_token_id=None, pad_token_id=0,
        initializer_range=0.2,
    )  # fmt: skip
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    return SimpleNamespace(model=model, tokenizer=Letters())
