"""Bytes per token of vLLM's own 4-bit cache, computed from its configuration. Needs vLLM, but no GPU.

    python benchmarks/stock_4bit.py > benchmarks/results/stock-4bit-bytes.json

The model shape is that of ``slimkv bench serve``. The first and last layers, which vLLM keeps in bf16, count as bf16.
"""

from __future__ import annotations

import json
from types import SimpleNamespace

from slimkv.lab.bench.serve_settings import SHAPES
from slimkv.lab.provenance import provenance
from slimkv.spec import BF16_BYTES

DTYPE, SHAPE = "turboquant_4bit_nc", "llama-3.1-8b"


def bytes_per_token() -> dict[str, object]:
    """Bytes per token of vLLM's 4-bit cache and of a bf16 cache, over all layers and heads."""
    import vllm
    from vllm.model_executor.layers.quantization.turboquant.config import TurboQuantConfig

    shape = SHAPES[SHAPE]
    layers, heads, dim = (shape[name] for name in ("num_hidden_layers", "num_key_value_heads", "head_dim"))
    model = SimpleNamespace(is_hybrid=False, hf_text_config=SimpleNamespace(num_hidden_layers=layers))
    kept = len(TurboQuantConfig.get_boundary_skip_layers(model))
    slot, plain = TurboQuantConfig.from_cache_dtype(DTYPE, dim).slot_size_aligned, 2 * BF16_BYTES * dim
    return {
        "dtype": DTYPE,
        "shape": SHAPE,
        "layers_in_bf16": kept,
        "bytes_per_token": heads * ((layers - kept) * slot + kept * plain),
        "bf16_bytes_per_token": heads * layers * plain,
        "vllm": vllm.__version__,
        "command": "python benchmarks/stock_4bit.py",
        "date": provenance().date,
    }


if __name__ == "__main__":
    print(json.dumps(bytes_per_token(), indent=2))
