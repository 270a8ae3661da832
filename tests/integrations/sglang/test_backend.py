"""``SlimKVAttnBackend`` on handmade batches, compared with attention on the original keys and values."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("sglang")

from plans import DIM, HEADS, PAGE, make_batch, make_pool
from sglang.srt.layers.radix_attention import RadixAttention

from slimkv.errors import InputError, UnsupportedError
from slimkv.integrations.sglang.backend import SlimKVAttnBackend

pytestmark = pytest.mark.sglang

QUERY_HEADS, POSITIONS, REQUESTS = 4, 96, 3


def make_layer(layer_id: int = 0, **others) -> RadixAttention:
    return RadixAttention(QUERY_HEADS, DIM, DIM**-0.5, HEADS, layer_id, **others)


def make_backend(formats=("raw",), layer=None, **others):
    pool = make_pool(list(formats), size=REQUESTS * POSITIONS)
    order = torch.randperm(REQUESTS * POSITIONS // PAGE) + 1
    slots = (order[:, None] * PAGE + torch.arange(PAGE)).view(REQUESTS, POSITIONS).int()
    runner = SimpleNamespace(
        is_draft_worker=False, model=torch.nn.Sequential(layer or make_layer()), device="cpu", page_size=PAGE,
        token_to_kv_pool=pool, req_to_token_pool=SimpleNamespace(req_to_token=slots), dtype=torch.float32,
        server_args=SimpleNamespace(speculative_num_draft_tokens=None), **others,
    )  # fmt: skip
    return SlimKVAttnBackend(runner), slots


def expected(query, key, value, window=None, cap=0.0, sinks=None):
    """Attention of query [heads, dim] at the last token's position; key and value are [tokens, num_kv_heads, dim]."""
    key, value = (x.repeat_interleave(QUERY_HEADS // HEADS, 1) for x in (key, value))
    scores = torch.einsum("hd,thd->ht", query.double(), key.double()) * DIM**-0.5
    if cap:
        scores = cap * torch.tanh(scores / cap)
    if window is not None:
        scores[:, : max(0, scores.shape[1] - window)] = -torch.inf
    if sinks is not None:
        scores = torch.cat([sinks.double()[:, None], scores], 1)
    weights = scores.softmax(1)[:, -key.shape[0] :]
    return torch.einsum("ht,thd->hd", weights, value.double())


def tokens(seed: int, count: int):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(3, count, QUERY_HEADS * DIM, generator=generator)


def run_step(backend, layer, mode, requests, before, new, slots, seed=0, **kwargs):
    """A forward pass of ``new`` tokens per request after ``before`` cached ones; returns query, K, V and output."""
    total = sum(new)
    q, k, v = tokens(seed, total)
    k, v = k[:, : HEADS * DIM].contiguous(), v[:, : HEADS * DIM].contiguous()
    where = torch.cat([slots[r, b : b + n] for r, b, n in zip(requests, before, new, strict=True)]).long()
    counted = before if mode == "TARGET_VERIFY" else [b + n for b, n in zip(before, new, strict=True)]
    batch = make_batch(mode, requests, counted, new, where)
    backend.init_forward_metadata(batch)
    forward = backend.forward_decode if mode == "DECODE" else backend.forward_extend
    out = forward(q, k.view(-1, HEADS, DIM), v.view(-1, HEADS, DIM), layer, batch, **kwargs)
    return q.view(-1, QUERY_HEADS, DIM), k.view(-1, HEADS, DIM), v.view(-1, HEADS, DIM), out.view(-1, QUERY_HEADS, DIM)


@pytest.mark.parametrize(
    ("layer", "how"),
    [
        ({}, {}),
        ({"sliding_window_size": 9}, {"window": 10}),
        ({"logit_cap": 2.0}, {"cap": 2.0}),
        ({}, {"sinks": torch.tensor([0.5, -1.0, 2.0, 0.0])}),
    ],
)
def test_prefill_decode_and_verification(layer, how):
    layer = make_layer(**layer)
    backend, slots = make_backend(layer=layer)
    extra = {"sinks": how["sinks"]} if "sinks" in how else {}
    seen = {request: (torch.zeros(0, HEADS, DIM), torch.zeros(0, HEADS, DIM)) for request in range(3)}
    steps = [("EXTEND", [0, 2], [20, 7]), ("MIXED", [1, 0], [33, 1]), ("DECODE", [0, 1, 2], [1, 1, 1]),
             ("TARGET_VERIFY", [2, 0], [3, 3])]  # fmt: skip
    for seed, (mode, requests, new) in enumerate(steps):
        before = [seen[r][0].shape[0] for r in requests]
        query, key, value, out = run_step(backend, layer, mode, requests, before, new, slots, seed, **extra)
        row = 0
        for request, count in zip(requests, new, strict=True):
            seen[request] = tuple(
                torch.cat([old, x[row : row + count]]) for old, x in zip(seen[request], (key, value), strict=True)
            )
            length = seen[request][0].shape[0]
            for i in range(count):
                end = length - count + i + 1
                want = expected(query[row + i], seen[request][0][:end], seen[request][1][:end], **how)
                torch.testing.assert_close(out[row + i].double(), want, atol=2e-6, rtol=2e-5)
            row += count


def test_padding_gives_zeros():
    """Padding rows after those of the last request, as on data-parallel ranks."""
    layer = make_layer()
    backend, slots = make_backend(layer=layer)
    q, k, v = tokens(0, 6)
    batch = make_batch("EXTEND", [0], [4], [4], torch.cat([slots[0, :4], torch.zeros(2, dtype=torch.int32)]).long())
    backend.init_forward_metadata(batch)
    out = backend.forward_extend(
        q, k[:, : HEADS * DIM].reshape(-1, HEADS, DIM), v[:, : HEADS * DIM].reshape(-1, HEADS, DIM), layer, batch
    )
    assert out[:4].any()
    assert not out[4:].any()


@pytest.mark.parametrize(("mode", "new"), [("DECODE", 1), ("TARGET_VERIFY", 4)])
def test_a_graphs_step_gives_what_the_eager_one_gives(mode, new):
    layer = make_layer()
    backend, slots = make_backend(("k4v4",), layer=layer)
    run_step(backend, layer, "EXTEND", [0, 2], [0, 0], [40, 21], slots)
    *_, eager = run_step(backend, layer, mode, [0, 2], [40, 21], [new, new], slots, seed=1)
    backend.init_cuda_graph_state(4, 4 * new)
    q, k, v = tokens(1, 2 * new)
    where = torch.cat([slots[0, 40 : 40 + new], slots[2, 21 : 21 + new]]).long()
    counted = [40, 21] if mode == "TARGET_VERIFY" else [41, 22]
    batch = make_batch(mode, [0, 2], counted, [new, new], where)
    backend.init_forward_metadata_out_graph(batch, in_capture=True)
    backend.init_forward_metadata_in_graph(batch)
    forward = backend.forward_decode if mode == "DECODE" else backend.forward_extend
    out = forward(
        q, k[:, : HEADS * DIM].reshape(-1, HEADS, DIM), v[:, : HEADS * DIM].reshape(-1, HEADS, DIM), layer, batch
    )
    torch.testing.assert_close(out.view_as(eager), eager, atol=1e-6, rtol=1e-5)


def test_graphs_of_prefill_are_refused():
    backend, slots = make_backend()
    backend.init_cuda_graph_state(4, 4)
    with pytest.raises(UnsupportedError, match="--disable-prefill-cuda-graph"):
        backend.init_forward_metadata_out_graph(make_batch("EXTEND", [0], [4], [4], slots[0, :4].long()))


def test_what_a_model_asks_beyond_is_refused_by_name():
    layer = make_layer()
    backend, slots = make_backend(layer=layer)
    with pytest.raises(UnsupportedError, match="rel_bias"):
        run_step(backend, layer, "EXTEND", [0], [0], [4], slots, rel_bias=torch.zeros(1))


def test_layers_that_share_a_cache_do_not_write():
    """A layer that uses the K and V of another layer passes none, or asks not to save them."""
    layer = make_layer()
    backend, slots = make_backend(layer=layer)
    query, _, _, out = run_step(backend, layer, "EXTEND", [0], [0], [8], slots)
    before = backend.token_to_kv_pool.packed(0).pages.clone()
    again = backend.forward_extend(
        query.reshape(8, -1), None, None, layer, make_batch("EXTEND", [0], [8], [8], slots[0, :8].long())
    )
    assert torch.equal(again.view_as(out), out)
    assert torch.equal(backend.token_to_kv_pool.packed(0).pages, before)


def test_a_draft_has_a_backend_of_its_own():
    with pytest.raises(InputError, match="--speculative-draft-attention-backend fa3"):
        SlimKVAttnBackend(SimpleNamespace(is_draft_worker=True))


def test_a_pool_that_is_not_slimkvs_is_refused():
    runner = SimpleNamespace(
        is_draft_worker=False, model=torch.nn.Sequential(make_layer()), device="cpu", page_size=PAGE,
        token_to_kv_pool=object(), req_to_token_pool=None,
    )  # fmt: skip
    with pytest.raises(UnsupportedError, match="built a object where slimkv's pages should be"):
        SlimKVAttnBackend(runner)


def test_kinds_of_layers_are_compiled_once_each(monkeypatch):
    ran = {}
    monkeypatch.setattr("slimkv.integrations.sglang.backend.run_steps", ran.__setitem__)
    layers = [make_layer(0), make_layer(1), make_layer(2, logit_cap=20.0), make_layer(3, sliding_window_size=7)]
    make_backend(["k4v4", "k4v4", "k4v4", "k5v3"], torch.nn.Sequential(*layers))
    kinds = list(ran)
    assert [kind.layout.spec.format for kind in kinds] == ["k4v4", "k4v4", "k5v3"]
    assert [kind.options.sliding_window for kind in kinds] == [None, None, 8]
    steps, *others = ran.values()
    assert len(steps) > 4
    assert others == [steps, steps]
