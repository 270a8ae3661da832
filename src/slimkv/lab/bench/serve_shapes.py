"""Model shapes for ``slimkv bench serve``: those of ``shapes.json`` by name, or a ``config.json``.

Weights are dummies, so only the shape matters. It has everything that determines the work and the cache: layers, heads,
windows, experts, latents.
"""

from __future__ import annotations

import json
from importlib import resources
from pathlib import Path
from typing import Any

from slimkv.errors import InputError

SHAPES: dict[str, dict[str, Any]] = json.loads(
    resources.files("slimkv.lab.bench").joinpath("shapes.json").read_text(encoding="utf-8")
)


def shape_config(shape: str) -> dict[str, Any]:
    """The configuration of a shape: one of ``SHAPES``, or a ``config.json`` (or the folder it is in)."""
    if shape in SHAPES:
        return SHAPES[shape]
    path = Path(shape)
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        raise InputError(
            f"unknown shape {shape!r}; known are {', '.join(SHAPES)}, or give a model's config.json or its folder"
        )
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise InputError(f"{file} is not JSON: {error}") from error
    if not isinstance(config, dict) or not config.get("architectures"):
        raise InputError(f"{file} does not name an architecture, as a model's configuration does")
    return config


def text_field(config: dict[str, Any], name: str) -> int:
    """A field of the text model, which composite models keep in a nested configuration."""
    nested = (config.get(part) or {} for part in ("text_config", "llm_config", "language_config"))
    found = next((part[name] for part in (config, *nested) if part.get(name)), None)
    if found is None:
        raise InputError(f"the configuration of {config['architectures'][0]} has no {name}")
    return int(found)
