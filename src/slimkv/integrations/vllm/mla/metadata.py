"""Step metadata, shared by all layers: vLLM's metadata of latent attention, and the slots of the context."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from slimkv.integrations.vllm.compat import AttentionCGSupport, CommonAttentionMetadata
from slimkv.integrations.vllm.mla import compat
from slimkv.integrations.vllm.refusals import check_cache
from slimkv.integrations.vllm.warmup import verified_tokens
from slimkv.ops import AttentionBatch


@dataclass
class SlimKVMLADecodeMetadata(compat.MLACommonDecodeMetadata):
    """The requests in decode or verification, which have few queries each."""

    batch: AttentionBatch


@dataclass
class SlimKVMLAMetadata(compat.MLACommonMetadata):
    """The metadata of one step."""

    context_slots: list[Tensor] = field(default_factory=list)  # int64 [tokens], for each chunk of prefill's context


class SlimKVMLAMetadataBuilder(compat.MLACommonMetadataBuilder):
    """Builds step metadata."""

    # A graph captures bounds and addresses only. It serves uniform batches of few queries, including verification.
    _cudagraph_support: ClassVar[Any] = AttentionCGSupport.UNIFORM_BATCH
    query_len_support: ClassVar[Any] = compat.QueryLenSupport.VARLEN

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device, SlimKVMLAMetadata)
        check_cache(vllm_config, kv_cache_spec.block_size)

    @classmethod
    def get_varlen_cudagraph_max_query_len(cls, vllm_config: Any, kv_cache_spec: Any) -> int | None:
        """The largest number of query tokens per request in a CUDA graph; kernels read the actual one on the device."""
        return verified_tokens(vllm_config)

    def _build_decode(
        self, block_table_tensor: Tensor, seq_lens_device: Tensor, max_seq_len: int, query_start_loc_cpu: Tensor,
        query_start_loc_device: Tensor, num_decode_tokens: int, max_query_len: int,
        dcp_tot_seq_lens_device: Tensor | None, **kwargs: Any,
    ) -> SlimKVMLADecodeMetadata:  # fmt: skip
        queries = min(max_query_len, num_decode_tokens)
        longest = min(max_seq_len, block_table_tensor.shape[1] * self.page_size)
        return SlimKVMLADecodeMetadata(
            block_table=block_table_tensor, seq_lens=seq_lens_device, dcp_tot_seq_lens=dcp_tot_seq_lens_device,
            batch=AttentionBatch(block_table_tensor, seq_lens_device, query_start_loc_device, queries, longest),
        )  # fmt: skip

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> Any:
        """The step's metadata."""
        step = super().build(common_prefix_len, common_attn_metadata, fast_build)
        if step.prefill is not None and step.prefill.chunked_context is not None:
            step.context_slots = [
                chunk_slots(step.prefill.block_table[chunk.request_slice], chunk, self.page_size)
                for chunk in step.prefill.chunked_context.chunks
            ]
        return step


def chunk_slots(block_table: Tensor, chunk: Any, block_size: int) -> Tensor:
    """Slots, int64 [num_context_tokens], of a chunk's tokens, request by request.

    ``block_table``: int32 [requests, blocks]; each request's tokens in the chunk begin at ``chunk.starts``.
    """
    request = chunk.token_to_seq.long()
    row = torch.arange(len(request), device=block_table.device)
    position = row - chunk.cu_seq_lens[request] + chunk.starts[request]
    return block_table[request, position // block_size].long() * block_size + position % block_size
