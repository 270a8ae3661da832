"""What a step's layers share: the tables vLLM keeps on the device, and bounds the host knows.

Nothing is read back from the device and nothing is done per request. vLLM puts requests with few queries first; where
others follow, the batch is attended in two parts, because parts whose keys are split to fill the device must be whole.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, ClassVar

import torch
from torch import Tensor

from slimkv.errors import UnsupportedError
from slimkv.integrations.vllm.calibration import MatrixIndex, served_model
from slimkv.integrations.vllm.compat import (
    AttentionCGSupport,
    AttentionMetadataBuilder,
    AttentionType,
    CommonAttentionMetadata,
    dcp_group,
    forward_metadata,
    is_delegated,
    stock_backend,
)
from slimkv.integrations.vllm.context_parallel import DCPConfig, ShardTables, shard_tables
from slimkv.integrations.vllm.settings import parse
from slimkv.integrations.vllm.startup import check_cache
from slimkv.ops import AttentionBatch


@dataclass(frozen=True)
class Part:
    """Consecutive requests that are attended in one call."""

    rows: slice  # of the step's queries
    batch: AttentionBatch
    shard: ShardTables | None = None  # where ranks share the tokens
    prompt: bool | None = None  # see ``AttendOptions``; None where it does not matter


@dataclass
class SlimKVMetadata:
    """One step. The names are those that vLLM's other parts look for."""

    num_actual_tokens: int
    max_query_len: int
    max_seq_len: int
    query_start_loc: Tensor
    seq_lens: Tensor
    block_table: Tensor
    slot_mapping: Tensor
    parts: tuple[Part, ...]
    causal: bool = True  # not for drafters of blocks whose tokens see one another both ways
    matrix_index: Tensor | None = None  # int32 [at least num_actual_tokens]: of query-aware matrices, by position


class SlimKVMetadataBuilder(AttentionMetadataBuilder):
    """Builds a step's metadata; for layers that are left to vLLM's own backend, that backend's."""

    # A graph holds bounds and addresses only: batches of equal short queries, speculative ones included.
    _cudagraph_support: ClassVar[Any] = AttentionCGSupport.UNIFORM_BATCH

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self._stock: Any = None
        if is_delegated(kv_cache_spec):
            backend = stock_backend(kv_cache_spec.head_size, _delegated_type(layer_names, vllm_config))
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
        """Uniform batches; for delegated layers what their backend supports."""
        if is_delegated(kv_cache_spec):
            stock = stock_backend(kv_cache_spec.head_size, AttentionType.ENCODER_DECODER)
            return stock.get_builder_cls().get_cudagraph_support(vllm_config, kv_cache_spec)
        if _sharing(vllm_config) is not None:
            return AttentionCGSupport.NEVER  # the tables of shared tokens are made anew at every step
        if parse(vllm_config.additional_config).deterministic:
            return AttentionCGSupport.NEVER  # vLLM would run the last token of a cached prompt as a generated one
        return cls._cudagraph_support

    @classmethod
    def get_varlen_cudagraph_max_query_len(cls, vllm_config: Any, kv_cache_spec: Any) -> int | None:
        """A graph follows the device's query lengths up to the bound it was captured with."""
        if is_delegated(kv_cache_spec):
            return None
        speculative = vllm_config.speculative_config
        drafted = speculative.num_speculative_tokens if speculative is not None else 0
        return 1 + (drafted or 0)

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> Any:
        """The step's metadata from what vLLM's scheduler decided."""
        common = common_attn_metadata
        if self._stock is not None:
            return self._stock.build(common_prefix_len, common, fast_build)
        if not isinstance(common.causal, bool) or (not common.causal and self._sharing is not None):
            raise UnsupportedError(
                "slimkv attends all requests of a step in causal order, or without decode context parallelism all of "
                "them both ways; this model or drafter asks for both at once"
            )
        return SlimKVMetadata(
            num_actual_tokens=common.num_actual_tokens,
            max_query_len=common.max_query_len,
            max_seq_len=common.max_seq_len,
            query_start_loc=common.query_start_loc,
            seq_lens=common.seq_lens,
            block_table=common.block_table_tensor,
            slot_mapping=common.slot_mapping,
            parts=tuple(self._with_shard(p) for p in self._parts(common)),
            causal=common.causal,
            matrix_index=self._index_of_step(common),
        )

    def _parts(self, common: CommonAttentionMetadata) -> tuple[Part, ...]:
        if self._deterministic and common.is_prefilling is not None:
            return _prompts_and_answers(common)
        return _parts(common, self.reorder_batch_threshold or 1)

    def _index_of_step(self, common: CommonAttentionMetadata) -> Tensor | None:
        if self._matrix_index is None:
            return None
        requests = common.num_reqs
        starts, lengths = common.query_start_loc[: requests + 1], common.seq_lens[:requests]
        return self._matrix_index.fill(starts, lengths, common.num_actual_tokens)

    def _with_shard(self, part: Part) -> Part:
        if self._sharing is None:
            return part
        batch = part.batch
        tables = shard_tables(
            self._sharing, batch.seq_lens, batch.cu_seqlens_q, part.rows.stop - part.rows.start, batch.max_query_len,
            batch.max_seq_len,
        )  # fmt: skip
        return replace(part, shard=tables)


def _matrix_index(vllm_config: Any, device: torch.device) -> MatrixIndex | None:
    known = served_model(vllm_config).calibration
    if known is None:
        return None
    scheduler, speculative = vllm_config.scheduler_config, vllm_config.speculative_config
    drafted = speculative.num_speculative_tokens if speculative is not None else 0
    most = max(scheduler.max_num_batched_tokens, scheduler.max_num_seqs * (1 + (drafted or 0)))
    return MatrixIndex(known.position_edges(vllm_config.model_config.max_model_len), most, device)


def step_metadata(layer_name: str) -> SlimKVMetadata | None:
    """The metadata of the step that runs, for a layer; None while vLLM measures memory."""
    steps = forward_metadata()
    found = steps.get(layer_name) if isinstance(steps, dict) else steps
    return found if isinstance(found, SlimKVMetadata) else None


def _sharing(vllm_config: Any) -> DCPConfig | None:
    parallel = vllm_config.parallel_config
    if parallel.decode_context_parallel_size == 1:
        return None
    group = dcp_group()
    return DCPConfig(group.world_size, group.rank_in_group, parallel.cp_kv_cache_interleave_size)


def _delegated_type(layer_names: list[str], vllm_config: Any) -> str:
    layers = vllm_config.compilation_config.static_forward_context
    return layers[layer_names[0]].attn_type


def _parts(common: CommonAttentionMetadata, few: int) -> tuple[Part, ...]:
    """The leading requests of at most ``few`` queries and the others; one part where there is only one kind."""
    rows, requests = common.num_actual_tokens, common.num_reqs
    table, lens = common.block_table_tensor[:requests], common.seq_lens[:requests]
    starts = common.query_start_loc[: requests + 1]
    longest = common.max_seq_len
    if common.max_query_len <= few:
        return (Part(slice(0, rows), AttentionBatch(table, lens, starts, min(common.max_query_len, rows), longest)),)
    starts_on_host = common.query_start_loc_cpu[: requests + 1]
    lengths = starts_on_host.diff()
    short = lengths <= few
    count = requests if bool(short.all()) else int((~short).int().argmax())
    middle = int(starts_on_host[count])
    most = min(common.max_query_len, rows - middle)
    least = min(most, int(lengths[count:].min())) if count < requests else 0
    if count == 0:
        return (Part(slice(0, rows), AttentionBatch(table, lens, starts, most, longest, least)),)
    decodes = AttentionBatch(table[:count], lens[:count], starts[: count + 1], min(few, middle), longest)
    rest = AttentionBatch(table[count:], lens[count:], starts[count:] - middle, most, longest, least)
    return Part(slice(0, middle), decodes), Part(slice(middle, rows), rest)


def _prompts_and_answers(common: CommonAttentionMetadata) -> tuple[Part, ...]:
    """Runs of requests that are in their prompts, and runs of others, however few queries each of them has."""
    requests = common.num_reqs
    kinds, starts = common.is_prefilling[:requests].tolist(), common.query_start_loc_cpu[: requests + 1].tolist()
    edges = [0, *(i for i in range(1, requests) if kinds[i] != kinds[i - 1]), requests]
    parts = []
    for first, end in pairwise(edges):
        rows = slice(starts[first], starts[end])
        lengths = [b - a for a, b in pairwise(starts[first : end + 1])]
        batch = AttentionBatch(
            common.block_table_tensor[first:end], common.seq_lens[first:end],
            common.query_start_loc[first : end + 1] - rows.start, max(lengths), common.max_seq_len, min(lengths),
        )  # fmt: skip
        parts.append(Part(rows, batch, prompt=kinds[first]))
    return tuple(parts)
