"""Times ``attend`` and ``attend_latent`` on pages that ``store`` has filled, and the baselines."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from slimkv import ops
from slimkv.codec import Codec
from slimkv.lab.bench import baselines, latent, run
from slimkv.lab.bench.cells import CELLS, AttendCell, choose, compute_dtype
from slimkv.lab.bench.results import Report
from slimkv.lab.bench.run import Options, Step
from slimkv.ops import AttendOptions, AttentionBatch, PackedKV

_CHUNK = 65536  # tokens stored at a time
_CHECKED_QUERIES = 16


@dataclass(frozen=True)
class Case:
    """A cell with its tensors. The blocks of a sequence are in random order; queries on latents are rotated."""

    cell: AttendCell
    backend: str
    kv: PackedKV
    batch: AttentionBatch
    query: Tensor
    query_rope: Tensor
    options: AttendOptions
    timing: ClassVar[dict[str, Any]] = {}  # arguments of the ``Timer``

    @classmethod
    def create(cls, cell: AttendCell, backend: str, device: torch.device, compile_only: bool = False) -> Case:
        """Stores random K and V. With ``compile_only``, sequences share a few blocks to save work."""
        layout, dtype = cell.layout_on(device), compute_dtype(device)
        per_sequence = layout.blocks_for(cell.context)
        total, chunk = cell.batch * per_sequence, min(_CHUNK, cell.batch * cell.context) // cell.page
        if compile_only:
            total = chunk
            table = torch.zeros(cell.batch, per_sequence, dtype=torch.int32, device=device)
        else:
            table = torch.randperm(total, device=device).to(torch.int32).view(cell.batch, per_sequence)
        pages = torch.empty(total, cell.num_kv_heads, layout.page_bytes, dtype=torch.uint8, device=device)
        kv = PackedKV(pages, Codec(layout.spec, device), layout)

        def random(*shape: int) -> Tensor:
            return torch.randn(shape, device=device, dtype=dtype)

        for first in range(0, total, chunk):
            slots = torch.arange(first * cell.page, min(first + chunk, total) * cell.page, device=device)
            key, value = (
                random(len(slots), cell.num_kv_heads, d) for d in (layout.spec.key_dim, layout.spec.value_dim)
            )
            ops.store_kv(key, value, kv, slots)
        lens = torch.tensor(cell.lengths, dtype=torch.int32, device=device)
        starts = torch.arange(cell.batch + 1, dtype=torch.int32, device=device) * cell.queries
        rows = cell.batch * cell.queries
        return cls(
            cell=cell,
            backend=backend,
            kv=kv,
            batch=AttentionBatch(table, lens, starts, cell.queries, cell.context, cell.queries),
            options=baselines.cell_options(cell, device),
            query=random(rows, cell.num_heads, cell.head_dim),
            query_rope=random(rows, cell.num_heads, cell.rope_dim),
        )

    def run(self) -> Tensor:
        """The timed call."""
        if self.cell.rope_dim:
            return ops.attend_latent(
                self.query, self.query_rope, self.kv, self.batch, softmax_scale=self.cell.softmax_scale,
                query_is_rotated=True, output_is_rotated=True, backend=self.backend,
            )  # fmt: skip
        return ops.attend(self.query, self.kv, self.batch, self.options, backend=self.backend)

    def error(self) -> float:
        """Relative error of the first sequence's last queries against float64 on the same codes."""
        cell, count = self.cell, min(self.cell.queries, _CHECKED_QUERIES)
        position = torch.arange(cell.context, device=self.query.device)
        slots = self.batch.block_table[0, position // cell.page].long() * cell.page + position % cell.page
        rows = slice(cell.queries - count, cell.queries)
        query, rope = (x[rows].double().unflatten(1, (cell.num_kv_heads, -1)) for x in (self.query, self.query_rope))
        if cell.rope_dim:
            value, _ = ops.gather_latent(self.kv, slots, rotated=True)
            key = torch.cat([value, ops.gather_latent(self.kv, slots)[1]], -1)[:, None]
            query, value = torch.cat([query, rope], -1), value[:, None]
        else:
            key, value = ops.gather_kv(self.kv, slots)
        scores = torch.einsum("qhgd,khd->qhgk", query, key.double()) * cell.softmax_scale
        if cell.softcap:
            scores = cell.softcap * torch.tanh(scores / cell.softcap)
        last = torch.arange(cell.context - count, cell.context, device=slots.device)
        hidden = position[None, :] > last[:, None]
        if cell.sliding_window is not None:
            hidden |= position[None, :] <= last[:, None] - cell.sliding_window
        scores = scores.masked_fill(hidden[:, None, None, :], -torch.inf)
        total = scores.logsumexp(-1, keepdim=True)
        if self.options.sinks is not None:
            total = torch.logaddexp(total, self.options.sinks.double().view(cell.num_kv_heads, -1)[None, :, :, None])
        exact = torch.einsum("qhgk,khd->qhgd", (scores - total).exp(), value.double()).flatten(1, 2)
        return float((self.run()[rows].double() - exact).norm() / exact.norm())

    @property
    def moved_bytes(self) -> int:
        """Bytes of the pages that are read."""
        return self.cell.packed_bytes

    @property
    def shape(self) -> AttendCell:
        """The cell without its format: cases of equal shape have the same baselines."""
        return replace(self.cell, name="", format="", prefill="16bit")

    def baselines(self) -> dict[str, tuple[int, Callable[[], baselines.Candidates]]]:
        """Attention on plain tensors of the same shape: the bytes that each moves, and a function that prepares it."""
        cell, device = self.cell, self.query.device
        bf16, fp8 = cell.dense_bytes(2), cell.dense_bytes(1)
        if cell.rope_dim:
            return {
                "flashmla_bf16": (bf16, partial(latent.flashmla, cell, device, False)),
                "flashmla_fp8": (fp8, partial(latent.flashmla, cell, device, True)),
                "flash_attn_mla_bf16": (bf16, partial(latent.flash_attention_latent, cell, device)),
            }
        inputs = baselines.DenseInputs.random(cell, device)
        return {
            "sdpa": (cell.dense_bytes(inputs.key.element_size()), partial(baselines.sdpa, inputs)),
            "sdpa_bf16": (bf16, partial(baselines.sdpa_bf16, inputs)),
            "fa2_bf16": (bf16, partial(baselines.sdpa, inputs, only_flash=True)),
            "fa3_bf16": (bf16, partial(baselines.fa3, inputs, False)),
            "fa3_fp8": (fp8, partial(baselines.fa3, inputs, True)),
            "vllm_4bit_nc": (fp8 // 2, partial(baselines.turboquant_attend, inputs)),
        }


def bench_attend(options: Options, step: Step) -> Report:
    """Runs the chosen cells with every chosen backend."""
    device = options.torch_device()
    small = options.small or device.type != "cuda"
    more = CELLS["attend_cpu"] if device.type == "cpu" else () if small else CELLS["attend_more"]
    more += CELLS["latent_small" if small else "latent"]
    usual = CELLS["attend_small" if small else "attend"] + (more if options.cells else ())
    backends = options.chosen_backends(device)
    cells = choose(usual, options.cells, options.page)
    return run.run_cells("attend", cells, lambda cell: backends, Case.create, options, step)
