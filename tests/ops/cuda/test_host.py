"""The emulated GPU of the kernels' tests: results of its instructions, and errors that it reports."""

from __future__ import annotations

import ctypes
from pathlib import Path

import host
import numpy as np
import pytest

pytestmark = pytest.mark.skipif(not host.has_compiler, reason="needs g++")


class Args(ctypes.Structure):
    _fields_ = [("into", ctypes.c_void_p), ("out", ctypes.c_void_p), ("mode", ctypes.c_int32), ("n", ctypes.c_int32)]


def run(
    name: str, x: np.ndarray, out: int, *, threads: int, mode=0, n=0, grid=(1,), shared=0, defines=None
) -> np.ndarray:
    library = host.compile(Path(__file__).parent / "machine.cu", defines)
    x = np.ascontiguousarray(x).view(np.uint32)
    result = np.zeros(out, np.uint32)
    args = Args(x.ctypes.data, result.ctypes.data, mode, n)
    host.launch(library, name, grid=grid, threads=threads, shared=shared, args=args)
    return result


@pytest.fixture
def rng():
    return np.random.default_rng(5)


def test_shuffles_and_votes(rng):
    x = rng.integers(0, 1 << 12, 32, dtype=np.uint32)
    lanes = np.arange(32)
    for got in run("shuffles", x, 2 * 128, threads=32, grid=(2,)).reshape(2, 4, 32):  # lanes in either order
        assert (got[0] == x[lanes ^ 5]).all()
        assert (got[1] == x[(lanes + 7) % 32]).all()
        assert (got[2] == x[lanes ^ 16]).all()
        assert (got[3] == 1).all()


@pytest.mark.parametrize(("lag", "kept"), [(None, True), ("1,0", True), ("1,1", False)])
def test_a_warp_that_lags_shows_a_missing_barrier(lag, kept, monkeypatch):
    """Warps take turns, so one that is a few steps behind another never meets its later writes."""
    monkeypatch.delenv(host.LAG, raising=False)
    if lag:
        monkeypatch.setenv(host.LAG, lag)
    x = np.arange(1, 33, dtype=np.uint32)
    assert (run("unordered", x, 32, threads=64, n=20, shared=128) == x).all() == kept


def test_a_lag_that_is_none_is_refused(monkeypatch):
    monkeypatch.setenv(host.LAG, "every second warp")
    with pytest.raises(host.LaunchError, match="every second warp"):
        run("shuffles", np.arange(32, dtype=np.uint32), 128, threads=32)


def data_mib() -> int:
    status = Path("/proc/self/status").read_text()
    return int(next(line for line in status.splitlines() if line.startswith("VmData")).split()[1]) >> 10


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc")
def test_libraries_share_their_stacks():
    """Hundreds of libraries share one set of stacks; with a set each, ``fork`` of a test process would fail."""
    x = np.arange(32, dtype=np.uint32)
    run("shuffles", x, 128, threads=32)
    before = data_mib()
    for k in range(2):
        run("shuffles", x, 128, threads=32, defines={"ANOTHER_LIBRARY": k})
    assert data_mib() - before < 64


def fragments(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """A [16, k], B [k, 8] and C [16, 8] in fragment order: uint32 [32, 10]."""
    per = 4 // a.itemsize  # elements per register
    half = 4 * per
    words = np.zeros((32, 10), np.uint32)
    for lane in range(32):
        g, t = divmod(lane, 4)
        for r in range(4):
            words[lane, r] = np.ascontiguousarray(a[g + 8 * (r % 2), half * (r // 2) + per * t :][:per]).view(
                np.uint32
            )[0]
        for r in range(2):
            words[lane, 4 + r] = np.ascontiguousarray(b[half * r + per * t :, g][:per]).view(np.uint32)[0]
        words[lane, 6:] = c[[g, g, g + 8, g + 8], [2 * t, 2 * t + 1, 2 * t, 2 * t + 1]].view(np.uint32)
    return words


def matrix(words: np.ndarray, dtype) -> np.ndarray:
    """The lanes' four results as C [16, 8]."""
    return words.view(dtype).reshape(8, 4, 2, 2).transpose(2, 0, 1, 3).reshape(16, 8)


@pytest.mark.parametrize(
    ("mode", "a_type", "b_type"), [(0, np.uint8, np.int8), (1, np.int8, np.uint8), (2, np.int8, np.int8)]
)
def test_integer_products_are_exact(rng, mode, a_type, b_type):
    a = rng.integers(np.iinfo(a_type).min, np.iinfo(a_type).max, (16, 32), dtype=a_type, endpoint=True)
    b = rng.integers(np.iinfo(b_type).min, np.iinfo(b_type).max, (32, 8), dtype=b_type, endpoint=True)
    c = rng.integers(-(2**20), 2**20, (16, 8), dtype=np.int32)
    got = matrix(run("products", fragments(a, b, c), 128, threads=32, mode=mode), np.int32)
    assert (got == a.astype(np.int32) @ b.astype(np.int32) + c).all()


def test_half_products(rng):
    a, b = rng.standard_normal((16, 16)).astype(np.float16), rng.standard_normal((16, 8)).astype(np.float16)
    c = rng.standard_normal((16, 8)).astype(np.float32)
    got = matrix(run("products", fragments(a, b, c), 128, threads=32, mode=3), np.float32)
    assert (got == (a.astype(np.float64) @ b.astype(np.float64) + c).astype(np.float32)).all()


def test_bfloat_products(rng):
    """Down to the smallest denormal numbers."""
    torch = pytest.importorskip("torch")
    a, b = (torch.from_numpy(rng.standard_normal(n).astype(np.float32)).bfloat16() for n in ((16, 16), (16, 8)))
    a[::2] *= 2.0**-126
    b *= 2.0**64
    c = np.zeros((16, 8), np.float32)
    words = fragments(*(x.view(torch.int16).numpy() for x in (a, b)), c)
    got = matrix(run("products", words, 128, threads=32, mode=4), np.float32)
    assert (got == (a.double() @ b.double()).float().numpy()).all()


def test_pairs_of_16_bit_floats(rng):
    """Products are rounded once, denormal numbers included; the larger magnitude is NaN if either operand is."""
    torch = pytest.importorskip("torch")
    words = rng.integers(0, 1 << 32, (20_000, 2), dtype=np.uint32)
    found = run("pairs", words, 4 * len(words), threads=64, n=len(words)).reshape(-1, 4)
    for column, dtype in ((0, torch.float16), (1, torch.bfloat16)):
        a, b = torch.from_numpy(words.view(np.int16).reshape(-1, 2, 2).copy()).view(dtype).unbind(1)
        product, larger = (
            torch.from_numpy(np.ascontiguousarray(found[:, i]).view(np.int16).reshape(-1, 2)).view(dtype)
            for i in (column, column + 2)
        )
        expected = (a.float() * b.float()).to(dtype)
        numbers = ~expected.isnan()
        assert torch.equal(product[numbers], expected[numbers])
        assert product[~numbers].isnan().all()
        nan = a.isnan() | b.isnan()
        assert torch.equal(larger[~nan], torch.maximum(a.abs(), b.abs())[~nan])
        assert larger[nan].isnan().all()


def test_cells_of_products(rng):
    """The exact product in units of the smallest float, rounded up to an integer."""
    a = rng.integers(-(2**23), 2**23, 5000).astype(np.float32)
    b = (rng.random(5000) * 100 / 2**23).astype(np.float32)
    a[:100], b[:100] = np.arange(-50, 50), 1  # exact integers
    exact = a.astype(np.float64) * b.astype(np.float64)
    words = np.stack([a * np.float32(2.0**-69), b * np.float32(2.0**-80)], 1)
    found = run("cells", words, len(a), threads=64, mode=4096, n=len(a)).astype(np.int64) - 4096
    assert (found == np.ceil(exact)).all()


def test_transpose(rng):
    x = rng.integers(0, 1 << 16, (8, 8), dtype=np.uint16)
    got = run("transpose", x, 32, threads=32).view(np.uint16).reshape(8, 8)
    assert (got == x.T).all()


def test_byte_permutation_with_signs(rng):
    x = rng.integers(0, 1 << 32, (500, 3), dtype=np.uint32)
    expected = np.zeros((500, 4), np.uint8)
    for row, (a, b, s) in zip(expected, x, strict=True):
        source = np.array([a, b]).view(np.uint8)
        for i in range(4):
            pick = int(s) >> 4 * i & 15
            row[i] = source[pick & 7] if pick < 8 else 255 * (source[pick & 7] >> 7)
    assert (run("permute", x, 500, threads=64, n=500) == expected.view(np.uint32)[:, 0]).all()


def test_16_bit_floats(rng):
    halves = np.arange(1 << 16, dtype=np.uint16).view(np.float16).astype(np.float32)
    halves = halves[np.isfinite(halves)]
    between = (halves[:-1].astype(np.float64) + halves[1:]) / 2  # ties
    any_bits = rng.integers(0, 1 << 32, 20000, dtype=np.uint32).view(np.float32)
    x = np.concatenate(
        [
            halves,
            between.astype(np.float32),
            np.nextafter(between.astype(np.float32), 0),
            any_bits[np.isfinite(any_bits)],
            [65519.996, 65520, -1e-9, 3e38],
        ]
    ).astype(np.float32)
    x = np.append(x[~np.isnan(x)], np.float32([np.inf, -np.inf]))
    got = run("conversions", x, 4 * len(x), threads=64, n=len(x)).reshape(-1, 4)
    with np.errstate(over="ignore"):
        as_half = x.astype(np.float16)
    assert (got[:, 0] == as_half.view(np.uint16)).all()
    assert (got[:, 1].view(np.float32) == as_half.astype(np.float32)).all()
    assert (got[:, 3] & 0xFFFF == as_half.view(np.uint16)).all()
    assert (got[:, 3] >> 16 == (as_half.view(np.uint16) ^ 0x8000)).all()
    torch = pytest.importorskip("torch")
    assert (got[:, 2] == torch.from_numpy(x).bfloat16().view(torch.int16).numpy().view(np.uint16)).all()


def test_shared_memory_and_copies(rng):
    x = rng.integers(0, 1 << 31, 512, dtype=np.uint32)
    got = run("through_shared", x, 1024, threads=128, grid=(2,), shared=2048).reshape(2, 512)
    assert (got == x[::-1]).all()
    not_waited = run("through_shared", x, 512, threads=128, shared=2048, mode=1)
    assert (not_waited == 0xFFFFFFFF).all()
    not_met = run("through_shared", x, 1024, threads=128, grid=(2,), shared=2048, mode=2).reshape(2, 512)
    assert (not_met == 0xFFFFFFFF).any(1).all(), "a missing barrier shows in either order of lanes"


@pytest.mark.parametrize("word", [512, -1])
def test_writing_beyond_shared_memory_is_reported(rng, word):
    with pytest.raises(host.LaunchError, match="beyond its 2048 bytes"):
        run("through_shared", np.zeros(512), 512, threads=128, shared=2048, mode=3, n=word)


def test_copying_beyond_shared_memory_is_reported():
    with pytest.raises(host.LaunchError, match="thread 64: an asynchronous copy to beyond"):
        run("through_shared", np.zeros(512), 512, threads=128, shared=1024)


@pytest.mark.parametrize(
    ("mode", "what"),
    [(0, "thread 40 has ended"), (1, "thread 40 waits at sync_threads"), (2, "thread 40 waits at shfl$")],
)
def test_lanes_that_do_not_meet_are_reported(mode, what):
    with pytest.raises(host.LaunchError, match=f"lanes do not meet.*{what}"):
        run("divergent", np.zeros(1), 64, threads=64, mode=mode)


def test_a_thread_that_does_not_wait_for_the_grid_before_is_reported():
    run("waiting", np.zeros(1), 1, threads=64, mode=-1)
    with pytest.raises(host.LaunchError, match="1 of 64 threads end without waiting for the grid before"):
        run("waiting", np.zeros(1), 1, threads=64, mode=7)


def test_arguments_that_do_not_fit_are_reported():
    class Other(ctypes.Structure):
        _fields_ = [("x", ctypes.c_int64)]

    with pytest.raises(host.LaunchError, match="takes 24 bytes of arguments, got 8"):
        host.launch(
            host.compile(Path(__file__).parent / "machine.cu"), "divergent", grid=(1,), threads=32, args=Other()
        )
