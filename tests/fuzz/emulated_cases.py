"""Random calls of the CUDA kernels on the emulated GPU: formats, head sizes, groups, queries, masks and partitions.

A case depends on its kind and number alone. Results are compared with exact attention, as in ``tests/ops/cuda``. Then
the tokens before every query's window are overwritten, which must not change a bit.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import pytest
import store_cases
import test_decode_cuda as decode_tests
import test_prefill_bytes_cuda as eight_bit_tests
import test_prefill_cuda as prefill_tests
import test_prefill_integers_cuda as integer_tests
import test_store_cuda as store_tests
import torch
from attention_cases import Built, Case, build
from test_attention import check_rows, poisoned_out, request_of

from slimkv.errors import SpecError
from slimkv.ops.attention.api import MAX_DECODE_QUERIES
from slimkv.ops.attention.cuda import decode, prefill, prefill_config, prefill_defines
from slimkv.ops.attention.cuda.decode_config import config_for
from slimkv.ops.cuda.device import record_of
from slimkv.ops.store.cuda import launch as store_launch
from slimkv.spec import CodecSpec, Kind

POISON = 0xFF
SIDES = (
    *("1", "2", "3", "4", "4", "4", "5", "5", "6", "7", "8"),
    *("u2", "u3", "u4", "u5", "u6", "u8", "ur3", "ur4", "ur8", "fp8"),
)
DIMS = (16, 32, 48, 64, 80, 96, 112, 128, 128, 144, 160, 192, 224, 256)
GROUPS = (1, 1, 2, 3, 4, 4, 5, 6, 7, 8, 8, 9, 10, 12, 14, 16, 20, 32)
SMALL_WORKSPACE = 1 << 18  # forces several passes over a few hundred tokens


def draw_format(chance: random.Random, dims: tuple[int, ...], sides: tuple[str, ...]) -> dict:
    """A valid format and its head sizes; half of the time, keys and values have the same codes."""
    while True:
        key, value = chance.choice(sides), chance.choice(sides)
        value = key if chance.random() < 0.5 else value
        dim = chance.choice(dims)
        found = {
            "format": "fp8" if key == value == "fp8" else f"k{key}v{value}",
            "dim": dim,
            "value_dim": None if chance.random() < 0.75 else chance.choice(dims),
        }
        try:
            CodecSpec.parse(*found.values())
        except SpecError:
            continue
        return found


def draw_options(chance: random.Random) -> dict:
    window = chance.choice((None, None, None, None, 1, 7, 40, 130, 300))
    return {
        "page": chance.choice((16, 16, 32, 64, 64, 128)),
        "window": window,
        "causal": window is not None or chance.random() > 0.1,
        "softcap": chance.choice((0.0, 0.0, 0.0, 3.0, 20.0)),
        "sinks": chance.random() < 0.25,
        "dtype": chance.choice(("bf16", "bf16", "fp16", "fp32")),
        "out_dtype": chance.choice(("fp32", "fp32", "bf16", "fp16")),
        "padding": chance.choice((0, 0, 3)),
        "strided": chance.random() < 0.2,
    }


def poison_unseen(built: Built) -> bool:
    """Overwrites the tokens before every query's window. Returns whether there are any."""
    case, found = built.case, False
    for sequence, (length, count) in enumerate(zip(case.lens, case.queries, strict=True)):
        unseen = 0 if case.window is None or not count else max(length - count - case.window + 1, 0)
        built.poison(built.positions(sequence)[:unseen], POISON)
        found = found or unseen > 0
    return found


def check_unseen(case: Case, out: torch.Tensor, attend: Callable[[Built, torch.Tensor, torch.Tensor], None]) -> None:
    built = build(case, torch.device("cpu"))
    if poison_unseen(built):
        again, lse = poisoned_out(case, built)
        attend(built, again, lse)
        assert torch.equal(again.nan_to_num(), out.nan_to_num()), "tokens that no query sees changed the result"
        assert torch.equal(again.isnan(), out.isnan()), "tokens that no query sees changed the result"


def decode_case(chance: random.Random, patch: pytest.MonkeyPatch) -> bool:
    most = chance.choice((1, 1, 2, 4, 8, 12, 16, 32))
    lens = [
        chance.choice((0, 1, chance.randint(1, 60), chance.randint(1, 400), chance.randint(100, 900)))
        for _ in range(chance.randint(1, 5))
    ]
    queries = [min(chance.choice((most, chance.randint(1, most), 1)), max(length, 1)) for length in lens]
    if chance.random() < 0.1:  # also a prompt, which this kernel must skip
        lens, queries = [*lens, 60], [*queries, 40]
    case = Case(
        **draw_format(chance, DIMS, SIDES), **draw_options(chance), group=chance.choice(GROUPS),
        num_kv_heads=chance.choice((1, 1, 2, 3)), lens=tuple(lens), queries=tuple(queries),
        query_norm=chance.choice((1.0, 1.0, 0.3)), peaked=0 not in lens and chance.random() < 0.1,
    )  # fmt: skip
    device = replace(decode_tests.SMALL_GPU, multiprocessors=chance.choice((2, 4, 8)), warpgroups=chance.random() < 0.7)

    def attend(built: Built, out: torch.Tensor, lse: torch.Tensor) -> None:
        decode.attend_packed(request_of(built, out, lse), device, decode_tests.launch)

    built = build(case, decode_tests.CPU)
    out, lse = poisoned_out(case, built)
    taken = decode.supports(request_of(built, out, lse)) is None
    if not taken or config_for(device, built.layout, case.group, max(case.queries)) is None:
        return False
    print(case, device)
    attend(built, out, lse)
    check_rows(built, out, lse, lambda count: count <= MAX_DECODE_QUERIES)
    check_unseen(case, out, attend)
    return True


def draw_prompts(chance: random.Random, longest: int, before: int) -> dict:
    """Lengths of sequences and numbers of queries, with at least one prompt."""
    queries = [chance.choice((1, 33, chance.randint(33, 70), chance.randint(33, longest))) for _ in range(2)]
    queries = [chance.randint(33, longest), *queries][: chance.randint(1, 3)]
    lens = [count + chance.choice((0, chance.randint(0, before))) for count in queries]
    return {"lens": tuple(lens), "queries": tuple(queries), "query_norm": 0.5}


def prefill_case(chance: random.Random, patch: pytest.MonkeyPatch) -> bool:
    form = draw_format(chance, prefill_config.HEAD_DIMS, SIDES) | {"value_dim": None}
    case = Case(
        **form, **draw_options(chance), **draw_prompts(chance, 150, chance.choice((300, 300, 1500))),
        group=chance.choice((1, 2, 3, 4, 5, 7, 8)), num_kv_heads=chance.choice((1, 1, 2)),
    )  # fmt: skip
    spec, gpu = CodecSpec.parse(case.format, case.dim), record_of((9, 0), chance.choice((2, 7, 40)))
    patch.setattr(prefill_config, "device_of", lambda device: gpu)
    patch.setattr(prefill, "device_of", lambda device: gpu)
    configs = [config for unpack in prefill_defines.Unpack for config in prefill_config.configs(spec, unpack)]
    configs.append(prefill_config.warp_config(spec, integer_tests.SMALL_GPU))
    config, budget = chance.choice(configs), chance.choice((prefill.WORKSPACE_BYTES, SMALL_WORKSPACE))
    print(case, config, budget, gpu.multiprocessors)

    def attend(built: Built, out: torch.Tensor, lse: torch.Tensor) -> None:
        prefill.attend_prefill(request_of(built, out, lse), prefill_tests.launch, budget, config)

    out = prefill_tests.attend_and_check(case, config=config, budget=budget)
    check_unseen(case, out, attend)
    return True


def eight_bit_case(chance: random.Random, patch: pytest.MonkeyPatch) -> bool:
    integers = chance.random() < 0.5
    dims = prefill_config.eight_bit_head_dims(single_warps=integers)
    form = draw_format(chance, dims, ("1", "2", "3", "4", "4")) | {"value_dim": None}
    case = Case(
        **form, **draw_options(chance), **draw_prompts(chance, 120, 600), group=chance.choice((1, 2, 3, 4, 7, 8)),
        num_kv_heads=1,
    )  # fmt: skip
    tests, config = integer_tests, None
    if integers:
        integer_tests.hold_to_a_small_gpu(patch)
    else:
        tests, config = eight_bit_tests, chance.choice(eight_bit_tests.CONFIGS[case.dim])
    budget = chance.choice((prefill.WORKSPACE_BYTES, SMALL_WORKSPACE))
    print(case, config or "integers", budget)

    def attend(built: Built, out: torch.Tensor, lse: torch.Tensor) -> None:
        request = eight_bit_tests.request_in_bytes(built, out, lse)
        prefill.attend_prefill(request, prefill_tests.launch, budget, config)

    out = tests.attend_and_check(case, config=config, budget=budget)
    check_unseen(case, out, attend)
    return True


def store_case(chance: random.Random, patch: pytest.MonkeyPatch) -> bool:
    query_aware = chance.random() < 0.4
    case = store_cases.Case(
        **draw_format(chance, DIMS, SIDES), heads=chance.randint(1, 3), tokens=chance.choice((1, 2, 5, 16, 17, 33, 77)),
        page=chance.choice((16, 32, 64)), dtype=chance.choice(("bf16", "fp16", "fp32")),
        slots=chance.choice(("aligned", "unaligned", "scattered")), strided=chance.random() < 0.2,
    )  # fmt: skip
    spec = case.layout.spec
    if (query_aware and spec.key.kind != Kind.LLOYD) or not store_tests.taken(case, query_aware):
        return False
    patch.setattr(store_launch, "FEW_VECTORS", chance.choice((0, 8192)))
    print(case, f"query_aware={query_aware}, few={store_launch.FEW_VECTORS}")
    store_tests.check(case, shaped=query_aware)
    return True


KINDS = {"decode": decode_case, "prefill": prefill_case, "eight_bit": eight_bit_case, "store": store_case}


def run_cases(kind: str, count: int) -> int:
    """Runs the first ``count`` cases of a kind. Returns how many of them a kernel supports."""
    taken = 0
    for number in range(count):
        chance = random.Random(f"{kind} {number}")
        with pytest.MonkeyPatch.context() as patch:
            try:
                taken += KINDS[kind](chance, patch)
            except Exception as error:
                raise AssertionError(f"{kind} case {number}: {error}") from error
    return taken
