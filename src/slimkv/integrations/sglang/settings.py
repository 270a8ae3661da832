"""Settings in SGLang: the ``slimkv`` entry of ``--json-model-override-args`` holds the fields of ``KVCacheConfig``.

{"slimkv": {"format": "k4v4", "layers": {"0-1": "fp8", "-1": "raw"}}}

Under SGLang's own attention, ``cold`` holds the fields for host memory: {"slimkv": {"cold": "k4v4"}}
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from slimkv.config import KVCacheConfig
from slimkv.errors import InputError
from slimkv.integrations.serving.model import KEY, parse_cold_settings, parse_settings
from slimkv.integrations.sglang.compat import server_options

OPTION = "--json-model-override-args"
COLD = "cold"
EXAMPLE = f'--attention-backend slimkv --page-size 64 {OPTION} \'{{"slimkv": {{"format": "k4v4"}}}}\''


def _overrides(server_args: Any) -> Mapping[str, Any]:
    """The server's overrides of the model's configuration, which include slimkv's entry."""
    text = server_args.json_model_override_args or "{}"
    try:
        given = json.loads(text) if isinstance(text, str) else text
    except json.JSONDecodeError as error:
        raise InputError(f"{OPTION} is not JSON: {error}; use {EXAMPLE}") from error
    if not isinstance(given, Mapping):
        raise InputError(f"{OPTION} must be an object, not {given!r}; use {EXAMPLE}")
    return given


def parse(server_args: Any) -> KVCacheConfig:
    """The configuration of the cache from the server's arguments; the default without an entry."""
    deterministic = getattr(server_options(server_args), "enable_deterministic_inference", False)
    return parse_settings(
        _overrides(server_args).get(KEY, {}), "SGLang", "--enable-deterministic-inference" if deterministic else None
    )


def cold(server_args: Any) -> KVCacheConfig | None:
    """The configuration of a cold tier under SGLang's own attention; None without one."""
    given = _overrides(server_args).get(KEY)
    if not isinstance(given, Mapping) or COLD not in given:
        return None
    if others := sorted(set(given) - {COLD}):
        raise InputError(
            f"{', '.join(others)} beside {COLD!r}: SGLang's own cache has no such settings. Put those of the pages in "
            f'host memory into {COLD!r}, as in {{"slimkv": {{"cold": {{"format": "k4v4"}}}}}}'
        )
    return parse_cold_settings(given[COLD])


def refuse_unused(server_args: Any) -> None:
    """Raises if the server's arguments have settings for slimkv, although it is neither the backend nor a cold tier."""
    if KEY in _overrides(server_args):
        raise InputError(
            f"{OPTION} has settings for slimkv, which is not switched on; use {EXAMPLE}, or {COLD!r} for a cold tier"
        )
