"""Options of every command get values that they cannot accept: exit code 2 and no traceback."""

from __future__ import annotations

import inspect
import typing

import pytest
import typer
from typer.testing import CliRunner

from slimkv.cli.app import COMMANDS, app, load


def commands(group: dict | None = None, path: tuple[str, ...] = ()):
    """Yields (path, function) for every command."""
    for name, command in ({name: load(name) for name in COMMANDS} if group is None else group).items():
        if inner := getattr(command, "commands", None):
            yield from commands(inner, (*path, name))
        else:
            yield (*path, name), command.callback


def numbers(function):
    """Yields the numeric options of a command."""
    hints = typing.get_type_hints(function, include_extras=True)
    for name, parameter in inspect.signature(function).parameters.items():
        hint = hints.get(name, parameter.annotation)  # wrapped commands have a signature but no type hints
        kind, *details = typing.get_args(hint) or (hint,)
        if {int, float} & {kind, *typing.get_args(kind)}:
            for info in details:
                if isinstance(info, typer.models.OptionInfo):
                    yield info.param_decls[0] if info.param_decls else "--" + name.replace("_", "-")


def options():
    """Yields command lines with malformed numbers and with options that do not exist."""
    for path, function in commands():
        yield (*path, "--no-such-option", "1")
        for option in numbers(function):
            for value in ("wrong", "", "1e"):
                yield (*path, option, value)


BAD = [
    *options(),
    ("bench", "attend", "--cells", "wrong"), ("bench", "serve", "--engine", "wrong"), ("bench", "wrong"), ("wrong",),
    ("soak", "--seconds", "-1"), ("soak", "--seconds", "nan"), ("soak", "--requests", "0"), ("soak", "--format", "x"),
    ("soak", "--cancelled", "2"), ("soak", "--cache-tokens", "5"), ("soak", "--max-model-len", "3"),
    ("soak", "--growth-mib", "inf"), ("soak", "--concurrency", "-3"), ("soak", "--rate", "0"),
    ("plan", "--config", "/nowhere"), ("plan", "--layers", "0", "--num-kv-heads", "2", "--head-dim", "64"),
    ("plan", "--layers", "2", "--num-kv-heads", "2", "--head-dim", "7"),
    ("plan", "--layers", "2", "--num-kv-heads", "2", "--head-dim", "64", "--block", "5"),
    ("plan", "--layers", "2", "--num-kv-heads", "2", "--head-dim", "64", "--sequences", "0"),
    ("eval", "attention", "--head-dim", "-16"), ("eval", "attention", "--format", "k9v9"),
    ("doctor", "--require", "x"),
]  # fmt: skip


@pytest.mark.parametrize("words", BAD, ids=" ".join)
def test_mistakes(words):
    result = CliRunner().invoke(app, list(words))
    assert result.exit_code == 2, (result.output, result.exception)
    assert result.exception is None or isinstance(result.exception, SystemExit)


def test_every_command_is_walked():
    paths = [path for path, _ in commands()]
    assert len(paths) > 20
    assert [path for path in paths if not any(words[: len(path)] == path for words in BAD)] == []
    assert sum(words[-1] == "wrong" for words in BAD) > 40, "numbers of every command"
