"""Step metadata, shared by all layers: vLLM's tables on the device, and bounds on the host.

Building it takes no device-to-host copy and no loop over requests. vLLM orders requests with few queries
first. Attention on a mixed batch takes two calls, because split-KV needs the decode requests in one call.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from slimkv.calibration.positions import matrix_index
from slimkv.errors import UnsupportedError
from slimkv.integrations.vllm import compat
from slimkv.integrations.vllm.context_parallel import DCPConfig, ShardTables, shard_tables
from slimkv.integrations.vllm.model import served_model
from slimkv.integrations.vllm.refusals import check_cache
from slimkv.integrations.vllm.settings import parse
from slimkv.integrations.vllm.warmup import verified_tokens
from slimkv.ops import AttentionBatch


@dataclass(frozen=True)
class Part:
    """Consecutive requests that share one attention call."""

    rows: slice  # within the step's queries
    batch: AttentionBatch
    shard: ShardTables | None = None  # under decode context parallelism
    prompt: bool | None = None  # see ``AttendOptions``; None unless deterministic


@dataclass
class StepMetadata:
    """The fields that vLLM itself reads, under its names."""

    num_actual_tokens: int
    max_query_len: int
    max_seq_len: int
    query_start_loc: Tensor
    seq_lens: Tensor
    slot_mapping: Tensor
    block_table: Tensor  # int32 [requests, blocks]

    @classmethod
    def of(cls, common: compat.CommonAttentionMetadata, **own: Any) -> Self:
        """Step metadata from vLLM's common metadata and slimkv's ``own`` fields."""
        names = ("num_actual_tokens", "max_query_len", "max_seq_len", "query_start_loc", "seq_lens", "slot_mapping")
        return cls(**{name: getattr(common, name) for name in names}, block_table=common.block_table_tensor, **own)


@dataclass
class SlimKVMetadata(StepMetadata):
    """The metadata of one step."""

    parts: tuple[Part, ...]
    causal: bool = True  # False for block drafters with bidirectional attention
    matrix_index: Tensor | None = None  # int32 [at least num_actual_tokens]: each token's position range


class SlimKVMetadataBuilder(compat.AttentionMetadataBuilder):
    """Builds step metadata; layers delegated to another backend get that backend's metadata."""

    # A graph captures bounds and addresses only. It serves uniform batches of few queries, including verification.
    _cudagraph_support: ClassVar[Any] = compat.AttentionCGSupport.UNIFORM_BATCH

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self._stock: Any = None
        if compat.is_delegated(kv_cache_spec):
            layer = vllm_config.compilation_config.static_forward_context[layer_names[0]]
            backend = compat.stock_backend(kv_cache_spec.head_size, layer.attn_type)
            self._stock = backend.get_builder_cls()(kv_cache_spec, layer_names, vllm_config, device)
            self.reorder_batch_threshold = self._stock.reorder_batch_threshold
            return
        self._init_reorder_batch_threshold(1, supports_spec_as_decode=True)
        self._sharing = _sharing(vllm_config)
        self._deterministic = parse(vllm_config.additional_config).deterministic
        self._matrix_index = _matrix_index(vllm_config, device)
        check_cache(vllm_config, kv_cache_spec.block_size)

    @classmethod
    def get_cudagraph_support(cls, vllm_config: Any, kv_cache_spec: Any) -> Any:
        """CUDA graphs of uniform batches; for delegated layers, the support of their backend."""
        if compat.is_delegated(kv_cache_spec):
            stock = compat.stock_backend(kv_cache_spec.head_size, compat.AttentionType.ENCODER_DECODER)
            return stock.get_builder_cls().get_cudagraph_support(vllm_config, kv_cache_spec)
        if _sharing(vllm_config) is not None:
            return compat.AttentionCGSupport.NEVER  # the shard tables are allocated anew at every step
        if parse(vllm_config.additional_config).deterministic:
            return compat.AttentionCGSupport.NEVER  # vLLM would replay a cached prompt's last token as a decoded one
        return cls._cudagraph_support

    @classmethod
    def get_varlen_cudagraph_max_query_len(cls, vllm_config: Any, kv_cache_spec: Any) -> int | None:
        """The largest number of query tokens per request in a CUDA graph; kernels read the actual one on the device."""
        return None if compat.is_delegated(kv_cache_spec) else verified_tokens(vllm_config)

    def build(
        self, common_prefix_len: int, common_attn_metadata: compat.CommonAttentionMetadata, fast_build: bool = False
    ) -> Any:
        """The step's metadata."""
        common = common_attn_metadata
        if self._stock is not None:
            return self._stock.build(common_prefix_len, common, fast_build)
        if not isinstance(common.causal, bool) or (not common.causal and self._sharing is not None):
            raise UnsupportedError(
                "slimkv needs one kind of attention for all requests of a step: causal or, without decode context "
                "parallelism, bidirectional; this model or drafter mixes the two"
            )
        requests, index = common.num_reqs, None
        if self._matrix_index is not None:
            starts, lengths = common.query_start_loc[: requests + 1], common.seq_lens[:requests]
            index = self._matrix_index.fill(starts, lengths, common.num_actual_tokens)
        by_prompt = self._deterministic and common.is_prefilling is not None
        found = list(_parts(common, self.reorder_batch_threshold or 1, by_prompt))
        if (sharing := self._sharing) is not None:
            found = [replace(x, shard=shard_tables(sharing, x.batch, x.rows.stop - x.rows.start)) for x in found]
        return SlimKVMetadata.of(common, parts=tuple(found), causal=common.causal, matrix_index=index)


class MatrixIndex:
    """The position range of each new token, int32, in a buffer whose address captured graphs may hold."""

    def __init__(self, edges: tuple[int, ...], max_tokens: int, device: torch.device) -> None:
        self._edges = edges
        self._rows = torch.arange(max_tokens, dtype=torch.int32, device=device)
        self.buffer = torch.zeros(max_tokens, dtype=torch.int32, device=device)

    def fill(self, cu_seqlens_q: Tensor, seq_lens: Tensor, tokens: int) -> Tensor:
        """Fills and returns the buffer. cu_seqlens_q int32 [requests + 1], seq_lens int32 [requests]."""
        rows = self._rows[:tokens]
        ends = cu_seqlens_q[1:].contiguous()
        request = torch.searchsorted(ends, rows, right=True).clamp(max=len(seq_lens) - 1)
        positions = seq_lens[request] - ends[request] + rows
        self.buffer[:tokens] = matrix_index(positions, self._edges)
        return self.buffer


def _matrix_index(vllm_config: Any, device: torch.device) -> MatrixIndex | None:
    known = served_model(vllm_config).calibration
    if known is None:
        return None
    scheduler = vllm_config.scheduler_config
    most = max(scheduler.max_num_batched_tokens, scheduler.max_num_seqs * verified_tokens(vllm_config))
    return MatrixIndex(known.position_edges(vllm_config.model_config.max_model_len), most, device)


def step_metadata(layer_name: str) -> SlimKVMetadata | None:
    """The current step's metadata for a layer; None while vLLM profiles memory."""
    found = compat.forward_metadata(layer_name)
    return found if isinstance(found, SlimKVMetadata) else None


def _sharing(vllm_config: Any) -> DCPConfig | None:
    parallel = vllm_config.parallel_config
    if parallel.decode_context_parallel_size == 1:
        return None
    group = compat.get_dcp_group()
    return DCPConfig(group.world_size, group.rank_in_group, parallel.cp_kv_cache_interleave_size)


def _parts(common: compat.CommonAttentionMetadata, few: int, by_prompt: bool) -> Iterator[Part]:
    """Divides a step into parts: the leading requests with at most ``few`` queries each, and the rest.

    ``by_prompt``: divides it instead into requests that are still in their prompts, and others.
    """
    rows, requests, longest = common.num_actual_tokens, common.num_reqs, common.max_seq_len
    table, lens = common.block_table_tensor[:requests], common.seq_lens[:requests]
    starts = common.query_start_loc[: requests + 1]
    if common.max_query_len <= few and not by_prompt:
        yield Part(slice(0, rows), AttentionBatch(table, lens, starts, min(common.max_query_len, rows), longest))
        return
    starts_on_host = common.query_start_loc_cpu[: requests + 1]
    lengths = starts_on_host.diff()
    kinds = common.is_prefilling[:requests] if by_prompt else (lengths > few).int().cummax(0).values
    edges = [0, *(kinds.diff().nonzero().flatten() + 1).tolist(), requests]
    for first, end in pairwise(edges):
        begin, stop = starts_on_host[[first, end]].tolist()
        own = lengths[first:end]
        batch = AttentionBatch(
            table[first:end], lens[first:end], starts[first : end + 1] - begin if begin else starts[: end + 1],
            int(own.max()), longest, int(own.min()),
        )  # fmt: skip
        yield Part(slice(begin, stop), batch, prompt=bool(kinds[first]) if by_prompt else None)
