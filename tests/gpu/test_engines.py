"""vLLM on a GPU: deterministic serving; speculation, hybrid models and host offload with CUDA graphs.

Each engine runs in its own process. The engines of a test run concurrently.

    python -m pytest tests/gpu/test_engines.py -s -k speculation

``-s`` shows the prompts whose tokens diverge, and the gap between the log-probabilities of the two tokens.
"""

from __future__ import annotations

import math
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("vllm")
sys.path.insert(0, str(Path(__file__).parent.parent / "integrations" / "shared"))
sys.path.insert(0, str(Path(__file__).parent.parent / "integrations" / "vllm"))

import transformers
from engines import NGRAM, draft_model, engine, run_engine, run_engines, slimkv
from prompts import long, partings, ragged, repeating, run, various
from row_exact import assert_same

from slimkv.ops.cuda.device import AS_DEVICE, NAMED

pytestmark = [pytest.mark.gpu, pytest.mark.vllm, pytest.mark.slow]

# A cache of fixed size, because engines that measure free memory cannot start concurrently.
MEMORY = {"gpu_memory_utilization": 0.05, "kv_cache_memory_bytes": 2 << 30}
GRAPHS = {"enforce_eager": False, "dtype": "bfloat16", "block_size": 64, **MEMORY}
# Prompts come in chunks of 96 tokens, in batches with room for all of them: a step of the draft model has one token per
# request more than the target's, and vLLM compiles for at most ``max_num_batched_tokens``.
SPECULATING = {**GRAPHS, "max_num_batched_tokens": 2048, "long_prefill_token_threshold": 96}
NEAR_TIE = 0.1  # nats between the two most likely tokens; bf16 GEMMs of another shape can reverse their order


def test_speculation_changes_no_more_than_another_batch_does():
    """k4v4 with full CUDA graphs, on prompts for which drafts do not change the tokens of the stock cache.

    bf16 GEMMs round differently for another shape, which moves some numbers across a code's boundary. One flipped code
    perturbs the next layer and flips more codes, so after a few tokens the quantization noise is unrelated. Tokens may
    therefore diverge at gaps as large as those between one batch and the same prompts one by one, without drafts. If a
    verified token attended to wrong pages, tokens would diverge by nats, and at once.
    """
    speculations = {"n-gram": NGRAM, "draft model": draft_model()}
    prompts = [*ragged(), *long(), *repeating()]
    plain = [{**run("a", prompts, 48), "logprobs": 20}, run("one by one", prompts, 48, one_by_one=True, reset=True)]
    drafting = [run("a", prompts, 48)]
    systems = {"stock": {}, "k4v4": slimkv("k4v4")}
    cells = [(system, how) for system in systems for how in (None, *speculations)]
    results = dict(
        zip(
            cells,
            run_engines(
                *(
                    (engine(**SPECULATING, **systems[system], **speculations.get(how, {})), drafting if how else plain)
                    for system, how in cells
                )
            ),
            strict=True,
        )
    )
    batch = results["k4v4", None]
    alone = {**batch, "tokens": {"a": batch["tokens"]["one by one"]}}
    by_batch = {i: gap for i, (_, gap) in partings(batch, alone, "a").items()}
    print(f"no draft, k4v4: {len(by_batch)} of {len(prompts)} prompts part when asked one by one (gap): {by_batch}")
    allowed = max([NEAR_TIE, *by_batch.values()])
    assert math.isfinite(allowed), "a token that was none of the 20 best"
    for how in speculations:
        found = {}
        for system in systems:
            drafted = results[system, how]
            assert drafted["counters"]["a"]["vllm:spec_decode_num_accepted_tokens"] > 10
            found[system] = partings(results[system, None], drafted, "a")
            print(f"{how}, {system}: {len(found[system])} of {len(prompts)} prompts part (token, gap): {found[system]}")
        apart = {i: gap for i, (_, gap) in found["k4v4"].items() if i not in found["stock"]}
        assert all(gap <= allowed for gap in apart.values()), (how, allowed, apart)


def test_deterministic_answers_depend_on_their_prompt_alone():
    """32 prompts: one by one, together, from the cache, in chunks of 256, with n-gram drafts and a draft model."""
    together = {**run("together", various(), 40), "logprobs": 3}
    plain = [together, {**together, "name": "cached"}, {**together, "name": "alone", "one_by_one": True, "reset": True}]
    shared = {"dtype": "bfloat16", "block_size": 64, "max_num_batched_tokens": 8192, **MEMORY, **slimkv("k4v4")}
    others = {"chunked": {"max_num_batched_tokens": 256}, "n-gram": NGRAM, "draft model": draft_model()}
    first, *rest = run_engines(
        (engine(**shared), plain),
        *((engine(**{**shared, **more}), [together]) for more in others.values()),
        VLLM_BATCH_INVARIANT="1",
    )
    for name in ("cached", "alone"):
        assert_same(first, "together", first, name)
    for name, found in zip(others, rest, strict=True):
        assert_same(first, "together", found, "together")
        assert name == "chunked" or found["counters"]["together"]["vllm:spec_decode_num_accepted_tokens"] > 10, name


def test_held_to_another_gpu(tmp_path):
    """The kernels of each GPU that ``SLIMKV_AS_DEVICE`` can name, for prompts, drafts and prefix-cache hits.

    Kernels for another GPU sum in another order, which flips codes as another batch does, so near ties may be decided
    differently.
    """
    prompts = [*ragged(), *long(), *repeating()]
    asked = {**engine(**SPECULATING), **slimkv("k4v4")}
    miss, alone = run("miss", prompts, 24), run("alone", prompts, 24, one_by_one=True, reset=True)
    drafting, records = [miss, {**miss, "name": "hit"}], ("", *sorted(NAMED))
    # Gaps come from an engine without drafts: with drafts, vLLM may report the alternatives of another token.
    plain, *answered = run_engines(
        (asked, [{**miss, "logprobs": 20}, alone]),
        *(({**asked, **NGRAM}, drafting) for _ in records),
        own=[
            {AS_DEVICE: record, "XDG_CACHE_HOME": str(tmp_path / str(i))}  # each learns key offsets from the same batch
            for i, record in enumerate(("", *records))
        ],
    )
    by_batch = partings(plain, {"tokens": {"miss": plain["tokens"]["alone"]}}, "miss")
    print(f"no record, one by one: {by_batch}")
    apart = {
        (record, name): partings(plain, {"tokens": {"miss": found["tokens"][name]}}, "miss")
        for record, found in zip(records, answered, strict=True)
        for name in ("miss", "hit")
    }
    for cell, found in apart.items():
        print(f"{cell}: {len(found)} of {len(prompts)} prompts part (token, gap): {found}")
    # How far apart prompts are without a record: one by one, and with drafts. Where the other token is none of the 20
    # most likely, the gap is unknown, and so is what a record may change.
    before = [found for (record, _), found in apart.items() if not record] + [by_batch]
    gaps = {i: max(found[i][1] for found in before if i in found) for i in set().union(*before)}
    known = set(range(len(prompts))) - {i for i, gap in gaps.items() if math.isinf(gap)}
    allowed = max([NEAR_TIE, *(gaps[i] for i in known & gaps.keys())])
    assert len(known) > len(prompts) / 2, gaps
    for (record, name), found in apart.items():
        assert all(gap <= allowed for i, (_, gap) in found.items() if i in known), (record, name, allowed)
    assert all(found["counters"]["hit"]["vllm:prefix_cache_hits"] > 0 for found in answered)
    assert all(found["counters"]["miss"]["vllm:spec_decode_num_accepted_tokens"] > 10 for found in answered)


def falcon_h1():
    return transformers.FalconH1ForCausalLM(
        transformers.FalconH1Config(
            hidden_size=256, intermediate_size=256, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
            head_dim=64, vocab_size=512, max_position_embeddings=4096, mamba_d_ssm=512, mamba_n_heads=8,
            mamba_d_head=64, mamba_d_state=64, mamba_n_groups=1, initializer_range=0.1, tie_word_embeddings=False,
            eos_token_id=None, pad_token_id=0,
        )
    )  # fmt: skip


def gpt_oss():
    return transformers.GptOssForCausalLM(
        transformers.GptOssConfig(
            hidden_size=256, intermediate_size=256, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
            head_dim=64, vocab_size=512, max_position_embeddings=4096, sliding_window=128, num_local_experts=4,
            num_experts_per_tok=2, layer_types=["sliding_attention", "full_attention"] * 2, initializer_range=0.1,
            eos_token_id=None, pad_token_id=0,
        )
    )  # fmt: skip


def qwen3_next():
    """A hybrid with gated delta nets."""
    return transformers.Qwen3NextForCausalLM(
        transformers.Qwen3NextConfig(
            hidden_size=256, intermediate_size=256, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
            head_dim=128, vocab_size=512, max_position_embeddings=4096, num_experts=4, num_experts_per_tok=2,
            moe_intermediate_size=64, shared_expert_intermediate_size=64, linear_num_key_heads=2,
            linear_num_value_heads=4, linear_key_head_dim=128, linear_value_head_dim=128, initializer_range=0.1,
            eos_token_id=None, pad_token_id=0,
        )
    )  # fmt: skip


@pytest.mark.parametrize(
    ("make", "dtype"),
    [(falcon_h1, "float32"), (qwen3_next, "bfloat16"), (gpt_oss, "float32")],  # vLLM's gated delta nets: bf16 only
)
def test_hybrids(make, dtype, tmp_path):
    """Lossless pages give the stock tokens. Codes give equal tokens for a miss, a prefix-cache hit, and a new miss.

    vLLM's own attention multiplies fp32 as TF32, so near ties may be decided differently: such divergences are printed.
    """
    torch.manual_seed(0)
    make().save_pretrained(tmp_path)
    prompts = [[(7 * i + 3 * j * j) % 500 + 3 for j in range(300 + 700 * i)] for i in range(3)]
    base = {
        "model": str(tmp_path), "skip_tokenizer_init": True, "max_model_len": 4096, "max_num_batched_tokens": 1024,
        "enable_prefix_caching": True, "block_size": None, "dtype": dtype, **MEMORY,
    }  # fmt: skip
    if make is qwen3_next:  # the default, FlashInfer's kernel if it is installed, takes minutes to compile
        base["gdn_prefill_backend"] = "triton"
    thrice = [run("miss", prompts, 16), run("hit", prompts, 16), run("afresh", prompts, 16, reset=True)]
    stock, raw, codes = run_engines(
        (base, [{**run("a", prompts, 16), "logprobs": 5}]),
        ({**base, **slimkv("raw")}, [run("a", prompts, 16)]),
        ({**base, "prefix_match_unit": 64, **slimkv("k4v4")}, thrice),
    )
    found = partings(stock, raw, "a")
    hits = codes["counters"]["hit"]["vllm:prefix_cache_hits"]
    print(f"{make.__name__}: raw parts from stock at (token, gap) {found}")
    print(f"{make.__name__}: blocks of {codes['block_size']} tokens, matched by 64: {hits:.0f} hits")
    assert all(gap < NEAR_TIE for _, gap in found.values())
    assert codes["tokens"]["miss"] == codes["tokens"]["hit"] == codes["tokens"]["afresh"]
    assert hits > 0


@pytest.mark.parametrize("layout", [None, "LBHNC"])
def test_host_offload(layout):
    """Blocks from host memory give the same tokens, whether or not the blocks of all layers are adjacent."""
    host = {"kv_offloading_size": 2, "kv_offloading_backend": "native"}
    runs = [run("first", long(), 16), run("flush", ragged(), 4), run("back", long(), 16, reset=True)]
    extra = {"VLLM_KV_CACHE_LAYOUT": layout} if layout else {}
    result = run_engine(engine(**GRAPHS, **host, **slimkv("k4v4")), runs, **extra)
    assert result["layout"] == (layout or "BLHNC")
    assert result["tokens"]["back"] == result["tokens"]["first"]
    assert result["counters"]["back"]["vllm:external_prefix_cache_hits"] > 0
