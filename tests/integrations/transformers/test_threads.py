"""Two models in two threads of one process: each generates the same tokens as alone."""

from __future__ import annotations

import threading

import torch
from tiny import tiny, tokens

import slimkv

JOBS = [("llama", "k4v4", 40), ("gemma3", "k6v4", 33)]


def generated(model, format: str, length: int) -> list[torch.Tensor]:
    out = []
    for seed in range(3):
        cache = slimkv.SlimKVCache(model.config, format, block_size=16)
        ids = tokens(2, length, seed)
        with slimkv.attention(model), torch.no_grad():
            for _ in range(4):
                logits = model(ids, past_key_values=cache).logits
                out.append(logits[:, -1])
                ids = logits[:, -1:].argmax(-1)
    return out


def test_two_models_in_two_threads():
    jobs = [(tiny(kind), *rest) for kind, *rest in JOBS]  # not in threads: weights come from torch's global generator
    alone = [generated(*job) for job in jobs]
    found: dict[int, list[torch.Tensor]] = {}
    errors: list[BaseException] = []
    start = threading.Barrier(2)

    def run(number: int) -> None:
        try:
            start.wait(60)
            found[number] = generated(*jobs[number])
        except BaseException as error:  # errors in a thread would otherwise be lost
            errors.append(error)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(JOBS))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(300)
    assert not errors
    for number, wanted in enumerate(alone):
        assert all(torch.equal(a, b) for a, b in zip(found[number], wanted, strict=True))
