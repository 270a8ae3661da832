"""Synthetic long-context tasks in the manner of RULER (Hsieh et al., 2024), made from a seed: they need no data set.

A context holds facts between sentences of a text, and several questions are asked about it. A question counts as
answered if greedy decoding begins with exactly the answer's tokens.
"""

from __future__ import annotations

import copy
import json
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any

import torch
from torch import Tensor

from slimkv.errors import InputError
from slimkv.lab.evals.harness import STRICT, CacheKind, attending
from slimkv.lab.evals.texts import wants_bos

_VOCABULARY = resources.files("slimkv.lab.suite").joinpath("vocabulary.json").read_text(encoding="utf-8")
WORDS = {kind: words.split() for kind, words in json.loads(_VOCABULARY).items()}
LETTERS = "ABCDEFGHJKLMNPQRSTUVWXYZ"
_SENTENCE = re.compile("[^.!?]+[.!?]+[\"'\u201d\u2019]?", re.S)
_FACTS_SHARE = 0.5  # at most this share of a context; the rest is text


@dataclass(frozen=True)
class Ask:
    """A question, its answer, and the block of the context that contains it."""

    suffix: str
    answer: str
    block: int


@dataclass(frozen=True)
class Draft:
    """A context without its filler text."""

    header: str
    blocks: list[str]  # in the order of the text
    asks: list[Ask]


@dataclass(frozen=True)
class Question:
    """Token ids of a question and its answer; ``depth``: the relative position of the answer in the context, 0 to 1."""

    suffix: tuple[int, ...]
    answer: tuple[int, ...]
    depth: float


@dataclass(frozen=True)
class Context:
    """Token ids of a context, and the questions about it."""

    task: str
    length: int  # tokens that context, question and answer may take
    prefix: tuple[int, ...]
    questions: tuple[Question, ...]


Builder = Callable[[random.Random, int, int], Draft]  # random numbers, blocks of facts that fit, questions


def _number(source: random.Random) -> str:
    return str(source.randint(10_000, 99_999))


def _keys(source: random.Random, count: int) -> list[str]:
    pairs = [f"{a}-{b}" for a in WORDS["adjectives"] for b in WORDS["nouns"]]
    return source.sample(pairs, min(count, len(pairs)))


def multikey(source: random.Random, room: int, questions: int) -> Draft:
    """Many keys with a number each; the question asks for the number of a key."""
    keys = _keys(source, max(room, 1))
    numbers = [_number(source) for _ in keys]
    blocks = [f"The special magic number for {k} is {n}." for k, n in zip(keys, numbers, strict=True)]
    asked = sorted(source.sample(range(len(keys)), min(questions, len(keys))))
    told = "The special magic number for {} is"
    asks = [Ask(f"\nQuestion: What is the special magic number for {keys[i]}?\nAnswer: {told.format(keys[i])}",
                f" {numbers[i]}", i) for i in asked]  # fmt: skip
    return Draft("Some special magic numbers are hidden within the following text. Memorize them.\n", blocks, asks)


def multivalue(source: random.Random, room: int, questions: int) -> Draft:
    """Several numbers for each key, in different places; the question asks for all of them, in order."""
    each = 2 if room < 32 else 4
    keys = _keys(source, max(room // each, 1))
    placed = [key for key in keys for _ in range(each)]
    source.shuffle(placed)
    numbers = [_number(source) for _ in placed]
    blocks = [f"One of the special magic numbers for {k} is {n}." for k, n in zip(placed, numbers, strict=True)]
    asks = []
    for key in source.sample(keys, min(questions, len(keys))):
        where = [i for i, other in enumerate(placed) if other == key]
        told = f"The special magic numbers for {key} are, in the order of the text,"
        question = f"\nQuestion: What are all the special magic numbers for {key}?\nAnswer: {told}"
        asks.append(Ask(question, f" {' and '.join(numbers[i] for i in where)}", where[0]))
    return Draft("Some special magic numbers are hidden within the following text. Memorize them.\n", blocks, asks)


def variables(source: random.Random, room: int, questions: int) -> Draft:
    """Chains of assignments; the question asks for a variable's value, up to three hops away."""
    hops = min(4, max(room, 1))
    count = max(1, min(room // hops, 100))
    names: set[str] = set()
    while len(names) < count * hops:
        names.add("".join(source.choices(LETTERS, k=4)))
    pool = sorted(names)
    source.shuffle(pool)
    chains = [pool[i * hops : (i + 1) * hops] for i in range(count)]
    values = [_number(source) for _ in chains]
    order = [number for number in range(count) for _ in range(hops)]
    source.shuffle(order)  # chains are interwoven; a chain's own assignments stay in order
    blocks, placed, at = [], [], [0] * count
    for number in order:
        step, chain = at[number], chains[number]
        right = f"number {values[number]}" if step == 0 else f"same number as variable {chain[step - 1]}"
        blocks.append(f"Variable {chain[step]} has the {right}.")
        placed.append((chain[step], values[number]))
        at[number] += 1
    asks = []
    for index in sorted(source.sample(range(len(placed)), min(questions, len(placed)))):
        name, value = placed[index]
        question = f"\nQuestion: Which number does variable {name} have?\nAnswer: Variable {name} has the number"
        asks.append(Ask(question, f" {value}", index))
    return Draft("Variables are given numbers within the following text. Keep track of them.\n", blocks, asks)


def common_words(source: random.Random, room: int, questions: int) -> Draft:
    """Lists of words, one of which is repeated often; the question asks which one."""
    count = max(1, min(questions, room, len(LETTERS)))
    size = max(8, 3 * room // count)  # words of a list
    blocks, asks = [], []
    for number in range(count):
        common, *others = source.sample(WORDS["nouns"], len(WORDS["nouns"]))
        words = [common] * (size // 2) + [others[i % len(others)] for i in range(size - size // 2)]
        source.shuffle(words)
        letter = LETTERS[number]
        blocks.append(f"List {letter}: {', '.join(words)}.")
        question = f"\nQuestion: Which word is the most common one in list {letter}?\nAnswer: The most common word in"
        asks.append(Ask(f"{question} list {letter} is", f" {common}", number))
    return Draft("Here are lists of words. Remember which word is the most common one in each.\n", blocks, asks)


def documents(source: random.Random, room: int, questions: int) -> Draft:
    """Documents about people in random order; the questions ask for birthplaces and professions."""
    people = source.sample(
        [f"{a} {b}" for a in WORDS["first_names"] for b in WORDS["last_names"]], max(1, min(room // 2, 500))
    )
    blocks, asks = [], []
    for number, name in enumerate(people):
        city, job = source.choice(WORDS["cities"]), source.choice(WORDS["jobs"])
        blocks.append(f"\nDocument {number + 1}: {name} was born in the city of {city} and works as a {job}.")
        if number % 2:
            question = f"\nQuestion: In which city was {name} born?\nAnswer: {name} was born in the city of"
            asks.append(Ask(question, f" {city}", number))
        else:
            question = f"\nQuestion: What is the work of {name}?\nAnswer: {name} works as a"
            asks.append(Ask(question, f" {job}", number))
    chosen = source.sample(asks, min(questions, len(asks)))
    return Draft("Answer questions about the people in the following documents.\n", blocks, chosen)


TASKS: dict[str, Builder] = {
    "multikey": multikey,
    "multivalue": multivalue,
    "variables": variables,
    "common-words": common_words,
    "documents": documents,
}


class TaskMaker:
    """Makes contexts of given lengths for a tokenizer: facts between sentences of ``text``, which repeats as needed."""

    def __init__(self, tokenizer: Any, text: str) -> None:
        self.tokenizer = tokenizer
        self.sentences = [" ".join(s.split()) for s in _SENTENCE.findall(text)]
        if not self.sentences:
            raise InputError("the text for the tasks has no sentences in it: give prose")
        self._counts: dict[str, int] = {}

    def encode(self, text: str) -> list[int]:
        """Token ids without special tokens."""
        return self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]

    def _count(self, text: str) -> int:
        if text not in self._counts:
            self._counts[text] = len(self.encode(" " + text))
        return self._counts[text]

    def make(self, task: str, length: int, number: int, questions: int, seed: int = 0) -> Context:
        """Context ``number`` of a task; the same arguments give the same tokens."""
        if task not in TASKS:
            raise InputError(f"unknown task {task!r}; known are {', '.join(TASKS)}")
        if questions < 1:
            raise InputError(f"a context needs at least 1 question, not {questions}")
        build, room = TASKS[task], 2 * questions if task != "common-words" else length
        while True:
            draft = build(random.Random(f"{seed}-{task}-{length}-{number}"), room, questions)
            asked = [(self.encode(ask.suffix), self.encode(ask.answer)) for ask in draft.asks]
            free = length - max(len(s) + len(a) for s, a in asked) - self._count(draft.header) - 1
            facts = sum(self._count(block) for block in draft.blocks)
            share = 1.0 if task == "common-words" else _FACTS_SHARE
            if facts <= share * free:
                break
            if room <= 1:
                raise InputError(f"{length} tokens are too few for the task {task!r}: give longer lengths")
            room = min(room - 1, int(room * max(share * free, 0) / facts) or 1)
        source = random.Random(f"{seed}-{task}-{length}-{number}-text")
        filler = [] if task == "common-words" else self._filler(source, free - facts)
        begin = [self.tokenizer.bos_token_id] if wants_bos(self.tokenizer) else []
        while True:
            text, starts = self._joined(source, draft, filler)
            prefix = begin + self.encode(text)
            if len(prefix) <= free + self._count(draft.header) + 1 or not filler:
                break
            filler.pop()
        found = tuple(
            Question(tuple(s), tuple(a), starts[ask.block] / max(len(text), 1))
            for ask, (s, a) in zip(draft.asks, asked, strict=True)
        )
        return Context(task, length, tuple(prefix), found)

    def _filler(self, source: random.Random, tokens: int) -> list[str]:
        """Consecutive sentences of the text from a random position on, of at most ``tokens`` tokens."""
        at, out, skipped = source.randrange(len(self.sentences)), [], 0
        while skipped < len(self.sentences):
            sentence = self.sentences[at % len(self.sentences)]
            at, cost = at + 1, self._count(sentence)
            if cost > tokens:
                skipped += 1
                continue
            out.append(sentence)
            tokens, skipped = tokens - cost, 0
        return out

    def _joined(self, source: random.Random, draft: Draft, filler: Sequence[str]) -> tuple[str, list[int]]:
        """The text, and where each block starts; blocks are at random positions between sentences."""
        places = sorted(source.randint(0, len(filler)) for _ in draft.blocks)
        text, starts, done = draft.header, [], 0
        for block, place in zip(draft.blocks, places, strict=True):
            text += "".join(sentence + " " for sentence in filler[done:place])
            starts.append(len(text))
            text, done = f"{text}{block} ", place
        return (text + " ".join(filler[done:])).rstrip(), starts


@torch.no_grad()
def answer_context(model: Any, kind: CacheKind, context: Context, chunk: int = 512) -> list[bool]:
    """Which questions are answered. The context is read once, in passes of ``chunk`` tokens; each question continues
    from a copy of that cache.

    Attention reads every key and value through the codec. Greedy decoding begins with the answer's tokens if and only
    if each of them is the most likely one after the question and the previous tokens, so one pass over question and
    answer is enough.
    """
    cache = kind.new(model, STRICT)
    with attending(model, kind.format):
        for first in range(0, len(context.prefix), chunk):
            part = _ids(context.prefix[first : first + chunk], model)
            model(part, past_key_values=cache, use_cache=True, logits_to_keep=1)
        return [_answers(model, copy.deepcopy(cache), question) for question in context.questions]


def _ids(tokens: tuple[int, ...], model: Any) -> Tensor:
    return torch.tensor([tokens], dtype=torch.int64, device=model.device)


def _answers(model: Any, cache: Any, question: Question) -> bool:
    count = len(question.answer)
    given = _ids(question.suffix + question.answer[:-1], model)
    logits = model(given, past_key_values=cache, use_cache=True, logits_to_keep=count).logits[0]
    expected = _ids(question.answer, model)[0]
    return bool((logits.argmax(-1) == expected).all())
