"""``SlimKVImpl``: attention of one layer in vLLM. It writes codes to the layer's blocks and attends to them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from slimkv import ops
from slimkv.calibration.guard import Guard
from slimkv.calibration.learned_offset import LayerOffset
from slimkv.config import KVCacheConfig
from slimkv.errors import UnsupportedError
from slimkv.integrations.serving.layer import ServedLayer
from slimkv.integrations.serving.model import ServedModel, shared_codec
from slimkv.integrations.vllm import compat
from slimkv.integrations.vllm.connectors import wants_cross_layer_blocks
from slimkv.integrations.vllm.context_parallel import attend_shards
from slimkv.integrations.vllm.metadata import SlimKVMetadata, step_metadata
from slimkv.integrations.vllm.model import find_layer, guard_of, layer_offset, layer_spec, served_model
from slimkv.integrations.vllm.page_sizes import PREFERRED_DENSE_BLOCK, backend_for_spec, supports_head_size
from slimkv.integrations.vllm.refusals import check_cache_dtype, check_engine, check_one_format, refuse
from slimkv.integrations.vllm.settings import parse
from slimkv.integrations.vllm.warmup import compile_ahead, kernel_block, profile_run
from slimkv.ops import PackedKV
from slimkv.ops.warmup import LayerKind
from slimkv.spec import CodecSpec, Kind, PageLayout, page_layout


class SlimKVImpl(compat.AttentionImpl):
    """Attention of one layer; encoder and cross attention run on vLLM's own implementation."""

    can_return_lse_for_decode = True
    supports_dcp = True
    supports_mtp_with_cp_non_trivial_interleave_size = True

    def __init__(
        self, num_heads: int, head_size: int, scale: float, num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None, sliding_window: int | None = None, kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None, attn_type: str = compat.AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None, sinks: Tensor | None = None, **others: Any,
    ) -> None:  # fmt: skip
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads or num_heads
        self.head_size = head_size
        self.scale = float(scale)
        self.sliding_window = sliding_window
        self.kv_cache_dtype = kv_cache_dtype
        self.logits_soft_cap = logits_soft_cap
        self.attn_type = attn_type
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name
        self.sinks = sinks
        self.alibi_slopes = alibi_slopes
        self._config = compat.get_current_vllm_config()
        self._stock: Any = None
        self._spec: CodecSpec | None = None
        self._number: int | None = None
        self._layer: ServedLayer | None = None
        self._settings: KVCacheConfig = parse(self._config.additional_config)
        check_engine(self._config)
        if attn_type != compat.AttentionType.DECODER:
            self._stock_backend = compat.stock_backend(head_size, attn_type)
            if self._settings.deterministic and not self._stock_backend.supports_batch_invariance():
                raise UnsupportedError(
                    f"deterministic: vLLM's {self._stock_backend.get_name()}, which runs {attn_type} attention beside "
                    "slimkv, is not batch-invariant"
                )
            extra = {} if sinks is None else {"sinks": sinks}
            self._stock = self._stock_backend.get_impl_cls()(
                num_heads, head_size, scale, num_kv_heads, alibi_slopes, sliding_window, kv_cache_dtype,
                logits_soft_cap, attn_type, kv_sharing_target_layer_name, **extra, **others,
            )  # fmt: skip
            return
        self._refuse(others)
        alike = num_heads, self.num_kv_heads, head_size, sliding_window, bool(logits_soft_cap), sinks is None
        compile_ahead((id(self._config), *alike), self._kinds, self._config)

    def _refuse(self, others: dict[str, Any]) -> None:
        """Raises for attention features of the model that slimkv does not support."""
        refuse("slimkv", {"ALiBi": self.alibi_slopes, **others})
        check_cache_dtype(self.kv_cache_dtype)
        if not supports_head_size(self.head_size):
            raise UnsupportedError(f"slimkv takes head sizes that are multiples of 16 up to 512, not {self.head_size}")
        prefill_shared = {"prefill context parallelism": self.pcp_world_size > 1}
        refuse("slimkv", prefill_shared, "use decode context or tensor parallelism")
        if self.dcp_world_size > 1:
            features = {
                "deterministic attention": self._settings.deterministic,
                "sliding windows": self.sliding_window,
                "attention sinks": self.sinks,
                "layers that share another's cache": self.kv_sharing_target_layer_name,
            }
            refuse("slimkv under decode context parallelism", features, "use tensor parallelism")

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        """Finds this implementation's layer and sets the layer's backend class to the one of its format."""
        if self._stock is not None:
            self._stock.process_weights_after_loading(act_dtype)
            return
        name, layer = find_layer(self._config, self)
        if self._settings.deterministic:  # vLLM does not say which rows of these belong to prompts
            features = {
                "attention in chunks": getattr(layer, "attention_chunk_size", None),
                "--kv-sharing-fast-prefill": self._config.cache_config.kv_sharing_fast_prefill,
            }
            refuse("slimkv's deterministic attention", features)
        dims = self.head_size, getattr(layer, "head_size_v", None)
        stored = self.kv_sharing_target_layer_name or name
        check_one_format(self._model, name, stored)
        self._spec, self._number = layer_spec(self._model, self._config, stored, dims, act_dtype)
        layer.attn_backend = backend_for_spec(
            layer.attn_backend, self._spec, cross_layer_blocks=wants_cross_layer_blocks(self._config)
        )
        self._name = name if self._number is None else str(self._number)  # in messages
        self._guard: Guard | None = None
        if self.kv_sharing_target_layer_name is None and self._spec.key.kind != Kind.RAW:
            self._guard = guard_of(self._settings.max_score_error, self._config)
            self._guard.expect(self._name)
        if self._layer is not None and self._layer.offset is not None:
            self._layer.offset.file = None  # weights are loaded again, perhaps not those of the model's files
        self._options = self._options_of(self._spec)
        self._variants: dict[tuple[bool, bool | None], ops.AttendOptions] = {}

    def _options_of(self, spec: CodecSpec) -> ops.AttendOptions:
        return ops.AttendOptions(
            softmax_scale=self.scale,
            sliding_window=self.sliding_window,
            softcap=self.logits_soft_cap or 0.0,
            sinks=self.sinks,
            prefill=self._settings.prefill_of(spec, shared_pages=True),
            deterministic=self._settings.deterministic,
        )

    def _kinds(self, device: torch.device) -> Iterator[LayerKind]:
        """A layer like this one in each of the model's formats: its own format is known only after loading."""
        model, dtype, heads = self._model, self._config.model_config.dtype, self.num_kv_heads
        layers = range(model.config.num_hidden_layers)
        numbers = {model.layer_spec(number, self.head_size, None, str(dtype)): number for number in layers}
        for spec, number in numbers.items():
            codec = shared_codec(spec, device)
            offset = LayerOffset(heads, codec) if model.centres(spec) else None  # kernels depend on its presence only
            served = ServedLayer(codec, model.matrices(number, codec, heads), offset, self._settings.backend)
            yield served.kind(self.num_heads, heads, dtype, self._kernel_layout(spec), self._options_of(spec))

    def _kernel_layout(self, spec: CodecSpec) -> PageLayout:
        return PageLayout(spec, kernel_block(self._config, PREFERRED_DENSE_BLOCK))

    def _served(self, device: torch.device) -> ServedLayer:
        """How the layer stores K and V. Created on first use, as sleep mode may discard what was created before."""
        if self._layer is None:
            assert self._spec is not None
            codec, shared = shared_codec(self._spec, device), self.kv_sharing_target_layer_name
            if shared is not None:  # the owner of the cache has the offset
                offset = self._config.compilation_config.static_forward_context[shared].impl._served(device).offset
            else:
                offset = layer_offset(self._model, self._config, self._number, self._spec, self.num_kv_heads, device)
            matrices = self._model.matrices(self._number, codec, self.num_kv_heads)
            self._layer = ServedLayer(codec, matrices, offset, self._settings.backend)
        return self._layer

    def _packed(self, kv_cache: Tensor) -> PackedKV:
        """vLLM's cache, uint8 [blocks, num_kv_heads, tokens, bytes], as pages [blocks, num_kv_heads, page_bytes]."""
        blocks, heads, tokens, size = kv_cache.shape
        served = self._served(kv_cache.device)
        return served.packed(kv_cache.view(blocks, heads, tokens * size), page_layout(served.codec.spec, tokens))

    def do_kv_cache_update(
        self, layer: Any, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        """Stores key and value [tokens, num_kv_heads, dim] in ``slot_mapping``; padding has negative slots."""
        if self._stock is not None:
            if not self._stock_backend.forward_includes_kv_cache_update:
                self._stock.do_kv_cache_update(layer, key, value, kv_cache, slot_mapping)
            return
        if kv_cache.numel() == 0:  # there is no cache while vLLM profiles memory
            return
        count, served = slot_mapping.shape[0], self._served(key.device)
        step = step_metadata(layer.layer_name) if self._settings.deterministic else None
        starts = None if step is None else step.query_start_loc
        index = self._matrix_index(served, layer, slice(0, count))
        served.store(key[:count], value[:count], self._packed(kv_cache), slot_mapping, index, starts)

    def _matrix_index(self, served: ServedLayer, layer: Any, rows: slice) -> Tensor | None:
        """The position range of each new token, if the calibration has several ranges."""
        several = served.matrices is not None and served.matrices.ndim == 4
        step = step_metadata(layer.layer_name) if several else None
        return None if step is None or step.matrix_index is None else step.matrix_index[rows]

    @cached_property
    def _model(self) -> ServedModel:
        return served_model(self._config)

    def whole_key_offset(self) -> Tensor | None:
        """The key offset of all ranks' KV heads, for fingerprints."""
        return None if self._spec is None else self._model.whole_offset(self._number, self._spec)

    def forward(
        self, layer: Any, query: Tensor, key: Tensor, value: Tensor, kv_cache: Tensor, attn_metadata: Any,
        output: Tensor, output_scale: Tensor | None = None, output_block_scale: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Computes attention of query [tokens, heads, dim] and writes output [tokens, heads, dim].

        ``do_kv_cache_update`` has already stored the new tokens.
        """
        if self._stock is not None:
            return self._stock.forward(
                layer, query, key, value, kv_cache, attn_metadata, output, output_scale, output_block_scale
            )
        if output_scale is not None or output_block_scale is not None:
            raise UnsupportedError("slimkv does not quantise attention's output")
        served = self._served(query.device)
        if attn_metadata is None:  # vLLM profiles memory before there is a cache
            if served.offset is not None and self.kv_sharing_target_layer_name is None:
                served.offset.provisional(key)
            kind = served.kind(
                query.shape[1], self.num_kv_heads, query.dtype, self._kernel_layout(served.codec.spec), self._options
            )
            profile_run(kind, query.shape[0], self._config)
            return output.zero_()
        kv = self._packed(kv_cache)
        count = attn_metadata.num_actual_tokens
        if self._guard is not None and self._guard.wants(self._name, count):
            slots = attn_metadata.slot_mapping[:count]
            served.check_scores(self._guard, self._name, query, key, kv, slots, self.scale)
        self._attend(layer, query, key, value, kv, attn_metadata, output)
        return output

    def _variant(self, causal: bool, prompt: bool | None) -> ops.AttendOptions:
        """The layer's options, with causal or bidirectional attention and for prompts or generated tokens."""
        found = self._variants.get((causal, prompt))
        if found is None:
            if not causal and self.sliding_window:
                raise UnsupportedError(
                    "this drafter needs a bidirectional sliding window, which slimkv does not support: give it another "
                    "attention_backend in the speculative config"
                )
            found = self._variants[causal, prompt] = replace(self._options, causal=causal, prompt=prompt)
        return found

    def _attend(
        self, layer: Any, query: Tensor, key: Tensor, value: Tensor, kv: PackedKV, step: SlimKVMetadata, output: Tensor
    ) -> None:
        served = self._served(query.device)
        raw = self._settings.reads_fresh_raw(shared_pages=True) and self.kv_sharing_target_layer_name is None
        for part in step.parts:
            options = self._variant(step.causal, part.prompt)
            rows, batch = part.rows, part.batch
            held = batch.block_table.shape[1] * kv.layout.block_size
            if batch.max_seq_len > held:
                batch = replace(batch, max_seq_len=held)
            if part.shard is not None:
                attend_shards(
                    query[rows], (key[rows], value[rows]), kv, batch, part.shard, compat.get_dcp_group(),
                    options=options, rounding=served.rounding(self._matrix_index(served, layer, rows)), raw=raw,
                    out=output[rows], backend=self._settings.backend,
                )  # fmt: skip
                continue
            fresh = (key[rows], value[rows]) if raw else None  # layers that share a cache have no keys
            ops.attend(query[rows], kv, batch, options, fresh=fresh, out=output[rows], backend=self._settings.backend)
