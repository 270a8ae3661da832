"""The demonstration's report: made from a real run on a small model, and looked at in a real browser."""

from __future__ import annotations

import html.parser
import json
import shutil
import struct
import subprocess
import zlib

import pytest

from slimkv.evals.report import write_report
from slimkv.evals.showcase import run_showcase
from slimkv.evals.svg import Axis, Series, chart

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = [
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update",
    "--disable-sync", "--no-first-run",
]  # fmt: skip


@pytest.fixture(scope="module")
def report(small, tmp_path_factory):
    seen = []
    showcase = run_showcase(
        small.model, small.tokenizer, name="small <model>", formats=("k3v3", "k4v4", "k6v6"), new_tokens=6, windows=1,
        window_tokens=64, question="long enough a question?", shown=lambda stock, packed: seen.append((stock, packed)),
    )  # fmt: skip
    assert len(seen) == 6
    assert len(seen[-1][0]) > len(seen[0][0])
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
    assert parsed.counts["svg"] == 3
    assert "small &lt;model&gt;" in text
    stored = json.loads(data.read_text())
    assert stored["quality"]["rows"][1]["format"] == "k4v4"
    assert stored["answers"][1]["cache_bytes"] < stored["answers"][1]["bf16_bytes"]
    assert {"command", "versions", "date"} <= set(stored["run"])
    plain, *packed = stored["memory"]
    assert plain["format"] == "bf16"
    assert all(p < q for curve in packed for p, q in zip(curve["bytes"], plain["bytes"], strict=True))


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


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine (Debian: apt-get install chromium)")
def test_report_in_a_browser(report, tmp_path):
    _, page, _ = report
    shot, profile = tmp_path / "report.png", tmp_path / "profile"
    common = [CHROMIUM, *FLAGS, f"--user-data-dir={profile}", "--window-size=1240,1800"]
    subprocess.run([*common, f"--screenshot={shot}", page.as_uri()], check=True, timeout=120, capture_output=True)
    width, height, raw = _pixels(shot.read_bytes())
    assert (width, height) == (1240, 1800)
    assert len(set(raw[i : i + 3] for i in range(0, len(raw) - 3, 997))) > 8  # not a blank page
    script = (
        "<script>document.title = [...document.querySelectorAll('svg, .card')].map(e => {"
        " const r = e.getBoundingClientRect();"
        " return r.width > 100 && r.height > 40 && r.right <= innerWidth ? 'ok' : 'BAD'; }).join(' ')"
        " + ' wide ' + (document.documentElement.scrollWidth > innerWidth);</script>"
    )
    for size in ("1240,1800", "700,1800"):
        probe = tmp_path / "probe.html"
        probe.write_text(page.read_text().replace("</body>", script + "</body>"))
        sized = [f"--user-data-dir={profile}", f"--window-size={size}", "--dump-dom"]
        command = [CHROMIUM, *FLAGS, *sized, probe.as_uri()]
        done = subprocess.run(command, check=True, timeout=120, capture_output=True, text=True)
        title = done.stdout.split("<title>")[1].split("</title>")[0]
        assert title.endswith("wide false"), title
        assert "BAD" not in title
        assert title.count("ok") >= 10
