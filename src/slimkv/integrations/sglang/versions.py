"""The supported versions of SGLang. Every process of SGLang imports this module, so it is light; see ``compat``."""

from __future__ import annotations

from slimkv.errors import MissingDependencyError
from slimkv.versions import version_numbers, version_text

OLDEST = (0, 5, 22)
NEWEST_TESTED = (0, 5, 23)


def installed_version() -> str:
    """The version of SGLang; raises if it is missing or too old."""
    try:
        from sglang.version import __version__
    except ImportError as error:
        raise MissingDependencyError(
            'the SGLang integration needs SGLang, which is not installed: pip install "slimkv[sglang]"'
        ) from error
    if version_numbers(__version__, 3) < OLDEST:
        raise MissingDependencyError(
            f"slimkv works in SGLang {version_text(OLDEST)} and later, not in {__version__}: "
            'pip install --upgrade "slimkv[sglang]"'
        )
    return __version__
