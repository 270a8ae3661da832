"""The fields of a model's configuration that determine its K and V, or latents."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from slimkv.calibration.identity import ModelIdentity, text_fields

_ROPE = ("rope_parameters", "rope_scaling", "rope_theta", "partial_rotary_factor", "rope_local_base_freq")
# Models whose rope part has the same order of dimensions in every engine; transformers reorders that of others.
_ONE_ROPE_ORDER = ("deepseek_v2",)


def model_fields(config: Any, engine: str = "") -> dict[str, Any]:
    """The fields of a transformers configuration (or mapping) that determine K and V, besides the weights.

    ``engine``: the name of the writer. It is included for latents whose rope part differs between engines.
    """
    given = text_fields(config)
    found = {**ModelIdentity.of(config).to_fields(), "rope": _rope(given)}
    if engine and given.get("kv_lora_rank") and given.get("model_type") not in _ONE_ROPE_ORDER:
        found["latents_of"] = engine
    return found


def _rope(given: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of the rotary embedding in a normal form: one mapping, with numbers as floats."""
    found: dict[str, Any] = {}
    for name in _ROPE:
        value = given.get(name)
        if isinstance(value, Mapping):
            found |= {str(k): v for k, v in value.items()}
        elif value is not None:
            found.setdefault(name, value)
    if found.get("rope_type") is None and found.get("type") is not None:
        found["rope_type"] = found["type"]
    found.pop("type", None)
    if isinstance(kind := found.get("rope_type"), str):
        found["rope_type"] = kind.removeprefix("deepseek_")  # vLLM renames yarn for these models
    return {name: _number(value) for name, value in sorted(found.items()) if value is not None}


def _number(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(k): _number(v) for k, v in sorted(value.items()) if v is not None}
    if isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    return value
