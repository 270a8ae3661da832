"""The report of the demo, from a real run on a small model. A real browser renders it."""

from __future__ import annotations

import html.parser
import json
import shutil
import struct
import subprocess
import zlib

import pytest
import torch

from slimkv.integrations.transformers.calibration.collect import gather_calibration
from slimkv.integrations.transformers.calibration.samples import random_windows
from slimkv.lab.demo.report import write_report
from slimkv.lab.demo.showcase import LONG_QUESTION, SHORT_QUESTION, Reader, long_prompt, read_together, run_showcase
from slimkv.lab.evals.harness import STOCK, CacheKind
from slimkv.lab.evals.texts import load_text
from slimkv.lab.report.charts import Axis, Series, chart

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = [
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update",
    "--disable-sync", "--no-first-run",
]  # fmt: skip


@pytest.fixture(scope="module")
def report(small, tmp_path_factory):
    seen = []
    calibration = gather_calibration(small.model, random_windows(small.model.config, 1, 64, seed=0), costs=False)
    showcase = run_showcase(
        small.model, small.tokenizer, calibration, name="small <model>", new_tokens=6, long_new_tokens=3, windows=1,
        text_tokens=600, window_tokens=64, shown=lambda question, texts: seen.append((question, texts)),
    )  # fmt: skip
    assert [question for question, _ in seen] == [SHORT_QUESTION] * 6 + [LONG_QUESTION] * 3
    assert list(seen[0][1]) == ["DynamicCache", "k4v4+cal"]
    assert list(seen[-1][1]) == ["DynamicCache", "k4v4+cal", "k4v4", "turboquant_4bit_nc", "fp8"]
    assert len(seen[5][1]["k4v4+cal"]) > len(seen[0][1]["k4v4+cal"])
    return showcase, *write_report(showcase, tmp_path_factory.mktemp("report"))


class _Page(html.parser.HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.counts: dict[str, int] = {}
        self.links: list[str] = []

    def handle_starttag(self, tag, attrs):
        self.counts[tag] = self.counts.get(tag, 0) + 1
        self.links += [v for k, v in attrs if k in ("src", "href") and v]
        if tag not in ("meta", "link", "br", "img", "line", "circle"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        if tag not in ("line", "circle"):
            assert self.open.pop() == tag


def test_report_is_whole_and_self_contained(report):
    _, page, data = report
    text = page.read_text()
    parsed = _Page()
    parsed.feed(text)
    assert parsed.open == []
    assert parsed.links == []
    assert "http" not in text.split("</style>")[1].replace("http://www.w3.org", "")
    assert parsed.counts["svg"] == 2
    assert "small &lt;model&gt;" in text
    stored = json.loads(data.read_text())
    assert text.index("Quality at equal bytes") < text.index("Memory by length") < text.index("A question about")
    rows = {row["format"]: row for row in stored["quality"]["rows"]}
    assert rows["k4v4"]["bytes_per_token"] == rows["k4v4+cal"]["bytes_per_token"]
    assert rows["k4v4"]["kl"] != rows["k4v4+cal"]["kl"]
    for question in (stored["short"], stored["long"]):
        stock, *packed = question["answers"]
        assert stock["first_difference"] is None
        assert all(a["cache_bytes"] < a["bf16_bytes"] for a in packed)
    assert stored["long"]["context_tokens"] > 600
    assert {"command", "versions", "date"} <= set(stored["run"])
    plain = stored["memory"].pop("bf16")
    assert all(p < q for packed in stored["memory"].values() for p, q in zip(packed, plain, strict=True))


def test_a_prompt_that_is_read_once_fills_a_cache_as_its_own_reading_would(small):
    ids = torch.randint(1, 127, (1, 50), generator=torch.Generator().manual_seed(0))
    kinds = [STOCK, CacheKind("k4v4", "k4v4"), CacheKind("k2v2", "k2v2")]
    together, alone = ([Reader(small.model, kind) for kind in kinds] for _ in range(2))
    read_together(together, ids)
    for one, other in zip(together, alone, strict=True):
        other.read(ids)
        assert one.next == other.next
        assert torch.equal(one.read(ids[:, :1]), other.read(ids[:, :1]))


def test_a_model_of_few_positions_gets_no_long_question(small, monkeypatch):
    monkeypatch.setattr(small.model.config, "max_position_embeddings", 256)
    assert long_prompt(small.model, small.tokenizer, load_text(), 3072, 24) is None


def test_charts_refuse_nothing_to_draw():
    with pytest.raises(ValueError, match="needs points"):
        chart("empty", Axis("x"), Axis("y"), [Series("none", [], [])])


def _pixels(png: bytes) -> tuple[int, int, bytes]:
    """Width, height and RGB(A) rows of a PNG without interlacing."""
    width, height, depth, colour = struct.unpack(">IIBB", png[16:26])
    assert depth == 8
    channels = {2: 3, 6: 4}[colour]
    body, at = b"", 8
    while at < len(png):
        size, kind = struct.unpack(">I4s", png[at : at + 8])
        body += png[at + 8 : at + 8 + size] if kind == b"IDAT" else b""
        at += 12 + size
    raw = zlib.decompress(body)
    assert len(raw) == height * (1 + width * channels)
    return width, height, raw


@pytest.mark.tail
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine (Debian: apt-get install chromium)")
def test_report_in_a_browser(report, tmp_path):
    _, page, _ = report
    shot, profile = tmp_path / "report.png", tmp_path / "profile"
    common = [CHROMIUM, *FLAGS, f"--user-data-dir={profile}", "--window-size=1240,1800"]
    subprocess.run([*common, f"--screenshot={shot}", page.as_uri()], check=True, timeout=120, capture_output=True)
    width, height, raw = _pixels(shot.read_bytes())
    assert (width, height) == (1240, 1800)
    assert len(set(raw[i : i + 3] for i in range(0, len(raw) - 3, 997))) > 8  # the page is not blank
    script = (
        "<script>document.title = [...document.querySelectorAll('svg, .card')].map(e => {"
        " const r = e.getBoundingClientRect();"
        " return r.width > 100 && r.height > 40 && r.right <= innerWidth ? 'ok' : 'BAD'; }).join(' ')"
        " + ' wide ' + (document.documentElement.scrollWidth > innerWidth);</script>"
    )
    dark = [*common, "--blink-settings=preferredColorScheme=0", f"--screenshot={shot}", page.as_uri()]
    subprocess.run(dark, check=True, timeout=120, capture_output=True)
    corners = [tuple(x[1:4]) for x in (raw, _pixels(shot.read_bytes())[2])]  # PNG filters keep the first pixel as it is
    assert corners == [(0xF4, 0xF6, 0xFA), (0x11, 0x15, 0x1D)]
    for size in ("1240,1800", "700,1800", "420,1800"):
        probe = tmp_path / "probe.html"
        probe.write_text(page.read_text().replace("</body>", script + "</body>"))
        sized = [f"--user-data-dir={profile}", f"--window-size={size}", "--dump-dom"]
        command = [CHROMIUM, *FLAGS, *sized, probe.as_uri()]
        done = subprocess.run(command, check=True, timeout=120, capture_output=True, text=True)
        title = done.stdout.split("<title>")[1].split("</title>")[0]
        assert title.endswith("wide false"), title
        assert "BAD" not in title
        assert title.count("ok") >= 10
