"""The folders where slimkv caches downloads and compiled kernels, and atomic writes to them."""

from __future__ import annotations

import json
import logging
import os
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any

from slimkv.errors import InputError

_LOG = logging.getLogger("slimkv")
_OTHERS = stat.S_IWGRP | stat.S_IWOTH


def cache_dir(kind: str) -> Path:
    """``$XDG_CACHE_HOME/slimkv/<kind>``, or ``~/.cache/slimkv/<kind>``; it need not exist."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "slimkv" / kind


def unsafe_reason(folder: Path) -> str | None:
    """Why machine code must not be cached in ``folder`` (another user could replace it), or None.

    The folder must belong to this user and be writable by this user only, and other users must not be able to rename
    it. A folder that does not exist yet is checked after its creation.
    """
    if not hasattr(os, "geteuid"):
        return None
    me = os.geteuid()
    for path, owners in ((folder.parent, (me, 0)), (folder, (me,))):
        try:
            about = path.lstat()
        except FileNotFoundError:
            continue
        except OSError as error:
            return f"{path} cannot be inspected ({error.strerror})"
        if not stat.S_ISDIR(about.st_mode):
            return f"{path} is not a folder"
        if about.st_uid not in owners:
            return f"{path} belongs to user {about.st_uid}, not to the current user ({me})"
        sticky = path != folder and about.st_mode & stat.S_ISVTX  # sticky, like /tmp: only owners can rename
        if about.st_mode & _OTHERS and not sticky:
            return f"other users may write to {path} (mode {stat.S_IMODE(about.st_mode):o}); use: chmod go-w {path}"
    return None


def keep_code(path: Path, content: bytes) -> str | None:
    """Writes machine code to ``path``, in a folder that only this user may write to.

    If that fails, warns once and returns the reason.
    """
    folder = path.parent
    reason = unsafe_reason(folder)
    try:
        if reason is None:
            folder.parent.parent.mkdir(parents=True, exist_ok=True)
            for made in (folder.parent, folder):
                made.mkdir(mode=0o700, exist_ok=True)
            reason = unsafe_reason(folder)  # another process may have created it
        if reason is None:
            write_whole(path, content)
    except OSError as error:
        reason = f"it cannot be written ({error.strerror or error})"
    if reason is not None:
        _warn_unsafe(folder, reason)
    return reason


@cache
def _warn_unsafe(folder: Path, reason: str) -> None:
    _LOG.warning(
        "compiled kernels are not cached in %s: %s. Until then every process compiles them again", folder, reason
    )


def read_json(path: Path) -> Any:
    """The contents of a JSON file; raises if it is not JSON."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise InputError(f"{path} is not JSON: {error}") from error


@contextmanager
def whole_file(path: Path, *, overwrite: bool = True) -> Iterator[Path]:
    """Yields a temporary file that then becomes ``path`` atomically; a failure leaves no file behind.

    ``overwrite=False`` keeps an existing file.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        temporary.chmod(0o644)
        if overwrite:
            temporary.replace(path)
        else:
            with suppress(FileExistsError):
                os.link(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write_whole(path: Path, content: bytes, *, overwrite: bool = True) -> None:
    """Writes ``content`` through ``whole_file``."""
    with whole_file(path, overwrite=overwrite) as temporary:
        temporary.write_bytes(content)
