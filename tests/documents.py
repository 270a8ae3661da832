"""Code snippets in the documentation: what each block requires, and the shell commands."""

from __future__ import annotations

import ast
import re
import shlex
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), *sorted((ROOT / "examples").glob("*.md"))]
PAGES += [ROOT / name for name in ("CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md")]
_FENCE = re.compile(r"(?:<!-- needs: (\w+) -->\n)?```(\w*)\n(.*?)```", re.S)


def snippets(path: Path) -> list[tuple[str | None, str, str]]:
    """(requirement, language, text) of every fenced block."""
    return [(m[1], m[2], m[3]) for m in _FENCE.finditer(path.read_text(encoding="utf-8"))]


def commands() -> list[tuple[str | None, str]]:
    """(requirement, command) for each command of every shell block, without comments and duplicates."""
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


def quoted_commands() -> list[str]:
    """Commands that scripts give: in the docstrings of ``examples/``, and in the shell scripts of ``benchmarks/``."""
    found = []
    for path in sorted((ROOT / "examples").glob("*.py")):
        lines = (ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "").splitlines()
        found += [line.strip() for line in lines if line.startswith(("slimkv ", "vllm serve ", "python -m "))]
    for path in sorted((ROOT / "benchmarks").glob("*.sh")):
        text = re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", path.read_text(encoding="utf-8"))  # the defaults of variables
        lines = text.replace("\\\n", " ").replace("$out/", "").splitlines()
        found += [line.strip().replace("python3 -m ", "") for line in lines if "python3 -m slimkv " in line]
    return found


def inline_commands() -> list[str]:
    """``slimkv`` commands in the text of the pages; lab notes and the changelog also name those of the past."""
    found: dict[str, None] = {}
    for path in PAGES:
        if "lab" not in path.parts and path.name != "CHANGELOG.md":
            text = re.sub(r"```.*?```", "", path.read_text(encoding="utf-8"), flags=re.S)
            found |= dict.fromkeys(" ".join(code.split()) for code in re.findall(r"`(slimkv [^`]+)`", text))
    return list(found)


def misspelt(words: list[str]) -> list[list[str]]:
    """The command once for each of its long options, which is misspelt; options after ``--`` are an engine's."""
    own = words[: words.index("--")] if "--" in words else words
    places = [place for place, word in enumerate(own) if word.startswith("--")]
    return [[*words[:place], words[place] + "-misspelt", *words[place + 1 :]] for place in places]


def served(program: str) -> list[list[str]]:
    """The documented servers, as words: ``vllm serve`` or ``python -m sglang.launch_server``."""
    every = [*(command for _, command in commands()), *quoted_commands()]
    return [shlex.split(command) for command in every if command.startswith(program + " ")]
