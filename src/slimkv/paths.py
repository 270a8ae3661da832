"""Where slimkv keeps what it fetched or made once."""

from __future__ import annotations

import os
from pathlib import Path


def cache_dir(kind: str) -> Path:
    """``$XDG_CACHE_HOME/slimkv/<kind>``, or ``~/.cache/slimkv/<kind>``; it need not exist."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "slimkv" / kind
