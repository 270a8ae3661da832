"""Halves the time of Triton's interpreter, which patches ``triton.language`` at every function call.

A launch replaces the functions of ``triton.language`` by the interpreter's, and restores them at its end. Every call of
a device function within the launch patches again: it looks at a thousand names and finds all of them patched.
"""

from __future__ import annotations

from typing import Any


def install() -> None:
    """Limits the patching to once per launch and module. Does nothing if this release of Triton patches differently."""
    try:
        from triton.runtime import interpreter

        patch, _ = interpreter._patch_lang, interpreter._LangPatchScope.restore
    except (ImportError, AttributeError):
        return
    seen: set[int] = set()  # ids of the dictionaries of patched modules; empty between launches

    def patch_once(function: Any) -> Any:
        module = id(function.__globals__)
        if module in seen:
            return None  # a call of a device function, whose caller ignores the scope
        scope = patch(function)
        if not seen:  # called for the launch itself

            def restore() -> None:
                seen.clear()
                type(scope).restore(scope)

            scope.restore = restore
        seen.add(module)
        return scope

    interpreter._patch_lang = patch_once
