"""The baselines: torch's attention everywhere, and vLLM's kernels if it is installed.

A baseline is a function that prepares its tensors and returns candidates: configurations that give the same result. The
fastest one is reported. A baseline that cannot run raises, and its row has the reason.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from slimkv.errors import UnsupportedError
from slimkv.lab.bench.cells import AttendCell, compute_dtype
from slimkv.lab.bench.results import Baseline
from slimkv.lab.bench.timing import Timer
from slimkv.ops.attention.api import AttendOptions
from slimkv.ops.cpu.isa import cpu_features

Call = Callable[[], object]
Candidates = Iterator[tuple[str, Call]]


@dataclass(frozen=True)
class DenseInputs:
    """K and V as tensors [batch * context, num_kv_heads, head_dim], queries [batch * queries, heads, head_dim]."""

    cell: AttendCell
    query: Tensor
    key: Tensor
    value: Tensor

    @classmethod
    def random(cls, cell: AttendCell, device: torch.device) -> DenseInputs:
        """Normally distributed values."""
        shape = (cell.batch * cell.context, cell.num_kv_heads, cell.head_dim)
        dtype = compute_dtype(device)
        query = torch.randn(cell.batch * cell.queries, cell.num_heads, cell.head_dim, device=device, dtype=dtype)
        key, value = (torch.randn(shape, device=device, dtype=dtype) for _ in range(2))
        return cls(cell, query, key, value)


def cell_options(cell: AttendCell, device: torch.device) -> AttendOptions:
    """The options of ``attend`` for this cell."""
    sinks = torch.linspace(-1, 1, cell.num_heads, device=device) if cell.sinks else None
    return AttendOptions(
        sliding_window=cell.sliding_window, softcap=cell.softcap, sinks=sinks, prefill=cell.prefill,
        deterministic=cell.deterministic,
    )  # fmt: skip


def _refuse_options(cell: AttendCell, *names: str) -> None:
    given = [name for name in names if getattr(cell, name)]
    if given:
        raise UnsupportedError(f"does not support {' or '.join(given)}")


def sdpa(inputs: DenseInputs, only_flash: bool = False) -> Candidates:
    """torch's own attention on contiguous K and V, as it does not support pages.

    ``only_flash``: with FlashAttention-2, which GPUs before Hopper and consumer GPUs run; torch may choose another.
    """
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.attention.bias import causal_lower_right

    cell = inputs.cell
    _refuse_options(cell, "shortest", "sliding_window", "softcap", "sinks")
    key, value = (
        x.view(cell.batch, cell.context, cell.num_kv_heads, -1).transpose(1, 2) for x in (inputs.key, inputs.value)
    )
    query = inputs.query.view(cell.batch, cell.queries, cell.num_heads, -1).transpose(1, 2)
    fast = [SDPBackend.FLASH_ATTENTION] if only_flash else [SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION]
    backends = fast if only_flash or query.is_cuda else [*fast, SDPBackend.MATH]
    mask: Any = causal_lower_right(cell.queries, cell.context) if cell.queries > 1 else None

    def call() -> Tensor:
        with sdpa_kernel(backends):
            return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=True)

    yield "contiguous K and V", call


def sdpa_bf16(inputs: DenseInputs) -> Candidates:
    """``sdpa`` in bfloat16 on a CPU that supports it; on a GPU it is bfloat16 already."""
    if inputs.query.dtype == torch.bfloat16:
        raise UnsupportedError("on this device, sdpa itself runs in bfloat16")
    if not {"bf16", "avx512_bf16", "amx_bf16"} & cpu_features():
        raise UnsupportedError("this CPU has no bfloat16 arithmetic")
    query, key, value = (x.bfloat16() for x in (inputs.query, inputs.key, inputs.value))
    yield from sdpa(DenseInputs(inputs.cell, query, key, value))


def flash_attention_3() -> Any:
    """vLLM's interface to FlashAttention-3; raises if it does not run."""
    from vllm.vllm_flash_attn import flash_attn_interface

    reason = flash_attn_interface.fa_version_unsupported_reason(3)
    if reason is not None:
        raise UnsupportedError(reason)
    return flash_attn_interface


def fa3(inputs: DenseInputs, fp8: bool) -> Candidates:
    """Paged FlashAttention-3 as vLLM calls it, with and without a precomputed schedule, in pages of 16 and 128.

    Deterministic cells use one split, as vLLM does with VLLM_BATCH_INVARIANT=1.
    """
    module, cell = flash_attention_3(), inputs.cell
    query, key, value = inputs.query, inputs.key, inputs.value
    device = query.device
    scales: dict[str, Tensor] = {}
    if fp8:
        query, key, value = (x.to(torch.float8_e4m3fn) for x in (query, key, value))
        one = torch.ones(1, device=device).expand(cell.batch, cell.num_kv_heads)
        scales = {"q_descale": one, "k_descale": one, "v_descale": one}
    out = torch.empty_like(inputs.query)
    lens = torch.tensor(cell.lengths, dtype=torch.int32, device=device)
    options = cell_options(cell, device)
    window = (-1, -1) if cell.sliding_window is None else (cell.sliding_window - 1, 0)
    extra = {} if options.sinks is None else {"s_aux": options.sinks.to(torch.bfloat16)}
    starts = torch.arange(cell.batch + 1, dtype=torch.int32, device=device) * cell.queries
    for page in (16, 128):
        count = cell.context // page
        table = torch.randperm(cell.batch * count, device=device).to(torch.int32).view(cell.batch, count)
        pages = [x.view(-1, page, cell.num_kv_heads, cell.head_dim) for x in (key, value)]
        for num_splits in (1,) if cell.deterministic else (0, 32):
            schedule = None
            if num_splits > 1:
                schedule = module.get_scheduler_metadata(
                    cell.batch, cell.queries, cell.context, cell.num_heads, cell.num_kv_heads, cell.head_dim, lens,
                    qkv_dtype=query.dtype, cu_seqlens_q=starts, page_size=page, causal=True, num_splits=num_splits,
                    window_size=window, has_softcap=cell.softcap > 0,
                )  # fmt: skip
            yield (
                f"pages of {page}, " + {0: "own split heuristic", 1: "one split"}.get(
                    num_splits, f"schedule of up to {num_splits} splits"),
                functools.partial(
                    module.flash_attn_varlen_func, query, *pages, cell.queries, starts, cell.context, seqused_k=lens,
                    causal=True, block_table=table, out=out, scheduler_metadata=schedule, num_splits=num_splits,
                    window_size=window, softcap=cell.softcap, fa_version=3, **scales, **extra,
                ),
            )  # fmt: skip


@dataclass(frozen=True)
class TurboQuant:
    """vLLM's stock turboquant_4bit_nc kernels, and the constants that its backend passes."""

    config: Any
    rotation: Tensor
    centroids: Tensor
    midpoints: Tensor

    @classmethod
    def create(cls, head_dim: int, device: torch.device) -> TurboQuant:
        """Raises if vLLM is not installed or lacks these kernels."""
        from vllm.model_executor.layers.quantization.turboquant.centroids import get_centroids
        from vllm.model_executor.layers.quantization.turboquant.config import TurboQuantConfig

        if head_dim & (head_dim - 1):
            raise UnsupportedError(f"its rotation needs a power of two, not {head_dim}")
        rotation = torch.ones(1, 1)
        while rotation.shape[0] < head_dim:
            rotation = torch.cat([torch.cat([rotation, rotation], 1), torch.cat([rotation, -rotation], 1)])
        config = TurboQuantConfig.from_cache_dtype("turboquant_4bit_nc", head_dim)
        centroids = get_centroids(head_dim, config.centroid_bits).to(device=device, dtype=torch.float32).sort().values
        return cls(config, (rotation / head_dim**0.5).to(device), centroids, (centroids[1:] + centroids[:-1]) / 2)

    def cache(self, tokens: int, num_kv_heads: int, page: int, device: torch.device) -> Tensor:
        """An empty cache, uint8 [blocks, page, num_kv_heads, slot bytes]."""
        return torch.zeros(
            -(-tokens // page), page, num_kv_heads, self.config.slot_size_aligned, dtype=torch.uint8, device=device
        )

    def store(self, key: Tensor, value: Tensor, cache: Tensor, slots: Tensor) -> None:
        """Stores K and V with the arguments that its backend passes."""
        from vllm.v1.attention.ops.triton_turboquant_store import triton_turboquant_store

        triton_turboquant_store(
            key, value, cache, slots, self.rotation, self.midpoints, mse_bits=self.config.key_mse_bits,
            key_packed_size=self.config.key_packed_size, value_quant_bits=self.config.effective_value_quant_bits,
            key_fp8=self.config.key_fp8,
        )  # fmt: skip


def turboquant_attend(inputs: DenseInputs) -> Candidates:
    """vLLM's turboquant_4bit_nc decode on a cache that its own store has filled."""
    from vllm.v1.attention.ops.triton_turboquant_decode import triton_turboquant_decode_attention

    cell, device = inputs.cell, inputs.query.device
    _refuse_options(cell, "shortest", "sliding_window", "softcap", "sinks", "deterministic")
    if cell.queries > 1:
        raise UnsupportedError("its decode takes one query per sequence")
    turbo = TurboQuant.create(cell.head_dim, device)
    total, page, num_splits = cell.batch * cell.context, 16, 32
    cache = turbo.cache(total, cell.num_kv_heads, page, device)
    for first in range(0, total, 32768):
        part = slice(first, min(first + 32768, total))
        slots = torch.arange(part.start, part.stop, dtype=torch.int32, device=device)
        turbo.store(inputs.key[part], inputs.value[part], cache, slots)
    table = torch.randperm(len(cache), device=device).to(torch.int32).view(cell.batch, -1)
    lens = torch.full((cell.batch,), cell.context, dtype=torch.int32, device=device)
    middle = torch.empty(cell.batch, cell.num_heads, num_splits, cell.head_dim + 1, device=device)
    yield (
        f"pages of {page}, {num_splits} splits",
        functools.partial(
            triton_turboquant_decode_attention, inputs.query, cache, table, lens, turbo.rotation, turbo.centroids,
            cell.head_dim**-0.5, turbo.config.key_mse_bits, turbo.config.key_packed_size,
            turbo.config.effective_value_quant_bits, key_fp8=turbo.config.key_fp8,
            norm_correction=turbo.config.norm_correction, PiT=turbo.rotation, mid_o_buf=middle,
            max_num_kv_splits=num_splits,
        ),
    )  # fmt: skip


def scatter(key: Tensor, value: Tensor, slots: Tensor) -> Candidates:
    """Writes unquantised K and V to the same slots of plain tensors with torch's index_put."""
    size = int(slots.max()) + 1
    cache = [torch.zeros(size, *x.shape[1:], dtype=x.dtype, device=x.device) for x in (key, value)]

    def call() -> None:
        cache[0].index_put_((slots,), key)
        cache[1].index_put_((slots,), value)

    yield "two index_put", call


def copy_of(moved_bytes: int, device: torch.device) -> Candidates:
    """A plain copy of the same number of bytes: the cost of the launch and of memory alone."""
    source = torch.zeros(moved_bytes // 2, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    yield "copy_", functools.partial(target.copy_, source)


def turboquant_store(key: Tensor, value: Tensor, slots: Tensor) -> Candidates:
    """vLLM's turboquant_4bit_nc store (its GEMM and element-wise launches included)."""
    _, num_kv_heads, head_dim = key.shape
    turbo = TurboQuant.create(head_dim, key.device)
    cache = turbo.cache(int(slots.max()) + 1, num_kv_heads, 16, key.device)
    yield "pages of 16", functools.partial(turbo.store, key, value, cache, slots.to(torch.int32))


def concat_and_cache(latent: Tensor, rope: Tensor, slots: Tensor) -> Candidates:
    """vLLM's store of unquantised latents: one launch."""
    from vllm import _custom_ops

    size = latent.shape[-1] + rope.shape[-1]
    cache = torch.zeros(int(slots.max()) // 64 + 1, 64, size, dtype=latent.dtype, device=latent.device)
    scale = torch.ones(1, device=latent.device)
    yield (
        "pages of 64",
        functools.partial(
            _custom_ops.concat_and_cache_mla, latent.flatten(1), rope.flatten(1), cache, slots.long(), "auto", scale
        ),
    )


def time_baseline(
    name: str, prepare: Callable[[], Candidates], timer: Timer, moved_bytes: int, copy: float, **timing: Any
) -> Baseline:
    """The fastest candidate, timed by ``timer``, or the reason why there is none."""
    if timer.device.type != "cuda" and name not in ("sdpa", "sdpa_bf16", "scatter", "copy"):
        return Baseline(name, None, None, None, "needs a CUDA device")
    times: dict[str, float] = {}
    reasons: list[str] = []
    try:
        for detail, call in prepare():
            try:
                times[detail] = timer(call, **timing)
            except Exception as error:  # this build lacks this configuration; others may run
                reasons.append(f"{detail}: {_one_line(error)}")
    except Exception as error:  # third-party code may raise anything; the row has the reason and the run continues
        reasons.append(_one_line(error))
    if not times:
        return Baseline(name, None, None, None, "; ".join(reasons))
    detail, ms = min(times.items(), key=lambda item: item[1])
    return Baseline(name, ms, None, moved_bytes / (1e-3 * ms) / copy, detail)


def _one_line(error: Exception) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:300]}"
