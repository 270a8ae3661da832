"""Checks of an engine's version. Every process of an engine imports this module, so it is light."""

from __future__ import annotations

from importlib import import_module

from slimkv.errors import MissingDependencyError, UnsupportedError
from slimkv.versions import version_numbers, version_text

Version = tuple[int, ...]


def check_installed(engine: str, module: str, oldest: Version) -> str:
    """The version of an engine, from one of its modules; raises if it is missing or older than ``oldest``."""
    version = _installed(engine, module)
    if version_numbers(version, len(oldest)) < oldest:
        raise MissingDependencyError(
            f"slimkv works in {engine} {version_text(oldest)} and later, not in {version}: "
            f'pip install --upgrade "slimkv[{engine.lower()}]"'
        )
    return version


def check_tested(engine: str, module: str, tested: Version) -> str:
    """The version of an engine that slimkv supports in the tested release only; raises for any other."""
    version = _installed(engine, module)
    if version_numbers(version, len(tested)) != tested:
        text = version_text(tested)
        raise UnsupportedError(
            f"slimkv was tested with {engine} {text} and runs in no other release; {version} is installed: "
            f'pip install "{engine.lower()}=={text}.*"'
        )
    return version


def _installed(engine: str, module: str) -> str:
    try:
        version: str = import_module(module).__version__
    except ImportError as error:
        raise MissingDependencyError(
            f'the {engine} integration needs {engine}, which is not installed: pip install "slimkv[{engine.lower()}]"'
        ) from error
    return version
