"""``SlimKVPool`` without an engine: the operations that SGLang needs."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("sglang")

from plans import DIM, HEADS, PAGE, make_plan, make_pool

from slimkv import ops
from slimkv.errors import InputError, UnsupportedError
from slimkv.integrations.sglang.backend import SlimKVAttnBackend
from slimkv.integrations.sglang.pool import bind

pytestmark = pytest.mark.sglang

FORMATS = ["k4v4", "raw", "k5v3"]


def filled(size: int = 8 * PAGE):
    """A pool with random tokens in slots 16..96 of all layers."""
    pool = make_pool(FORMATS, size)
    slots = torch.arange(PAGE, 6 * PAGE)
    torch.manual_seed(0)
    for layer in range(len(FORMATS)):
        key, value = torch.randn(2, len(slots), HEADS, DIM)
        pool.store(layer, slots, key, value)
    return pool, slots


def decoded(pool, layer: int, slots: torch.Tensor) -> torch.Tensor:
    return torch.cat(ops.gather_kv(pool.packed(layer), slots, backend="reference"), -1)


def test_bytes_are_those_of_the_plan():
    pool = make_pool(FORMATS)
    per_token = HEADS * (68 + 2 * DIM * 4 + 68)
    assert pool.plan.token_bytes(None) == per_token
    assert pool.get_kv_size_bytes() == (per_token * 9 * PAGE, 0), "one page more than was asked for, for padding"
    addresses, sizes, items = pool.get_contiguous_buf_infos()
    assert sum(sizes) == per_token * 9 * PAGE
    assert [size // item for size, item in zip(sizes, items, strict=True)] == [9] * 3
    assert addresses == [pool.packed(layer).pages.data_ptr() for layer in range(3)]


def test_raw_layers_give_back_what_was_stored():
    pool = make_pool(["raw"])
    key, value = torch.randn(2, 20, HEADS, DIM)
    slots = torch.randperm(8 * PAGE)[:20]
    pool.store(0, slots, key, value)
    assert torch.equal(decoded(pool, 0, slots), torch.cat([key, value], -1))


def test_a_stage_of_a_pipeline_counts_its_layers_from_its_first():
    pool = make_pool(["raw", "raw"], start_layer=7, end_layer=9)
    backend = SimpleNamespace(token_to_kv_pool=pool)
    assert SlimKVAttnBackend._pool_of(backend, 8) == (pool, 1, False)


def test_moved_tokens_are_the_same_tokens():
    pool, slots = filled()
    source, target = slots[[3, 40, 17]], slots[[60, 4, 50]]
    before = [decoded(pool, layer, source) for layer in range(3)]
    pool.move_kv_cache(target, source)
    for layer in range(3):
        assert torch.equal(decoded(pool, layer, target), before[layer])


def test_tokens_come_back_from_the_host_in_other_slots():
    pool, slots = filled()
    pool.cpu_offloading_chunk_size = 11
    before = [decoded(pool, layer, slots) for layer in range(3)]
    kept = pool.get_cpu_copy(slots)
    assert [len(pieces) for pieces in kept] == [8, 8, 8]
    for layer in range(3):
        pool.packed(layer).pages.fill_(0xA5)
    elsewhere = torch.randperm(8 * PAGE)[: len(slots)] + PAGE
    pool.load_cpu_copy(kept, elsewhere)
    for layer in range(3):
        assert torch.equal(decoded(pool, layer, elsewhere), before[layer])


def test_pages_move_to_host_memory_and_back_as_rows(monkeypatch):
    """Codes and scales share one row, so SGLang's own host pool moves both."""
    monkeypatch.setattr("slimkv.integrations.sglang.host_pool.check_hooks", lambda targets: None)
    from sglang.srt.mem_cache.pool_host.minimax_m3_nvfp4 import MiniMaxM3Nvfp4MainKVPoolHost

    pool = make_pool(["k4v4", "k4v4"])
    slots = torch.arange(PAGE, 5 * PAGE)
    for layer in range(2):
        pool.store(layer, slots, *torch.randn(2, len(slots), HEADS, DIM))
    before = [decoded(pool, layer, slots) for layer in range(2)]
    (info,) = pool.get_device_pool_infos()
    host = MiniMaxM3Nvfp4MainKVPoolHost(
        info.buffer_info, 2.0, 0, PAGE, "layer_first", pin_memory=False, device_capacity_tokens=pool.size,
        start_layer=0, end_layer=1,
    )  # fmt: skip
    there = torch.arange(3 * PAGE, 7 * PAGE)
    host.backup_from_device_all_layer(pool, there, slots, "kernel")
    back = torch.cat([torch.arange(6 * PAGE, 8 * PAGE), torch.arange(PAGE, 3 * PAGE)])
    pool._slab.zero_()
    for layer in range(2):
        host.load_to_device_per_layer(pool, there, back, layer, "kernel")
        assert torch.equal(decoded(pool, layer, back), before[layer])


def test_layers_of_different_sizes_have_no_host_memory(monkeypatch):
    monkeypatch.setattr("slimkv.integrations.sglang.host_pool.check_hooks", lambda targets: None)
    with pytest.raises(UnsupportedError, match="give all layers one format"):
        make_pool(FORMATS).get_device_pool_infos()


@pytest.mark.parametrize("name", ["get_key_buffer", "get_value_buffer", "get_kv_buffer", "set_kv_buffer"])
def test_nobody_gets_tensors_to_write_past_the_codec(name):
    """Models with fused kernels write into these tensors. The pool's dtype keeps them from trying."""
    pool = make_pool(["k4v4"])
    assert pool.dtype == torch.uint8
    with pytest.raises(UnsupportedError, match="cached tensors of layer 0"):
        getattr(pool, name)(0)


def test_a_pool_of_other_shape_than_sized_is_refused():
    with pytest.raises(UnsupportedError, match="planned 2 of 64 and 64"):
        make_pool(["k4v4"], head_num=4)
    with pytest.raises(UnsupportedError, match="builds 2 layers of cache, but planned 1"):
        make_pool(["k4v4"], layer_num=2)
    with pytest.raises(InputError, match="pages of 32 tokens, but planned 16"):
        bind(make_plan(["k4v4"]), ())(
            64, page_size=32, dtype=torch.float32, head_num=HEADS, head_dim=DIM, layer_num=1, device="cpu",
            enable_memory_saver=False,
        )  # fmt: skip


def test_post_capture_backing_is_refused():
    with pytest.raises(UnsupportedError, match="before graphs are captured"):
        make_pool(["k4v4"], post_capture_active=True)


def test_a_hook_that_sglang_did_not_take_stops_the_pool():
    hooked = bind(make_plan(["k4v4"]), ("sglang.srt.nowhere.Nothing.method",))
    with pytest.raises(UnsupportedError, match=r"did not install slimkv's hooks on sglang\.srt\.nowhere"):
        hooked(64, page_size=PAGE, dtype=torch.float32)
