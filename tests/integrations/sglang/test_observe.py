"""Calibration inside SGLang: statistics agree with those from transformers, and engines can use the file."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("sglang")

from engines import BASE, environment, run_engine, slimkv
from observed import check_it_is_what_transformers_finds, write_llama

from slimkv.calibration import Calibration
from slimkv.errors import InputError, UnsupportedError
from slimkv.integrations.sglang.observe import gather_calibration

pytestmark = pytest.mark.sglang

OBSERVE = f"""
import sys
from slimkv.integrations.sglang.observe import gather_calibration
if __name__ == "__main__":
    own = {{name: value for name, value in {BASE!r}.items() if name in
           ("device", "dtype", "attention_backend", "context_length", "max_total_tokens", "log_level")}}
    gather_calibration(sys.argv[1], samples=(16, 128), **own).save(sys.argv[2])
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    return write_llama(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def observed(folder, tmp_path_factory) -> Path:
    target = tmp_path_factory.mktemp("file") / "observed.safetensors"
    script = target.with_suffix(".py")
    script.write_text(OBSERVE)
    done = subprocess.run(
        [sys.executable, str(script), folder, str(target)], env=environment(), capture_output=True, text=True,
        timeout=600, check=False,
    )  # fmt: skip
    assert not done.returncode, done.stdout + done.stderr
    return target


@pytest.mark.slow
@pytest.mark.extended
def test_it_finds_what_transformers_finds(folder, observed):
    check_it_is_what_transformers_finds(folder, Calibration.load(observed))


@pytest.mark.slow
@pytest.mark.extended
def test_its_file_serves(folder, observed):
    runs = [{"name": "a", "prompts": [list(range(3, 90))], "max_tokens": 8}]
    cache = slimkv("k4v4", calibration=str(observed))
    result = run_engine({"model_path": folder, **cache}, runs)
    assert len(result["tokens"]["a"][0]) == 8


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"disable_radix_cache": False}, "disable_radix_cache"),
        ({"pp_size": 2}, "pp_size = 1, not 2"),
        ({"dp_size": 2}, "dp_size = 1, not 2"),
        ({"attention_backend": "slimkv"}, "attention_backend slimkv"),
    ],
)
def test_what_it_refuses(options, named):
    with pytest.raises((InputError, UnsupportedError), match=named):
        gather_calibration("nowhere", **options)
