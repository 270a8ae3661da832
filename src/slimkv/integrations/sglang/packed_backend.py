"""``PackedBackend``: prepares steps for attention on packed K and V and on packed latents."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from slimkv.errors import InputError, UnsupportedError
from slimkv.integrations.sglang.compat import AttentionBackend
from slimkv.integrations.sglang.metadata import BlockTables, GraphTables, Step, eager_step, verified_tokens
from slimkv.integrations.sglang.refusals import DRAFT_BACKEND


class PackedBackend(AttentionBackend):
    """Prepares eager steps and steps in CUDA graphs."""

    _tables: BlockTables  # set by the subclass
    _forward: Callable[..., Tensor]  # attention of the subclass, with the arguments of forward_decode

    def __init__(self, model_runner: Any) -> None:
        super().__init__()
        if model_runner.is_draft_worker:
            raise InputError(DRAFT_BACKEND)
        self.device = torch.device(model_runner.device)
        self.token_to_kv_pool = model_runner.token_to_kv_pool
        self._graph: GraphTables | None = None
        self.forward_metadata: Step | None = None

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Called before a step outside a graph."""
        self.forward_metadata = eager_step(forward_batch, self._tables) if forward_batch.batch_size else None

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Called before graphs of up to ``max_bs`` requests and ``max_num_tokens`` tokens are captured."""
        self._graph = GraphTables(max_bs, max_num_tokens, self._tables, self.device)

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        """Called before a graph is captured or replayed: selects the tables that it reads."""
        step, _ = self._graph_step(forward_batch)
        self.forward_metadata = step

    def init_forward_metadata_in_graph(self, forward_batch: Any) -> None:
        """Captured at the start of the graph: updates its tables."""
        step, more = self._graph_step(forward_batch)
        assert self._graph is not None
        self._graph.fill(forward_batch, step, more)
        self.forward_metadata = step

    def _graph_step(self, batch: Any) -> tuple[Step, int]:
        """The step of a batch's graph, and the number of tokens that the batch's lengths do not include yet."""
        if self._graph is None:
            raise UnsupportedError("SGLang captures a graph without init_cuda_graph_state")
        if batch.forward_mode.is_decode_or_idle():
            return self._graph.step(batch.batch_size, 1), 0
        if batch.forward_mode.is_target_verify():
            each = verified_tokens(batch)
            return self._graph.step(batch.batch_size, each), each
        raise UnsupportedError(
            f"slimkv captures graphs for decode and verification, not for {batch.forward_mode.name}: "
            "use --disable-prefill-cuda-graph"
        )

    def forward_decode(
        self, q: Tensor, k: Tensor, v: Tensor, layer: Any, forward_batch: Any, save_kv_cache: bool = True, **more: Any
    ) -> Tensor:
        """Decode, prefill with or without a prefix in the cache, mixed batches, and verification."""
        return self._forward(q, k, v, layer, forward_batch, save_kv_cache, **more)

    forward_extend = forward_decode

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        """The length of padding requests."""
        return 1

    get_cpu_graph_seq_len_fill_value = get_cuda_graph_seq_len_fill_value

    def update_verify_buffers_to_fill_after_draft(self, spec_info: Any, cuda_graph_bs: int | None) -> None:
        """Does nothing: chains are causal, so no mask depends on the drafted tokens."""

    def support_triton(self) -> bool:
        """Whether SGLang may use its Triton helpers."""
        return self.device.type == "cuda"


def check_pool(pool: Any, expected: type) -> None:
    """Raises unless the pool that SGLang built is slimkv's."""
    if not isinstance(pool, expected):
        raise UnsupportedError(
            f"SGLang built a {type(pool).__name__} where slimkv's pages should be: slimkv's hook on the pool's class "
            "had no effect, or this model has a cache of another kind"
        )


def refuse_unknown(others: Mapping[str, Any]) -> None:
    """Raises for arguments of a model's attention call that slimkv does not support."""
    asked = [name for name, value in others.items() if value is not None and value is not False]
    if asked:
        raise UnsupportedError(f"slimkv does not support these arguments of the model's attention: {', '.join(asked)}")
