"""Arbitrary format names, sizes and configurations raise a SlimKVError or give something usable."""

from __future__ import annotations

import pytest

pytest.importorskip("hypothesis")

from budget import fuzz
from hypothesis import example, given
from hypothesis import strategies as st

from slimkv import CodecSpec, KVCacheConfig, PageLayout
from slimkv.config import FRESH
from slimkv.errors import SlimKVError
from slimkv.memory_plan import parse_size
from slimkv.spec import BLOCK_SIZES, parse_format

PIECES = [
    "k",
    "v",
    "u",
    "ur",
    "fp8",
    "raw",
    "rawbf16",
    "rawfp32",
    "turboquant_",
    "4bit",
    "_nc",
    "+",
    "-",
    " ",
    "0",
    "\0",
]
WORDS = st.one_of(
    st.text(max_size=12),
    st.lists(st.one_of(st.sampled_from(PIECES), st.integers(-3, 99).map(str)), max_size=6).map("".join),
    st.builds(lambda k, v: f"k{k}v{v}", st.integers(0, 10), st.integers(0, 10)),
)
ANYTHING = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), WORDS, st.binary(max_size=4),
    st.lists(st.integers(), max_size=3),
)  # fmt: skip
FIELDS = [
    "format",
    "layers",
    "fresh",
    "sink_tokens",
    "recent_tokens",
    "calibration",
    "key_policy",
    "seed",
    "backend",
    "x",
]


def check_format(word) -> None:
    try:
        parse_format(word)
    except SlimKVError:
        return
    spec = CodecSpec.parse(word, 64)
    assert spec.format == word.strip().lower()
    again = CodecSpec.parse(spec.canonical_format, 64)
    assert (again.key.kind, again.key.bits, again.value.kind) == (spec.key.kind, spec.key.bits, spec.value.kind)
    assert PageLayout(spec, 16).page_bytes > 0


def check_sizes(word, head_dim, value_dim, block_size) -> None:
    try:
        layout = PageLayout(CodecSpec.parse(word, head_dim, value_dim), block_size)
    except SlimKVError:
        return
    assert 0 < layout.content_bytes <= layout.page_bytes
    assert layout.row_bytes * layout.block_size == layout.content_bytes


def check_config(fields) -> None:
    try:
        config = KVCacheConfig.parse(fields)
    except SlimKVError:
        return
    assert config.fresh in FRESH
    try:
        formats = config.layer_formats(4)
    except SlimKVError:
        return
    for name in formats:
        check_format(name)


def check_size(text) -> None:
    try:
        assert parse_size(text) >= 0
    except SlimKVError:
        return


SIZES = (
    st.sampled_from(["k4v4", "k3v5", "fp8", "ku4vfp8"]), st.one_of(ANYTHING, st.integers(0, 1100)),
    st.one_of(st.none(), ANYTHING, st.integers(0, 1100)), st.one_of(ANYTHING, st.sampled_from(BLOCK_SIZES)),
)  # fmt: skip
LAYERS = st.dictionaries(st.one_of(WORDS, st.integers(-9, 9)), WORDS, max_size=3)
CONFIGS = st.one_of(ANYTHING, st.dictionaries(st.sampled_from(FIELDS), st.one_of(ANYTHING, LAYERS), max_size=4))
MEMORY = st.one_of(ANYTHING, st.builds(lambda n, u: f"{n}{u}", st.floats(), st.sampled_from(["GiB", "MB", "", "k"])))


@fuzz(600)
@given(st.one_of(WORDS, ANYTHING))
@example("k4v4 ")
def test_format_names(word):
    check_format(word)


@fuzz(400)
@given(*SIZES)
def test_sizes(word, head_dim, value_dim, block_size):
    check_sizes(word, head_dim, value_dim, block_size)


@fuzz(500)
@given(CONFIGS)
def test_configurations(fields):
    check_config(fields)


@fuzz(300)
@given(MEMORY)
def test_memory_sizes(text):
    check_size(text)


@pytest.mark.slow
@fuzz(50_000)
@given(st.one_of(WORDS, ANYTHING), st.tuples(*SIZES), CONFIGS, MEMORY)
def test_names_at_length(word, sizes, fields, memory):
    check_format(word)
    check_sizes(*sizes)
    check_config(fields)
    check_size(memory)
