"""Warm-up: the steps that engines run before they serve."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from functools import partial

import pytest
import torch

from slimkv.codec import Codec
from slimkv.errors import InputError
from slimkv.ops.attention.api import MAX_DECODE_QUERIES, AttendOptions, AttendRequest
from slimkv.ops.attention.cuda import decode as decode_cuda
from slimkv.ops.attention.cuda import prefill as prefill_cuda
from slimkv.ops.attention.cuda import prefill_config
from slimkv.ops.attention.cuda.decode import _prepare, reachable_kernels
from slimkv.ops.cuda.device import Device
from slimkv.ops.latent.warmup import LatentKind, run_latent_steps
from slimkv.ops.warmup import LayerKind, Step, decoding_steps, run_steps, serving_steps
from slimkv.spec import LatentSpec, PageLayout, page_layout, parse_spec

H200 = Device(132, 233472, 232448, copy_engine=True, warpgroups=True)


def kind(format: str = "k4v4", **options) -> LayerKind:
    codec = Codec(parse_spec(format, 64))
    return LayerKind(codec, PageLayout(codec.spec, 16), 4, 2, torch.float32, AttendOptions(**options))


def test_each_kind_of_step_is_there_once():
    steps = serving_steps(4096, verified=5)
    assert len(set(steps)) == len(steps)
    assert {(s.queries, s.max_seq_len) for s in steps} >= {(1, 4096), (1, 128), (5, 4096), (5, 128)}
    assert max(s.queries for s in steps) > MAX_DECODE_QUERIES
    assert all(s.queries <= s.max_seq_len for s in serving_steps(3))


@pytest.mark.parametrize("step", serving_steps(200, verified=3), ids=str)
def test_steps_run(step):
    run_steps(kind(softcap=20.0, sliding_window=40), [step])


def test_signatures_tell_kernels_apart():
    assert kind().signature == kind().signature
    others = [kind("k4v3"), kind(softcap=1.0), kind(sliding_window=8), kind(sinks=torch.zeros(4)), kind(prefill="8bit")]
    others += [kind(deterministic=True), replace(kind(), key_offset=torch.zeros(2, 64))]
    others += [replace(kind(), query_aware=torch.zeros(2, *ranges, 64, 64)) for ranges in ((), (3,))]
    assert len({k.signature for k in (kind(), *others)}) == 1 + len(others)
    assert kind(softcap=1.0).signature == kind(softcap=2.0).signature


def test_prefill_of_any_length_asks_for_one_kernel_of_few_queries(monkeypatch):
    """A prompt's second chunk must not need a kernel that its first one did not load."""
    seen = set()

    def prepare(request):
        seen.add(frozenset(_prepare(request, H200, MAX_DECODE_QUERIES).plan.defines.items()))

    for step in (Step(1, 64, 64), Step(1, 64, 1 << 14), Step(8, 33, 1 << 17), Step(64, 40, 2048)):
        monkeypatch.setattr("slimkv.ops.attention.api.REGISTRY.select", lambda *_: Loaded(prepare))
        run_steps(kind(), [step])
    assert len(seen) == 1


@pytest.fixture
def unpoisoned(monkeypatch):
    """Leaves memory unfilled: no kernel reads it, and filling the workspaces of long prompts takes most of the time."""
    monkeypatch.setattr(torch, "empty", torch.empty.__wrapped__)


FORMATS = ("k4v4", "k2v2", "k3v5", "k8v8", "k6v4", "fp8", "ku4vu4", "k1v1", "turboquant_k8v4")
SMALL = Device(142, 102400, 101376)


@pytest.mark.parametrize("device", [H200, SMALL], ids=["H200", "99 KB"])
@pytest.mark.parametrize("format", FORMATS)
def test_every_request_runs_a_kernel_that_warm_up_compiles(format, device):
    """For any numbers and lengths of sequences and queries, whether or not some are prefilled."""
    chance, ran = random.Random(format), 0
    for dim in (64, 80, 96, 112, 128, 192, 256):
        codec = Codec(parse_spec(format, dim))
        for _ in range(4):  # layers with several requests each: finding the kernels of a layer takes most of the time
            layout, group = (
                PageLayout(codec.spec, chance.choice((16, 32, 64))),
                chance.choice((1, 2, 3, 4, 7, 8, 12, 16, 32)),
            )
            window, softcap = chance.choice((None, 100)), chance.choice((0.0, 30.0))
            options = AttendOptions(sliding_window=window, softcap=softcap)
            dtype = chance.choice((torch.float16, torch.bfloat16))
            kernels = reachable_kernels(device, layout, group, dtype, options)
            for _ in range(4):
                heads, most = chance.choice((1, 2, 8)), chance.choice((7, 15, MAX_DECODE_QUERIES))
                queries = [
                    chance.choice((1, 1, 2, 4, 8, chance.randint(1, 60))) for _ in range(chance.choice((1, 2, 40)))
                ]
                longest = chance.choice((128, 4096, 1 << 17))
                query = torch.empty(1, dtype=dtype).expand(sum(queries), heads * group, dim)
                out = torch.empty(1, dtype=dtype).expand(sum(queries), heads * group, codec.spec.value_dim)
                ints = torch.zeros(len(queries) + 1, dtype=torch.int32)
                request = AttendRequest(
                    query, torch.empty(1, heads, layout.page_bytes, dtype=torch.uint8), ints[:-1, None], ints[:-1],
                    ints, max(queries), longest, codec, layout, options, None, out, None, None, None,
                )  # fmt: skip
                try:
                    plan = _prepare(request, device, most).plan
                except InputError:  # no configuration fits, and `supports` refuses the request
                    continue
                ran += 1
                assert (plan.config.source, plan.defines) in kernels
    assert ran > 20


@pytest.mark.usefixtures("unpoisoned")
@pytest.mark.parametrize("device", [H200, SMALL], ids=["H200", "99 KB"])
@pytest.mark.parametrize(
    ("format", "prefill"), [("k4v4", "16bit"), ("k4v4", "8bit"), ("ku4vu4", "16bit"), ("k6v5", "16bit")]
)
def test_every_prompt_runs_kernels_that_warm_up_compiles(format, prefill, device, monkeypatch):
    """For any numbers and lengths of prompts, with or without sequences that decode, in one pass or several."""
    for module in (prefill_config, prefill_cuda):
        monkeypatch.setattr(module, "device_of", lambda _: device)
    chance, sources = random.Random(format), Counter()
    for dim in (64, 96, 128, 256):
        codec = Codec(parse_spec(format, dim))
        for _ in range(12):
            layout, group, heads = (
                PageLayout(codec.spec, chance.choice((16, 64))),
                chance.choice((1, 4, 7)),
                chance.choice((2, 8)),
            )
            window, softcap = chance.choice((None, 100)), chance.choice((0.0, 30.0))
            deterministic = prefill == "16bit" and chance.random() < 0.2
            options = AttendOptions(
                sliding_window=window, softcap=softcap, prefill=prefill, deterministic=deterministic
            )
            longest = chance.choice((40, 100, 700, 4096))
            queries = [
                longest,
                *(chance.choice((1, longest)) for _ in range(chance.choice((0, 1, 40 if longest < 700 else 2)))),
            ]
            query = torch.empty(1, dtype=torch.bfloat16).expand(sum(queries), heads * group, dim)
            ints = torch.zeros(len(queries) + 1, dtype=torch.int32)
            shift = torch.empty(1).expand(sum(queries), heads * group) if softcap and chance.random() < 0.5 else None
            request = AttendRequest(
                query, torch.empty(1, heads, layout.page_bytes, dtype=torch.uint8), ints[:-1, None], ints[:-1], ints,
                longest, chance.choice((longest, 1 << 14)), codec, layout, options, None, query, None, None, None,
                score_shift=shift,
            )  # fmt: skip
            if (prefill == "8bit" and prefill_config.eight_bit_refusal(request)) or prefill_config.refusal(request):
                continue
            kernels = prefill_cuda.reachable_kernels(device, layout, torch.bfloat16, options)

            def launch(source, name, defines, *rest, kernels=kernels):
                assert (source, defines) in kernels
                sources[source] += 1

            prefill_cuda.attend_prefill(request, launch, budget=1 << 24)
    assert len(sources) == 2


@pytest.mark.usefixtures("unpoisoned")
@pytest.mark.parametrize("device", [H200, SMALL], ids=["H200", "99 KB"])
@pytest.mark.parametrize("page", [16, 32, 64])
def test_every_step_of_an_engine_runs_kernels_that_warm_up_compiles(page, device, monkeypatch):
    """Any number of requests with any number of new tokens, as after prefix-cache hits, up to 8,192 per step."""
    for module in (decode_cuda, prefill_config, prefill_cuda):
        monkeypatch.setattr(module, "device_of", lambda _: device)
    monkeypatch.setattr(prefill_cuda, "attend_prefill", partial(prefill_cuda.attend_prefill, budget=1 << 22))
    ran: set[tuple[object, ...]] = set()

    def launch(source, defines):
        ran.add((source, *defines.items()))

    monkeypatch.setattr(decode_cuda, "_launcher", lambda _: lambda call: launch(call.source, call.defines))
    monkeypatch.setattr(prefill_cuda, "launcher", lambda _: lambda source, name, defines, *_: launch(source, defines))
    codec, group, heads, options = Codec(parse_spec("k4v4", 128)), 4, 8, AttendOptions()
    layout = PageLayout(codec.spec, page)
    pages = torch.empty(1, heads, layout.page_bytes, dtype=torch.uint8)
    for sequences in (1, 2, 7, 16, 33, 64, 256):
        for queries in (1, 2, 3, 5, 8, 12, 16, 17, 24, 31, 32, 33, 48, 64, 100, 192, 300, 600, 2048, 8192):
            if sequences * queries > 8192:
                continue
            query = torch.empty(1, dtype=torch.bfloat16).expand(sequences * queries, heads * group, 128)
            ints = torch.zeros(sequences + 1, dtype=torch.int32)
            request = AttendRequest(
                query, pages, ints[:-1, None], ints[:-1], ints, queries, max(2048, queries), codec, layout, options,
                None, query, None, None, None,
            )  # fmt: skip
            decode_cuda.run(request)
    kernels = reachable_kernels(device, layout, group, torch.bfloat16, options)
    kernels += prefill_cuda.reachable_kernels(device, layout, torch.bfloat16, options)
    assert ran <= {(source, *defines.items()) for source, defines in kernels}
    assert len({source for source, *_ in ran}) == 4  # decode, verification, unpacking, prefill
    assert len(ran) > 8


class Loaded:
    """A backend that passes its requests to a function."""

    def __init__(self, run) -> None:
        self.run = run

    def load(self):
        return self


@pytest.mark.parametrize(("verified", "steps"), [(1, 2), (4, 4)])
def test_every_kind_of_step_of_latents_is_run_once(verified, steps):
    """Steps of one query and of ``verified`` queries, with short and long sequences."""
    spec = LatentSpec.parse("c4r8", seed=100 + verified)
    kind = LatentKind(Codec(spec), page_layout(spec, 16), 4, 0.1, torch.float32, None)
    assert run_latent_steps(kind, decoding_steps(1000, verified)) == steps
    assert run_latent_steps(kind, decoding_steps(1000, verified)) == 0
    rows = replace(kind, layout=page_layout(spec, 16, token_rows=True))  # tables of slots
    assert run_latent_steps(rows, [Step(3, 1, 24)]) == 1
