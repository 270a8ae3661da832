"""The constants that launchers and CUDA sources share are equal."""

from __future__ import annotations

import re

import host

from slimkv.ops.cuda import constants


def _enum(name: str) -> dict[str, int]:
    text = (host.SOURCES / "common" / "types.cuh").read_text()
    body = re.search(rf"enum {name} {{(.*?)}}", text)
    assert body is not None
    return {word: int(number) for word, number in re.findall(r"(\w+) = (\d+)", body[1])}


def test_the_sources_number_kinds_and_dtypes_as_the_launchers_do():
    assert _enum("Kind") == {kind.name: n for kind, n in constants.KIND_NUMBERS.items()}
    assert _enum("DType") == {str(dtype)[6:].upper(): n for dtype, n in constants.DTYPE_NUMBERS.items()}
