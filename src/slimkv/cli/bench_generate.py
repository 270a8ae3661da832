"""``slimkv bench generate``: decoding through transformers, beside the stock cache."""

from __future__ import annotations

from typing import Annotated

import typer

from slimkv.cli.options import Json, comma_list, user_errors


def generate(
    model: Annotated[str | None, typer.Option(help="A model; default: a Llama of random weights.")] = None,
    formats: Annotated[str, typer.Option("--format", help="Formats to time.")] = "k4v4",
    context: Annotated[int, typer.Option(help="Tokens in the cache before decoding.")] = 32768,
    batch: Annotated[int, typer.Option(help="Sequences.")] = 1,
    new_tokens: Annotated[int, typer.Option(help="Decode steps to time.")] = 64,
    layers: Annotated[int, typer.Option(help="Layers of the random-weight model.")] = 8,
    rounds: Annotated[int, typer.Option(help="Times each cache is timed; the median counts.")] = 3,
    dtype: Annotated[str, typer.Option(help="bfloat16, float16 or float32.")] = "bfloat16",
    device: Annotated[str, typer.Option(help="cuda or cpu.")] = "cuda",
    threads: Annotated[int | None, typer.Option(help="CPU threads; default: torch's choice.")] = None,
    as_json: Json = False,
) -> None:
    """Decoding with a packed cache and fused attention, and with DynamicCache and SDPA, in one run."""
    import torch
    from rich.table import Table

    from slimkv.bench.generate import GenerateSettings, time_generation
    from slimkv.cli.output import emit

    if threads is not None:
        torch.set_num_threads(threads)
    with user_errors():
        settings = GenerateSettings(
            model=model, formats=tuple(comma_list(formats, str)), context=context, batch=batch, new_tokens=new_tokens,
            layers=layers, rounds=rounds, dtype=dtype, device=device,
        )  # fmt: skip
        report = time_generation(settings)
    table = Table(title=f"decoding at {context} tokens, batch {batch}, {report.run.device}")
    names = ("cache", "tokens/s", "ms/step", "over stock", "lengths met before: ms/step", "over stock", "cache bytes")
    for name in (*names, "of bf16", "prefill s"):
        table.add_column(name, justify="left" if name == "cache" else "right")
    for row in report.rows:
        table.add_row(
            row.cache, f"{row.tokens_per_second:.1f}", f"{row.milliseconds_per_step:.2f}", f"{row.over_stock:.2f}x",
            f"{row.milliseconds_per_step_again:.2f}", f"{row.over_stock_again:.2f}x", f"{row.cache_bytes:,}",
            f"{row.bytes_of_bf16:.3f}", f"{row.prefill_seconds:.2f}",
        )  # fmt: skip
    emit(report, as_json, table)
