"""``slimkv plan``: how many tokens fit."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from rich.table import Table

from slimkv.cli.options import Json
from slimkv.cli.output import emit, make_table
from slimkv.cli.parsing import comma_list, count, option
from slimkv.errors import InputError
from slimkv.memory_plan import FULL, USEFUL_MATCH, LayerGroup, ModelShape, Plan, make_plan, parse_size, read_config


def plan(
    config: Annotated[Path | None, option("A model's config.json, or the folder it is in.")] = None,
    layers: Annotated[int | None, count("Without --config: number of layers.")] = None,
    num_kv_heads: Annotated[int | None, count("Without --config: KV heads per layer.")] = None,
    head_dim: Annotated[int | None, option("Without --config: head size.")] = None,
    memory: Annotated[str, option("Memory for the cache, such as 40GiB.")] = "16GiB",
    formats: Annotated[
        str | None, option("Formats, such as k4v4,k3v3, or c4,c4r8 of latents (MLA). Default: a selection.", "--format")
    ] = None,
    sequences: Annotated[int, count("Sequences that share the memory.")] = 1,
    block: Annotated[int, option("Tokens per page: 1, 16, 32, 64 or 128.")] = 16,
    as_json: Json = False,
) -> None:
    """Print bytes per token and tokens that fit, for each format and kind of layer."""
    shape = _shape(config, layers, num_kv_heads, head_dim)
    budget = parse_size(memory)
    if not budget:
        raise InputError(f"--memory must be more than 0 bytes, not {memory}; write 40GiB, for example")
    wanted = None if formats is None else comma_list("--format", formats)
    result = make_plan(shape, wanted, budget, sequences=sequences, block_size=block)
    emit(result, as_json, *([] if as_json else _tables(result)))


def _shape(config: Path | None, layers: int | None, num_kv_heads: int | None, head_dim: int | None) -> ModelShape:
    given = {"--layers": layers, "--num-kv-heads": num_kv_heads, "--head-dim": head_dim}
    if config is not None:
        if clash := [name for name, value in given.items() if value is not None]:
            raise InputError(f"--config replaces {', '.join(clash)}; give one or the other")
        return read_config(config)
    if layers is None or num_kv_heads is None or head_dim is None:
        missing = [name for name, value in given.items() if value is None]
        raise InputError(f"give --config, or also {', '.join(missing)}")
    return ModelShape("model", (LayerGroup(FULL, layers, num_kv_heads, head_dim, head_dim),))


def _tables(result: Plan) -> list[Table]:
    memory = f"{result.memory_bytes / 2**30:.2f} GiB"
    table = make_table(
        f"{result.model}: {memory}, {result.sequences} sequence(s), pages of {result.block_size} tokens",
        *("format", "bits/number", "bytes/token", "of bf16", "tokens/sequence", "tokens in total", "against bf16"),
    )
    kinds = make_table(
        "by kind of layer: bytes per token, maximum per sequence",
        *("format", "kind", "layers", "KV heads", "window", "bytes/token", "at most"),
        left=2,
    )
    for row in result.formats:
        tokens = "any" if row.tokens_per_sequence is None else f"{row.tokens_per_sequence:,}"
        total = "any" if row.total_tokens is None else f"{row.total_tokens:,}"
        more = "-" if row.tokens_ratio_to_bf16 is None else f"{row.tokens_ratio_to_bf16:.2f}x"
        size = f"{row.bytes_per_token:,.0f}", f"1/{row.ratio_to_bf16:.2f}"
        table.add_row(row.format, f"{row.bits_per_number:.2f}", *size, tokens, total, more)
        for group in row.groups:
            most = "grows" if group.bytes_at_window is None else f"{group.bytes_at_window / 2**20:,.2f} MiB"
            window = "-" if group.window is None else f"{group.window:,}"
            counts = str(group.layers), str(group.num_kv_heads), window
            kinds.add_row(row.format, group.kind, *counts, f"{group.bytes_per_token:,.0f}", most)
    if not result.state_bytes_per_sequence:
        return [table, kinds]
    states = f"{result.state_bytes_per_sequence / 2**20:,.2f} MiB"
    title = f"hybrid model: {states} of states per sequence; blocks in vLLM"
    hybrid = make_table(title, "format", "prefix caching", "tokens per block", left=2)
    for row in result.formats:
        if row.hybrid_block_size is not None:
            way = "use --prefix-match-unit 64" if row.hybrid_block_size > USEFUL_MATCH else "by block"
            hybrid.add_row(row.format, way, f"{row.hybrid_block_size:,}")
    return [table, kinds, hybrid]
