"""The documentation agrees with the code."""

import importlib.util
import re
import tomllib
from pathlib import Path

import pytest
import torch

import slimkv
from slimkv import Codec, CodecSpec, PageLayout
from slimkv.spec import LAYOUT_VERSION

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "slimkv"


def text(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def test_every_room_is_in_the_map_and_nothing_else():
    listed = set(re.findall(r"`([a-z0-9_.]+)`", " ".join(re.findall(r"^\|(.*?)\|", text("docs/structure.md"), re.M))))
    listed -= {"main"}
    modules = {
        ".".join(path.relative_to(SOURCE).with_suffix("").parts).removesuffix(".__init__")
        for path in SOURCE.rglob("*.py")
        if path.name != "__main__.py"  # it only runs the command line
    }
    rooms = {"ops", "integrations", "lab"}  # in these folders, each subfolder has one line
    known = {m for m in modules if not (m.split(".")[0] in rooms and m.count(".") > 1)} - {"__init__"}
    packages = {"codec", "ops", "cache", "integrations", "lab"}  # these are headings of the map
    assert known - packages - listed == set(), "modules without a line in docs/structure.md"
    assert listed <= modules, "docs/structure.md names modules that do not exist"


def test_the_bytes_table_of_the_readme():
    table = text("README.md").split("<!-- bytes table")[1].split("<!-- end -->")[0]
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines() if line.startswith("|")
    ]
    words = rows[0][1:]
    assert len(words) >= 8
    assert len(rows) >= 7
    for row in rows[2:]:
        for word, cell in zip(words, row[1:], strict=True):
            layout = PageLayout(CodecSpec.parse(word, int(row[0])), 16)
            assert cell == f"{layout.bytes_per_token:g} ({layout.compression_ratio:.2f}\N{MULTIPLICATION SIGN})", (
                word,
                row[0],
            )


def test_the_readmes_chart_and_figures_are_those_of_the_reports():
    spec = importlib.util.spec_from_file_location("readme", ROOT / "benchmarks" / "readme.py")
    readme = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(readme)
    assert readme.filled(text("README.md")) == text("README.md"), "run: python benchmarks/readme.py"
    assert readme.chart() == text("docs/images/serving.svg"), "run: python benchmarks/readme.py"


def test_the_codec_in_the_quick_start():
    code = next(x for x in re.findall(r"```python\n(.*?)```", text("docs/guides/quickstart.md"), re.S) if "Codec" in x)
    scope: dict = {}
    exec(compile(code, "quickstart.md", "exec"), scope)
    assert scope["packed"].shape == (8, 1024, 66)
    assert scope["restored"].shape == (8, 1024, 128)
    assert scope["restored"].dtype == torch.float32
    assert scope["scores"].shape == (8, 1, 1024)


def test_the_page_example():
    layout = PageLayout(CodecSpec.parse("k4v4", 128), 16)
    assert (layout.key.codes_offset, layout.value.codes_offset) == (0, 1024)
    assert (layout.key.field_offset(0), layout.value.field_offset(0)) == (2048, 2080)
    assert layout.page_bytes == 2112
    assert f"layout version {LAYOUT_VERSION}" in text("docs/design/page-format.md")


def test_versions_agree():
    assert f"## {slimkv.__version__}" in text("CHANGELOG.md")
    pins = dict(re.findall(r"^([\w.-]+)==(\S+)$", text("requirements/ci.txt") + text("requirements/torch.txt"), re.M))
    assert pins["torch"] == "2.13.0"
    project = tomllib.loads(text("pyproject.toml"))["project"]
    assert set(project["optional-dependencies"]) >= {"cli", "triton", "transformers", "vllm", "sglang", "eval", "dev"}
    assert project["scripts"]["slimkv"] == "slimkv.cli:main"


@pytest.mark.parametrize("format", re.findall(r"^\| `(\w+)` \| [A-Za-z]", text("docs/design/codec.md"), re.M))
def test_bytes_in_the_outlier_table(format):
    row = next(line for line in text("docs/design/codec.md").splitlines() if line.startswith(f"| `{format}` |"))
    assert Codec.from_format(format, 128).compression_ratio() == 512 / float(row.split("|")[3])
