"""Generate with transformers: slimkv.enable packs the KV cache of ``model.generate``.

python examples/generate.py
python examples/generate.py --model Qwen/Qwen3-0.6B --format k5v4
python examples/generate.py --prompt "Why is the sky blue?"      # a short prompt: see the note on blocks
"""

import argparse
from pathlib import Path

import slimkv
from slimkv.lab import models

LICENSE = (Path(__file__).parents[1] / "LICENSE").read_text(encoding="utf-8")
LONG = f"{LICENSE[:4800]}\n\nIn one sentence: what may I do with a work under this license?"

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--model", default=models.DEFAULT, help="a packaged model, a folder, or a hub name")
parser.add_argument("--format", default="k4v4", help="how keys and values are stored")
parser.add_argument("--prompt", default=LONG, help="default: a license of about 1,000 tokens, and a question")
parser.add_argument("--new-tokens", type=int, default=32)
arguments = parser.parse_args()

model, tokenizer, _ = models.load(arguments.model)  # a packaged model, or from_pretrained
chat = [{"role": "user", "content": arguments.prompt}]
inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)

slimkv.enable(model, arguments.format)  # generate now uses a packed cache
out = model.generate(**inputs, max_new_tokens=arguments.new_tokens, do_sample=False, return_dict_in_generate=True)
print(tokenizer.decode(out.sequences[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))

cache = out.past_key_values
size = cache.size()
print(f"\n{size.tokens:,} tokens: {size.allocated_bytes:,} bytes packed, {size.bf16_bytes:,} in bf16")
print(
    f"That is {size.compression_ratio:.2f}x smaller than bf16. The cache grows in blocks of {cache.block_size} tokens"
)
print("and the last block is partly empty, so a short prompt saves less.")
print(f"\n{slimkv.status(model)}")
