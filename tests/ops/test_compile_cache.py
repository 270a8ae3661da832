"""The cache of compiled kernels on disk: concurrent writers, damaged files, full disks, and unsafe folders."""

from __future__ import annotations

import logging
import multiprocessing
import os
import resource
import signal
import stat
import tempfile
from pathlib import Path

import pytest

from slimkv import paths
from slimkv.ops.cpu import compiler, isa
from slimkv.ops.cuda import compiler as cuda

GENERIC = isa.find("generic")
# Writes a "library" that differs from call to call, as a compiler may.
FAKE = '#!/bin/sh\nwhile [ "$1" != -o ]; do shift; done\nprintf "library of %s" "$$" > "$2"\n'


@pytest.fixture
def fake_compiler(tmp_path, monkeypatch):
    """A fake compiler that is fast. Returns a function that counts its calls."""
    program, calls = tmp_path / "cxx", tmp_path / "calls"
    program.write_text(FAKE + f'echo x >> "{calls}"\n')
    program.chmod(0o755)
    calls.touch()
    monkeypatch.setenv("CXX", str(program))
    paths._warn_unsafe.cache_clear()
    return lambda: len(calls.read_text().splitlines())


def whole(path: Path) -> bool:
    return path.name == compiler._name(path.name.rsplit("-", 1)[0], path)


def in_processes(count: int, function, *arguments) -> None:
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=function, args=arguments) for _ in range(count)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0] * count


def keep_and_find(folder: Path) -> None:
    for i in range(60):
        content = f"{os.getpid()} {i}".encode() * 5000
        assert compiler._keep(content, folder, "stem").read_bytes() == content
        found = compiler._find(folder, "stem")
        assert found is not None
        assert whole(found)


def test_several_processes_write_at_once(tmp_path):
    folder = tmp_path / "slimkv" / "cpu"
    in_processes(4, keep_and_find, folder)
    assert all(whole(path) for path in folder.iterdir())
    assert len(list(folder.iterdir())) == 4 * 60, "nothing is left beside"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_a_library_is_built_once_and_again_where_it_is_damaged(fake_compiler, tmp_path):
    path = compiler.build_library(GENERIC, cache=tmp_path / "a")
    assert compiler.build_library(GENERIC, cache=tmp_path / "a") == path
    assert fake_compiler() == 1
    for damage in (b"", path.read_bytes()[:-1], path.read_bytes() + b"x", b"\0" * 17):
        path.write_bytes(damage)
        path = compiler.build_library(GENERIC, cache=tmp_path / "a")
        assert whole(path)
    assert fake_compiler() == 5


@pytest.mark.parametrize("mode", [0o777, 0o775, 0o757])
def test_a_folder_that_others_may_write_is_refused(mode, fake_compiler, tmp_path, caplog):
    folder = tmp_path / "cpu"
    mine = compiler.build_library(GENERIC, cache=folder)
    folder.chmod(mode)
    with caplog.at_level(logging.WARNING, "slimkv"):
        path = compiler.build_library(GENERIC, cache=folder)
    assert path != mine
    assert path.parent != folder
    assert unsafe(path.parent) is None
    assert f"chmod go-w {folder}" in caplog.text
    folder.chmod(0o700)
    assert compiler.build_library(GENERIC, cache=folder) == mine


def unsafe(folder: Path) -> str | None:
    return paths.unsafe_reason(folder)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
def test_a_folder_of_somebody_else_is_refused(fake_compiler, tmp_path, caplog):
    folder = tmp_path / "cpu"
    folder.mkdir(mode=0o700)
    os.chown(folder, 65534, 65534)
    with caplog.at_level(logging.WARNING, "slimkv"):
        assert compiler.build_library(GENERIC, cache=folder).parent != folder
    assert "belongs to user 65534" in caplog.text
    assert not list(folder.iterdir())


def test_what_stands_above_is_looked_at_too(tmp_path):
    above = tmp_path / "slimkv"
    (above / "cpu").mkdir(parents=True, mode=0o700)
    above.chmod(0o777)
    assert "other users may write" in unsafe(above / "cpu")
    above.chmod(0o1777)
    assert unsafe(above / "cpu") is None, "as in /tmp, only its owner renames a folder there"
    above.chmod(0o700)
    (above / "link").symlink_to(above / "cpu")
    assert "not a folder" in unsafe(above / "link")


def write_with_little_space(folder: Path) -> None:
    """For a process of its own. Files are limited to 8 bytes, so that a part of a write succeeds, as on a full disk."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8, 8))
    try:
        paths.write_whole(folder / "x", b"0123456789" * 10_000)
    except OSError:
        assert os.listdir(folder) == []
        return
    raise AssertionError("it was written")


def test_a_full_disk_leaves_nothing(tmp_path):
    in_processes(1, write_with_little_space, tmp_path)


def test_a_full_or_read_only_cache_is_passed_by(fake_compiler, tmp_path, monkeypatch, caplog):
    real, folder = paths.write_whole, tmp_path / "cpu"

    def full(path, content):
        if path.parent == folder:
            raise OSError(28, "No space left on device")
        real(path, content)

    monkeypatch.setattr(paths, "write_whole", full)
    with caplog.at_level(logging.WARNING, "slimkv"):
        path = compiler.build_library(GENERIC, cache=folder)
    assert whole(path)
    assert "No space left on device" in caplog.text
    for module in (paths, compiler):
        monkeypatch.setattr(module, "write_whole", lambda path, content: real(Path("/proc/nowhere/x"), content))
    with pytest.raises(compiler.CompileError, match="free some space or set XDG_CACHE_HOME or TMPDIR"):
        compiler.build_library(GENERIC, cache=folder)


def test_a_temporary_folder_that_is_gone_is_an_error_with_a_name(fake_compiler, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "gone"))
    with pytest.raises(compiler.CompileError, match="could not be run"):
        compiler.build_library(GENERIC, cache=tmp_path / "cpu")


# -- CUDA --------------------------------------------------------------------------------------------------------------


def write_and_read(folder: Path) -> None:
    for i in range(200):
        path = folder / f"{i % 3}.cubin"
        code = bytes([os.getpid() % 256]) * 100_000
        cuda._write_cached(path, code)
        found = cuda._read_cached(path)
        assert found is not None
        assert len(set(found)) == 1, "of one writer as a whole"


def test_machine_code_is_written_by_several_processes_at_once(tmp_path):
    in_processes(4, write_and_read, tmp_path / "cuda")
    assert sorted(os.listdir(tmp_path / "cuda")) == ["0.cubin", "1.cubin", "2.cubin"]


def test_machine_code_of_others_or_cut_off_is_not_loaded(tmp_path, caplog):
    paths._warn_unsafe.cache_clear()
    folder = tmp_path / "cuda"
    cuda._write_cached(folder / "a.cubin", b"code")
    assert cuda._read_cached(folder / "a.cubin") == b"code"
    whole = (folder / "a.cubin").read_bytes()
    (folder / "a.cubin").write_bytes(whole[:-1])
    assert cuda._read_cached(folder / "a.cubin") is None, "a file that was cut off is noticed, not used"
    (folder / "a.cubin").write_bytes(whole)
    folder.chmod(0o777)
    assert cuda._read_cached(folder / "a.cubin") is None
    with caplog.at_level(logging.WARNING, "slimkv"):
        cuda._write_cached(folder / "b.cubin", b"code")
    assert os.listdir(folder) == ["a.cubin"]
    assert "chmod go-w" in caplog.text
