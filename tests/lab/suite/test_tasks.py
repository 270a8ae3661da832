"""The synthetic tasks: lengths, and that answers occur in their contexts."""

from __future__ import annotations

import re

import pytest
import torch

from slimkv.errors import InputError
from slimkv.lab import models
from slimkv.lab.evals.harness import STOCK, CacheKind, attending
from slimkv.lab.evals.texts import load_text
from slimkv.lab.suite.tasks import TASKS, Context, Question, TaskMaker, answer_context


@pytest.fixture(scope="module")
def maker():
    transformers = pytest.importorskip("transformers")
    return TaskMaker(transformers.AutoTokenizer.from_pretrained(models.folder(models.DEFAULT)), load_text())


@pytest.mark.parametrize("length", [256, 700, 3000])
@pytest.mark.parametrize("task", list(TASKS))
def test_contexts_have_their_length_and_their_answers(maker, task, length):
    context = maker.make(task, length, 0, 4)
    longest = len(context.prefix) + max(len(q.suffix) + len(q.answer) for q in context.questions)
    assert 0.8 * length < longest <= length
    assert 1 <= len(context.questions) <= 4
    text, tokenizer = maker.tokenizer.decode(context.prefix), maker.tokenizer
    for question in context.questions:
        asked, answer = tokenizer.decode(question.suffix), tokenizer.decode(question.answer)
        assert answer.startswith(" ")
        assert 0 <= question.depth < 1
        for word in re.findall(r"\w+", answer.replace(" and ", " ")):
            assert re.search(rf"\b{word}\b", text), (asked, answer)


def test_the_same_number_gives_the_same_tokens(maker):
    assert maker.make("multikey", 400, 1, 4) == maker.make("multikey", 400, 1, 4)
    assert maker.make("multikey", 400, 1, 4) != maker.make("multikey", 400, 2, 4)
    assert maker.make("multikey", 400, 1, 4, seed=1) != maker.make("multikey", 400, 1, 4)


def test_answers_of_multikey_are_behind_their_keys(maker):
    context = maker.make("multikey", 900, 0, 8)
    text = maker.tokenizer.decode(context.prefix)
    for question in context.questions:
        key = re.search(r"number for ([\w-]+)\?", maker.tokenizer.decode(question.suffix))[1]
        assert f"number for {key} is{maker.tokenizer.decode(question.answer)}." in text


def test_values_are_asked_in_the_order_of_the_text(maker):
    context = maker.make("multivalue", 900, 0, 8)
    text = maker.tokenizer.decode(context.prefix)
    for question in context.questions:
        key = re.search(r"numbers for ([\w-]+)\?", maker.tokenizer.decode(question.suffix))[1]
        found = re.findall(rf"numbers for {key} is (\d+)\.", text)
        assert maker.tokenizer.decode(question.answer).strip() == " and ".join(found)
        assert len(found) > 1


def test_variables_are_resolved_by_following_their_chain(maker):
    context = maker.make("variables", 900, 0, 12)
    text = maker.tokenizer.decode(context.prefix)
    steps = dict(re.findall(r"Variable (\w+) has the (?:number|same number as variable) (\w+)\.", text))
    hops = set()
    for question in context.questions:
        name = re.search(r"variable (\w+) have", maker.tokenizer.decode(question.suffix))[1]
        count = 0
        while not steps[name].isdigit():
            name, count = steps[name], count + 1
        assert steps[name] == maker.tokenizer.decode(question.answer).strip()
        hops.add(count)
    assert len(hops) > 1


def test_the_common_word_is_the_most_common(maker):
    context = maker.make("common-words", 900, 0, 6)
    text = maker.tokenizer.decode(context.prefix)
    for question in context.questions:
        letter = re.search(r"in list (\w) is", maker.tokenizer.decode(question.suffix))[1]
        words = re.search(rf"List {letter}: ([^.]*)\.", text)[1].split(", ")
        answer = maker.tokenizer.decode(question.answer).strip()
        assert max(set(words), key=words.count) == answer
        assert words.count(answer) > 2 * max(words.count(w) for w in set(words) - {answer})


@pytest.mark.parametrize("task", list(TASKS))
def test_what_does_not_fit_is_refused(maker, task):
    with pytest.raises(InputError, match="too few"):
        maker.make(task, 24, 0, 4)


def test_nonsense_is_refused(maker):
    with pytest.raises(InputError, match="unknown task 'sums'; known are multikey"):
        maker.make("sums", 512, 0, 4)
    with pytest.raises(InputError, match="at least 1 question, not 0"):
        maker.make("multikey", 512, 0, 0)
    with pytest.raises(InputError, match="no sentences"):
        TaskMaker(maker.tokenizer, "no full stop")


@pytest.mark.parametrize("kind", [STOCK, CacheKind("k4v4", "k4v4")], ids=lambda kind: kind.name)
def test_an_answer_is_what_greedy_decoding_says(small, kind):
    """The model's own greedy continuation counts as correct; a continuation with another last token does not."""
    prefix = tuple(range(1, 90))
    suffix = (5, 9, 33)
    ids = torch.tensor([prefix + suffix])
    with attending(small.model, kind.format), torch.no_grad():
        said = small.model.generate(
            ids, attention_mask=torch.ones_like(ids), past_key_values=kind.new(small.model, "strict"),
            max_new_tokens=4, do_sample=False,
        )[0, ids.shape[1] :].tolist()  # fmt: skip
    wrong = [*said[:-1], (said[-1] + 1) % 128]
    questions = (Question(suffix, tuple(said), 0.5), Question(suffix, tuple(wrong), 0.5))
    answers = answer_context(small.model, kind, Context("t", 128, prefix, questions), chunk=32)
    assert answers == [True, False]
