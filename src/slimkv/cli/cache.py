"""``slimkv cache``: shows and verifies prompt-cache files."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from slimkv.cli.options import Json
from slimkv.cli.output import emit
from slimkv.wire import prompt_file
from slimkv.wire.prompt_file import PromptHeader, read_header

app = typer.Typer(name="cache", no_args_is_help=True, help="Inspect prompt-cache files.")
File = Annotated[Path, typer.Argument(help="A prompt-cache file.")]


@app.command()
def info(file: File, as_json: Json = False) -> None:
    """Show the metadata of a file; its contents are not checked (see verify)."""
    facts = _facts(read_header(file))
    table = Table(title=str(file), show_header=False)
    for name, value in facts.items():
        shown = ", ".join(f"{k}={v}" for k, v in value.items()) if isinstance(value, dict) else str(value)
        table.add_row(name.replace("_", " "), shown)
    emit(facts, as_json, table)


@app.command()
def verify(file: File, as_json: Json = False) -> None:
    """Verify the checksum of a file and the hash of every block; exit code 2 if something is wrong."""
    header = prompt_file.verify(file)
    result = {"file": str(file), "whole": True, "tokens": header.num_tokens, "fingerprint": header.fingerprint.hash}
    emit(result, as_json, f"{file} is whole: {header.num_tokens:,} tokens, fingerprint {header.fingerprint.hash[:16]}")


def _facts(header: PromptHeader) -> dict[str, Any]:
    mark = header.fingerprint
    size = header.path.stat().st_size
    return {
        "tokens": header.num_tokens,
        "bytes": size,
        "bytes_per_token": round(size / header.num_tokens, 1),
        "layers": len(mark.layers),
        "formats": Counter(layer.format for layer in mark.layers),  # number of layers by format
        "num_kv_heads": sorted({layer.num_kv_heads for layer in mark.layers}),
        "head_dims": sorted({(layer.key_dim, layer.value_dim) for layer in mark.layers}),
        "block_size": mark.block_size,
        "dtype": mark.dtype,
        "seed": mark.seed,
        "layout_version": mark.layout_version,
        "model": dict(mark.model),
        "weights": mark.weights,
        "fingerprint": mark.hash,
        "writer": header.writer,
    }
