"""Settings in SGLang: the ``slimkv`` entry of ``--json-model-override-args`` holds the fields of ``KVCacheConfig``.

{"slimkv": {"format": "k4v4", "layers": {"0-1": "fp8", "-1": "raw"}}}
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from slimkv.config import KVCacheConfig
from slimkv.errors import InputError
from slimkv.integrations.serving.model import KEY, parse_settings
from slimkv.integrations.sglang.compat import server_options

OPTION = "--json-model-override-args"
EXAMPLE = f'--attention-backend slimkv --page-size 64 {OPTION} \'{{"slimkv": {{"format": "k4v4"}}}}\''


def parse(server_args: Any) -> KVCacheConfig:
    """The server's arguments -> the configuration of its cache; its defaults where nothing is set."""
    text = server_args.json_model_override_args or "{}"
    try:
        given = json.loads(text) if isinstance(text, str) else text
    except json.JSONDecodeError as error:
        raise InputError(f"{OPTION} is not JSON: {error}; use {EXAMPLE}") from error
    if not isinstance(given, Mapping):
        raise InputError(f"{OPTION} must be an object, not {given!r}; use {EXAMPLE}")
    deterministic = getattr(server_options(server_args), "enable_deterministic_inference", False)
    return parse_settings(given.get(KEY, {}), "SGLang", "--enable-deterministic-inference" if deterministic else None)
