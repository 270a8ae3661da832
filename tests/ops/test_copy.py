"""``copy_tokens`` writes the bytes that encoding into the target slots would write, and no others."""

from __future__ import annotations

import pytest
import torch
from store_cases import Case, build

from slimkv import ops
from slimkv.errors import InputError
from slimkv.ops import PackedKV
from slimkv.spec import BLOCK_SIZES, CodecSpec, PageLayout

FORMATS = ["k1v1", "k3v5", "k4v4", "k7v2", "ku3vur6", "fp8", "krawbf16vrawfp32"]
BACKENDS = ["reference", "triton"]


def finite(case: Case, device: torch.device) -> tuple:
    """The vectors of ``case``, none of which is too large for any format."""
    key, value, *rest = build(case, device)
    return key.clamp(-1e3, 1e3), value.clamp(-1e3, 1e3), *rest


def stored(case: Case, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Pages with every slot of ``case`` filled, and those slots."""
    key, value, slots, pages, codec = finite(case, device)
    ops.store_kv(key, value, PackedKV(pages, codec, case.layout), slots, backend="reference")
    return pages, slots[slots >= 0].long()


def moved_by_encoding(case: Case, device: torch.device, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """The pages after the tokens of ``source`` are encoded and stored again at ``target``."""
    key, value, slots, pages, codec = finite(case, device)
    ops.store_kv(key, value, PackedKV(pages, codec, case.layout), slots, backend="reference")
    where = [int((slots == s).nonzero()[0]) for s in source]
    ops.store_kv(key[where], value[where], PackedKV(pages, codec, case.layout), target, backend="reference")
    return pages


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("page", [size for size in BLOCK_SIZES if size <= 64])
@pytest.mark.parametrize("format", FORMATS)
def test_a_moved_token_has_the_bytes_of_one_encoded_there(format, page, backend, device):
    case = Case(format=format, heads=2, tokens=40, page=page, dtype="fp32")
    pages, slots = stored(case, device)
    source, target = slots[[0, 5, 9]], slots[[20, 3, 11]]
    want = moved_by_encoding(case, device, source, target)
    ops.copy_tokens(pages, source, target, layout=case.layout, backend=backend)
    assert torch.equal(pages, want)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("dim", "value_dim"), [(16, None), (80, 48), (256, None)])
def test_every_head_size(dim, value_dim, backend, device):
    case = Case(format="k5v3", dim=dim, value_dim=value_dim, heads=1, tokens=24, page=16, dtype="fp32")
    pages, slots = stored(case, device)
    want = moved_by_encoding(case, device, slots[:4], slots[10:14])
    ops.copy_tokens(pages, slots[:4].int(), slots[10:14].int(), layout=case.layout, backend=backend)
    assert torch.equal(pages, want)


@pytest.mark.parametrize("backend", BACKENDS)
def test_tokens_may_change_places(backend, device):
    case = Case(heads=1, tokens=40, page=16, dtype="fp32")
    pages, slots = stored(case, device)
    before = ops.read_tokens(pages, slots, layout=case.layout, backend=backend)
    order = torch.randperm(len(slots), device=device)
    ops.copy_tokens(pages, slots, slots[order], layout=case.layout, backend=backend)
    after = ops.read_tokens(pages, slots[order], layout=case.layout, backend=backend)
    assert torch.equal(after, before)


@pytest.mark.parametrize("backend", BACKENDS)
def test_negative_slots_are_skipped(backend, device):
    case = Case(heads=1, tokens=20, page=16, dtype="fp32")
    pages, slots = stored(case, device)
    untouched = pages.clone()
    nowhere = torch.full_like(slots[:3], -1)
    ops.copy_tokens(pages, slots[:3], nowhere, layout=case.layout, backend=backend)
    ops.copy_tokens(pages, nowhere, slots[:3], layout=case.layout, backend=backend)
    assert torch.equal(pages, untouched)
    assert not ops.read_tokens(pages, nowhere, layout=case.layout, backend=backend).any()


@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_move_to_other_pages(backend, device):
    case = Case(heads=2, tokens=40, page=32, dtype="fp32")
    pages, slots = stored(case, device)
    rows = ops.read_tokens(pages, slots, layout=case.layout, backend=backend)
    assert rows.shape == (len(slots), 2, case.layout.row_bytes)
    elsewhere = torch.zeros_like(pages)
    ops.write_tokens(rows, elsewhere, slots, layout=case.layout, backend=backend)
    again = ops.read_tokens(elsewhere, slots, layout=case.layout, backend=backend)
    assert torch.equal(again, rows)


@pytest.mark.parametrize("format", FORMATS)
def test_rows_hold_every_meaningful_byte_of_a_page(format):
    for block_size in BLOCK_SIZES:
        layout = PageLayout(CodecSpec.parse(format, 64), block_size)
        assert layout.row_bytes * block_size == layout.content_bytes


def test_what_does_not_fit_is_refused(device):
    case = Case(heads=1, tokens=20, page=16, dtype="fp32")
    pages, slots = stored(case, device)
    with pytest.raises(InputError, match="as many of both"):
        ops.copy_tokens(pages, slots[:3], slots[:2], layout=case.layout)
    with pytest.raises(InputError, match="int32 or int64"):
        ops.copy_tokens(pages, slots[:3].float(), slots[:3], layout=case.layout)
    with pytest.raises(InputError, match="rows must be"):
        ops.write_tokens(pages[0], pages, slots[:3], layout=case.layout)
