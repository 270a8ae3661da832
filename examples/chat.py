"""A chat of several turns on one cache, which grows and is never computed twice.

python examples/chat.py                     # three prepared turns
python examples/chat.py --interactive       # your own, until an empty line
"""

import argparse
from collections.abc import Iterator

import slimkv
from slimkv.lab import models

TURNS = ("My name is Ada and I live in Turin.", "Name one thing to see in my city.", "What is my name?")

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--model", default=models.DEFAULT, help="a packaged model, a folder, or a hub name")
parser.add_argument("--format", default="k4v4", help="how keys and values are stored")
parser.add_argument("--new-tokens", type=int, default=24, help="per turn")
parser.add_argument("--interactive", action="store_true")
arguments = parser.parse_args()


def turns() -> Iterator[str]:
    """What the user says."""
    if not arguments.interactive:
        yield from TURNS
    while arguments.interactive and (said := input("> ").strip()):
        yield said


model, tokenizer, _ = models.load(arguments.model)
# The first tokens of a chat draw much attention (they are "sinks"): these 4 stay in the model's own dtype.
cache = slimkv.SlimKVCache(model.config, arguments.format, sink_tokens=4)
history: list[dict[str, str]] = []
with slimkv.attention(model):
    for said in turns():
        history.append({"role": "user", "content": said})
        inputs = tokenizer.apply_chat_template(
            history, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        known = cache.get_seq_length()
        out = model.generate(**inputs, past_key_values=cache, max_new_tokens=arguments.new_tokens, do_sample=False)
        answer = tokenizer.decode(out[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        history.append({"role": "assistant", "content": answer})
        # What the template writes for the answer can differ from what was generated: forget what does not match.
        again = tokenizer.apply_chat_template(history, return_tensors="pt", return_dict=True)["input_ids"]
        kept = min(cache.get_seq_length(), again.shape[1])
        same = int((again[0, :kept] == out[0, :kept]).long().cumprod(0).sum())
        if same < cache.get_seq_length():
            cache.crop(same - cache.get_seq_length())
        print(f"> {said}\n{answer}\n[{known} tokens were cached before; {cache.nbytes:,} bytes now]\n")
