"""Chat over several turns with the stock cache and a packed one, side by side. Each turn extends its cache.

python examples/chat.py                     # three prepared turns
python examples/chat.py --interactive       # your own, until an empty line
"""

import argparse
import contextlib
import itertools
import textwrap
from collections.abc import Iterator
from typing import Any

from transformers import DynamicCache

import slimkv
from slimkv.lab import models

TURNS = ("My name is Ada and I live in Turin.", "Name one thing to see in my city.", "What is my name?")
WIDTH = 56  # characters per column

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--model", default=models.DEFAULT, help="a packaged model, a folder, or a hub name")
parser.add_argument("--format", default="k4v4", help="how the packed cache stores keys and values")
parser.add_argument("--new-tokens", type=int, default=24, help="per turn")
parser.add_argument("--interactive", action="store_true")
arguments = parser.parse_args()

model, tokenizer, _ = models.load(arguments.model)


class Chat:
    """One conversation and its cache."""

    def __init__(self, name: str, cache: Any, attention: Any) -> None:
        self.name, self.cache, self.attention = name, cache, attention
        self.history: list[dict[str, str]] = []

    def say(self, text: str) -> str:
        """Returns the model's answer. Only tokens that are not cached yet are computed."""
        self.history.append({"role": "user", "content": text})
        inputs = self.tokens(add_generation_prompt=True)
        with self.attention(model):
            out = model.generate(
                **inputs, past_key_values=self.cache, max_new_tokens=arguments.new_tokens, do_sample=False
            )
        answer = tokenizer.decode(out[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        self.history.append({"role": "assistant", "content": answer})
        # The template may tokenize the answer differently than it was generated, so keep only the common prefix.
        again, cached = self.tokens()["input_ids"], self.cache.get_seq_length()
        kept = min(cached, again.shape[1])
        same = int((again[0, :kept] == out[0, :kept]).long().cumprod(0).sum())
        if same < cached:
            self.cache.crop(same - cached)
        return answer

    def tokens(self, **options: Any) -> Any:
        """The token ids of the conversation so far."""
        return tokenizer.apply_chat_template(self.history, return_tensors="pt", return_dict=True, **options)

    def nbytes(self) -> int:
        """Bytes of the cached keys and values."""
        if isinstance(self.cache, slimkv.SlimKVCache):
            return self.cache.nbytes
        return sum(x.numel() * x.element_size() for layer in self.cache.layers for x in (layer.keys, layer.values))


def turns() -> Iterator[str]:
    """Yields the user's messages."""
    if not arguments.interactive:
        yield from TURNS
    while arguments.interactive and (said := input("> ").strip()):
        yield said


chats = (
    Chat(
        f"stock cache, {model.dtype}".replace("torch.", ""), DynamicCache(config=model.config), contextlib.nullcontext
    ),
    # The first tokens of a chat are attention sinks, so 4 of them stay in the model's own dtype.
    Chat(arguments.format, slimkv.SlimKVCache(model, arguments.format, sink_tokens=4), slimkv.attention),
)
for said in turns():
    print(f"> {said}")
    answers = [textwrap.wrap(chat.say(said), WIDTH) for chat in chats]
    notes = [f"[{chat.name}: {chat.nbytes():,} bytes, {chat.cache.get_seq_length()} tokens]" for chat in chats]
    for left, right in itertools.zip_longest(*answers, fillvalue=""):
        print(f"{left:{WIDTH}} | {right}")
    print(f"{notes[0]:{WIDTH}} | {notes[1]}\n")
