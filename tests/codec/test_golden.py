"""The bytes of pages are fixed by a checked-in file: a change of the format must fail here.

After an intended change, run ``pytest tests/codec/test_golden.py --regenerate-golden``. If earlier pages become
unreadable (anything but "encodings" changed), raise ``LAYOUT_VERSION`` in ``slimkv.spec`` first.
"""

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest
import torch

from page_blocks import pack_block
from slimkv import Codec, CodecSpec, Encoded, PageLayout
from slimkv.codec import pack
from slimkv.codec.codebook import codebook
from slimkv.codec.quantize import becomes_short
from slimkv.codec.rotation import signed_hadamard
from slimkv.spec import DEFAULT_SEED, LAYOUT_VERSION, Kind, ScalePolicy

FILE = Path(__file__).parent.parent / "golden" / "pages.json"
FORMATS = [
    *(f"k{b}v{b}" for b in range(1, 9)),
    *(f"ku{b}vu{b}" for b in range(2, 9)),
    *(
        "k5v4",
        "turboquant_k8v4",
        "turboquant_4bit_nc",
        "turboquant_k3v4_nc",
        "turboquant_3bit_nc",
        "kur4vur4",
        "fp8",
        "raw",
        "krawfp32vrawfp16",
        "k1v7",
    ),
]
DIMS = [(64, 64), (80, 80), (96, 96), (128, 128), (192, 128), (256, 256), (576, 512)]
BLOCKS = (1, 16, 64)
CODEBOOK_DIMS = (16, 64, 80, 96, 112, 128, 192, 256, 512, 576, 1024)


def integers(count: int, seed: int) -> np.ndarray:
    """``count`` pseudo-random 32-bit integers, from integer arithmetic that does not depend on any library."""
    out, state = np.empty(count, dtype=np.int64), seed
    for i in range(count):
        state = (state * 6364136223846793005 + 1442695040888963407) % 2**64
        out[i] = state >> 32
    return out


POOL = integers(1 << 16, 2026)


def numbers(shape: tuple[int, ...], offset: int) -> np.ndarray:
    """Integers of 0 .. 2^32 - 1 from the pool."""
    return POOL[(np.arange(np.prod(shape)) * 3 + offset) % len(POOL)].reshape(shape)


def heavy_vectors(tokens: int, dim: int, offset: int) -> torch.Tensor:
    """Vectors of exact binary fractions with a few large coordinates and very different norms."""
    drawn = numbers((tokens, dim), offset)
    value = (drawn % 65536 - 32768) * np.where(drawn >> 16 & 15, 1, 16) * 2.0**-12
    return torch.tensor(value * 2.0 ** (np.arange(tokens) % 13 - 6)[:, None], dtype=torch.float32)


def digest(data: torch.Tensor | np.ndarray) -> str:
    array = data.numpy() if isinstance(data, torch.Tensor) else np.ascontiguousarray(data)
    return hashlib.sha256(array.tobytes()).hexdigest()[:24]


def arbitrary(side, tokens: int, offset: int) -> Encoded:
    codes = numbers((tokens, side.dim), offset)
    codes = codes - 2**31 if side.format.bits == 32 else codes % (1 << side.format.bits)
    fields = numbers((tokens, side.format.field_count), offset + 7) % 65536
    dtype = torch.int32 if side.format.bits > 8 else torch.uint8
    return Encoded(torch.tensor(codes).to(dtype), torch.tensor(fields, dtype=torch.int32))


def layout_entries() -> dict[str, str]:
    """The positions of bytes: digests of pages with arbitrary codes and fields."""
    out = {}
    for format in FORMATS:
        for key_dim, value_dim in DIMS:
            for block in BLOCKS:
                layout = PageLayout(CodecSpec.parse(format, key_dim, value_dim), block)
                tokens = block - block // 4
                page = pack_block(layout, arbitrary(layout.key, tokens, 0), arbitrary(layout.value, tokens, 11))
                out[f"{format} {key_dim}/{value_dim} x{block}"] = f"{layout.page_bytes} {digest(page)}"
    return out


def encoding_entries() -> dict[str, str]:
    """The codes and fields of vectors, for every format and policy."""
    out = {}
    for format in FORMATS:
        for key_dim, value_dim in DIMS:
            for policy in ScalePolicy:
                spec = CodecSpec.parse(format, key_dim, value_dim, key_policy=policy, value_policy=policy)
                if policy != ScalePolicy.NORM and Kind.LLOYD not in (spec.key.kind, spec.value.kind):
                    continue
                name = f"{format} {key_dim}/{value_dim} {policy}"
                rows = [compressed(Codec(spec), spec, side) for side in ("key", "value")]
                out[name] = " ".join(map(digest, rows))
                if becomes_short(spec.key, torch.bfloat16, key_dim):
                    rows = [compressed(Codec(spec), spec, side, torch.bfloat16) for side in ("key", "value")]
                    out[f"{name} of bfloat16"] = " ".join(map(digest, rows))
    return out


def compressed(codec: Codec, spec: CodecSpec, side: str, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    fmt, dim = getattr(spec, side), getattr(spec, f"{side}_dim")
    x = heavy_vectors(24, dim, 5).to(dtype)
    x = x.to(getattr(torch, fmt.raw_dtype)) if fmt.kind == Kind.RAW else x
    return codec.pack_key(x) if side == "key" else codec.pack_value(x)


def table_entries() -> dict[str, str]:
    """Levels, units and rotations, which give the codes their meaning."""
    out = {}
    for dim in CODEBOOK_DIMS:
        out[f"rotation {dim}"] = digest(signed_hadamard(dim, DEFAULT_SEED))
        for bits in range(1, 9):
            book = codebook(bits, dim)
            out[f"codebook {bits} bits {dim}"] = f"{book.unit} {digest((book.levels * 128).astype(np.int64))}"
    return out


def everything() -> dict:
    small = PageLayout(CodecSpec.parse("k3v2", 16), 16)
    page = pack_block(small, arbitrary(small.key, 16, 0), arbitrary(small.value, 16, 11))
    return {
        "layout_version": LAYOUT_VERSION,
        "page": {"k3v2 16 x16": page.numpy().tobytes().hex()},
        "layouts": layout_entries(),
        "encodings": encoding_entries(),
        "tables": table_entries(),
    }


def test_pages_are_what_the_golden_file_says(request: pytest.FixtureRequest):
    found = everything()
    if request.config.getoption("--regenerate-golden"):
        FILE.parent.mkdir(exist_ok=True)
        FILE.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    golden = json.loads(FILE.read_text(encoding="utf-8"))
    assert golden["layout_version"] == LAYOUT_VERSION, (
        "a new layout version needs a new golden file; see this file's top"
    )
    for part in ("page", "layouts", "encodings", "tables"):
        assert golden[part].keys() == found[part].keys()
        changed = [name for name, value in golden[part].items() if found[part][name] != value]
        assert not changed, f"{len(changed)} {part} changed, the first {changed[:5]}: see this file's top"


def test_the_golden_file_notices_a_moved_byte():
    golden = json.loads(FILE.read_text(encoding="utf-8"))
    layout = PageLayout(CodecSpec.parse("k4v4", 64), 16)
    tables = pack.page_tables(layout, torch.device("cpu"))
    page = pack_block(layout, arbitrary(layout.key, 12, 0), arbitrary(layout.value, 12, 11))
    name = "k4v4 64/64 x16"
    assert golden["layouts"][name] == f"{layout.page_bytes} {digest(page)}"
    first, second = tables.byte_offsets[0, :2].tolist()
    page[[first, second]] = page[[second, first]]
    assert golden["layouts"][name] != f"{layout.page_bytes} {digest(page)}"


def test_the_integers_are_what_they_were():
    assert integers(3, 1).tolist() == [1817669548, 2187888307, 2784682393]
