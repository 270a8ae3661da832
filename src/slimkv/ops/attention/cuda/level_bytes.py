"""Levels of codes as byte operands for the integer tensor cores."""

from __future__ import annotations

from functools import lru_cache

from slimkv.codec.byte_levels import byte_words
from slimkv.codec.codebook import codebook
from slimkv.spec import Kind, TensorFormat


def in_bytes(fmt: TensorFormat) -> bool:
    """Whether the integer tensor cores can multiply codes of this format."""
    return fmt.kind == Kind.UNIFORM or (fmt.kind == Kind.LLOYD and fmt.bits <= 4)


@lru_cache(maxsize=64)
def level_bytes(fmt: TensorFormat, dim: int) -> tuple[int, int]:
    """Two words of bytes b = level + 63.5, by code; at 4 bits x by magnitude, b = x ^ 0xFF (positive) or x ^ 0x80."""
    if not in_bytes(fmt) or fmt.bits > 4:
        return 0, 0
    if fmt.kind == Kind.UNIFORM:
        return byte_words(list(range(8)))
    levels = codebook(fmt.bits, dim).levels_by_code.tolist()
    if fmt.bits == 4:
        return byte_words([0xFF ^ int(level + 63.5) for level in levels[8:]])
    return byte_words([int(level + 63.5) for level in levels + levels[-1:] * 6])
