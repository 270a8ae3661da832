"""A model that engines are calibrated with, and what transformers finds in it."""

from __future__ import annotations

from pathlib import Path

import torch

from slimkv.calibration import Calibration


def write_llama(folder: Path) -> str:
    """A Llama with random weights."""
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=512, hidden_size=128, intermediate_size=192, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=64, max_position_embeddings=2048, initializer_range=0.1, bos_token_id=1,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return str(folder)


def check_it_is_what_transformers_finds(folder: str, made: Calibration) -> None:
    import transformers

    from slimkv.integrations.transformers.calibration.collect import gather_calibration

    model = transformers.LlamaForCausalLM.from_pretrained(folder).eval()
    other = gather_calibration(model, costs=False, samples=(16, 128))
    assert made.identity == other.identity
    assert made.max_positions == other.max_positions == 2048
    assert sorted(made.layers) == sorted(other.layers)
    for number, layer in made.layers.items():
        want = other.layers[number]
        assert layer.rotary.planes.tolist() == want.rotary.planes.tolist()
        assert torch.allclose(layer.rotary.frequencies, want.rotary.frequencies, atol=1e-5)
        # Other texts of the same model: close, and far from those of another head.
        apart = (layer.query_moment - want.query_moment).norm(dim=(1, 2)) / want.query_moment.norm(dim=(1, 2))
        swapped = (layer.query_moment - want.query_moment.flip(0)).norm() / want.query_moment.norm()
        assert apart.max() < 0.5 * swapped
