"""Decodes a model shaped like DeepSeek V3.2 in vLLM on one Hopper GPU: `c4` against FlashMLA's `fp8_ds_mla`.

    python benchmarks/sparse_engine.py [--layers 6 --requests 32 --context 8192 --systems c4,fp8_ds_mla,files,offload]

The model has dummy weights and a few layers with dense MLPs: only the cache and attention are compared. `files` and
`offload` run the same prompts twice, with `SlimKVPromptConnector` and with host offload. The second run reads packed
latents and the indexer's keys from there, and its answers must equal the first. If vLLM has no DeepGEMM, `stand_in/`
computes the indexer's scores for all systems.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
import types
from pathlib import Path
from typing import Any

STAND_IN = Path(__file__).with_name("stand_in")
SHAPE: dict[str, Any] = {
    "architectures": ["DeepseekV32ForCausalLM"], "model_type": "deepseek_v32", "torch_dtype": "bfloat16",
    "bos_token_id": 1, "eos_token_id": 2, "tie_word_embeddings": False, "hidden_act": "silu", "rms_norm_eps": 1e-6,
    "attention_bias": False, "hidden_size": 7168, "intermediate_size": 2048, "moe_intermediate_size": 256,
    "num_attention_heads": 128, "num_key_value_heads": 128, "q_lora_rank": 1536, "kv_lora_rank": 512,
    "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128, "n_routed_experts": 8, "n_shared_experts": 1,
    "num_experts_per_tok": 2, "moe_layer_freq": 1, "n_group": 1, "topk_group": 1, "topk_method": "noaux_tc",
    "scoring_func": "sigmoid", "norm_topk_prob": False, "routed_scaling_factor": 1.0, "vocab_size": 32000,
    "max_position_embeddings": 65536, "rope_theta": 10000.0, "index_topk": 2048, "index_n_heads": 64,
    "index_head_dim": 128,
    "rope_scaling": {
        "type": "yarn", "factor": 40, "original_max_position_embeddings": 4096, "beta_fast": 32, "beta_slow": 1,
        "mscale": 1.0, "mscale_all_dim": 1.0,
    },
}  # fmt: skip
SLIMKV = {"attention_backend": "CUSTOM", "additional_config": {"slimkv": {"format": "c4"}}}
SYSTEMS: dict[str, dict[str, Any]] = {
    "c4": SLIMKV,
    "fp8_ds_mla": {"attention_backend": "FLASHMLA_SPARSE", "kv_cache_dtype": "fp8_ds_mla"},
    "files": {
        **SLIMKV,
        "kv_transfer_config": {
            "kv_connector": "SlimKVPromptConnector", "kv_role": "kv_both",
            "kv_connector_module_path": "slimkv.integrations.vllm.prompt_connector",
            "kv_connector_extra_config": {"slimkv_weights": "dummies"},
        },
    },
    "offload": {**SLIMKV, "kv_offloading_size": 4, "kv_offloading_backend": "native"},
}  # fmt: skip
STEPS, WARM_STEPS = 64, 8


class Engine:
    """One engine with prompts of random tokens."""

    def __init__(self, system: str, asked: argparse.Namespace) -> None:
        from vllm import LLM

        folder = Path(tempfile.mkdtemp())
        config = {**SHAPE, "num_hidden_layers": asked.layers, "first_k_dense_replace": asked.layers}
        (folder / "config.json").write_text(json.dumps(config))
        arguments = dict(SYSTEMS[system])
        if system == "files":
            arguments["kv_transfer_config"]["kv_connector_extra_config"]["shared_storage_path"] = str(folder / "store")
        self.count, self.length = asked.requests, asked.context
        self.llm = LLM(
            model=str(folder), load_format="dummy", skip_tokenizer_init=True, disable_log_stats=False, seed=0,
            dtype="bfloat16", block_size=64, max_num_seqs=asked.requests, max_model_len=asked.context + 256,
            max_num_batched_tokens=8192, kv_cache_memory_bytes=asked.cache_gib << 30,
            compilation_config={
                "mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [1, asked.requests],
            },
            **arguments,
        )  # fmt: skip

    def answers(self, tokens: int) -> tuple[list[list[int]], float]:
        """Answers to all prompts in one batch, and the seconds taken."""
        import torch
        from vllm import SamplingParams

        source = torch.Generator().manual_seed(0)
        ids = torch.randint(3, SHAPE["vocab_size"], (self.count, self.length), generator=source).tolist()
        params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        start = time.perf_counter()
        made = self.llm.generate([{"prompt_token_ids": x} for x in ids], params, use_tqdm=False)
        return [list(x.outputs[0].token_ids) for x in made], time.perf_counter() - start

    def decoding(self) -> dict[str, Any]:
        """Tokens that fit, and the time of prefill and of a decode step after cached prompts."""
        cache = self.llm.llm_engine.vllm_config.cache_config
        _, prefill = self.answers(1)
        times = {n: min(self.answers(n)[1] for _ in range(2)) for n in (WARM_STEPS, WARM_STEPS + STEPS)}
        step = (times[WARM_STEPS + STEPS] - times[WARM_STEPS]) / STEPS * 1e3
        return {
            "tokens": cache.num_gpu_blocks * cache.block_size,
            "prefill s": round(prefill, 2),
            "step ms": round(step, 3),
        }

    def from_outside(self) -> dict[str, Any]:
        """Tokens that came from files or host memory, and how many answers equal those of the first run."""
        first, _ = self.answers(12)
        time.sleep(2)  # files are written in the background
        self.llm.reset_prefix_cache()
        again, _ = self.answers(12)
        hits = sum(m.value for m in self.llm.get_metrics() if m.name == "vllm:external_prefix_cache_hits")
        return {"hits": hits, "same": sum(a == b for a, b in zip(first, again, strict=True)), "of": len(first)}


def run_one(system: str, asked: argparse.Namespace) -> None:
    """Runs one system in this process and prints its results as JSON."""
    if importlib.util.find_spec("cutlass") is None:
        # vLLM imports this kernel on every GPU, but it needs cutlass and is for newer GPUs only.
        fake: Any = types.ModuleType("vllm.models.deepseek_v32.nvidia.ops.fused_q_cutedsl")
        fake.fused_q_cutedsl, fake.is_fused_q_cutedsl_supported = None, lambda *given, **more: False
        sys.modules[fake.__name__] = fake
    engine = Engine(system, asked)
    print(f"> {json.dumps(engine.decoding() if system in ('c4', 'fp8_ds_mla') else engine.from_outside())}", flush=True)
    os._exit(0)


def main() -> None:
    """Runs each system in its own process."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--context", type=int, default=8192)
    parser.add_argument("--cache-gib", type=int, default=8)
    parser.add_argument("--systems", default=",".join(SYSTEMS))
    parser.add_argument("--one", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.one:
        return run_one(asked.one, asked)
    environment = {
        **os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_USE_FLASHINFER_SAMPLER": "0",
        "VLLM_LOGGING_LEVEL": "WARNING",
    }  # fmt: skip
    if not any(importlib.util.find_spec(name) for name in ("deep_gemm", "vllm.third_party.deep_gemm")):
        environment |= {"PYTHONPATH": f"{STAND_IN}:{os.environ.get('PYTHONPATH', '')}", "VLLM_USE_DEEP_GEMM": "0"}
    for system in asked.systems.split(","):
        done = subprocess.run(
            [sys.executable, __file__, *sys.argv[1:], "--one", system], env=environment, text=True, capture_output=True
        )
        figures = [line[2:] for line in done.stdout.splitlines() if line.startswith("> ")]
        print(f"{system}: {figures[0] if figures else (done.stdout + done.stderr)[-2000:]}", flush=True)


if __name__ == "__main__":
    main()
