"""Sparse latent attention in vLLM (DeepSeek V3.2, GLM-5): queries attend to the tokens that an indexer picks.

All queries, including those of prompts, use absorbed projections and read packed token rows. The indexer and its cache
are vLLM's own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from slimkv import ops
from slimkv.errors import UnsupportedError
from slimkv.integrations.vllm.compat import AttentionCGSupport, AttentionMetadataBuilder, CommonAttentionMetadata
from slimkv.integrations.vllm.metadata import StepMetadata
from slimkv.integrations.vllm.mla.backend import SlimKVMLABackend
from slimkv.integrations.vllm.mla.compat import SharedTopkIndicesBuffer, global_slots
from slimkv.integrations.vllm.mla.impl import SlimKVMLAImpl
from slimkv.integrations.vllm.refusals import check_cache
from slimkv.ops.latent.cuda.launch import format_refusal
from slimkv.ops.warmup import Step
from slimkv.spec import page_layout

QUERIES_AT_ONCE = 256  # bounds the memory of partial results


@dataclass
class SlimKVSparseMetadata(StepMetadata):
    """The metadata of one step. All tokens count as decode tokens, so that vLLM expands no latents into K and V."""

    num_reqs: int
    req_id_per_token: Tensor  # int32 [tokens]
    block_size: int
    lengths: Tensor  # int32 [tokens]: slots per query, including skipped ones
    starts: Tensor  # int32 [tokens + 1]: 0, 1, ...
    topk_tokens: int
    num_decodes: int
    num_decode_tokens: int
    num_prefills: int = 0
    prefill: None = None
    decode: None = None


class SlimKVSparseMetadataBuilder(AttentionMetadataBuilder):
    """Builds step metadata."""

    # A graph captures addresses and the number of tokens only.
    _cudagraph_support: ClassVar[Any] = AttentionCGSupport.UNIFORM_BATCH

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        check_cache(vllm_config, kv_cache_spec.block_size)
        tokens = vllm_config.scheduler_config.max_num_batched_tokens
        self._topk: int = vllm_config.model_config.hf_text_config.index_topk
        self._requests = torch.zeros(tokens, dtype=torch.int32, device=device)
        self._lengths = torch.full((tokens,), self._topk, dtype=torch.int32, device=device)
        self._starts = torch.arange(tokens + 1, dtype=torch.int32, device=device)

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> SlimKVSparseMetadata:
        """The step's metadata."""
        step = common_attn_metadata
        tokens = step.num_actual_tokens
        requests = self._requests[:tokens]  # at a fixed address, which CUDA graphs capture
        torch.searchsorted(step.query_start_loc[1:], self._starts[:tokens], right=True, out_int32=True, out=requests)
        return SlimKVSparseMetadata.of(
            step, num_reqs=step.num_reqs, req_id_per_token=requests.clamp_(max=step.num_reqs - 1),
            block_size=self.kv_cache_spec.block_size,
            lengths=self._lengths[:tokens], starts=self._starts[: tokens + 1], topk_tokens=self._topk,
            num_decodes=step.num_reqs, num_decode_tokens=tokens,
        )  # fmt: skip


class SlimKVSparseMLAImpl(SharedTopkIndicesBuffer, SlimKVMLAImpl):
    """Sparse latent attention of one layer."""

    is_sparse = True
    supports_dense_mha_prefill = False
    token_rows = True

    def __init__(
        self,
        *arguments: Any,
        indexer: Any = None,
        topk_indices_buffer: Tensor | None = None,
        index_group_builder: Any = None,  # shares mapped indices among layers; unused, every layer maps its own
        **mla: Any,
    ) -> None:
        super().__init__(*arguments, **mla)
        self.init_topk_indices_buffer(indexer, topk_indices_buffer)
        if getattr(self._config.attention_config, "hisparse_config", None) is not None:
            raise UnsupportedError("packed latents do not go to host memory (HiSparse): leave out hisparse_config")
        if self._settings.reads_fresh_raw(shared_pages=True):
            raise UnsupportedError(
                "sparse latent attention reads every token from its codes, new ones too: leave fresh at 'auto', not "
                "'raw'"
            )

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        """See ``SlimKVMLAImpl``; raises for a format that the GPU's kernel does not read."""
        super().process_weights_after_loading(act_dtype)
        device = next(self.kv_b_proj.parameters()).device
        if device.type != "cpu" and (reason := format_refusal(page_layout(self._spec, 64, True))):
            raise UnsupportedError(f"sparse latent attention on a GPU: {reason}")

    def _warmup_steps(self) -> list[Step]:
        """The smallest and the largest step."""
        return [Step(queries, 1, self.topk_indices_buffer.shape[1]) for queries in (1, QUERIES_AT_ONCE)]

    def prepare_for_batch(self, attn_metadata: Any = None) -> None:
        """Does nothing: vLLM uses it for caches in host memory, and indices are mapped on the stream that made them."""

    record_logical_topk_ready = prepare_for_batch

    def forward_mqa(
        self, q: Tensor | tuple[Tensor, Tensor], kv_c_and_k_pe_cache: Tensor, attn_metadata: Any, layer: Any
    ) -> tuple[Tensor, Tensor | None]:
        """See ``SlimKVMLAImpl``. Queries attend to the positions in ``topk_indices_buffer``; -1 means none."""
        latent, rope = q if isinstance(q, tuple) else q.split([self.kv_lora_rank, self.qk_rope_head_dim], dim=-1)
        kv, step, tokens = self._packed(kv_c_and_k_pe_cache), attn_metadata, len(latent)
        slots = global_slots(
            self.topk_indices_buffer[:tokens], step.req_id_per_token[:tokens], step.block_table, kv.layout.block_size
        )
        out = latent.new_empty(tokens, latent.shape[1], self.kv_lora_rank)
        for first in range(0, tokens, QUERIES_AT_ONCE):
            part = slice(first, min(first + QUERIES_AT_ONCE, tokens))
            starts = step.starts[: part.stop - first + 1]
            batch = ops.AttentionBatch(slots[part], step.lengths[part], starts, 1, slots.shape[1])
            ops.attend_latent(
                latent[part], rope[part], kv, batch, softmax_scale=self.scale, query_is_rotated=True,
                output_is_rotated=True, out=out[part], backend=self._settings.backend,
            )  # fmt: skip
        return out, None


class SlimKVSparseMLABackend(SlimKVMLABackend):
    """Sparse latent attention on packed token rows."""

    impl, builder = SlimKVSparseMLAImpl, SlimKVSparseMetadataBuilder
    is_sparse = classmethod(lambda cls: True)  # layers have an indexer

    @classmethod
    def supports_compute_capability(cls, capability: Any) -> bool:
        """Whether slimkv has a kernel for token rows on this GPU."""
        return (capability.major, capability.minor) == (9, 0)
