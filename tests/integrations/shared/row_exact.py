"""Matrix products row by row, so that only attention can depend on the batch.

On a CPU, the rounding of GEMMs depends on the shapes, in any engine. The engines' switches for batch-invariant serving
make GEMMs invariant on GPUs only.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def row_by_row(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Applies ``function`` to every row of x [..., dim] separately."""
    rows = x.reshape(-1, x.shape[-1])
    if rows.shape[0] <= 1:
        return function(x)
    return torch.cat([function(rows[i : i + 1]) for i in range(rows.shape[0])]).reshape(*x.shape[:-1], -1)


def exact_linear(patch: Callable[[object, str, object], None]) -> None:
    """Replaces torch's linear layers by row-by-row ones. ``patch(owner, name, value)`` sets an attribute."""
    plain = torch.nn.functional.linear

    def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return row_by_row(lambda row: plain(row, weight, bias), x)

    patch(torch.nn.functional, "linear", linear)


def tiny_model(folder: object) -> str:
    """Folder of a Llama with random weights. Its output soon repeats itself, so that n-gram lookup finds drafts."""
    import transformers

    config = transformers.LlamaConfig(
        hidden_size=64, intermediate_size=64, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
        head_dim=32, vocab_size=512, max_position_embeddings=1024, initializer_range=0.1, bos_token_id=None,
        eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(config).eval().save_pretrained(folder)
    return str(folder)


PROMPTS = [[(7 * i + 3 * j * j + i * j) % 500 + 3 for j in range(20 + (53 * i) % 290)] for i in range(12)]


def assert_same(one: dict, name: str, other: dict, as_name: str) -> None:
    """Tokens and log-probabilities of two runs are bitwise equal."""
    assert other["tokens"][as_name] == one["tokens"][name], (name, as_name)
    assert other["logprobs"][as_name] == one["logprobs"][name], (name, as_name)
