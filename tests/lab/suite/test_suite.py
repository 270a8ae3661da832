"""Part of ``slimkv suite smoke`` on a small model: files, resuming, failing parts, and the report in a browser."""

from __future__ import annotations

import csv
import html.parser
import json
import shutil
import subprocess
from pathlib import Path

import pytest
from typer.testing import CliRunner

from slimkv.cli.app import app
from slimkv.errors import InputError
from slimkv.lab.suite import parts
from slimkv.lab.suite.compare import as_markdown, compare
from slimkv.lab.suite.runner import DONE, FAILED, REUSED, run_suite
from slimkv.lab.suite.settings import FULL, NAMES, SIZES, make_settings
from slimkv.lab.suite.tasks import TASKS
from slimkv.lab.suite.written import read_results

SLICE = {
    "formats": ("fp8", "turboquant_4bit_nc", "k4v4", "k2v2"), "calibration": "none", "windows": 2, "window_tokens": 48,
    "position_tokens": 64, "needle_contexts": (96,), "needle_depths": (0.5,), "lengths": (160,), "contexts": 1,
    "questions": 2, "decode_context": 32, "decode_tokens": 2, "parts": ("memory", "agreement", "positions", "needle",
    "tasks", "drafts", "generate"),
}  # fmt: skip
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = [
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update",
    "--disable-sync", "--no-first-run",
]  # fmt: skip


def statuses(results) -> dict[str, str]:
    return {part["name"]: part["status"] for part in results["parts"]}


@pytest.fixture(scope="module")
def run(tiny_folder, tmp_path_factory):
    """A finished run: (folder, results, progress steps)."""
    folder, steps, lines = tmp_path_factory.mktemp("suite") / "out", [], []
    settings = make_settings("smoke", str(tiny_folder), device="cpu", **SLICE)
    results = run_suite(settings, folder, lambda what, done, total: steps.append(done / total), lines.append)
    assert lines[-1].startswith(f"[{len(results['parts'])}/{len(results['parts'])}] decoding speed at 32 tokens: done")
    return folder, results, steps


def test_everything_is_measured_for_every_cache(run):
    _, results, steps = run
    assert results["failed"] == []
    assert set(statuses(results).values()) == {DONE}
    assert steps == sorted(steps)
    assert 0 <= steps[0] < steps[-1] <= 1
    assert [p for p in statuses(results) if p.startswith("tasks")] == [f"tasks-{task}-160" for task in TASKS]
    rows = {row["format"]: row for row in results["summary"]["rows"]}
    assert list(rows) == ["raw", "fp8", "turboquant_4bit_nc", "k4v4", "k2v2"]
    for name, row in rows.items():
        assert row["tokens_fit"] > 0
        assert row["decode"]["tokens_per_second"] > 0
        assert row["drafts"]["acceptance_length"] == pytest.approx(
            row["drafts"]["over_raw"] * rows["raw"]["drafts"]["acceptance_length"]
        )
        assert row["needle"]["tried"] == 4
        assert row["answers"]["asked"] >= 5
        assert name == "raw" or row["kl"] > 0
        assert name == "raw" or row["perplexity_test"]["verdict"] in ("not distinguishable", "worse", "better")
        assert name == "raw" or row["answers_test"]["p_corrected"] <= 1
    assert rows["raw"]["bytes_per_token"] > rows["fp8"]["bytes_per_token"] > rows["k4v4"]["bytes_per_token"]
    assert rows["k2v2"]["kl"] > rows["k4v4"]["kl"] > rows["fp8"]["kl"]
    assert ["turboquant_4bit_nc", "k4v4"] in results["summary"]["groups"]


def test_the_tests_agree_with_the_perplexities(run):
    """The paired test reports the same difference as the perplexities."""
    _, results, _ = run
    rows = {row["format"]: row for row in results["summary"]["rows"]}
    for name in ("fp8", "k4v4", "k2v2"):
        relative = rows[name]["perplexity"] / rows["raw"]["perplexity"] - 1
        assert rows[name]["perplexity_test"]["difference"] == pytest.approx(relative, rel=1e-6, abs=1e-9)


def test_files(run):
    folder, results, _ = run
    assert json.loads((folder / "results.json").read_text()) == json.loads(json.dumps(results))
    with (folder / "results.csv").open() as file:
        lines = list(csv.DictReader(file))
    kl = {line["format"]: float(line["value"]) for line in lines if line["metric"] == "kl"}
    assert kl == {row["format"]: row["kl"] for row in results["summary"]["rows"] if "kl" in row}
    exact = [line for line in lines if line["metric"] == "exact_match"]
    assert len(exact) == 5 * len(TASKS)
    assert all(0 <= float(line["low"]) <= float(line["value"]) <= float(line["high"]) <= 1 for line in exact)
    told = (folder / "summary.md").read_text()
    assert "not distinguishable" in told
    assert "| k2v2 |" in told


def test_a_finished_part_is_not_run_again(run, tiny_folder, monkeypatch):
    folder, results, _ = run
    monkeypatch.setattr("slimkv.lab.models.load", lambda *args, **kwargs: pytest.fail("the model was loaded"))
    again = run_suite(make_settings("smoke", str(tiny_folder), device="cpu", **SLICE), folder)
    assert set(statuses(again).values()) == {REUSED}
    assert again["summary"] == results["summary"]


def test_what_changed_is_run_again(run, tiny_folder, tmp_path, monkeypatch):
    copied = tmp_path / "out"
    shutil.copytree(run[0], copied)
    more = {**SLICE, "parts": ("memory", "positions"), "position_tokens": 80}
    more_positions = run_suite(make_settings("smoke", str(tiny_folder), device="cpu", **more), copied)
    assert statuses(more_positions) == {"memory": REUSED, "positions": DONE}
    memory_only = make_settings("smoke", str(tiny_folder), device="cpu", **{**more, "parts": ("memory",)})
    monkeypatch.setattr("slimkv.lab.suite.runner.code_digest", lambda: "another")
    assert statuses(run_suite(memory_only, copied)) == {"memory": DONE}
    kept = next((copied / "parts").glob("memory-*.json"))
    for path in (copied / "parts").glob("memory-*.json"):
        path.write_text(kept.read_text()[:40])  # a truncated file is measured again
    assert statuses(run_suite(memory_only, copied)) == {"memory": DONE}


def test_a_part_that_fails_is_reported_and_the_rest_goes_on(tiny_folder, tmp_path, monkeypatch):
    def broken(*args, **kwargs):
        raise RuntimeError("the <positions> broke")

    monkeypatch.setattr("slimkv.lab.suite.parts.measure_positions", broken)
    words = ["suite", "smoke", str(tiny_folder), "--output", str(tmp_path / "out"), "--parts", "positions,memory",
             "--calibration", "none", "--device", "cpu"]  # fmt: skip
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 1
    results = read_results(tmp_path / "out")
    assert results["failed"] == ["positions"]
    assert {part["name"]: part["status"] for part in results["parts"]} == {"memory": DONE, "positions": FAILED}
    assert "the &lt;positions&gt; broke" in (tmp_path / "out" / "report.html").read_text()
    assert "RuntimeError: the <positions> broke" in (tmp_path / "out" / "summary.md").read_text()
    assert "Traceback" in (tmp_path / "out" / "parts" / "positions-failed.txt").read_text()
    monkeypatch.undo()
    done = CliRunner().invoke(app, [*words, "--json", "--positions", "64"])
    assert done.exit_code == 0, done.output  # the failed part is run again


def test_a_calibration_that_fails_leaves_the_plain_formats(tiny_folder, tmp_path, monkeypatch):
    def broken(*args, **kwargs):
        raise RuntimeError("no calibration")

    monkeypatch.setattr("slimkv.lab.suite.workbench.Workbench.calibrate", broken)
    settings = make_settings("smoke", str(tiny_folder), device="cpu", formats=("k4v4", "k4v4+cal"), parts=("memory",))
    results = run_suite(settings, tmp_path / "out")
    assert results["failed"] == ["calibration"]
    assert results["formats"] == ["raw", "k4v4"]


def test_calibrated_formats(tiny_folder, tmp_path):
    from slimkv import calibrate_model
    from slimkv.lab import models

    model = models.load(str(tiny_folder)).model
    import torch

    windows = torch.randint(0, 1000, (1, 64), generator=torch.Generator().manual_seed(0))
    calibrate_model(model, tmp_path / "c.safetensors", windows=windows)
    more = {**SLICE, "formats": ("k4v4", "k4v4+cal"), "calibration": str(tmp_path / "c.safetensors"),
            "parts": ("memory", "agreement", "generate")}  # fmt: skip
    results = run_suite(make_settings("smoke", str(tiny_folder), device="cpu", **more), tmp_path / "out")
    assert results["failed"] == []
    rows = {row["format"]: row for row in results["summary"]["rows"]}
    assert rows["k4v4"]["bytes_per_token"] == rows["k4v4+cal"]["bytes_per_token"]
    assert rows["k4v4"]["kl"] != rows["k4v4+cal"]["kl"]
    assert rows["k4v4+cal"]["decode"]["tokens_per_second"] > 0
    assert (tmp_path / "out" / "calibration.safetensors").is_file()


def test_two_runs_side_by_side(run, tiny_folder, tmp_path):
    folder, results, _ = run
    more = {**SLICE, "formats": ("k4v4", "k2v2"), "parts": ("memory", "tasks")}
    other = run_suite(make_settings("smoke", str(tiny_folder), device="cpu", **more), tmp_path / "out")
    found = compare(results, other, "one", "two")
    assert found.settings["size.formats"][0] == ("fp8", "turboquant_4bit_nc", "k4v4", "k2v2")
    lines = {(line.format, line.metric, line.task): line for line in found.lines}
    assert lines["k4v4", "answers", ""].verdict == "same"
    assert lines["k2v2", "bytes_per_token", ""].difference == 0
    assert not any(line.format == "fp8" for line in found.lines)
    assert found.only_a > 0
    assert "| k4v4 | answers |" in as_markdown(found)
    done = CliRunner().invoke(app, ["suite", "compare", str(folder), str(tmp_path / "out"), "--json"])
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["only_b"] == found.only_b
    refused = CliRunner().invoke(app, ["suite", "compare", str(folder), str(tmp_path)])
    assert refused.exit_code == 2
    assert "has no results.json" in refused.output


def test_a_model_with_sliding_windows(tiny_folder, tmp_path):
    """A full sliding window cannot be cropped, so each question and the second timing of decoding copy the cache."""
    transformers = pytest.importorskip("transformers")
    config = transformers.Gemma3TextConfig(
        hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
        vocab_size=49152, head_dim=32, max_position_embeddings=256, sliding_window=48, pad_token_id=0,
        layer_types=["sliding_attention", "full_attention"],
    )  # fmt: skip
    model = tmp_path / "model"
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(model)
    for path in tiny_folder.glob("*token*"):
        shutil.copy(path, model)
    more = {**SLICE, "formats": ("k4v4",), "decode_context": 64, "parts": ("tasks", "generate")}
    results = run_suite(make_settings("smoke", str(model), device="cpu", **more), tmp_path / "out")
    assert results["failed"] == []
    assert all(row["decode"]["tokens_per_second"] > 0 for row in results["summary"]["rows"])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"engine": "tgi"}, "unknown engine 'tgi'; known are transformers, vllm"),
        ({"parts": ("speed",)}, "unknown part 'speed'; known are memory"),
        ({"formats": ("k4v4", "k4v4")}, "list each format once"),
        ({"formats": ("raw",)}, "leave out raw, which is always measured"),
        ({"formats": ("k9v9",)}, "k9v9"),
        ({"formats": ("k4v4+cal",), "calibration": "none"}, "needs a calibration"),
        ({"formats": ("calibrated",)}, "name formats such as"),
        ({"lengths": (0,)}, "lengths must be at least 1, not 0"),
        ({"lengths": ()}, "lengths must name at least one"),
        ({"questions": 0}, "questions must be at least 1, not 0"),
        ({"task_folder": "nowhere"}, "there is no folder nowhere"),
    ],
)
def test_wrong_settings_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        make_settings("smoke", "model", device="cpu", **change)


def test_wrong_names_and_folders_are_refused(tiny_folder, tmp_path):
    with pytest.raises(InputError, match="unknown size 'huge'; known are smoke, quick, full"):
        make_settings("huge", "model")
    settings = make_settings("smoke", str(tiny_folder), device="cpu", **SLICE)
    (tmp_path / "mine.txt").write_text("important")
    with pytest.raises(InputError, match="has other files in it"):
        run_suite(settings, tmp_path)
    with pytest.raises(InputError, match="is a file"):
        run_suite(settings, tmp_path / "mine.txt")
    with pytest.raises(InputError, match="cannot be read"):
        run_suite(make_settings("smoke", str(tmp_path / "no-model"), device="cpu"), tmp_path / "out")


def test_sizes_grow_and_lengths_beyond_the_model_are_left_out(tiny_folder, tmp_path):
    assert set(SIZES) == {(name, gpu) for name in NAMES for gpu in (False, True)}
    settings = make_settings(FULL, str(tiny_folder), device="cpu", calibration="none")
    bench = parts.Workbench(settings, tmp_path)
    planned, notes = parts.plan_parts(bench)
    assert any(
        "1,024, 2,048, 4,096 tokens are left out, limited to 512 by the model's positions" in note for note in notes
    )
    assert all(int(part.name.rsplit("-", 1)[1]) <= 512 for part in planned if part.kind == "tasks")
    served = make_settings("smoke", str(tiny_folder), device="cpu", engine="vllm", tasks=("hellaswag",))
    kinds = {part.kind for part in parts.plan_parts(parts.Workbench(served, tmp_path))[0]}
    assert kinds == {"memory", "tasks", "lm-eval"}


class _Page(html.parser.HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.counts: dict[str, int] = {}
        self.links: list[str] = []

    def handle_starttag(self, tag, attrs):
        self.counts[tag] = self.counts.get(tag, 0) + 1
        self.links += [v for k, v in attrs if k in ("src", "href") and v]
        if tag not in ("meta", "link", "br", "img", "line", "circle", "rect"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        if tag not in ("line", "circle", "rect"):
            assert self.open.pop() == tag


def test_the_page_is_whole_and_self_contained(run):
    text = (run[0] / "report.html").read_text()
    page = _Page()
    page.feed(text)
    assert page.open == []
    assert page.links == []
    assert "http" not in text.split("</style>")[1].replace("http://www.w3.org", "")
    assert page.counts["svg"] == 6
    for told in ("Quality at equal bytes", "Synthetic tasks", "Task by task", "Needle in a haystack", "Findings"):
        assert told in text


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine (Debian: apt-get install chromium)")
def test_the_page_in_a_browser(run, tmp_path):
    page, profile = run[0] / "report.html", tmp_path / "profile"
    script = (
        "<script>document.title = [...document.querySelectorAll('svg, .card')].map(e => {"
        " const r = e.getBoundingClientRect();"
        " return r.width > 100 && r.height > 40 && r.right <= innerWidth ? 'ok' : 'BAD'; }).join(' ')"
        " + ' ' + [...document.querySelectorAll('svg text')].map(e => {"
        " const r = e.getBoundingClientRect(), s = e.closest('svg').getBoundingClientRect();"
        " return r.left >= s.left - 1 && r.right <= s.right + 1 ? '' : 'CUT:' + e.textContent; }).join('')"
        " + ' wide ' + (document.documentElement.scrollWidth > innerWidth)"
        " + ' ' + getComputedStyle(document.body).backgroundColor;</script>"
    )
    probe = tmp_path / "probe.html"
    probe.write_text(page.read_text().replace("</body>", script + "</body>"))
    for size, more, colour in (
        ("1240,1800", [], "rgb(244, 246, 250)"),
        ("420,1800", ["--blink-settings=preferredColorScheme=0"], "rgb(17, 21, 29)"),
    ):
        sized = [f"--user-data-dir={profile}", f"--window-size={size}", "--dump-dom", *more]
        command = [CHROMIUM, *FLAGS, *sized, Path(probe).as_uri()]
        done = subprocess.run(command, check=True, timeout=240, capture_output=True, text=True)
        title = done.stdout.split("<title>")[1].split("</title>")[0]
        assert f"wide false {colour}" in title, title
        assert "BAD" not in title
        assert "CUT" not in title
        assert title.count("ok") >= 12
