"""Rotary embeddings: measured, applied, averaged."""

from __future__ import annotations

import pytest
import torch

from slimkv.calibration.gather import common_range, probe_shifts, rotary_of_layer
from slimkv.calibration.rotary import Rotary, measure_rotary
from slimkv.errors import InputError

DIM = 64


def rotary(kind: str) -> Rotary:
    first, size = {"halves": (0, 64), "neighbours": (0, 64), "start": (0, 24), "end": (40, 24)}[kind]
    index = first + torch.arange(size)
    planes = index.view(-1, 2) if kind == "neighbours" else torch.stack(index.chunk(2), 1)
    return Rotary(planes, 10000.0 ** (-torch.arange(0, size, 2).double() / size))


def queries(count: int = 400) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(count, DIM, generator=generator) @ torch.randn(DIM, DIM, generator=generator)


def at(known: Rotary, x: torch.Tensor, shift: int) -> torch.Tensor:
    return known.turned(x, torch.full((len(x),), shift))


@pytest.mark.parametrize("noise", [0.0, 2.0**-9])  # none, and that of bfloat16
@pytest.mark.parametrize("kind", ["halves", "neighbours", "start", "end"])
def test_planes_and_frequencies_are_found(kind, noise):
    known, x = rotary(kind), queries()
    generator = torch.Generator().manual_seed(1)
    shifted = {s: at(known, x, s) for s in probe_shifts(8192)}
    shifted = {s: y * (1 + noise * torch.randn(y.shape, generator=generator)) for s, y in shifted.items()}
    found = measure_rotary(x, shifted)
    assert found.planes.tolist() == known.planes.tolist()
    assert (found.frequencies - known.frequencies).abs().max() * 8192 < (0.01 if noise else 1e-4)


def test_queries_that_do_not_change_do_not_turn():
    x = queries()
    assert not measure_rotary(x, {1: x, 32: x}).turns


def test_other_changes_are_not_taken_for_rotations():
    x = queries()
    other = queries(401)[1:]
    assert measure_rotary(x, {1: other}) is None
    found = rotary_of_layer(x, {1: other, 32: other})
    assert (found.rotary.turns, found.max_positions) == (False, None)


def test_frequencies_that_change_hold_up_to_there():
    known, x = rotary("halves"), queries()
    slower = Rotary(known.planes, known.frequencies / 3)
    found = rotary_of_layer(x, {1: at(known, x, 1), 32: at(known, x, 32), 1024: at(slower, x, 1024)})
    assert torch.allclose(found.rotary.frequencies, known.frequencies, atol=1e-5)
    assert found.max_positions == 32 + 64
    assert common_range({0: found}, 8192, 8192, 128) == 96


def test_shifts_reach_from_1_to_the_end():
    assert probe_shifts(8192) == (1, 32, 1024, 8128)
    assert probe_shifts(65) == (1,)
    with pytest.raises(InputError, match="too few to measure"):
        probe_shifts(64)
    for shifts in ((), (2,), (1, 100)):
        with pytest.raises(InputError, match="begin with 1"):
            measure_rotary(queries(), {s: queries() for s in shifts})


@pytest.mark.parametrize("kind", ["halves", "end"])
@pytest.mark.parametrize(("start", "stop"), [(0, 1), (7, 8), (0, 128), (4096, 4196)])
def test_the_mean_over_positions_is_that_of_every_position(kind, start, stop):
    known, x = rotary(kind), queries()
    moment = x.double().mT @ x.double() / len(x)
    want = torch.zeros_like(moment)
    for position in range(start, stop):
        turned = at(known, torch.eye(DIM), position).double()
        want += turned.mT @ moment @ turned / (stop - start)
    got = known.mean_moments(moment, [(start, stop)])[0]
    assert (got - want).abs().max() < 1e-6 * want.abs().max()
    assert torch.equal(got, got.mT)
    with pytest.raises(InputError, match="are not a range"):
        known.mean_moments(moment, [(5, 5)])


def test_the_mean_of_turned_vectors_is_that_of_all_positions():
    rotary = Rotary(torch.tensor([[0, 2], [1, 3]]), torch.tensor([0.3, 0.001], dtype=torch.float64))
    vector = torch.randn(2, 5, dtype=torch.float64)
    for positions in (1, 7, 500):
        turned = [rotary.turned(vector[None].float(), torch.tensor([t]))[0].double() for t in range(positions)]
        torch.testing.assert_close(
            rotary.mean_vector(vector, positions), torch.stack(turned).mean(0), atol=1e-5, rtol=1e-4
        )
    assert torch.equal(Rotary.none().mean_vector(vector, 9), vector)
