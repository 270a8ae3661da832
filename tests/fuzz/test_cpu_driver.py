"""Random calls of the compiled CPU kernels by the native driver; the slow tests also use sanitizers."""

from __future__ import annotations

import pytest

pytest.importorskip("hypothesis")

import cpu_driver
from budget import count

from slimkv.ops.cpu import isa
from slimkv.ops.cpu.compiler import find_compiler

pytestmark = pytest.mark.skipif(find_compiler() is None, reason="needs a C++ compiler")


@pytest.fixture(scope="module")
def layouts(tmp_path_factory):
    path = tmp_path_factory.mktemp("layouts") / "layouts"
    cpu_driver.write_layouts(cpu_driver.random_layouts(60, 0), path)
    return path


def test_random_calls(layouts, tmp_path):
    cpu_driver.run(cpu_driver.build(tmp_path, sanitize=False), layouts, 0, count(15_000))


@pytest.mark.slow
@pytest.mark.parametrize("name", [isa.find().name, "generic"])
@pytest.mark.parametrize("threads", [1, 3])
def test_random_calls_under_sanitizers(name, threads, layouts, tmp_path):
    driver = cpu_driver.build(tmp_path, sanitize=True, name=name)
    cpu_driver.run(driver, layouts, 10**9, count(50_000), threads)


@pytest.mark.slow
def test_a_million_random_calls(tmp_path):
    many = tmp_path / "layouts"
    cpu_driver.write_layouts(cpu_driver.random_layouts(400, 1), many)
    cpu_driver.run(cpu_driver.build(tmp_path, sanitize=False), many, 0, count(1_000_000))
