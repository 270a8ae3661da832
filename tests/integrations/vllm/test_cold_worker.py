"""The cold tier without an engine: cache layouts, bands, chunks, and round trips through host memory."""

from __future__ import annotations

import re
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("vllm")

import torch
from torch import Tensor

from slimkv.calibration.learned_offset import LayerOffset
from slimkv.codec import Codec
from slimkv.codec.key_offset import wants_offset
from slimkv.config import KVCacheConfig
from slimkv.errors import InputError, SlimKVError, UnsupportedError
from slimkv.integrations.serving.cold.band import BandCodec, ColdLayer, bands_of, block_bytes
from slimkv.integrations.serving.cold.rows import LayerRows
from slimkv.integrations.serving.model import ServedModel
from slimkv.integrations.vllm.cold import worker as cold_worker
from slimkv.integrations.vllm.cold.compat import GPULoadStoreSpec, MLAAttention
from slimkv.integrations.vllm.cold.layers import HotCache
from slimkv.integrations.vllm.cold.spec import SlimKVOffloadingSpec, cold_settings
from slimkv.integrations.vllm.cold.worker import ColdWorker
from slimkv.spec import CodecSpec, LatentSpec

pytestmark = pytest.mark.vllm

BLOCKS, HEADS, TOKENS, DIM = 12, 2, 32, 64
SETTINGS = KVCacheConfig("k4v4")


class Rows:
    """Cache of [blocks, heads, tokens, K and V], as in vLLM's GPU backends."""

    shape = (BLOCKS, HEADS, TOKENS, 2 * DIM)

    def places(self, cache: Tensor, block: int, token: int) -> tuple[Tensor, Tensor]:
        return cache[block, :, token, :DIM], cache[block, :, token, DIM:]

    def do_kv_cache_update(self, layer, key, value, cache, slots) -> None:
        scales = (1, 1) if cache.dtype.is_floating_point else (layer._k_scale, layer._v_scale)
        if not cache.dtype.is_floating_point:
            cache = cache.view(torch.float8_e4m3fn)
        tokens = TOKENS
        for row, slot in enumerate(slots.tolist()):
            if slot >= 0:
                for x, place, scale in zip(
                    (key, value), self.places(cache, slot // tokens, slot % tokens), scales, strict=True
                ):
                    place.copy_((x[row].float() / scale).to(cache.dtype))


class Halves(Rows):
    """Cache with K of all tokens before V, and tokens before heads."""

    shape = (BLOCKS, 2, TOKENS, HEADS, DIM)

    def places(self, cache, block, token):
        return cache[block, 0, token], cache[block, 1, token]


class Columns(Rows):
    """Cache with dimensions before tokens, as for a GEMM that reads columns."""

    shape = (BLOCKS, HEADS, 2 * DIM, TOKENS)

    def places(self, cache, block, token):
        return cache[block, :, :DIM, token], cache[block, :, DIM:, token]


class Sums(Rows):
    """An implementation whose cache is not K and V per token."""

    def places(self, cache, block, token):
        return cache[block, :, token, :DIM], cache[block, :, 0, DIM:]


def layer(impl: Rows, number: int = 0, format: str = "k4v4", dtype=torch.float32, **scales) -> ColdLayer:
    cache = torch.zeros(impl.shape, dtype=dtype)
    module = SimpleNamespace(
        kv_cache=cache, impl=impl, kv_cache_dtype="auto" if dtype.is_floating_point else "fp8", num_kv_heads=HEADS,
        **scales,
    )  # fmt: skip
    return ColdLayer(f"layers.{number}", number, module, CodecSpec.parse(format, DIM).with_raw_dtype("float32"), HEADS)


def random_kv(tokens: int, seed: int) -> tuple[Tensor, Tensor]:
    source = torch.Generator().manual_seed(seed)
    key, value = (torch.randn(tokens, HEADS, DIM, generator=source) for _ in "kv")
    return key + 3 * torch.randn(HEADS, DIM, generator=source), value


@pytest.mark.parametrize("impl", [Rows(), Halves(), Columns()], ids=["rows", "halves", "columns"])
def test_any_order_of_k_and_v_is_found(impl):
    cold = layer(impl)
    cache = HotCache(cold, BLOCKS, TOKENS, torch.float32)
    key, value = random_kv(3 * TOKENS, 0)
    blocks = torch.tensor([7, 2, 9])
    slots = (blocks[:, None] * TOKENS + torch.arange(TOKENS)).flatten()
    cache.write(slots, key, value)
    got = torch.empty_like(key), torch.empty_like(value)
    cache.read(blocks, *got)
    assert torch.equal(got[0], key)
    assert torch.equal(got[1], value)
    assert not cold.module.kv_cache[0].any()  # probing the layout does not write to the cache
    assert (cache.sides is None) == (type(impl) is Columns)
    if cache.sides is not None:
        two = layer(impl, 1)
        rows = LayerRows.of([cache.plain_sides, HotCache(two, BLOCKS, TOKENS, torch.float32).plain_sides])
        rows.copy(blocks, torch.cat([key, key + 1], 1), torch.cat([value, value + 1], 1), read=False)
        for k, v, x in ((key, value, cold), (key + 1, value + 1, two)):
            HotCache(x, BLOCKS, TOKENS, torch.float32).read(blocks, *got)
            assert torch.equal(got[0], k)
            assert torch.equal(got[1], v)
        both = torch.empty(3 * TOKENS, 2 * HEADS, DIM), torch.empty(3 * TOKENS, 2 * HEADS, DIM)
        rows.copy(blocks, *both, read=True)
        assert torch.equal(both[0], torch.cat([key, key + 1], 1))
        assert torch.equal(both[1], torch.cat([value, value + 1], 1))
    assert LayerRows.of([cache.plain_sides, None]) is None


def test_an_fp8_cache_is_read_with_its_scales():
    cold = layer(Rows(), dtype=torch.uint8, _k_scale=torch.tensor(0.37), _v_scale=torch.tensor(5.1))
    cache = HotCache(cold, BLOCKS, TOKENS, torch.float32)
    key, value = random_kv(TOKENS, 0)
    cache.write(torch.arange(TOKENS) + 4 * TOKENS, key, value)
    got = torch.empty_like(key), torch.empty_like(value)
    cache.read(torch.tensor([4]), *got)
    for x, y in zip(got, (key, value), strict=True):
        assert (x - y).norm() < 0.04 * y.norm()  # e4m3 has 3 mantissa bits


@pytest.mark.parametrize(
    ("made", "why"),
    [
        (lambda: layer(Sums()), "missing or changed"),
        (lambda: layer(Rows(), dtype=torch.int32), "holds torch.int32"),
        (lambda: layer(type("Wide", (Rows,), {"shape": (BLOCKS, HEADS, TOKENS, 2 * DIM + 8)})()), "numbers where"),
    ],
    ids=["not K and V", "integers", "scales beside"],
)
def test_other_caches_are_refused(made, why):
    with pytest.raises(UnsupportedError, match=why):
        HotCache(made(), BLOCKS, TOKENS, torch.float32)


def region(chunks: int, row_bytes: int) -> SimpleNamespace:
    rows = torch.zeros(chunks, row_bytes, dtype=torch.int8)
    return SimpleNamespace(create_next_worker_view=lambda size: rows[:, :size], cleanup=lambda: None, rows=rows)


def make_worker(layers, chunks=16, per_chunk=1, tokens=TOKENS, settings=SETTINGS, center=True):
    bands = bands_of(layers, tokens)
    codecs = []
    for band in bands:
        caches = [HotCache(x, BLOCKS, tokens, torch.float32) for x in band.layers]
        wanted = center and wants_offset(band.layout.spec)
        offsets = [LayerOffset(HEADS, Codec(x.spec)) if wanted else None for x in band.layers]
        model = ServedModel(settings, "", None, 2048, lambda: (0, 1), random_weights=True)
        codecs.append(BandCodec(model, band, caches, offsets, torch.float32))
    size = block_bytes(bands) * per_chunk
    host = region(chunks, size)
    return ColdWorker([codecs], host, size, per_chunk), host


def fill(layers, blocks, seed=0):
    """Writes random K and V into the caches of all layers and returns them, by layer."""
    out = []
    for i, x in enumerate(layers):
        cache = HotCache(x, BLOCKS, TOKENS, torch.float32)
        key, value = random_kv(len(blocks) * TOKENS, seed + i)
        slots = (torch.tensor(blocks)[:, None] * TOKENS + torch.arange(TOKENS)).flatten()
        cache.write(slots, key, value)
        out.append((key, value))
    return out


def read(x: ColdLayer, blocks) -> tuple[Tensor, Tensor]:
    cache = HotCache(x, BLOCKS, TOKENS, torch.float32)
    got = tuple(torch.empty(len(blocks) * TOKENS, HEADS, DIM) for _ in "kv")
    cache.read(torch.tensor(blocks), *got)
    return got


def chunks_spec(ids):
    return SimpleNamespace(block_ids=np.array(ids, dtype=np.int32))


# Relative error of Lloyd-Max codes of a normal variable: at most 1.7 * 2^-b
BOUND = {"k8v8": 1.7 / 2**8, "k4v4": 1.7 / 2**4, "k2v2": 1.7 / 2**2, "raw": 0.0}


@pytest.mark.parametrize("pieces", ["one piece", "a block at a time"])
@pytest.mark.parametrize("formats", [("k8v8",) * 3, ("k4v4", "k4v4", "raw"), ("k2v2", "k8v8", "k2v2")], ids="-".join)
def test_blocks_come_back_from_host_memory(formats, pieces, monkeypatch):
    if pieces != "one piece":
        monkeypatch.setattr(cold_worker, "PIECE_BYTES", 1)
    layers = [layer((Rows, Columns, Halves)[i](), i, f) for i, f in enumerate(formats)]
    for x in layers:
        assert x.page(TOKENS)[0].block_size == TOKENS
    worker, host = make_worker(layers)
    given = fill(layers, [3, 8, 1, 5])
    assert worker.submit_store(7, GPULoadStoreSpec([3, 8, 1, 5], [4], [0]), chunks_spec([4, 2, 11, 9]))
    assert [r.job_id for r in worker.get_finished()] == [7]
    assert {i for i in range(16) if host.rows[i].any()} == {2, 4, 9, 11}
    worker.submit_load(8, chunks_spec([4, 2, 11, 9]), GPULoadStoreSpec([0, 10, 2, 7], [4], [0]))
    done = worker.get_finished()
    assert [(r.job_id, r.success, r.transfer_size) for r in done] == [(8, True, 4 * host.rows.shape[1])]
    for x, (key, value), format in zip(layers, given, formats, strict=True):
        got = read(x, [0, 10, 2, 7])
        centred = key - key.mean(0)
        assert (got[0] - key).norm() <= BOUND[format] * 1.3 * centred.norm()
        assert (got[1] - value).norm() <= BOUND[format] * value.norm()


def test_chunks_of_several_blocks_begin_anywhere():
    """A load may read part of a chunk. Blocks are counted from the start of the prompt."""
    layers = [layer(Rows(), 0, "raw")]
    worker, _ = make_worker(layers, per_chunk=4)
    given = fill(layers, [0, 1, 2, 3, 4, 5, 6])
    worker.submit_store(1, GPULoadStoreSpec([0, 1, 2, 3, 4, 5, 6], [7], [0]), chunks_spec([9, 3]))
    worker.submit_load(2, chunks_spec([9, 3]), GPULoadStoreSpec([11, 8, 7], [3], [2]))  # blocks 2, 3 and 4
    key, value = read(layers[0], [11, 8, 7])
    assert torch.equal(key, given[0][0][2 * TOKENS : 5 * TOKENS])
    assert torch.equal(value, given[0][1][2 * TOKENS : 5 * TOKENS])


def test_latents_are_keys_and_their_rope_parts_values():
    class Rows:
        def do_kv_cache_update(self, latent, rope, cache, slots, dtype, scale):
            cache.view(-1, cache.shape[-1])[slots] = torch.cat([latent, rope.squeeze(1)], -1)

    module = MLAAttention.__new__(MLAAttention)
    torch.nn.Module.__init__(module)
    module.impl, module.kv_cache_dtype, module.num_kv_heads = Rows(), "auto", 1
    module.kv_cache, module._k_scale = torch.zeros(BLOCKS, TOKENS, 512 + 64), torch.ones(())
    spec = LatentSpec.parse("c4").with_raw_dtype("float32")
    worker, _ = make_worker([ColdLayer("layers.0", 0, module, spec, 1)], center=False)
    source = torch.randn(3, TOKENS, 512 + 64, generator=torch.Generator().manual_seed(0))
    module.kv_cache[[2, 5, 1]] = source
    worker.submit_store(1, GPULoadStoreSpec([2, 5, 1], [3], [0]), chunks_spec([0, 1, 2]))
    module.kv_cache.zero_()
    worker.submit_load(2, chunks_spec([0, 1, 2]), GPULoadStoreSpec([7, 0, 4], [3], [0]))
    back = module.kv_cache[[7, 0, 4]]
    assert torch.equal(back[..., 512:], source[..., 512:])  # rope parts stay unquantised
    assert 0 < (back - source)[..., :512].norm() < BOUND["k4v4"] * source[..., :512].norm()


def test_warming_up_changes_nothing_but_block_0(monkeypatch):
    """No key offset is learnt and no layer is checked by the fidelity guard."""
    monkeypatch.setattr(cold_worker, "PIECE_BYTES", 1 << 18)  # two blocks
    layers = [layer(Rows(), i) for i in range(2)]
    worker, _ = make_worker(layers)
    worker._stores.warm()
    codec = worker._stores.groups[0][0]
    assert codec._unchecked
    assert not any(x.known for x in codec._offsets)
    assert not any(x.module.kv_cache[1:].any() for x in layers)


def test_keys_that_would_be_lost_are_refused():
    """If the constant part of keys is much larger than their differences, 4 bits without centring lose the latter."""
    layers = [layer(Rows())]
    cache = HotCache(layers[0], BLOCKS, TOKENS, torch.float32)
    key, value = random_kv(TOKENS, 0)
    cache.write(torch.arange(TOKENS), key + 100, value)
    job = 1, GPULoadStoreSpec([0], [1], [0]), chunks_spec([0])
    make_worker(layers)[0].submit_store(*job)
    with pytest.raises(InputError, match="would lose the keys of"):
        make_worker(layers, center=False)[0].submit_store(*job)
    make_worker(layers, center=False, settings=KVCacheConfig("k4v4", max_score_error=0))[0].submit_store(*job)


@pytest.mark.parametrize(("format", "tokens", "least"), [("k4v4", 16, 3.7), ("k2v2", 16, 7.0), ("k4v4", 32, 3.7)])
def test_host_memory_holds_more_tokens(format, tokens, least):
    """Ratio of the bytes of a block in bf16 to those in host memory, with scales and alignment; head size 128."""
    heads = 8
    layers = [
        ColdLayer(f"layers.{i}", i, SimpleNamespace(num_kv_heads=heads), CodecSpec.parse(format, 128), heads)
        for i in range(32)
    ]
    row = -(-block_bytes(bands_of(layers, tokens)) // 4096) * 4096
    assert 2 * 2 * 32 * heads * 128 * tokens / row >= least


@pytest.mark.parametrize(
    "field", [{"sink_tokens": 4}, {"recent_tokens": 4}, {"age": {512: "k2v2"}}, {"memory": "1GiB"}]
)
def test_formats_by_age_are_refused(field):
    with pytest.raises(UnsupportedError, match=f"the cold tier does not support {next(iter(field))}"):
        cold_settings({"slimkv": field})


@pytest.mark.parametrize("field", [{"fresh": "codes"}, {"prefill": "16bit"}, {"deterministic": True}])
def test_how_attention_reads_is_not_the_tiers_to_choose(field):
    with pytest.raises(UnsupportedError, match=f"the cold tier does not support {next(iter(field))}"):
        cold_settings({"slimkv": field})


def test_unknown_options_are_refused():
    with pytest.raises(InputError, match="no setting 'cpu_bytes'; did you mean 'cpu_bytes_to_use'"):
        cold_settings({"slimkv": "k4v4", "cpu_bytes": 1 << 30})


def cold_config(**extra):
    """The part of vLLM's offloading configuration that is checked before layers are searched."""
    parallel = SimpleNamespace(pp_size=1, dcp_size=1, pcp_size=1)
    extra = {"slimkv": "k4v4", "cpu_bytes_to_use": 1 << 30, **extra}
    return SimpleNamespace(extra_config=extra, engine_id="e", parallel=parallel, canonical_layout=False)


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        *(
            ({"cpu_bytes_to_use": size}, "must be the cold tier's number of bytes")
            for size in (None, "1GiB", 0, -5, [])
        ),
        ({"store_threshold": 2}, "no store_threshold"),
        ({"secondary_tiers": {"type": "fs", "root_dir": "kv"}}, "secondary_tiers must be a list"),
        ({"secondary_tiers": ["fs"]}, "it does not know 'fs'"),
        ({"secondary_tiers": [{"type": "fs", "root_dir": 5}]}, "it does not know {'type': 'fs', 'root_dir': 5}"),
        ({"secondary_tiers": [{"type": "obj", "root_dir": "kv"}]}, "it does not know {'type': 'obj'"),
    ],
)
def test_options_that_the_tier_cannot_follow_are_refused(extra, message):
    with pytest.raises(SlimKVError, match=re.escape(message)):
        SlimKVOffloadingSpec(cold_config(**extra))


def test_batch_invariance_is_refused(monkeypatch):
    """A block that comes back from host memory differs from the computed block."""
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    with pytest.raises(UnsupportedError, match="does not work with VLLM_BATCH_INVARIANT=1"):
        SlimKVOffloadingSpec(cold_config())
