"""Compares lossless pages with SGLang's own attention, token by token: ``python benchmarks/sglang_tokens.py RESULT``.

Both engines run at the same time in separate processes, with a model shaped like Llama-3.1-8B and dummy weights. Where
answers diverge, the result records the logprob gap between the stock engine's two most likely tokens.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from slimkv.lab.bench.serve_settings import ServeSettings, engine_plan, shape_config, text_field, write_model

LENGTHS = (3, 17, 64, 65, 128, 301, 512, 1000, 2049, 3001, 8200)
REPEATS, OUTPUT = 3, 32
TOKENS = 1 << 16  # capacity of each engine's cache; holds all prompts and answers


def prompts(shape: str) -> list[list[int]]:
    """Random prompts. The last third repeats the first third, which is then found in the radix cache."""
    config, source = shape_config(shape), random.Random(0)
    vocabulary, longest = text_field(config, "vocab_size"), text_field(config, "max_position_embeddings") - OUTPUT
    lengths = [length for length in LENGTHS if length < longest]
    fresh = [source.choices(range(3, vocabulary), k=length) for length in lengths * (REPEATS - 1)]
    return [*fresh, *fresh[: len(lengths)]]


def run_one(system: str, shape: str, eager: bool, target: Path) -> None:
    """Writes the answers of one system, with the gap between the two most likely tokens at every position."""
    import sglang

    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder, "model"), shape)
        few = (("max_total_tokens", TOKENS),)  # the other engine runs on the same device
        settings = ServeSettings(engine="sglang", systems=(system,), shape=shape, context=8300, eager=eager, extra=few)
        engine = sglang.Engine(**engine_plan(system, settings, Path(folder, "model"))["arguments"])
        params = {"temperature": 0, "max_new_tokens": OUTPUT, "ignore_eos": True}
        outputs = engine.generate(
            input_ids=prompts(shape),
            sampling_params=params,
            return_logprob=True,
            top_logprobs_num=2,
        )
        target.write_text(json.dumps([answer(output) for output in outputs]))
        engine.shutdown()


def answer(output: dict[str, Any]) -> dict[str, Any]:
    """The tokens of an answer, and the logprob gap between the best and second-best token of each position."""
    best = output["meta_info"]["output_top_logprobs"]
    return {
        "tokens": output["output_ids"],
        "gaps": [place[0][0] - place[1][0] for place in best],
        "cached": output["meta_info"]["cached_tokens"],
    }


def compare(stock: list[dict[str, Any]], ours: list[dict[str, Any]]) -> dict[str, Any]:
    """Counts requests with the same tokens and locates the first difference of the others."""
    partings = []
    for number, (theirs, mine) in enumerate(zip(stock, ours, strict=True)):
        places = [i for i, (a, b) in enumerate(zip(theirs["tokens"], mine["tokens"], strict=True)) if a != b]
        if places:
            partings.append({"request": number, "token": places[0], "stock_gap": theirs["gaps"][places[0]]})
    return {"requests": len(stock), "same": len(stock) - len(partings), "partings": partings}


def main() -> None:
    """Runs both systems in separate processes, or one of them in this process."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("result", type=Path)
    parser.add_argument("--system", help="run one system here and write its answers")
    parser.add_argument("--systems", default="bf16,raw", help="the stock system, then slimkv's")
    parser.add_argument("--shape", default="llama-3.1-8b")
    parser.add_argument("--eager", action="store_true", help="without CUDA graphs")
    given = parser.parse_args()
    if given.system:
        run_one(given.system, given.shape, given.eager, given.result)
        return
    targets = {system: given.result.with_suffix(f".{system}.json") for system in given.systems.split(",")}
    running = [
        subprocess.Popen(
            [sys.executable, __file__, str(target), "--system", system, "--shape", given.shape]
            + (["--eager"] if given.eager else [])
        )
        for system, target in targets.items()
    ]
    if any([process.wait() for process in running]):
        raise SystemExit("an engine stopped before its answers; its output is above")
    report = compare(*(json.loads(target.read_text()) for target in targets.values()))
    given.result.write_text(json.dumps(report, indent=2) + "\n")
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
