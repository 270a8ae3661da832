"""mkdocs hooks: the version in header and footer, and a visible label over code that needs an engine or a GPU."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
_VERSION = re.compile(r'^__version__ = "(.+)"$', re.M)
_NEEDS = re.compile(r"^<!-- needs: (\w+) -->\n", re.M)
_LABELS = {
    "gpu": "Needs an NVIDIA GPU",
    "vllm": "Needs vLLM",
    "sglang": "Needs SGLang",
    "lm_eval": "Needs lm-evaluation-harness",
    "time": "Takes up to an hour, or a night",
    "results": "Needs the folders of two finished runs",
}


def on_config(config: Any) -> Any:
    """Puts the package's version into header and footer."""
    found = _VERSION.search((ROOT / "src" / "slimkv" / "__init__.py").read_text(encoding="utf-8"))
    if found is None:
        raise ValueError("src/slimkv/__init__.py has no __version__ for the site")
    config.extra["package_version"] = found[1]
    config.copyright = f"slimkv {found[1]} · Apache-2.0"
    return config


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Shows readers what the tests read from ``<!-- needs: ... -->``; an unknown name is an error."""
    return _NEEDS.sub(lambda m: f'<p class="needs">{_LABELS[m[1]]}</p>\n\n', markdown)
