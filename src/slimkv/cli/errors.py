"""Errors of commands: one line on standard error and an exit code (2; 1 for a full disk or memory), no traceback."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, cast

import typer
from typer.core import TyperGroup

from slimkv.errors import SlimKVError

USAGE, INTERRUPTED = 2, 130  # exit codes
# Newer releases of typer include their own click, so its exceptions are looked up through typer.
_ClickException = cast(type[Exception], typer.BadParameter.__mro__[2])


class OneLineErrors(TyperGroup):
    """The root command, which catches the errors of all commands."""

    def main(self, *args: Any, **options: Any) -> Any:
        """Runs a command and exits with its exit code."""
        run: Callable[..., Any] = super().main
        if not options.pop("standalone_mode", True):
            return run(*args, standalone_mode=False, **options)
        try:
            code = run(*args, standalone_mode=False, **options)
        except SlimKVError as error:
            code = _tell(str(error))
        except _ClickException as error:
            code = _tell_usage(error)
        except (OSError, MemoryError, RuntimeError) as error:  # such as a full disk, or no memory left
            memory = type(error).__name__ == "OutOfMemoryError" or "DefaultCPUAllocator" in str(error)  # torch's
            if isinstance(error, RuntimeError) and not memory:
                raise
            code = _tell(str(error) or "out of memory", 1)
        except typer.Abort:
            code = INTERRUPTED
        if code == INTERRUPTED:  # typer returns it without a message
            _tell("interrupted")
        sys.exit(code or 0)


def _tell(message: str, code: int = USAGE) -> int:
    typer.echo(f"error: {' '.join(message.split())}", err=True)
    return code


def _tell_usage(error: Any) -> int:
    """Reports an option or argument that cannot be parsed, and the command whose help explains it."""
    message = error.format_message()
    if type(error).__name__ == "NoArgsIsHelpError":  # a group without a command: prints its help
        typer.echo(message, err=True)
        return int(error.exit_code)
    context = getattr(error, "ctx", None)
    help = f" (see {context.command_path} --help)" if context is not None else ""
    if "No such option" in message and " serve --help" in help and "bench" not in help:
        message = message.partition(" (Possible")[0] + ": options of the engine follow --, as in MODEL -- --port 8000"
    return _tell(message.rstrip(".") + help, error.exit_code)
