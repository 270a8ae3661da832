"""The example and the snippets for vLLM from Python, on its CPU engine."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("vllm")

from engines import ENVIRONMENT, environment, model_folder

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.extended]

ROOT = Path(__file__).parents[3]


def test_offline():
    script = ROOT / "examples" / "vllm_offline.py"
    done = subprocess.run(
        [sys.executable, str(script), "--cpu"], env=environment(), capture_output=True, text=True, timeout=600,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert "Paris" in done.stdout


def test_the_guides_python(tmp_path):
    """The snippet of the guide, on a small model and with the sizes that the CPU engine needs."""
    guide = (ROOT / "docs" / "guides" / "vllm.md").read_text(encoding="utf-8")
    snippet = re.search(r"```python\n(.*?)```", guide, re.S)[1]
    assert 'LLM("MODEL",' in snippet
    sizes = 'max_model_len=256, block_size=32, enforce_eager=True, dtype="float32",'
    snippet = snippet.replace('LLM("MODEL",', f"LLM({model_folder()!r}, {sizes}")
    body = "".join(f"    {line}\n" for line in snippet.splitlines())
    script = tmp_path / "snippet.py"
    script.write_text(f"if __name__ == '__main__':\n{body}    print(llm.generate('Hello')[0].outputs[0].text)\n")
    done = subprocess.run(
        [sys.executable, str(script)], env={**os.environ, **ENVIRONMENT}, capture_output=True, text=True, timeout=600,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
