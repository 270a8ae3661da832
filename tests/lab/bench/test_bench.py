"""The benchmark commands, on small cells and the CPU."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from typer.testing import CliRunner

from slimkv.cli.app import app
from slimkv.cli.bench import report_table
from slimkv.errors import InputError, SlimKVError
from slimkv.lab.bench import attention as attend
from slimkv.lab.bench import baselines
from slimkv.lab.bench import run as bench_run
from slimkv.lab.bench import store as bench_store
from slimkv.lab.bench.cells import CELLS, AttendCell, choose
from slimkv.lab.bench.run import Options
from slimkv.lab.bench.timing import Timer
from slimkv.ops.attention.api import AttendOptions

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """Runs each timed call only once, since these tests do not look at times."""

    def once(timer, call, cold=True, before=None):
        if before is not None:
            before()
        call()
        return 0.5

    monkeypatch.setattr(Timer, "__call__", once)
    monkeypatch.setattr(bench_run, "copy_bandwidth", lambda device: 1e10)


ATTEND_CELLS, MORE_ATTEND_CELLS, STORE_CELLS = CELLS["attend"], CELLS["attend_more"], CELLS["store"]
ALL_CELLS = [
    ATTEND_CELLS + MORE_ATTEND_CELLS + CELLS["latent"],
    STORE_CELLS,
    CELLS["attend_small"],
    CELLS["store_small"],
]


@pytest.mark.parametrize("cells", ALL_CELLS)
def test_cells_have_names_of_their_own_and_fit_whole_pages(cells):
    assert len({cell.name for cell in cells}) == len(cells)
    for cell in cells:
        size = cell.context if isinstance(cell, AttendCell) else cell.tokens
        assert size % cell.page == 0 or size < 2 * cell.page
        assert cell.layout.spec.format


def test_bytes_and_flops_of_a_cell():
    cell = next(c for c in ATTEND_CELLS if c.name == "decode-32x32K")
    assert cell.packed_bytes == 32 * 32768 * 8 * 132
    assert cell.dense_bytes(2) == 32 * 32768 * 8 * 512
    prefill = next(c for c in ATTEND_CELLS if c.name.startswith("prefill"))
    assert prefill.flops == 4 * 32 * 128 * sum(range(32768 - 2048 + 1, 32768 + 1))
    assert replace(prefill, sliding_window=1024).flops == 4 * 32 * 128 * 2048 * 1024
    chunk = next(c for c in STORE_CELLS if c.name == "chunk-8192")
    assert chunk.moved_bytes(2) == 8192 * 8 * (512 + 132)


def test_a_ragged_cell_has_lengths_from_the_shortest_to_the_longest():
    cell = next(c for c in MORE_ATTEND_CELLS if c.shortest is not None)
    assert cell.lengths[0] == max(cell.lengths) == cell.context
    assert min(cell.lengths) == cell.shortest
    assert cell.read_tokens == sum(cell.lengths) < cell.batch * cell.context
    windowed = next(c for c in MORE_ATTEND_CELLS if c.sliding_window == 128)
    assert windowed.read_tokens == 128 * windowed.batch


@pytest.mark.parametrize(
    "options", [{"shortest": 64}, {"softcap": 3.0}, {"sliding_window": 100}, {"sinks": True}, {"queries": 3}], ids=str
)
def test_the_error_of_a_cell_knows_its_options(options):
    cell = AttendCell("x", batch=3, context=256, num_heads=4, num_kv_heads=2, head_dim=64, page=16, **options)
    torch.manual_seed(0)
    case = attend.Case.create(cell, "cpu", CPU)
    assert case.error() < 1e-3
    if options.keys() & {"softcap", "sliding_window"}:  # the check would notice a missing option
        assert replace(case, options=AttendOptions()).error() > 1e-2


@pytest.mark.parametrize("cell", CELLS["latent_small"], ids=lambda cell: cell.name)
def test_cells_of_latents(cell):
    torch.manual_seed(0)
    assert attend.Case.create(cell, "cpu", CPU).error() < 1e-5
    assert cell.dense_bytes(2) == 2 * 512 * 160 * 2
    assert cell.flops == pytest.approx(2 * cell.queries * (512 - (cell.queries - 1) / 2) * 4 * 2 * (2 * 128 + 32))


def test_latents_are_timed_when_asked_for():
    report = attend.bench_attend(Options(device="cpu", cells=("mla-4h-2x512",)), lambda step: None)
    assert [row.format for row in report.rows] == ["c4"]
    assert report.rows[0].baseline("flashmla_bf16").detail == "needs a CUDA device"
    big = next(c for c in CELLS["latent"] if c.name == "mla-16h-32x32K")
    assert big.packed_bytes == 32 * 32768 * 386


def test_choosing():
    assert choose(ATTEND_CELLS, ["all"], None) == list(ATTEND_CELLS)
    names = [c.name for c in choose(ATTEND_CELLS, ["prefill-*", "decode-8x32K", "*8x32K"], 16)]
    assert names == ["prefill-2048q-1x32K", "decode-8x32K"]
    assert {c.page for c in choose(ATTEND_CELLS, [], 16)} == {16}
    assert choose(STORE_CELLS, [], None) == list(STORE_CELLS)
    with pytest.raises(InputError, match="no cell is called 'decode-9'; known here are decode-32x32K,"):
        choose(ATTEND_CELLS, ["decode-9"], None)


def test_a_report():
    report = attend.bench_attend(Options(device="cpu"), lambda step: None)
    assert [row.cell for row in report.rows] == [cell.name for cell in CELLS["attend_small"]]
    assert {row.backend for row in report.rows} == {"cpu"}
    for row in report.rows:
        assert row.error < 1e-4
        assert row.fraction_of_copy == pytest.approx(row.moved_bytes / 0.5e-3 / 1e10)
        assert row.baseline("sdpa").ratio == 1
        assert row.baseline("fa3_bf16").ms is None
        assert row.baseline("fa3_bf16").detail == "needs a CUDA device"
        assert (row.tflops is not None) == row.cell.startswith("prefill")
    assert report.versions["torch"] == torch.__version__
    lines = report_table(report)[1:]
    assert "fa3_fp8 is absent: needs a CUDA device" in lines


def test_a_wrong_result_is_not_timed(monkeypatch):
    monkeypatch.setattr(attend.Case, "run", lambda self: torch.zeros_like(self.query))
    with pytest.raises(SlimKVError, match="decode-2x512 with cpu: the output differs from float64 by 1"):
        attend.bench_attend(Options(device="cpu", cells=("decode-2x512",), no_baselines=True), lambda step: None)


def test_the_fastest_configuration_counts_and_failures_are_told(monkeypatch):
    times = {"slow": 3.0, "fast": 2.0}

    def candidates():
        for name in times:
            yield name, lambda name=name: name
        yield "broken", lambda: "broken"

    def timer(call, cold=True, before=None):
        if call() == "broken":
            raise RuntimeError("no kernel\nfor this")
        return times[call()]

    timer.device = CPU
    found = baselines.time_baseline("sdpa", candidates, timer, 10**9, 1e12).against(1.0)
    assert (found.ms, found.ratio, found.detail) == (2.0, 2.0, "fast")
    assert found.fraction_of_copy == pytest.approx(0.5)
    times.clear()
    absent = baselines.time_baseline("sdpa", candidates, timer, 10**9, 1e12)
    assert (absent.ms, absent.ratio) == (None, None)
    assert absent.detail == "broken: RuntimeError: no kernel for this"


def test_deterministic_cells_ask_for_it_and_for_one_split(monkeypatch):
    (cell,) = choose(MORE_ATTEND_CELLS, ["decode-1x128K-deterministic"], None)
    assert baselines.cell_options(cell, CPU).deterministic
    small, asked = replace(cell, context=256), []

    class FlashAttention3:
        @staticmethod
        def flash_attn_varlen_func(*_, num_splits, **__):
            asked.append(num_splits)

    monkeypatch.setattr(baselines, "flash_attention_3", FlashAttention3)
    for _, call in baselines.fa3(baselines.DenseInputs.random(small, CPU), False):
        call()
    assert asked == [1, 1]


def test_sdpa_computes_the_same_attention():
    """The timed baseline must compute the same attention: the same mask and heads."""
    cell = AttendCell("", batch=2, context=32, queries=4, num_heads=6, num_kv_heads=2, head_dim=16)
    inputs = baselines.DenseInputs.random(cell, CPU)
    ((_, call),) = baselines.sdpa(inputs)
    got = call().transpose(1, 2)  # [batch, queries, heads, dim]
    key, value = (x.view(2, 32, 2, 16) for x in (inputs.key, inputs.value))
    query = inputs.query.view(2, 4, 2, 3, 16)
    scores = torch.einsum("bqhgd,bkhd->bqhgk", query, key) / 4
    seen = torch.arange(32)[None, :] <= torch.arange(28, 32)[:, None]
    weights = scores.masked_fill(~seen[None, :, None, None, :], -torch.inf).softmax(-1)
    want = torch.einsum("bqhgk,bkhd->bqhgd", weights, value).flatten(2, 3)
    assert torch.allclose(got, want, atol=1e-5)


@pytest.mark.parametrize("operation", ["attend", "store"])
def test_commands(operation, tmp_path):
    cell = {"attend": "decode-2x512", "store": "decode-16"}[operation]
    arguments = ["bench", operation, "--device", "cpu", "--cells", cell, "--output", str(tmp_path / "r.json")]
    shown = CliRunner().invoke(app, arguments)
    assert shown.exit_code == 0, shown.output
    assert cell in shown.stdout
    assert "vllm_4bit_nc is absent: needs a CUDA device" in " ".join(shown.stdout.split())
    printed = json.loads(CliRunner().invoke(app, [*arguments, "--json"]).stdout)
    assert printed["rows"][0]["cell"] == cell
    assert json.loads((tmp_path / "r.json").read_text())["rows"] == printed["rows"]


def test_mistakes_are_one_line():
    for arguments, message in [
        (["--cells", "nothing"], "no cell is called 'nothing'"),
        (["--backend", "warp", "--cells", "decode-2x512"], "no backend 'warp'; known are "),
    ]:
        result = CliRunner().invoke(app, ["bench", "attend", "--device", "cpu", "--quiet", *arguments])
        assert result.exit_code == 2
        assert message in result.output
        assert len(result.output.strip().splitlines()) == 1


def test_a_timer_takes_the_median(monkeypatch):
    monkeypatch.undo()
    clock = iter([0.0, 0.150, 1.0, 1.020, 2.0, 2.030, 3.0, 3.040, 4.0, 4.010])
    monkeypatch.setattr("slimkv.lab.bench.timing.time.perf_counter", lambda: next(clock))
    assert Timer(CPU)(lambda: None) == pytest.approx(30.0)


def test_uniform_codes_are_timed_where_they_are_stored(monkeypatch):
    device = torch.device("cuda", 0)
    monkeypatch.setattr(bench_run, "cuda_unavailable_reason", lambda device: None)
    cells = {cell.name: cell for cell in STORE_CELLS}
    chosen = {name: bench_store._backends(cell, Options(), device) for name, cell in cells.items()}
    assert chosen["decode-128-4bit_nc"] == chosen["rotation-on-8192"] == ["triton"]
    assert chosen["chunk-8192"] == chosen["mla-chunk-8192"] == ["cuda"]
    assert bench_store._backends(cells["rotation-on-8192"], Options(backends=("cuda",)), device) == ["cuda"]
