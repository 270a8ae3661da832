"""The ``slimkv`` command: one file per command group. Engines and transformers are imported on use."""

import io
import os
import signal
import sys
from typing import Any

from slimkv import __version__


def main() -> None:
    """Runs the command line. An interrupt, a closed pipe or a full disk ends it without a traceback."""
    code: Any = 0
    interrupts: list[int] = []

    def interrupt(number: int, frame: Any) -> None:
        interrupts.append(number)
        raise KeyboardInterrupt

    signal.signal(signal.SIGINT, interrupt)
    try:
        try:
            _run()
        except SystemExit as ended:
            code = ended.code
        if sys.stdout is not None:
            sys.stdout.flush()  # at exit, an error would be printed with a traceback
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # for what is still buffered
        code = code or (1 if isinstance(error, BrokenPipeError) else f"error: {error}")  # the reader may be head
    except BaseException as error:  # packages that are being imported turn interrupts into other errors
        if not interrupts and not isinstance(error, KeyboardInterrupt):
            raise
        print("error: interrupted", file=sys.stderr)
        code = 130
    sys.exit(code)


def _run() -> None:
    """Runs the command line; if typer or rich is missing, says which extra to install."""
    if sys.argv[1:] == ["--version"]:
        print(f"slimkv {__version__}")
        return
    try:
        import rich  # noqa: F401  (commands import it only when they print)

        from slimkv.cli.app import app
    except ModuleNotFoundError as error:
        if error.name not in ("typer", "rich"):
            raise
        sys.exit(f"the slimkv command needs {error.name}, which is not installed: pip install 'slimkv[cli]'")
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # without UTF-8, a run must not fail when it prints its result
    app()
