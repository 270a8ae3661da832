"""Times ``attend`` on pages that ``store`` has filled, and the baselines."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from slimkv import ops
from slimkv.codec import Codec
from slimkv.errors import SlimKVError
from slimkv.lab.bench import baselines
from slimkv.lab.bench.baselines import DenseInputs, cell_options, compute_dtype, time_baseline
from slimkv.lab.bench.cells import (
    ATTEND_CELLS,
    CPU_ATTEND_CELLS,
    MORE_ATTEND_CELLS,
    SMALL_ATTEND_CELLS,
    AttendCell,
    choose,
)
from slimkv.lab.bench.latent import (
    LATENT_CELLS,
    SMALL_LATENT_CELLS,
    LatentCase,
    LatentCell,
    flash_attention_latent,
    flashmla,
)
from slimkv.lab.bench.options import Options, Step, compile_ahead, silent
from slimkv.lab.bench.results import Baseline, Report, Row, make_report
from slimkv.lab.bench.timing import Timer, copy_bandwidth
from slimkv.ops import AttendOptions, AttentionBatch, PackedKV

_CHUNK = 65536  # tokens stored at a time
_CHECKED_QUERIES = 16


@dataclass(frozen=True)
class Case:
    """A cell with its tensors. The blocks of a sequence are in random order."""

    cell: AttendCell
    backend: str
    kv: PackedKV
    batch: AttentionBatch
    query: Tensor
    options: AttendOptions

    @classmethod
    def create(cls, cell: AttendCell, backend: str, device: torch.device, compile_only: bool = False) -> Case:
        """Stores random K and V. With ``compile_only`` all sequences share a few blocks: every kernel, little work."""
        layout = cell.layout
        per_sequence = layout.blocks_for(cell.context)
        total = cell.batch * per_sequence
        chunk = min(_CHUNK, cell.batch * cell.context) // cell.page
        if compile_only:
            total = chunk
            table = torch.zeros(cell.batch, per_sequence, dtype=torch.int32, device=device)
        else:
            table = torch.randperm(total, device=device).to(torch.int32).view(cell.batch, per_sequence)
        pages = torch.empty(total, cell.num_kv_heads, layout.page_bytes, dtype=torch.uint8, device=device)
        kv, dtype = PackedKV(pages, Codec(layout.spec, device), layout), compute_dtype(device)
        order = torch.randperm(total, device=device)
        for first in range(0, total, chunk):
            blocks = order[first : first + chunk]
            slots = (blocks[:, None] * cell.page + torch.arange(cell.page, device=device)).flatten()
            key, value = (
                torch.randn(len(slots), cell.num_kv_heads, cell.head_dim, device=device, dtype=dtype) for _ in range(2)
            )
            ops.store_kv(key, value, kv, slots)
        lens = torch.tensor(cell.lengths, dtype=torch.int32, device=device)
        starts = torch.arange(cell.batch + 1, dtype=torch.int32, device=device) * cell.queries
        return cls(
            cell=cell,
            backend=backend,
            kv=kv,
            batch=AttentionBatch(table, lens, starts, cell.queries, cell.context, cell.queries),
            options=cell_options(cell, device),
            query=torch.randn(cell.batch * cell.queries, cell.num_heads, cell.head_dim, device=device, dtype=dtype),
        )

    def attend(self) -> Tensor:
        """The timed call."""
        return ops.attend(self.query, self.kv, self.batch, self.options, backend=self.backend)

    def error(self) -> float:
        """Relative error of the first sequence's last queries against float64 on the same codes."""
        cell, count = self.cell, min(self.cell.queries, _CHECKED_QUERIES)
        position = torch.arange(cell.context, device=self.query.device)
        slots = self.batch.block_table[0, position // cell.page].long() * cell.page + position % cell.page
        key, value = ops.gather_kv(self.kv, slots)
        rows = slice(cell.queries - count, cell.queries)
        query = self.query[rows].double().unflatten(1, (cell.num_kv_heads, -1))
        scores = torch.einsum("qhgd,khd->qhgk", query, key.double()) / math.sqrt(cell.head_dim)
        last = torch.arange(cell.context - count, cell.context, device=slots.device)
        if cell.softcap:
            scores = cell.softcap * torch.tanh(scores / cell.softcap)
        hidden = position[None, :] > last[:, None]
        if cell.sliding_window is not None:
            hidden |= position[None, :] <= last[:, None] - cell.sliding_window
        scores = scores.masked_fill(hidden[:, None, None, :], -torch.inf)
        total = scores.logsumexp(-1, keepdim=True)
        if self.options.sinks is not None:
            total = torch.logaddexp(total, self.options.sinks.double().view(cell.num_kv_heads, -1)[None, :, :, None])
        exact = torch.einsum("qhgk,khd->qhgd", (scores - total).exp(), value.double()).flatten(1, 2)
        return float((self.attend()[rows].double() - exact).norm() / exact.norm())


def _case(cell: AttendCell, backend: str, device: torch.device, compile_only: bool = False) -> Case | LatentCase:
    if isinstance(cell, LatentCell):
        return LatentCase.create(cell, backend, device, compile_only)
    return Case.create(cell, backend, device, compile_only)


def _compile(job: tuple[AttendCell, str, str]) -> None:
    """Compiles the kernels of a cell, in a separate process."""
    cell, backend, device = job
    case = _case(cell, backend, torch.device(device), compile_only=True)
    case.error()
    torch.cuda.synchronize()


Prepare = dict[str, tuple[int, Callable[[], baselines.Candidates]]]


def _latent_baselines(cell: LatentCell, device: torch.device) -> Prepare:
    return {
        "flashmla_bf16": (cell.dense_bytes(2), partial(flashmla, cell, device, False)),
        "flashmla_fp8": (cell.dense_bytes(1), partial(flashmla, cell, device, True)),
        "flash_attn_mla_bf16": (cell.dense_bytes(2), partial(flash_attention_latent, cell, device)),
    }


def _dense_baselines(cell: AttendCell, device: torch.device) -> Prepare:
    inputs = DenseInputs.random(cell, device)
    return {
        "sdpa": (cell.dense_bytes(inputs.key.element_size()), partial(baselines.sdpa, inputs)),
        "sdpa_bf16": (cell.dense_bytes(2), partial(baselines.sdpa_bf16, inputs)),
        "fa3_bf16": (cell.dense_bytes(2), partial(baselines.fa3, inputs, False)),
        "fa3_fp8": (cell.dense_bytes(1), partial(baselines.fa3, inputs, True)),
        "vllm_4bit_nc": (cell.dense_bytes(1) // 2, partial(baselines.turboquant_attend, inputs)),
    }


def _baselines(cell: AttendCell, timer: Timer, ours_ms: float, copy: float, step: Step) -> list[Baseline]:
    prepare = (
        _latent_baselines(cell, timer.device) if isinstance(cell, LatentCell) else _dense_baselines(cell, timer.device)
    )
    found = []
    for name, (moved, candidates) in prepare.items():
        step(f"{cell.name}: {name}")
        found.append(time_baseline(name, candidates, timer, ours_ms, moved, copy))
    return found


def _same_shape(a: AttendCell, b: AttendCell) -> bool:
    return replace(a, name="", format="", prefill="16bit") == replace(b, name="", format="", prefill="16bit")


def bench_attend(options: Options, step: Step = silent) -> Report:
    """Runs the chosen cells under every chosen implementation."""
    device = options.torch_device()
    small = options.small or device.type != "cuda"
    more = CPU_ATTEND_CELLS if device.type == "cpu" else () if small else MORE_ATTEND_CELLS
    more += SMALL_LATENT_CELLS if small else LATENT_CELLS
    usual = (SMALL_ATTEND_CELLS if small else ATTEND_CELLS) + (more if options.cells else ())
    cells = choose(usual, options.cells, options.page)
    backends = options.chosen_backends(device)
    compile_ahead(_compile, [(cell, backend, str(device)) for cell in cells for backend in backends], device, step)
    step("copy bandwidth")
    copy, timer = copy_bandwidth(device), Timer(device)
    rows: list[Row] = []
    plain: list[tuple[AttendCell, str, float]] = []
    shared: list[tuple[AttendCell, list[Baseline]]] = []
    for cell in cells:
        for backend in backends:
            step(f"{cell.name}: {backend}")
            torch.manual_seed(0)
            case = _case(cell, backend, device)
            error = case.error()
            if not error < 1:
                raise SlimKVError(
                    f"{cell.name} with {backend}: the output differs from float64 by {error:.2g}; its time means "
                    "nothing"
                )
            ms = timer(case.attend)
            del case
            if cell.format == "k4v4":
                plain.append((cell, backend, ms))
            peer = next(((c, t) for c, i, t in plain if i == backend and c is not cell and _same_shape(c, cell)), None)
            found: list[Baseline] = []
            if options.baselines:
                timed = next((b for c, b in shared if _same_shape(c, cell)), None)
                if timed is None:
                    timed = _baselines(cell, timer, ms, copy, step)
                    shared.append((cell, timed))
                found = [b.against(ms) for b in timed]
            shape = ("batch", "context", "queries", "num_heads", "num_kv_heads", "head_dim", "page")
            moved = cell.packed_bytes
            tflops = cell.flops / (1e9 * ms) if cell.compute_bound else None
            over = ms / peer[1] * peer[0].packed_bytes / moved if peer else None
            figures = {"error": error, "tflops": tflops, "over_k4v4_by_bytes": over}
            rows.append(Row.timed(cell, shape, backend, ms, moved, copy, found, **figures))
            if device.type == "cuda":
                torch.cuda.empty_cache()
    return make_report("attend", rows, device, copy, options.command("attend"))
