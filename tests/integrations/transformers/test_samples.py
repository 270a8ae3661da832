"""Token ids on which a model is calibrated if no text is given."""

from __future__ import annotations

import pytest
import torch
from tiny import tiny

from slimkv.errors import InputError
from slimkv.integrations.transformers.calibration.collect import gather_calibration
from slimkv.integrations.transformers.calibration.samples import FRAGMENT, draw, random_windows, sampled_windows


@pytest.fixture(scope="module")
def model():
    return tiny("llama")


def test_random_windows_are_seeded_and_begin_with_bos(model):
    ids = random_windows(model.config, 3, 50)
    assert (ids[:, 0] == 1).all()
    assert ids.max() > 80
    assert torch.equal(ids, random_windows(model.config, 3, 50))
    assert not torch.equal(ids, random_windows(model.config, 3, 50, seed=1))
    with pytest.raises(InputError, match="the model reads 2 to 512"):
        random_windows(model.config, 1, 513)


@pytest.mark.parametrize("kind", ["llama", "gemma3", "gpt_oss", "qwen3_next"])
def test_sampled_windows_are_what_the_model_says(kind):
    """With the same random numbers, a pass over each whole fragment draws the same ids as sampling."""
    model = tiny(kind)
    ids = sampled_windows(model, 2, 150)
    assert ids.shape == (2, 150)
    assert (ids[:, ::FRAGMENT] == model.config.bos_token_id).all()
    rows = 4  # two fragments per window, the second one truncated
    generator = torch.Generator().manual_seed(0)
    torch.randint(model.config.vocab_size, (rows, 1), generator=generator)
    chances = torch.stack([torch.rand(rows, generator=generator, dtype=torch.float64) for _ in range(FRAGMENT - 1)], 1)
    same = total = 0
    for row, chance in enumerate(chances):
        fragment = ids[row // 2, row % 2 * FRAGMENT :][:FRAGMENT]
        with torch.no_grad():
            logits = model(fragment[None]).logits[0, :-1]
        again = draw(logits, chance[: len(logits)])
        same, total = same + int((again == fragment[1:]).sum()), total + len(logits)
    assert same >= 0.99 * total  # except for random numbers at the boundary between two ids


def test_sampling_is_seeded_and_bounded(model):
    ids = sampled_windows(model, 3, 40)
    assert torch.equal(ids, sampled_windows(model, 3, 40))
    assert not torch.equal(ids, sampled_windows(model, 3, 40, seed=1))
    with pytest.raises(InputError, match="the model reads 2 to 512"):
        sampled_windows(model, 1, 513)


def test_without_bos_fragments_begin_with_a_random_id(model):
    other = tiny("llama")
    other.config.bos_token_id = None
    first = sampled_windows(other, 20, 4)[:, 0]
    assert len(first.unique()) > 5


def test_large_vocabularies_are_drawn_from_as_they_are():
    logits = torch.randn(1, 1700, generator=torch.Generator().manual_seed(0)) * 2
    logits[:, 600:1100] = -torch.inf
    ends = logits[0].double().softmax(-1).cumsum(-1)
    chances = torch.linspace(0, 1 - 1e-9, 4001, dtype=torch.float64)
    drawn = draw(logits.expand(len(chances), -1), chances)
    want = torch.searchsorted(ends, chances, right=True)
    assert (drawn != want).double().mean() < 1e-3
    assert not ((drawn >= 600) & (drawn < 1100)).any()
    assert draw(logits, torch.ones(1, dtype=torch.float64)).item() < 1700


def test_it_is_what_calibration_reads_by_default(model):
    """Statistics gathered during sampling equal those of reading all ids except the last of each fragment."""
    made = gather_calibration(model, costs=False, samples=(2, 64))
    assert made.source == "128 token ids sampled from the model, seed 0"
    want = gather_calibration(model, sampled_windows(model, 2, 64)[:, :63], costs=False)
    assert torch.allclose(made.layers[1].query_moment, want.layers[1].query_moment, rtol=1e-3, atol=1e-4)
