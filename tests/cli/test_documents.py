"""Every snippet in the documentation runs: Python unchanged, commands on a small model. Links must resolve.

A snippet that needs an engine or a GPU is marked ``<!-- needs: vllm -->`` (or with another name). The tests of that
engine run it; here only its arguments are checked. ``<!-- setup ... -->`` contains definitions that a page's fragments
assume. It runs before the Python of the page.
"""

from __future__ import annotations

import json
import re
import shlex
import tomllib
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from documents import PAGES, ROOT, commands, snippets
from slimkv import KVCacheConfig, SlimKVCache, attention, calibrate_model
from slimkv.lab import models
from tail import sample

SETUP = re.compile(r"<!-- setup\n(.*?)-->", re.S)
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
EXTRAS = PROJECT["optional-dependencies"]
REPOSITORY = re.search(r"^repo_url: (\S+)$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), re.M)[1]
# Model names in the documentation. The packaged model replaces HUB_NAME, a tiny model the others.
HUB_NAME = "HuggingFaceTB/SmolLM2-135M-Instruct"
MODELS = ("MODEL", "smollm2-135m-instruct", "gemma-3-270m", "path/to/model")
_SUITE = ["--parts", "memory,agreement", "--format", "k4v4", "--windows", "1", "--tokens", "48", "--device", "cpu"]
# Fewer and shorter windows than in the documentation. If an option occurs twice, its last value counts.
SMALLER = {
    "demo": [],
    "calibrate": ["--windows", "1", "--tokens", "64"],
    "bench generate": ["--context", "64", "--new-tokens", "4", "--rounds", "1"],
    "eval agreement": ["--windows", "1", "--tokens", "64"],
    "eval needle": ["--contexts", "96", "--depths", "0.5"],
    "eval generation": ["--new-tokens", "4"],
    "eval positions": ["--windows", "1", "--tokens", "128"],
    "suite smoke": _SUITE,
    "suite quick": _SUITE,
    "suite full": _SUITE,
}


def named(path: Path) -> str:
    return str(path.relative_to(ROOT))


def python_pages() -> list[Path]:
    return [p for p in PAGES if any(lang == "python" and need is None for need, lang, _ in snippets(p))]


HERE = (None, "time", "results")  # needs satisfied by small sizes or by the fixture below
ELSEWHERE = ("vllm", "sglang", "gpu", "lm_eval")  # engine tests, tests/gpu and tests/lab/suite/test_lm_eval.py
SLIMKV = [command for need, command in commands() if need in HERE and command.startswith("slimkv ")]


@pytest.mark.parametrize("path", PAGES, ids=named)
def test_blocks_say_their_language(path):
    text = path.read_text(encoding="utf-8")
    assert text.count("```") == 2 * len(snippets(path)), "a fence is open, or has more than a language"
    for _, language, body in snippets(path):
        assert language in ("python", "bash", "text", "json"), (language, body[:80])


@pytest.mark.parametrize("path", sample(python_pages(), 2), ids=named)
def test_python_runs(path, tmp_path, monkeypatch):
    pytest.importorskip("transformers")
    monkeypatch.chdir(tmp_path)
    scope: dict = {}
    for text in SETUP.findall(path.read_text(encoding="utf-8")):
        exec(compile(text, f"{path} (setup)", "exec"), scope)
    for need, language, text in snippets(path):
        if language == "python" and need is None:
            if HUB_NAME in text:
                text = text.replace(HUB_NAME, str(models.folder(models.DEFAULT)))
            text = _with_fewer_tokens(text)
            exec(compile(text, str(path), "exec"), scope)


def _with_fewer_tokens(text: str) -> str:
    """Reduces the thousands of tokens that a calibration reads by default."""
    small = "windows=__import__('torch').arange(64).reshape(1, 64)"
    return re.sub(r"(calibrate_model\(model(?:, \"[^\"]*\")?)", rf"\1, {small}", text)


@pytest.fixture(scope="module")
def workplace(tiny_folder, tmp_path_factory):
    """A folder with every file that the commands name: a config, calibrations, a prompt cache, a text, two suites."""
    from slimkv.cli.app import app
    from slimkv.lab.evals.texts import load_text

    folder = tmp_path_factory.mktemp("documents")
    (folder / "wiki.test.raw").write_text(load_text(), encoding="utf-8")
    (folder / "path" / "to").mkdir(parents=True)
    (folder / "path" / "to" / "config.json").write_bytes((tiny_folder / "config.json").read_bytes())
    model = models.load(str(tiny_folder)).model
    windows = torch.randint(0, 1000, (1, 64), generator=torch.Generator().manual_seed(0))
    for name in ("smollm2", "gemma3", "model"):
        calibrate_model(model, folder / f"{name}.safetensors", windows=windows, budget=4.25)
    cache, ids = SlimKVCache(model, "k4v4"), windows[:, :32]
    with attention(model), torch.no_grad():
        model(ids, past_key_values=cache)
    cache.save(folder / "prompt.safetensors", model, ids)
    for name in ("suite-quick-a", "suite-quick-b"):
        small = ["--parts", "memory", "--format", "k4v4", "--device", "cpu", "--output", str(folder / name)]
        done = CliRunner().invoke(app, ["suite", "smoke", str(tiny_folder), *small])
        assert done.exit_code == 0, done.output
    mine = folder / "cache" / "slimkv" / "models"  # unpacking a model takes most of a minute, so reuse it
    mine.parent.mkdir(parents=True)
    mine.symlink_to(Path(models.folder(models.DEFAULT)).parent, target_is_directory=True)
    return folder


def name_of(command: str) -> str:
    words = command.split()[1:]
    return " ".join(words[:2]) if words[0] in ("eval", "bench", "suite") else words[0]


def first_of_each(commands: list[str]) -> list:
    """All commands. The tail has all but the first of each name, and ``demo``, which test_eval_model.py runs."""
    first = {name_of(command): command for command in reversed(commands) if name_of(command) != "demo"}.values()
    return [c if c in first else pytest.param(c, marks=pytest.mark.tail) for c in commands]


@pytest.mark.parametrize("command", first_of_each(SLIMKV))
def test_slimkv_commands_run(command, workplace, tiny_folder, monkeypatch):
    from slimkv.cli.app import app

    monkeypatch.chdir(workplace)
    monkeypatch.setenv("XDG_CACHE_HOME", str(workplace / "cache"))
    words, name = shlex.split(command)[1:], name_of(command)
    words = [str(tiny_folder) if word in MODELS else word for word in words]
    on_a_model = ("demo", "eval agreement", "eval needle", "eval generation", "eval positions")
    if name in on_a_model and "--model" not in words:
        words += ["--model", str(tiny_folder)]
    if name.startswith("suite ") and len(words) == 2:
        words.append(str(tiny_folder))
    if "auto" in words:
        words[words.index("auto")] = str(workplace / "model.safetensors")
    if name == "demo":
        words += ["--calibration", str(workplace / "model.safetensors")]
    result = CliRunner().invoke(app, [*words, *SMALLER.get(name, [])])
    assert result.exit_code == 0, f"{command}\n{result.output[-2000:]}"


def test_every_command_is_run_by_a_test():
    """Each runs here or in an engine's tests. CI runs ``make`` targets, and installs by ``make test-install``."""
    for need, command in commands():
        assert need in (*HERE, *ELSEWHERE), command
        assert need in ELSEWHERE or command.split()[0] in ("slimkv", "make", "pip", "git", "cd"), command


def test_other_commands_are_known_and_their_arguments_hold():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M))
    for _, command in commands():
        words = shlex.split(command)
        if words[0] == "make":
            assert words[1] in targets, command
        elif words[:2] == ["pip", "install"]:
            extras = re.search(r"\[(.*?)\]", words[2])
            assert words[2].split("[")[0] in ("slimkv", "."), command
            assert " @ " not in words[2] or words[2].endswith(f" @ git+{REPOSITORY}"), command
            assert extras is None or set(extras[1].split(",")) <= set(EXTRAS), command
        elif words[:2] == ["vllm", "serve"]:
            transfer = json.loads(words[words.index("--kv-transfer-config") + 1]) if "CUSTOM" not in words else {}
            if "spec_name" in (cold := transfer.get("kv_connector_extra_config", {})):  # vLLM's own attention
                assert (cold["spec_name"], transfer["kv_connector"]) == ("SlimKVOffloadingSpec", "OffloadingConnector")
                KVCacheConfig.parse(cold["slimkv"])
                continue
            assert words[words.index("--attention-backend") + 1] == "CUSTOM"
            settings = json.loads(words[words.index("--additional-config") + 1])["slimkv"]
            settings = {k: v for k, v in settings.items() if k != "calibration"}  # a file that does not exist here
            KVCacheConfig.parse(settings)
        elif words[0] in ("git", "cd"):
            assert words in (["git", "clone", REPOSITORY], ["cd", "slimkv"]), command
        elif words[:2] == ["python", "-m"]:
            assert words[2].split(".")[0] in ("slimkv", "sglang"), command
        elif words[0] == "python":
            assert (ROOT / words[1]).is_file(), command
        else:
            assert words[0] in ("slimkv", "python", "bash"), command
            assert words[0] != "bash" or (ROOT / words[1]).is_file(), command


def _anchors(path: Path) -> set[str]:
    heads = re.findall(r"^#+ (.*)$", re.sub(r"```.*?```", "", path.read_text(encoding="utf-8"), flags=re.S), re.M)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


@pytest.mark.parametrize("path", PAGES, ids=named)
def test_links_lead_somewhere(path):
    text = re.sub(r"```.*?```", "", path.read_text(encoding="utf-8"), flags=re.S)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if target.startswith(("http://", "https://", "mailto:")):
            continue
        name, _, anchor = target.partition("#")
        file = (path.parent / name).resolve() if name else path
        assert file.exists(), f"{named(path)} links to {target}"
        assert ROOT in file.parents, f"{named(path)} links outside: {target}"
        if anchor and file.suffix == ".md":
            assert anchor in _anchors(file), f"{named(path)} links to {target}"


def test_every_page_is_in_the_navigation():
    navigation = set(re.findall(r": ([\w/-]+\.md)$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), re.M))
    pages = {str(p.relative_to(ROOT / "docs")) for p in (ROOT / "docs").rglob("*.md")}
    assert navigation == {page for page in pages if not page.startswith("lab/")}  # lab notes are linked, not listed
