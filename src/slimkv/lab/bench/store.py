"""Times ``store`` and the baselines."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from slimkv import ops
from slimkv.calibration.positions import matrix_index, position_edges
from slimkv.codec import Codec
from slimkv.codec.query_aware import query_aware_matrix
from slimkv.lab.bench import baselines, run
from slimkv.lab.bench.cells import CELLS, StoreCell, choose, compute_dtype
from slimkv.lab.bench.results import Report
from slimkv.lab.bench.run import Options, Step
from slimkv.ops import PackedKV, Rounding
from slimkv.ops.store.cuda.launch import format_refusal


@dataclass(frozen=True)
class Case:
    """A cell with its tensors and the prepared call."""

    cell: StoreCell
    key: Tensor
    value: Tensor
    slots: Tensor
    run: Callable[[], None]  # the timed call

    @classmethod
    def create(cls, cell: StoreCell, backend: str, device: torch.device, compile_only: bool = False) -> Case:
        """A chunk fills whole pages in random order; scattered tokens go to different pages."""
        layout, dtype = cell.layout_on(device), compute_dtype(device)
        blocks = cell.tokens if cell.scattered else layout.blocks_for(cell.tokens)
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
        codec = Codec(layout.spec, device)
        rounding = _rounding(cell, codec) if cell.query_aware else None
        kv = PackedKV(pages, codec, layout, key[0].bfloat16() if cell.centred else None)
        plan = ops.plan_store(key, value, kv, slots, rounding, backend=backend)
        index = None if rounding is None else rounding.index
        return cls(cell, key, value, slots, partial(plan.run, key, value, slots, index))  # as engines do in every step

    def error(self) -> None:
        """Not checked: tests compare the bytes with those of the reference."""

    @property
    def moved_bytes(self) -> int:
        """Bytes of K and V that are read, and of pages that are written."""
        return self.cell.moved_bytes(self.key.element_size())

    @property
    def shape(self) -> StoreCell:
        """The cell itself, because a baseline copies as many bytes as its format moves."""
        return self.cell

    @property
    def timing(self) -> dict[str, Any]:
        """Chunks are read from memory (a cold cache). The few tokens of a decode step come from the previous kernel.

        The inputs of a warm cell have just been written by a copy, whose time is subtracted.
        """
        return {"cold": not self.cell.scattered, "before": _writer(self.key, self.value) if self.cell.warm else None}

    def baselines(self) -> dict[str, tuple[int, Callable[[], baselines.Candidates]]]:
        """A copy, unquantised stores and vLLM's store: the bytes that each moves, and the function that prepares it."""
        moved, inputs = self.moved_bytes, (self.key, self.value, self.slots)
        plain = 2 * (self.key.nbytes + self.value.nbytes)
        found: dict[str, tuple[int, Callable[[], baselines.Candidates]]] = {
            "copy": (moved, partial(baselines.copy_of, moved, self.key.device)),
            "scatter": (plain, partial(baselines.scatter, *inputs)),
        }
        if self.cell.rope_dim:
            return found | {"vllm_mla": (plain, partial(baselines.concat_and_cache, *inputs))}
        return found | {"vllm_4bit_nc": (moved, partial(baselines.turboquant_store, *inputs))}


def _writer(key: Tensor, value: Tensor) -> Callable[[], object]:
    """A call that writes K and V again, so that the L2 cache holds as much of them as fits."""
    copies = key.clone(), value.clone()

    def write() -> None:
        key.copy_(copies[0])
        value.copy_(copies[1])

    return write


def _rounding(cell: StoreCell, codec: Codec) -> Rounding:
    """Matrices from synthetic queries with few strong directions, per head and, with positions, per range."""
    generator = torch.Generator().manual_seed(0)
    queries = torch.randn(cell.num_kv_heads, 512, cell.head_dim, generator=generator)
    queries = queries * torch.logspace(0, -1.5, cell.head_dim)
    matrices = query_aware_matrix(queries.mT @ queries, codec.key_rotation.cpu()).to(codec.device)
    if not cell.max_positions:
        return Rounding(matrices)
    edges = position_edges(cell.max_positions)
    several = torch.stack([matrices.roll(i, 0) for i in range(len(edges))])
    positions = torch.arange(cell.tokens) % cell.max_positions
    if cell.scattered:
        positions = torch.randint(cell.max_positions, (cell.tokens,), generator=generator)
    return Rounding(several, matrix_index(positions.to(codec.device), edges))


def _backends(cell: StoreCell, options: Options, device: torch.device) -> list[str]:
    """The implementations to time; by default the one that stores the cell's format on ``device``."""
    chosen = options.chosen_backends(device)
    left_to_triton = not options.backends and chosen == ["cuda"] and format_refusal(cell.layout_on(device)) is not None
    return ["triton"] if left_to_triton else chosen


def bench_store(options: Options, step: Step) -> Report:
    """Runs the chosen cells with every chosen backend. A decode step is timed as one of many launches in a graph."""
    device = options.torch_device()
    small = options.small or device.type != "cuda"
    more = CELLS["store_cpu"] if device.type == "cpu" and options.cells else ()
    cells = choose(CELLS["store_small" if small else "store"] + more, options.cells, options.page)
    return run.run_cells("store", cells, lambda cell: _backends(cell, options, device), Case.create, options, step)
