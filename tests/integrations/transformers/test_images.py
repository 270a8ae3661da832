"""Images: only the text decoder's attention is replaced, and image tokens keep the mask made by the model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from architectures import build
from outcomes import NEW, TOLERANCE
from tiny import LOSSLESS
from transformers import DynamicCache

import slimkv
from slimkv.integrations.transformers.layers import PackedLayer
from slimkv.integrations.transformers.stock_attention import switchable_configs
from tail import sample

NAMES = [
    "Gemma3ForConditionalGeneration",
    "LlavaForConditionalGeneration",
    "Qwen2_5_VLForConditionalGeneration",
    "MllamaForConditionalGeneration",
    "PaliGemmaForConditionalGeneration",
]


def prompt(image_token: int, count: int, pads: tuple[int, ...] = (4, 0)) -> dict[str, torch.Tensor]:
    """Left-padded sequences of text, ``count`` image tokens, and more text."""
    ids = torch.randint(3, 100, (len(pads), 10 + count + 8), generator=torch.Generator().manual_seed(5))
    mask = torch.ones_like(ids)
    ids[:, 10 : 10 + count] = image_token
    for row, pad in enumerate(pads):
        ids[row, :pad], mask[row, :pad] = 0, 0
    return {"input_ids": ids, "attention_mask": mask}


def inputs_for(model: Any) -> dict[str, Any]:
    """Inputs for two sequences, each with a random image and text."""
    generator = torch.Generator().manual_seed(6)
    config, vision = model.config, model.config.vision_config
    kind = type(model).__name__
    if kind.startswith("Qwen2_5_VL"):
        side = vision.patch_size**2 * vision.in_channels * vision.temporal_patch_size
        grid = torch.tensor([[1, 4, 4]] * 2)
        asked = prompt(config.image_token_id, 16 // vision.spatial_merge_size**2)
        types = (asked["input_ids"] == config.image_token_id).int()
        pixels = torch.randn(2 * 16, side, generator=generator)
        return {**asked, "pixel_values": pixels, "image_grid_thw": grid, "mm_token_type_ids": types}
    size = vision.image_size
    if kind.startswith("Mllama"):
        asked = prompt(config.image_token_index, 1)
        tiles = vision.max_num_tiles
        return {
            **asked,
            "pixel_values": torch.randn(2, 1, tiles, vision.num_channels, size, size, generator=generator),
            "aspect_ratio_ids": torch.ones(2, 1, dtype=torch.int64),
            "aspect_ratio_mask": torch.ones(2, 1, tiles, dtype=torch.int64),
            "cross_attention_mask": torch.ones(2, asked["input_ids"].shape[1], 1, tiles, dtype=torch.int64),
        }
    count = config.mm_tokens_per_image if kind.startswith("Gemma3") else (size // vision.patch_size) ** 2
    asked = prompt(config.image_token_id, count)
    asked["pixel_values"] = torch.randn(2, 3, size, size, generator=generator)
    if not kind.startswith("Llava"):
        types = asked["input_ids"] == config.image_token_id
        asked["token_type_ids"] = types.long()
    return asked


@torch.no_grad()
def answer(model: Any, inputs: dict[str, Any], cache: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Greedy tokens and logits."""
    out = model.generate(
        **inputs, past_key_values=cache, max_new_tokens=NEW, do_sample=False, output_logits=True,
        return_dict_in_generate=True,
    )  # fmt: skip
    return out.sequences, torch.stack(out.logits)


@pytest.mark.parametrize("name", sample(NAMES, 3))
def test_images_give_the_stock_answer(name):
    model = build(name)
    inputs = inputs_for(model)
    tokens, logits = answer(model, inputs, DynamicCache(config=model.config))
    without = {**inputs, "pixel_values": torch.zeros_like(inputs["pixel_values"])}
    assert not torch.equal(answer(model, without, DynamicCache(config=model.config))[1], logits)  # the image matters
    tower = next(m for m in model.modules() if "Vision" in type(m).__name__ and hasattr(m, "config"))
    before = tower.config._attn_implementation
    for fused in (False, True):
        for fresh in ("raw", "codes"):
            cache = slimkv.SlimKVCache(model.config, LOSSLESS, fresh=fresh, block_size=16)
            if fused:
                with slimkv.attention(model) as counts:
                    assert tower.config._attn_implementation == before
                    found = answer(model, inputs, cache)
                assert counts.fused > 0
            else:
                found = answer(model, inputs, cache)
            assert torch.equal(found[0], tokens)
            limit = TOLERANCE * float(logits.abs().max())
            torch.testing.assert_close(found[1], logits, rtol=0, atol=limit)
            assert sum(isinstance(x, PackedLayer) and x.tokens > 0 for x in cache.layers) > 0


@pytest.mark.parametrize("name", NAMES)
def test_only_the_text_decoder_is_switched(name):
    model = build(name)
    text = type(model.config.get_text_config(decoder=True))
    assert {type(config) for config in switchable_configs(model)} == {text}


def test_layers_that_attend_an_image_stay_stock():
    model = build("MllamaForConditionalGeneration")
    cross = model.config.text_config.cross_attention_layers
    cache = slimkv.SlimKVCache(model.config, "k4v4")
    assert cross
    assert [isinstance(x, PackedLayer) for x in cache.layers] == [i not in cross for i in range(len(cache.layers))]
