import itertools
import pickle

import numpy as np
import pytest

from slimkv import CodecSpec, PageLayout, ScalePolicy
from slimkv.codec.key_offset import wants_offset
from slimkv.errors import SpecError
from slimkv.formats import Kind, TensorFormat, fp8, is_latent_format, known_formats, lloyd, raw, uniform
from slimkv.spec import BLOCK_SIZES, LatentSpec, fragment_word, page_layout

PARTS = {
    **{str(b): lloyd(b) for b in range(1, 9)},
    **{f"u{b}": uniform(b) for b in range(2, 9)},
    **{f"ur{b}": uniform(b, rotated=True) for b in range(2, 9)},
    "fp8": fp8(),
    "raw": raw(),
    "rawbf16": raw("bfloat16"),
    "rawfp16": raw("float16"),
    "rawfp32": raw("float32"),
}
PRESETS = {
    "turboquant_k8v4": (fp8(), uniform(4)),
    "turboquant_4bit_nc": (lloyd(4), uniform(4)),
    "turboquant_k3v4_nc": (lloyd(3), uniform(4)),
    "turboquant_3bit_nc": (lloyd(3), uniform(3)),
    "fp8": (fp8(), fp8()),
    "raw": (raw(), raw()),
}


@pytest.mark.parametrize("key", PARTS)
def test_every_pair_of_parts_parses_and_round_trips(key):
    for value in PARTS:
        format = f"k{key}v{value}"
        spec = CodecSpec.parse(format, 128)
        assert (spec.key, spec.value) == (PARTS[key], PARTS[value])
        assert spec.format == format
        assert CodecSpec.parse(spec.canonical_format, 128) == spec


@pytest.mark.parametrize("format", PRESETS)
def test_presets(format):
    spec = CodecSpec.parse(format, 64)
    assert (spec.key, spec.value) == PRESETS[format]
    assert spec.format == spec.canonical_format == format
    assert CodecSpec.parse(f" {format.upper()} ", 64) == spec
    assert format in known_formats()


def test_equal_formats_have_one_canonical_name():
    assert CodecSpec.parse("kfp8vfp8", 64).canonical_format == "fp8"
    assert CodecSpec.parse("kfp8vu4", 64) == CodecSpec.parse("turboquant_k8v4", 64)
    assert CodecSpec.parse("k4v4", 64, key_policy="plain").canonical_format == "k4v4"


@pytest.mark.parametrize("names", [("kfp8vu4", "turboquant_k8v4"), ("turboquant_k8v4", "kfp8vu4")])
def test_layouts_keep_the_name_that_was_asked_for(names):
    """The name decides whether an engine centres keys, so a cached layout must not be returned under another name."""
    layouts = {name: page_layout(CodecSpec.parse(name, 48), 32) for name in names}
    assert {name: layout.spec.format for name, layout in layouts.items()} == {name: name for name in names}
    assert wants_offset(layouts["kfp8vu4"].spec)
    assert not wants_offset(layouts["turboquant_k8v4"].spec)
    assert page_layout(CodecSpec.parse(names[0], 48), 32) is layouts[names[0]]


def test_raw_follows_the_model_unless_it_names_its_dtype():
    assert CodecSpec.parse("raw", 64).with_raw_dtype("float32").format == "krawfp32vrawfp32"
    assert CodecSpec.parse("krawv4", 64).with_raw_dtype("float16").format == "krawfp16v4"
    explicit = CodecSpec.parse("krawbf16vrawbf16", 64)
    assert explicit.with_raw_dtype("float32") is explicit


def test_a_number_means_lloyd_max():
    assert CodecSpec.parse("k8v4", 64).key == lloyd(8)


@pytest.mark.parametrize(
    "format", ["", "k4", "v4", "k4v", "k9v4", "k0v4", "ku1v4", "kur1v4", "k4v4 v4", "int4", "kl4xv4", "k44v4"]
)
def test_unknown_formats_are_refused_with_the_known_ones(format):
    with pytest.raises(SpecError) as caught:
        CodecSpec.parse(format, 128)
    assert repr(format) in str(caught.value)
    assert known_formats() in str(caught.value)


def test_vllm_recipes_use_norm_correction():
    assert CodecSpec.parse("turboquant_4bit_nc", 128).key.policy == ScalePolicy.NORM
    assert CodecSpec.parse("turboquant_k3v4_nc", 128).key.policy == ScalePolicy.NORM


def test_policy_applies_to_lloyd_sides_only():
    spec = CodecSpec.parse("k4vu4", 128, key_policy="unbiased", value_policy="unbiased")
    assert spec.key.policy == ScalePolicy.UNBIASED
    assert spec.value == uniform(4)
    with pytest.raises(SpecError, match=r"'fast'.*plain, norm, unbiased"):
        CodecSpec.parse("k4v4", 128, key_policy="fast")
    with pytest.raises(SpecError, match=r"'fast'.*plain, norm, unbiased"):
        CodecSpec.parse("fp8", 128, key_policy="fast")


@pytest.mark.parametrize("dim", [0, 8, 100, 130, 1040, -16])
def test_head_sizes_that_are_refused(dim):
    with pytest.raises(SpecError, match=f"{dim} is not supported.*multiples of 16.*1024"):
        CodecSpec.parse("k4v4", dim)
    with pytest.raises(SpecError, match="value head_dim"):
        CodecSpec.parse("k4v4", 64, dim)


def test_every_multiple_of_16_is_taken_and_dims_may_differ():
    for dim in range(16, 1025, 16):
        assert CodecSpec.parse("k4v4", dim).value_dim == dim
    assert CodecSpec.parse("k4v4", 192, 128).value_dim == 128


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"kind": Kind.LLOYD, "bits": 4}, "rotated"),
        ({"kind": Kind.LLOYD, "bits": 9, "rotated": True}, "9 bits"),
        ({"kind": Kind.UNIFORM, "bits": 1}, "1 bits"),
        ({"kind": Kind.FP8, "bits": 4}, "4 bits"),
        ({"kind": Kind.FP8, "bits": 8, "rotated": True}, "unrotated"),
        ({"kind": Kind.RAW, "bits": 8}, "16 bits"),
        ({"kind": Kind.RAW, "bits": 16, "raw_dtype": "int16"}, "int16.*bfloat16, float16, float32"),
    ],
)
def test_formats_that_make_no_sense(kwargs, message):
    with pytest.raises(SpecError, match=message):
        TensorFormat(**kwargs)


@pytest.mark.parametrize("seed", [-1, 2**63])
def test_bad_seeds(seed):
    with pytest.raises(SpecError, match=f"seed {seed}"):
        CodecSpec.parse("k4v4", 64, seed=seed)


def test_with_raw_dtype_touches_raw_sides_only():
    spec = CodecSpec.parse("krawv4", 64).with_raw_dtype("float32")
    assert spec.key == raw("float32")
    assert spec.value == lloyd(4)


# -- bytes ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("format", "most"), [("k4v4", 132), ("k3v3", 100), ("k2v2", 68)])
@pytest.mark.parametrize("block", BLOCK_SIZES[1:])
def test_bytes_at_head_size_128(format, most, block):
    layout = PageLayout(CodecSpec.parse(format, 128), block)
    assert layout.content_bytes <= most * block
    assert layout.page_bytes - layout.content_bytes < 16
    assert layout.bytes_per_token == layout.page_bytes / block
    assert layout.compression_ratio == 512 / layout.bytes_per_token


@pytest.mark.parametrize("dim", [16, 64, 80, 96, 112, 128, 192, 256, 512, 576, 1024])
@pytest.mark.parametrize("bits", range(1, 9))
def test_no_byte_is_padded_but_the_region_alignment(dim, bits):
    for block in BLOCK_SIZES:
        layout = PageLayout(CodecSpec.parse(f"k{bits}v{bits}", dim), block)
        exact = block * (2 * dim * bits // 8 + 4)
        assert layout.content_bytes == exact
        assert layout.page_bytes == (exact + 15) // 16 * 16


def test_compression_ratios_of_whole_regions():
    ratios = {
        w: PageLayout(CodecSpec.parse(w, 128), 16).compression_ratio for w in ("k4v4", "k3v3", "k2v2", "fp8", "raw")
    }
    assert ratios["k4v4"] == 512 / 132
    assert ratios["k3v3"] == 512 / 100
    assert ratios["k2v2"] == 512 / 68
    assert ratios["fp8"] == 512 / 260
    assert ratios["raw"] == 1.0


def test_block_sizes_and_counts():
    with pytest.raises(SpecError, match="block size 24 is not one of 1, 16, 32, 64, 128"):
        PageLayout(CodecSpec.parse("k4v4", 64), 24)
    layout = PageLayout(CodecSpec.parse("k4v4", 64), 32)
    assert [layout.blocks_for(n) for n in (0, 1, 32, 33)] == [0, 1, 1, 2]
    assert layout.pool_bytes(10, 3) == 30 * layout.page_bytes
    with pytest.raises(SpecError, match="no field 1"):
        layout.key.field_offset(1)


# -- bit positions ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dim", [16, 48, 80, 128, 144])
@pytest.mark.parametrize("bits", [1, 2, 3, 4, 5, 6, 7, 8])
@pytest.mark.parametrize("block", [1, 16])
@pytest.mark.parametrize("transposed", [False, True], ids=["key", "value"])
def test_every_bit_of_a_tile_is_used_once_and_a_byte_has_one_token(dim, bits, block, transposed):
    layout = PageLayout(CodecSpec.parse(f"k{bits}v{bits}", dim), block)
    side = layout.value if transposed else layout.key
    owner = np.full(side.tile_bytes, -1)
    used = []
    for plane in side.planes:
        start = side.bit_positions(plane)
        for bit in range(plane.bits):
            used.append((start + bit).ravel())
            byte = (start + bit) // 8
            for token in range(side.tile_tokens):
                assert set(owner[byte[token]]) <= {-1, token}
                owner[byte[token]] = token
    assert np.array_equal(np.sort(np.concatenate(used)), np.arange(8 * side.tile_bytes))
    assert sum(p.bits for p in side.planes) == bits


def test_a_lane_finds_its_fragment_in_whole_words():
    """At 4 bits, the eight values of a lane in a slice are one 32-bit word, in mma.m16n8k16's register order."""
    layout = PageLayout(CodecSpec.parse("k4v4", 128), 16)
    key, value = (side.bit_positions(side.planes[0]) for side in (layout.key, layout.value))
    for g, t, piece in itertools.product(range(8), range(4), range(8)):
        lane = 4 * g + t
        format = int(fragment_word(np.array(piece), np.array(lane), 8))
        tokens, dims = (g, g + 8), [16 * piece + d for d in (2 * t, 2 * t + 1, 2 * t + 8, 2 * t + 9)]
        assert [key[a, d] for a in tokens for d in dims] == [32 * format + 4 * n for n in range(8)]
        rows, columns = (16 * piece + g, 16 * piece + g + 8), (2 * t, 2 * t + 1, 2 * t + 8, 2 * t + 9)
        assert [value[a, d] for a in columns for d in rows] == [32 * format + 4 * n for n in range(8)]


@pytest.mark.parametrize("formats", range(1, 17))
def test_fragment_words_are_a_permutation_in_vectors_of_four(formats):
    format, lane = np.meshgrid(np.arange(formats), np.arange(32), indexing="ij")
    place = fragment_word(format, lane, formats)
    assert np.array_equal(np.sort(place.ravel()), np.arange(32 * formats))
    for first in range(0, formats - formats % 4, 4):
        assert (place[first] % 4 == 0).all()
        assert (np.diff(place[first : first + 4], axis=0) == 1).all()


# -- latents -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("format", "dims", "bytes_per_token"),
    [
        ("c4", (512, 64), 386), ("c4r8", (512, 64), 324), ("c6r8", (512, 64), 452), ("craw", (512, 64), 1152),
        ("c4rfp8", (512, 64), 324), ("c4", (256, 32), 194), ("c3r8", (128, 32), 84), ("cu4ru8", (512, 64), 328),
    ],
)  # fmt: skip
def test_bytes_of_latents(format, dims, bytes_per_token):
    spec = LatentSpec.parse(format, *dims)
    assert (spec.key_dim, spec.value_dim) == dims
    for block in (16, 32, 64, 128):
        assert PageLayout(spec, block).page_bytes == block * bytes_per_token


@pytest.mark.parametrize("latent", PARTS)
def test_every_latent_format_parses_and_round_trips(latent):
    for rope in PARTS:
        spec = LatentSpec.parse(f"c{latent}r{rope}")
        assert (spec.key, spec.value) == (PARTS[latent], PARTS[rope])
        assert spec.format == f"c{latent}r{rope}"
        assert LatentSpec.parse(spec.canonical_format) == spec
        assert is_latent_format(spec.format)
    assert LatentSpec.parse(f"c{latent}").value == raw()


def test_token_rows_are_aligned_and_as_small_as_tiles():
    for format, row in (("c4", 384), ("c4r8", 320), ("c6r8", 448), ("craw", 1152), ("cfp8", 640)):
        rows, tiles = (PageLayout(LatentSpec.parse(format), 64, token_rows) for token_rows in (True, False))
        assert rows.key.row_stride == rows.value.row_stride == row
        assert rows.value.codes_offset == 512 * rows.spec.key.bits // 8
        assert rows.page_bytes == tiles.page_bytes
        assert rows != tiles
        assert pickle.loads(pickle.dumps(rows)) == rows
    assert 656 * 64 / PageLayout(LatentSpec.parse("c4"), 64, True).page_bytes > 1.69  # 656 bytes per token: fp8_ds_mla
    with pytest.raises(SpecError, match="token_rows is for latents, not for K and V of format k4v4"):
        PageLayout(CodecSpec.parse("k4v4", 128), 64, True)


def test_latents_are_not_keys_and_values():
    assert LatentSpec.parse("c4r8", 64, 64) != CodecSpec.parse("k4v8", 64)
    assert LatentSpec.parse(" C4R8 ").format == "c4r8"
    assert LatentSpec.parse("c4").with_raw_dtype("float32").format == "c4rrawfp32"
    assert LatentSpec.parse("craw").with_raw_dtype("float16").canonical_format == "crawfp16rrawfp16"
    assert not is_latent_format("k4v4")
    for wrong in ("c9", "k4v4", "c4v4", "c4r", "c4r9", "", 4):
        with pytest.raises(SpecError, match="c4"):
            LatentSpec.parse(wrong)
    with pytest.raises(SpecError, match="key head_dim 500"):
        LatentSpec.parse("c4", 500)


def test_reprs_are_one_short_line():
    assert repr(CodecSpec.parse("k4v4", 128)) == "CodecSpec('k4v4', key_dim=128, value_dim=128, seed=81)"
    unbiased = CodecSpec.parse("k4v4", 128, key_policy="unbiased")
    assert repr(unbiased) == "CodecSpec('k4v4', key_dim=128, value_dim=128, key_policy='unbiased', seed=81)"
    assert repr(LatentSpec.parse("c4r8", 512, 64)) == "LatentSpec('c4r8', key_dim=512, value_dim=64, seed=81)"
