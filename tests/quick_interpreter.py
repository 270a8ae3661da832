"""Takes half of the time out of Triton's interpreter, which replaces ``triton.language`` at every call of a function.

A launch puts the interpreter's functions into ``triton.language``, and takes them out when it ends. Every call of a
device function within it does so again, which looks at a thousand names and finds nothing left to do.
"""

from __future__ import annotations

from typing import Any


def install() -> None:
    """Once per launch and module from here on; nothing, if this release of Triton does it in another way."""
    try:
        from triton.runtime import interpreter

        patch, _ = interpreter._patch_lang, interpreter._LangPatchScope.restore
    except (ImportError, AttributeError):
        return
    seen: set[int] = set()  # modules, by their dictionaries; empty between launches

    def patch_once(function: Any) -> Any:
        module = id(function.__globals__)
        if module in seen:
            return None  # the call of a device function, which keeps no scope
        scope = patch(function)
        if not seen:  # the launch itself

            def restore() -> None:
                seen.clear()
                type(scope).restore(scope)

            scope.restore = restore
        seen.add(module)
        return scope

    interpreter._patch_lang = patch_once
