"""Runs each kind of step once on a scratch page before SGLang serves, so that no request waits for compilation."""

from __future__ import annotations

from collections.abc import Iterable

from slimkv.ops.warmup import LayerKind, Step, run_step, serving_steps

_PREFILL = 1024  # tokens; longer passes run the same kernels


def compile_kernels(kinds: Iterable[LayerKind], max_seq_len: int, verified: int) -> int:
    """Runs prefill, decode, verification of ``verified`` tokens, and the remainders of cached prompts, once per kind of
    layer. Returns the number of steps.
    """
    distinct = {kind.signature: kind for kind in kinds}
    steps = [Step(1, min(_PREFILL, max_seq_len), max_seq_len), *serving_steps(max_seq_len, verified)]
    for kind in distinct.values():
        for step in steps:
            run_step(kind, step)
    return len(distinct) * len(steps)
