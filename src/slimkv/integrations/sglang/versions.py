"""The supported versions of SGLang. Every process of SGLang imports this module, so it is light; see ``compat``."""

from __future__ import annotations

from slimkv.integrations.serving.versions import check_installed

OLDEST = (0, 5, 22)
NEWEST_TESTED = (0, 5, 23)


def installed_version() -> str:
    """The version of SGLang; raises if it is missing or too old."""
    return check_installed("SGLang", "sglang.version", OLDEST)
