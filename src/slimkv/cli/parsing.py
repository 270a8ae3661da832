"""How options are declared. Each is checked when it is parsed, before any work starts."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import torch
import typer

from slimkv.config import AUTO
from slimkv.errors import InputError
from slimkv.lab.settings import MOST, check_range, option_name


def comma_list(option: str, text: str, kind: Callable[[str], Any] = str) -> list[Any]:
    """``512, 1024`` -> ``[512, 1024]``: at least one value, each once."""
    try:
        found = [kind(part.strip()) for part in text.split(",") if part.strip()]
    except ValueError as error:
        raise InputError(f"{option} takes numbers separated by commas, not {text!r}") from error
    if not found:
        raise InputError(f"{option} takes at least one value, or several separated by commas; not {text!r}")
    if len(set(found)) < len(found):
        raise InputError(f"{option} takes each value once, not {text!r}")
    return found


def numbers(help: str, kind: type[int] | type[float], least: float, most: float = MOST) -> Any:
    """An option that is a comma-separated list of numbers from ``least`` to ``most``."""

    def check(param: typer.CallbackParam, given: str) -> str:
        for number in comma_list(param.opts[0], given, kind):
            check_range(param.opts[0], number, least, most)
        return given

    return option(help, callback=check)


def given(context: typer.Context, *parameters: str) -> list[str]:
    """The options among ``parameters`` that are on the command line, such as ``--max-positions``."""
    sources = {name: context.get_parameter_source(name) for name in parameters}
    found = [name for name, source in sources.items() if source is not None and source.name == "COMMANDLINE"]
    return ["--" + name.replace("_", "-") for name in found]


def option(help: str, *names: str, **more: Any) -> Any:
    """An option. Its name is the parameter's, unless ``names`` are given."""
    return typer.Option(*names, help=help, **more)


def choice(help: str, *known: str) -> Any:
    """An option that takes one of the ``known`` values, which are listed after ``help``."""

    def check(param: typer.CallbackParam, given: str) -> str:
        if given not in known:
            raise InputError(f"{param.opts[0]} {given!r} is not one of {', '.join(known)}")
        return given

    return option(f"{help}: {', '.join(known)}.", callback=check)


def count(help: str, least: int = 1, most: int = MOST) -> Any:
    """An option that is an integer from ``least`` to ``most``."""

    def check(param: typer.CallbackParam, given: int | None) -> int | None:
        if given is not None:
            check_range(param.opts[0], given, least, most)
        return given

    return option(help, callback=check)


def check_device(name: str) -> str:
    """``auto`` -> ``cuda`` if there is a GPU, else ``cpu``; raises for a missing device."""
    if name == AUTO:
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise InputError(f"unknown device {name!r}; use auto, cpu, cuda or cuda:1") from error
    if device.type not in ("cpu", "cuda"):
        raise InputError(f"slimkv does not run on {name!r}; use auto, cpu, cuda or cuda:1")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise InputError(f"torch sees no CUDA device, so --device {name} cannot be used; use --device cpu")
    if device.type == "cpu" and device.index:
        raise InputError(f"there is no {name}; use cpu, which is all cores")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise InputError(f"there is no {name}: torch sees {torch.cuda.device_count()} CUDA device(s)")
    return name


def check_file(context: typer.Context, path: Path | None) -> Path | None:
    """A file that can be written; no other option writes it."""
    if path is None:
        return None
    if path.is_dir():
        raise InputError(f"{path} is a folder; give the name of a file in it")
    if os.path.lexists(path) and not path.is_file():
        raise InputError(f"{path} is a device, a pipe or a broken link; give the name of a regular file")
    if path in context.params.values():
        raise InputError(f"two options name {path}; give each a file of its own")
    if not path.parent.is_dir():
        raise InputError(f"the folder {path.parent} does not exist, so {path.name} cannot be written there; create it")
    if not os.access(path.parent, os.W_OK):
        raise InputError(f"the folder {path.parent} cannot be written to; choose another for {path.name}")
    if path.is_file() and not os.access(path, os.W_OK):
        raise InputError(f"{path} cannot be written to; choose another name")
    return path


def check_drawing(context: typer.Context, path: Path | None) -> Path | None:
    """An SVG file that can be written."""
    check_file(context, path)
    if path is not None and path.suffix != ".svg":
        raise InputError(f"plots are SVG files; give --plot a name such as {path.with_suffix('.svg')}, not {path}")
    return path


def check_folder(path: Path | None) -> Path | None:
    """A folder to write into; it is created when there is something to write."""
    if path is None:
        return None
    first = next(parent for parent in (path, *path.absolute().parents) if os.path.lexists(parent))
    if not first.is_dir():
        raise InputError(f"{first} is {'a file' if first.is_file() else 'not a folder'}; give a folder")
    if not os.access(first, os.W_OK):
        raise InputError(f"the folder {first} cannot be written to; choose another")
    return path


def command_like(
    function: Callable[..., Any], run: Callable[..., None], parameters: Iterable[inspect.Parameter]
) -> Callable[..., None]:
    """``run`` as a command with the name and the help of ``function`` and these options."""
    keyword = inspect.Parameter.KEYWORD_ONLY
    run.__signature__ = inspect.Signature([x.replace(kind=keyword) for x in parameters])  # type: ignore[attr-defined]
    run.__annotations__, run.__doc__, run.__name__ = {}, function.__doc__, function.__name__
    return run


def option_parameters(options: dict[str, tuple[Any, Any]]) -> list[inspect.Parameter]:
    """Parameters of a command from ``{name: (annotation, default)}``."""
    keyword = inspect.Parameter.KEYWORD_ONLY
    return [inspect.Parameter(name, keyword, default=d, annotation=a) for name, (a, d) in options.items()]


def takes(*kinds: type[Any], unset: Sequence[str] = ()) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Gives a command the options of settings dataclasses (``slimkv.lab.settings``): the fields with a help text.

    The command's first argument is a dict of the given values and of defaults. Fields without a default, and those in
    ``unset``, are in it only if they are given. A tuple is written as a comma-separated list.
    """

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        _, *rest = inspect.signature(function, eval_str=True).parameters.values()
        options, lists = dict[str, tuple[Any, Any]](), dict[str, tuple[str, type]]()  # ``lists``: flag, element type
        for one, hint in ((one, get_type_hints(kind)[one.name]) for kind in kinds for one in fields(kind)):
            help, known = one.metadata.get("help"), one.metadata.get("known")
            if not help:
                continue
            default = None if one.default in (MISSING, ()) or one.name in unset else one.default
            if get_origin(hint) is tuple:
                lists[one.name], hint = (option_name(one), get_args(hint)[0]), str
                default = default if default is None else ",".join(map(str, default))
            named = option(f"{help}: {', '.join(known)}." if known else help, option_name(one))
            options[one.name] = Annotated[hint if default is not None else hint | None, named], default

        def run(**given: Any) -> None:
            values = {name: value for name in options if (value := given.pop(name)) is not None}
            for name in lists.keys() & values.keys():
                flag, kind = lists[name]
                values[name] = tuple(comma_list(flag, values[name], kind))
            function(values, **given)

        return command_like(function, run, [*option_parameters(options), *rest])

    return decorate
