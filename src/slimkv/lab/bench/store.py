"""Times ``store`` and the baselines."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from slimkv import ops
from slimkv.calibration.positions import matrix_index, position_edges
from slimkv.codec import Codec
from slimkv.codec.query_aware import query_aware_matrix
from slimkv.lab.bench import baselines
from slimkv.lab.bench.baselines import compute_dtype, time_baseline
from slimkv.lab.bench.cells import CPU_STORE_CELLS, SMALL_STORE_CELLS, STORE_CELLS, StoreCell, choose
from slimkv.lab.bench.options import Options, Step, compile_ahead, silent
from slimkv.lab.bench.results import Baseline, Report, Row, make_report
from slimkv.lab.bench.timing import Timer, copy_bandwidth
from slimkv.ops import PackedKV, Rounding
from slimkv.ops.store.cuda.launch import format_refusal
from slimkv.spec import PageLayout

Sized = tuple[Callable[[], baselines.Candidates], int]  # a baseline and its bytes


def _layout(cell: StoreCell, device: torch.device) -> PageLayout:
    """The cell's pages, with raw sides in the dtype of the stored values."""
    dtype = str(compute_dtype(device)).removeprefix("torch.")
    return PageLayout(cell.layout.spec.with_raw_dtype(dtype), cell.page)


def _inputs(cell: StoreCell, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """K, V, slots and pages. A chunk fills whole pages in random order; scattered tokens go to different pages."""
    layout, dtype = _layout(cell, device), compute_dtype(device)
    blocks = cell.tokens if cell.scattered else cell.layout.blocks_for(cell.tokens)
    order = torch.randperm(blocks, device=device)
    if cell.scattered:
        slots = order * cell.page + torch.randint(cell.page, (blocks,), device=device)
    else:
        slots = (order[:, None] * cell.page + torch.arange(cell.page, device=device)).flatten()[: cell.tokens]
    key, value = (
        torch.randn(cell.tokens, cell.num_kv_heads, dim, device=device, dtype=dtype)
        for dim in (layout.spec.key_dim, layout.spec.value_dim)
    )
    pages = torch.zeros(blocks, cell.num_kv_heads, layout.page_bytes, dtype=torch.uint8, device=device)
    return key, value, slots, pages


def _call(cell: StoreCell, backend: str, device: torch.device) -> tuple[partial[None], tuple[Tensor, Tensor, Tensor]]:
    key, value, slots, pages = _inputs(cell, device)
    layout = _layout(cell, device)
    codec = Codec(layout.spec, device)
    rounding = Rounding(*_query_aware(cell, codec)) if cell.query_aware else None
    kv = PackedKV(pages, codec, layout, key[0].bfloat16() if cell.centred else None)
    plan = ops.plan_store(key, value, kv, slots, rounding, backend=backend)
    index = None if rounding is None else rounding.index
    return partial(plan.run, key, value, slots, index), (key, value, slots)  # as engines do in every step


def _writer(key: Tensor, value: Tensor) -> Callable[[], object]:
    """Baselines that write unquantised K and V."""
    copies = key.clone(), value.clone()

    def write() -> None:
        key.copy_(copies[0])
        value.copy_(copies[1])

    return write


def _query_aware(cell: StoreCell, codec: Codec) -> tuple[Tensor, Tensor | None]:
    """Matrices for queries that live in few directions, others for every head; by position, and then an index."""
    generator = torch.Generator().manual_seed(0)
    queries = torch.randn(cell.num_kv_heads, 512, cell.head_dim, generator=generator)
    queries = queries * torch.logspace(0, -1.5, cell.head_dim)
    matrices = query_aware_matrix(queries.mT @ queries, codec.key_rotation.cpu()).to(codec.device)
    if not cell.max_positions:
        return matrices, None
    edges = position_edges(cell.max_positions)
    several = torch.stack([matrices.roll(i, 0) for i in range(len(edges))])
    positions = torch.arange(cell.tokens) % cell.max_positions
    if cell.scattered:
        positions = torch.randint(cell.max_positions, (cell.tokens,), generator=generator)
    return several, matrix_index(positions.to(codec.device), edges)


def _engines(cell: StoreCell, inputs: tuple[Tensor, Tensor, Tensor], moved: int) -> dict[str, Sized]:
    """vLLM's own stores: 4-bit K and V, or unquantised latents."""
    if cell.rope_dim:
        return {"vllm_mla": (partial(baselines.concat_and_cache, *inputs), 2 * (inputs[0].nbytes + inputs[1].nbytes))}
    return {"vllm_4bit_nc": (partial(baselines.turboquant_store, cell, *inputs), moved)}


def _backends(cell: StoreCell, options: Options, device: torch.device) -> list[str]:
    """The implementations to time; by default the one that stores the cell's format on ``device``."""
    chosen = options.chosen_backends(device)
    left_to_triton = not options.backends and chosen == ["cuda"] and format_refusal(_layout(cell, device)) is not None
    return ["triton"] if left_to_triton else chosen


def _compile(job: tuple[StoreCell, str, str]) -> None:
    """Compiles the kernels of a cell, in a separate process."""
    cell, backend, device = job
    _call(cell, backend, torch.device(device))[0]()
    torch.cuda.synchronize()


def bench_store(options: Options, step: Step = silent) -> Report:
    """Runs the chosen cells under every chosen implementation.

    Chunks are read from memory (a cold cache). The inputs of a warm cell have just been written by a copy, whose time
    is subtracted, and are in the cache as far as they fit. The few tokens of a decode step come from the previous
    kernel, so their inputs are warm, and the time is that of one launch among others in a graph.
    """
    device = options.torch_device()
    small = options.small or device.type != "cuda"
    more = CPU_STORE_CELLS if device.type == "cpu" and options.cells else ()
    cells = choose((SMALL_STORE_CELLS if small else STORE_CELLS) + more, options.cells, options.page)
    backends = {cell: _backends(cell, options, device) for cell in cells}
    compile_ahead(_compile, [(c, backend, str(device)) for c in cells for backend in backends[c]], device, step)
    step("copy bandwidth")
    copy, timer, rows = copy_bandwidth(device), Timer(device), []
    for cell in cells:
        known: list[Baseline] = []  # the same for every implementation
        for backend in backends[cell]:
            step(f"{cell.name}: {backend}")
            torch.manual_seed(0)
            call, inputs = _call(cell, backend, device)
            cold, before = not cell.scattered, _writer(*inputs[:2]) if cell.warm else None
            ms = timer(call, cold=cold, before=before)
            moved = cell.moved_bytes(inputs[0].element_size())
            if options.baselines and not known:
                candidates: dict[str, Sized] = {
                    "copy": (partial(baselines.copy_of, moved, device), moved),
                    "scatter": (partial(baselines.scatter, cell, *inputs), 2 * (inputs[0].nbytes + inputs[1].nbytes)),
                    **_engines(cell, inputs, moved),
                }
                known = [
                    time_baseline(name, candidate, timer, ms, size, copy, cold, before)
                    for name, (candidate, size) in candidates.items()
                ]
            shape = ("tokens", "num_kv_heads", "head_dim", "page")
            rows.append(Row.timed(cell, shape, backend, ms, moved, copy, [b.against(ms) for b in known]))
    return make_report("store", rows, device, copy, options.command("store"))
