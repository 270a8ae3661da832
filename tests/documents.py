"""Reads code snippets and shell commands from the documentation, with the requirements of each."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), *sorted((ROOT / "examples").glob("*.md"))]
PAGES += [ROOT / name for name in ("CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md")]
_FENCE = re.compile(r"(?:<!-- needs: (\w+) -->\n)?```(\w*)\n(.*?)```", re.S)


def snippets(path: Path) -> list[tuple[str | None, str, str]]:
    """(requirement, language, text) of every fenced block."""
    return [(m[1], m[2], m[3]) for m in _FENCE.finditer(path.read_text(encoding="utf-8"))]


def commands() -> list[tuple[str | None, str]]:
    """(requirement, command) for every distinct command of all shell blocks, without comments."""
    found: dict[str, str | None] = {}
    for path in PAGES:
        for need, language, text in snippets(path):
            pending = ""
            for line in text.replace("\\\n", " ").splitlines() if language == "bash" else ():
                command = f"{pending} {line.split('  #')[0].split(' # ')[0]}".strip()
                pending = command if command.count("'") % 2 else ""  # a quoted string continues on the next line
                if command and not pending and not command.startswith("#"):
                    found.setdefault(" ".join(command.split()), need)
    return [(need, command) for command, need in found.items()]
