"""First steps of a new user. ``make test-install`` runs this in an environment with only the wheel and its extras."""

from __future__ import annotations

import re
import subprocess
import sys
import sysconfig
from pathlib import Path

from documents import ROOT, snippets

SMALLER = 2.5  # the least factor by which the example's cache must be smaller than bf16


def quick_start() -> None:
    """Runs the Python blocks of the quick start that need no engine, one after another."""
    scope: dict[str, object] = {}
    for need, language, text in snippets(ROOT / "docs" / "guides" / "quickstart.md"):
        if language == "python" and need is None and "calibrate_model" not in text:  # sampling takes half a minute
            exec(compile(text, "quickstart.md", "exec"), scope)


def example() -> None:
    """Runs ``examples/generate.py`` and checks the saving that it prints."""
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / "generate.py"), "--new-tokens", "8"],
        stdout=subprocess.PIPE, text=True, check=True,
    )  # fmt: skip
    print(done.stdout)
    found = re.search(r"([\d.]+)x smaller", done.stdout)
    assert found is not None, "examples/generate.py prints no size"
    assert float(found[1]) >= SMALLER, f"examples/generate.py shows a cache only {found[1]}x smaller than bf16's"


def main() -> None:
    import slimkv

    installed = Path(slimkv.__file__).parent
    assert installed.is_relative_to(sysconfig.get_path("purelib")), f"slimkv comes from {installed}, not from the wheel"
    command = str(Path(sysconfig.get_path("scripts")) / "slimkv")
    shown = subprocess.run([command, "--version"], capture_output=True, text=True, check=True).stdout
    assert shown == f"slimkv {slimkv.__version__}\n", shown
    subprocess.run([command, "doctor"], check=True)
    quick_start()
    example()


if __name__ == "__main__":
    main()
