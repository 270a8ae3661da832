"""lm-evaluation-harness: raw pages score exactly like its own Hugging Face model, packed pages do not."""

from __future__ import annotations

import re
import shlex
import shutil
from pathlib import Path

import pytest

from documents import commands
from slimkv.errors import InputError
from slimkv.lab import models
from slimkv.lab.evals.harness import STOCK, CacheKind

pytest.importorskip("lm_eval", reason="needs lm-evaluation-harness: make test-suite installs it")

HERE = Path(__file__).parent / "lm_eval_tasks"
TASKS = ("slimkv_seasons", "slimkv_spelling")
RAW_PAGES = CacheKind("raw pages", "krawfp32vrawfp32")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder of tasks whose data the harness can find."""
    target = tmp_path_factory.mktemp("tasks")
    for path in HERE.iterdir():
        shutil.copy(path, target)
    for path in target.glob("*.yaml"):
        path.write_text(path.read_text().replace("PATH", str(target)))
    return str(target)


@pytest.fixture(scope="module")
def answered(tiny_folder, folder):
    """Scores of the harness's own model, and of our adapter with several caches."""
    from lm_eval.models.huggingface import HFLM

    from slimkv.lab.suite.lm_eval import evaluate, slimkv_lm

    loaded = models.load(str(tiny_folder))
    stock = HFLM(pretrained=loaded.model, tokenizer=loaded.tokenizer, batch_size=1)
    found = {"stock": evaluate(stock, TASKS, None, folder)}
    for kind in (STOCK, RAW_PAGES, CacheKind("k4v4", "k4v4"), CacheKind("k2v2", "k2v2")):
        model = slimkv_lm(loaded.model, loaded.tokenizer, kind)
        found[kind.name] = {**evaluate(model, TASKS, None, folder), "loss": _losses(model)}
    found["stock"]["loss"] = _losses(stock)
    return found


def _losses(model) -> list[tuple[float, bool]]:
    from lm_eval.api.instance import Instance

    pairs = [("Question: Which season is the coldest?\nAnswer:", " winter, of course"), ("One, two,", " three, four")]
    asked = [Instance("loglikelihood", {}, pair, i) for i, pair in enumerate(pairs)]
    return model.loglikelihood(asked)


@pytest.mark.parametrize("cache", ["raw", "raw pages"])
def test_raw_scores_are_those_of_the_harness(answered, cache):
    assert answered[cache]["results"] == answered["stock"]["results"]
    assert answered[cache]["samples"] == answered["stock"]["samples"]
    for (ours, greedy), (theirs, expected) in zip(answered[cache]["loss"], answered["stock"]["loss"], strict=True):
        assert ours == (theirs if cache == "raw" else pytest.approx(theirs, rel=1e-5))
        assert greedy == expected


def test_packed_caches_are_really_used(answered):
    stock, packed, coarse = (answered[name]["loss"] for name in ("stock", "k4v4", "k2v2"))
    for one, other in ((stock, packed), (stock, coarse), (packed, coarse)):
        assert min(abs(a[0] - b[0]) for a, b in zip(one, other, strict=True)) > 1e-3


def test_what_the_harness_gives(answered):
    results, samples = answered["k4v4"]["results"], answered["k4v4"]["samples"]
    assert set(results) == set(TASKS)
    assert {"acc", "acc_norm"} <= set(results["slimkv_seasons"])
    assert len(samples["slimkv_seasons"]["acc"]) == 10
    assert sum(samples["slimkv_seasons"]["acc"]) / 10 == pytest.approx(results["slimkv_seasons"]["acc"])
    assert len(samples["slimkv_spelling"]["exact_match"]) == 4


def test_unknown_tasks_are_refused(tiny_folder, folder):
    from slimkv.lab.suite.lm_eval import evaluate, slimkv_lm

    loaded = models.load(str(tiny_folder))
    model = slimkv_lm(loaded.model, loaded.tokenizer, STOCK)
    with pytest.raises(InputError, match="has no task nonsense"):
        evaluate(model, ("nonsense",), None, folder)


def test_the_guides_command(tiny_folder, folder, tmp_path):
    from typer.testing import CliRunner

    from slimkv.cli.app import app

    (command,) = [c for need, c in commands() if need == "lm_eval" and c.startswith("slimkv ")]
    words = shlex.split(command)[1:]
    words[words.index("MODEL")] = str(tiny_folder)
    words[words.index("--tasks") + 1] = ",".join(TASKS)
    small = ["--task-folder", folder, "--limit", "2", "--parts", "lm-eval", "--format", "k4v4", "--device", "cpu"]
    done = CliRunner().invoke(app, [*words, *small, "--output", str(tmp_path / "out")])
    assert done.exit_code == 0, done.output
    assert TASKS[0] in (tmp_path / "out" / "report.html").read_text(encoding="utf-8")


def test_the_guides_python(tiny_folder, folder, monkeypatch, capsys):
    """Unchanged except for a small model and a task that needs no network."""
    import lm_eval
    from lm_eval.tasks import TaskManager

    guide = (Path(__file__).parents[3] / "docs" / "guides" / "suite.md").read_text(encoding="utf-8")
    code = re.search(r"<!-- needs: lm_eval -->\n```python\n(.*?)```", guide, re.S)[1]
    assert 'tasks=["hellaswag"], limit=20' in code
    code = code.replace("hellaswag", "slimkv_seasons").replace("limit=20", "limit=2")
    manager, evaluate = TaskManager(include_path=folder, include_defaults=False), lm_eval.simple_evaluate
    monkeypatch.setattr(lm_eval, "simple_evaluate", lambda **given: evaluate(**given, task_manager=manager))
    monkeypatch.setattr(models, "default", lambda: models.load(str(tiny_folder)))
    exec(compile(code, "suite.md", "exec"), {})
    assert "slimkv_seasons" in capsys.readouterr().out
