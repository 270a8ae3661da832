"""Prints how many tokens fit into a given memory in each format. No weights are needed.

    python examples/plan_memory.py
    python examples/plan_memory.py --config path/to/config.json --memory 40GiB --sequences 16

The same from the command line: ``slimkv plan``.
"""

import argparse
from pathlib import Path

from slimkv.memory_plan import make_plan, parse_size, read_config, shape_of

LLAMA_3_1_8B = {
    "model_type": "llama", "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
    "hidden_size": 4096, "head_dim": 128,
}  # fmt: skip

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--config", type=Path, help="a model's config.json; default: the shape of Llama-3.1-8B")
parser.add_argument("--memory", default="40GiB")
parser.add_argument("--sequences", type=int, default=1, help="sequences that share the memory")
parser.add_argument("--format", default="raw,fp8,k6v6,k4v4,k3v3")
arguments = parser.parse_args()

shape = read_config(arguments.config) if arguments.config else shape_of(LLAMA_3_1_8B)
plan = make_plan(shape, arguments.format.split(","), parse_size(arguments.memory), sequences=arguments.sequences)
print(f"{'format':<10}{'bytes/token':>12}{'tokens that fit':>18}{'against bf16':>14}")
for row in plan.formats:
    tokens = "any number" if row.total_tokens is None else f"{row.total_tokens:,}"
    ratio = "" if row.tokens_ratio_to_bf16 is None else f"{row.tokens_ratio_to_bf16:.2f}x"
    print(f"{row.format:<10}{row.bytes_per_token:>12,.0f}{tokens:>18}{ratio:>14}")
