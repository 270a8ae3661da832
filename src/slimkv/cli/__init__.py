"""The ``slimkv`` command: one file per command group. Engines and transformers are imported on use."""

import io
import sys


def main() -> None:
    """Runs the command line; if typer or rich is missing, says which extra to install."""
    if sys.argv[1:] == ["--version"]:
        from slimkv import __version__

        print(f"slimkv {__version__}")
        return
    try:
        import rich  # noqa: F401  (commands import it only when they print)

        from slimkv.cli.app import app
    except ModuleNotFoundError as error:
        if error.name not in ("typer", "rich"):
            raise
        sys.exit(f"the slimkv command needs {error.name}, which is not installed: pip install 'slimkv[cli]'")
    except KeyboardInterrupt:  # while torch is imported
        print("error: interrupted", file=sys.stderr)
        sys.exit(130)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # without UTF-8, a run must not fail when it prints its result
    app()
