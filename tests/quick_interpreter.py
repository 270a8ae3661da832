"""Halves the run time of Triton's interpreter, which patches ``triton.language`` on every call of a device function.

A launch patches the interpreter's functions into ``triton.language`` and restores the originals when it ends. Every
call of a device function in between patches again: it looks at a thousand names and finds nothing to do.
"""

from __future__ import annotations

from typing import Any


def install() -> None:
    """Makes the interpreter patch each module once per launch. Does nothing if this Triton works differently."""
    try:
        from triton.runtime import interpreter

        patch, _ = interpreter._patch_lang, interpreter._LangPatchScope.restore
    except (ImportError, AttributeError):
        return
    seen: set[int] = set()  # ids of the dictionaries of patched modules; empty between launches

    def patch_once(function: Any) -> Any:
        module = id(function.__globals__)
        if module in seen:
            return None  # called for a device function, whose call does not use the scope
        scope = patch(function)
        if not seen:  # called for the launch itself

            def restore() -> None:
                seen.clear()
                type(scope).restore(scope)

            scope.restore = restore
        seen.add(module)
        return scope

    interpreter._patch_lang = patch_once
