"""The examples run unchanged on a CPU. Those for vLLM run in the tests of its integration."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent.parent / "examples"
# Arguments that keep each example short, and a part of its output.
RUNS = {
    "generate.py": (["--new-tokens", "8"], "x smaller than bf16"),
    "chat.py": (["--new-tokens", "6"], "| [k4v4: "),
    "calibrate_and_compare.py": ([], "k4v4+cal"),
    "plan_memory.py": ([], "33,792         1,270,992         3.88x"),
    "own_engine.py": ([], "64 of 64 blocks free again"),
}
OF_VLLM = {"vllm_offline.py", "vllm_served.py"}


def test_every_example_is_run_and_listed():
    files = {path.name for path in FOLDER.glob("*.py")}
    assert files == set(RUNS) | OF_VLLM
    listed = (FOLDER / "README.md").read_text(encoding="utf-8")
    assert all(f"[{name}]({name})" in listed for name in files)


SLOW = ("chat.py", "calibrate_and_compare.py")


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.tail) if n in SLOW else n for n in RUNS])
def test_example(name):
    arguments, expected = RUNS[name]
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, str(FOLDER / name), *arguments],
        capture_output=True, text=True, timeout=600, env=environment, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert expected in done.stdout


@pytest.mark.slow
def test_the_notebook(tmp_path):
    """The notebook's code runs from top to bottom, and it is stored without outputs."""
    cells = json.loads((FOLDER / "slimkv.ipynb").read_text(encoding="utf-8"))["cells"]
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in code)
    script = tmp_path / "notebook.py"
    script.write_text("\n".join("".join(cell["source"]) for cell in code), encoding="utf-8")
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stderr
    assert "slimkv is on: 30 of 30 layers are packed (30 k4v4)" in done.stdout
    assert [line.split(":")[0] for line in done.stdout.splitlines() if "x smaller: " in line][-1] == "k2v2"
