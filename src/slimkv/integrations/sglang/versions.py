"""The supported release of SGLang. Every process of SGLang imports this module, so it is light; see ``compat``."""

from __future__ import annotations

from slimkv.integrations.serving.versions import check_tested

TESTED = (0, 5, 23)


def installed_version() -> str:
    """The version of SGLang; raises if it is missing or not the tested release."""
    return check_tested("SGLang", "sglang.version", TESTED)
