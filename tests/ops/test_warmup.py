"""The steps that engines run before they serve."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from slimkv.codec import Codec
from slimkv.errors import InputError
from slimkv.ops.attention.api import MAX_DECODE_QUERIES, AttendOptions, AttendRequest
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
    others = [kind("k4v3"), kind(softcap=1.0), kind(sliding_window=8)]
    assert len({k.signature for k in (kind(), *others)}) == 4
    assert kind(softcap=1.0).signature == kind(softcap=2.0).signature


def test_prefill_of_any_length_asks_for_one_kernel_of_few_queries(monkeypatch):
    """A prompt's second chunk must not meet a kernel that its first one did not."""
    seen = set()

    def prepare(request):
        seen.add(frozenset(_prepare(request, H200, MAX_DECODE_QUERIES).plan.defines.items()))

    for step in (Step(1, 64, 64), Step(1, 64, 1 << 14), Step(8, 33, 1 << 17), Step(64, 40, 2048)):
        monkeypatch.setattr("slimkv.ops.attention.api.REGISTRY.select", lambda *_: Loaded(prepare))
        run_steps(kind(), [step])
    assert len(seen) == 1


FORMATS = ("k4v4", "k2v2", "k3v5", "k8v8", "k6v4", "fp8", "ku4vu4", "k1v1", "turboquant_k8v4")
SMALL = Device(142, 102400, 101376)


@pytest.mark.parametrize("device", [H200, SMALL], ids=["H200", "99 KB"])
@pytest.mark.parametrize("format", FORMATS)
def test_every_request_runs_a_kernel_that_warm_up_compiles(format, device):
    """Whatever the numbers and lengths of sequences and queries are, and whether some are prefilled."""
    chance, ran = random.Random(format), 0
    for dim in (64, 80, 96, 112, 128, 192, 256):
        codec = Codec(parse_spec(format, dim))
        for _ in range(12):
            layout, group = (
                PageLayout(codec.spec, chance.choice((16, 32, 64))),
                chance.choice((1, 2, 3, 4, 7, 8, 12, 16, 32)),
            )
            window, softcap = chance.choice((None, 100)), chance.choice((0.0, 30.0))
            options = AttendOptions(sliding_window=window, softcap=softcap)
            heads, most = chance.choice((1, 2, 8)), chance.choice((7, 15, MAX_DECODE_QUERIES))
            queries = [chance.choice((1, 1, 2, 4, 8, chance.randint(1, 60))) for _ in range(chance.choice((1, 2, 40)))]
            longest, dtype = chance.choice((128, 4096, 1 << 17)), chance.choice((torch.float16, torch.bfloat16))
            query = torch.empty(1, dtype=dtype).expand(sum(queries), heads * group, dim)
            out = torch.empty(1, dtype=dtype).expand(sum(queries), heads * group, codec.spec.value_dim)
            ints = torch.zeros(len(queries) + 1, dtype=torch.int32)
            request = AttendRequest(
                query, torch.empty(1, heads, layout.page_bytes, dtype=torch.uint8), ints[:-1, None], ints[:-1], ints,
                max(queries), longest, codec, layout, options, None, out, None, None, None,
            )  # fmt: skip
            try:
                plan = _prepare(request, device, most).plan
            except InputError:  # no configuration fits, and `supports` refuses the request
                continue
            ran += 1
            assert (plan.config.source, plan.defines) in reachable_kernels(device, layout, group, dtype, options)
    assert ran > 20


class Loaded:
    """A backend that only looks at the request."""

    def __init__(self, run) -> None:
        self.run = run

    def load(self):
        return self


@pytest.mark.parametrize(("verified", "steps"), [(1, 2), (4, 4)])
def test_every_kind_of_step_of_latents_is_run_once(verified, steps):
    """One query and four, short and long."""
    spec = LatentSpec.parse("c4r8", seed=100 + verified)
    kind = LatentKind(Codec(spec), page_layout(spec, 16), 4, 0.1, torch.float32, None)
    assert run_latent_steps(kind, decoding_steps(1000, verified)) == steps
    assert run_latent_steps(kind, decoding_steps(1000, verified)) == 0
    rows = replace(kind, layout=page_layout(spec, 16, token_rows=True))  # tables of slots
    assert run_latent_steps(rows, [Step(3, 1, 24)]) == 1
