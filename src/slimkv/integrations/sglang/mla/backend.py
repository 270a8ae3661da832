"""``SlimKVLatentBackend``: latent attention on packed pages for SGLang's layers."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from slimkv import ops
from slimkv.errors import UnsupportedError
from slimkv.integrations.sglang import refusals
from slimkv.integrations.sglang.metadata import BlockTables, Step
from slimkv.integrations.sglang.mla.compat import DeepseekV2AttentionMLA, dense_attention, register_forward_methods
from slimkv.integrations.sglang.mla.folding import FoldedProjections
from slimkv.integrations.sglang.mla.pool import SlimKVLatentPool
from slimkv.integrations.sglang.mla.prefill import Prefill, attend_prefill, plan_prefill
from slimkv.integrations.sglang.packed_backend import PackedBackend, check_pool, refuse_unknown
from slimkv.integrations.sglang.transfer import state_in_handshake
from slimkv.ops.latent.warmup import LatentKind, run_latent_steps
from slimkv.ops.warmup import decoding_steps


class SlimKVLatentBackend(PackedBackend):
    """Decode and verification attend to packed latents with absorbed queries; prefill expands latents into K and V."""

    def __init__(self, model_runner: Any) -> None:
        super().__init__(model_runner)
        check_pool(self.token_to_kv_pool, SlimKVLatentPool)
        self._pool = pool = self.token_to_kv_pool
        self._attention = _attention_modules(model_runner.model)
        self._dense = dense_attention(self.device)
        self._config = pool.plan.config
        state_in_handshake(model_runner, pool.plan)
        refusals.forbid_new_weights(model_runner.model, pool.plan)
        self._fresh_codes = not self._config.reads_fresh_raw(shared_pages=True)
        self._tables = BlockTables(model_runner.req_to_token_pool.req_to_token, model_runner.page_size)
        self._prefill: tuple[Step, Prefill] | None = None
        self._folded = {
            layer: FoldedProjections(module, ops.latent_rotation(self._packed(layer).codec))
            for layer, module in self._attention.items()
        }
        register_forward_methods(type(self), model_runner.server_args.speculative_draft_attention_backend)
        if self.device.type != "cpu":  # warm-up is for GPU kernels
            self._compile(model_runner)

    def _packed(self, layer: int) -> ops.PackedKV:
        return self._pool.packed(layer - self._pool.start_layer)

    def _compile(self, runner: Any) -> None:
        verified = runner.server_args.speculative_num_draft_tokens or 1
        steps = decoding_steps(self._tables.width * self._tables.page_size, verified)
        for layer, module in self._attention.items():
            kv, heads, scale = self._packed(layer), module.attn_mqa.tp_q_head_num, float(module.attn_mqa.scaling)
            run_latent_steps(LatentKind(kv.codec, kv.layout, heads, scale, runner.dtype, self._config.backend), steps)

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """See ``PackedBackend``."""
        self._fold_new_weights()
        super().init_forward_metadata(forward_batch)

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        """See ``PackedBackend``."""
        self._fold_new_weights()
        super().init_forward_metadata_out_graph(forward_batch, in_capture)

    def _fold_new_weights(self) -> None:
        for folded in self._folded.values():
            folded.update()

    @torch.compiler.disable
    def _forward(
        self, q: Tensor, k: Tensor, v: Tensor, layer: Any, batch: Any, save_kv_cache: bool,
        q_rope: Tensor | None = None, k_rope: Tensor | None = None, **others: Any,
    ) -> Tensor:  # fmt: skip
        """Returns [tokens, heads * value_dim], with zeros in padding rows.

        Decode and verification pass absorbed queries, prefill passes K and V from ``prepare_prefill_qkv``.
        """
        refuse_unknown(others)
        step = self.forward_metadata
        assert step is not None
        query = q.view(-1, layer.tp_q_head_num, q.shape[-1] if q.ndim == 3 else layer.qk_head_dim)
        if layer is not self._attention[layer.layer_id].attn_mqa:
            assert not save_kv_cache
            return self._expanded(query, k, v, layer, batch, step)
        if q_rope is None or k_rope is None:
            raise UnsupportedError("SGLang passed latents and rope parts as one tensor; slimkv needs two")
        if save_kv_cache:
            self._pool.store(layer.layer_id - self._pool.start_layer, batch.out_cache_loc, k, k_rope)
        return self._absorbed(query, q_rope.view(*query.shape[:2], -1), layer, step)

    def _absorbed(self, latent: Tensor, rope: Tensor, layer: Any, step: Step) -> Tensor:
        """latent [tokens, heads, latent_dim], rope [tokens, heads, rope_dim] -> [tokens, heads * latent_dim]."""
        kv, rotated = self._packed(layer.layer_id), self._folded[layer.layer_id].rotated
        out = torch.empty_like(latent, memory_format=torch.contiguous_format)
        if latent.shape[0] > step.num_queries:  # padding rows, which attention does not write
            out[step.num_queries :].zero_()
        for part in step.parts:
            rows = part.rows
            ops.attend_latent(
                latent[rows], rope[rows], kv, part.batch, softmax_scale=float(layer.scaling), query_is_rotated=rotated,
                output_is_rotated=rotated, out=out[rows], backend=self._config.backend,
            )  # fmt: skip
        return out.view(out.shape[0], -1)

    def prepare_prefill_qkv(
        self, *, q: Tensor, q_pe: Tensor, kv_a: Tensor, k_pe: Tensor, positions: Tensor, layer: Any, forward_batch: Any
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Called by SGLang's attention module: stores its new tokens and returns queries, K and V.

        q [tokens, heads, nope + rope], kv_a [tokens, latent_dim], k_pe [tokens, 1, rope_dim], before rotary embedding.
        With ``fresh: codes``, K and V are expanded from the stored codes, as for later requests.
        """
        if layer.rotary_emb is not None:
            q_pe, k_pe = layer.rotary_emb(positions, q_pe, k_pe)
        q[..., layer.qk_nope_head_dim :] = q_pe
        index, slots = layer.layer_id - self._pool.start_layer, forward_batch.out_cache_loc
        self._pool.store(index, slots, kv_a, k_pe)
        if self._fresh_codes and not self._packed(layer.layer_id).codec.spec.is_lossless_for(str(kv_a.dtype)):
            kv_a, rope = self._pool.gather(index, slots, kv_a.dtype)
            k_pe = rope.unsqueeze(1)
        return q, *_expand(layer, kv_a, k_pe, forward_batch)

    def _expanded(self, query: Tensor, key: Tensor, value: Tensor, layer: Any, batch: Any, step: Step) -> Tensor:
        """query, key [tokens, heads, dim], value [tokens, heads, value_dim] -> [tokens, heads * value_dim]."""
        module, index = self._attention[layer.layer_id], layer.layer_id - self._pool.start_layer
        prefill = self._prefill_of(batch, step)

        def expand(slots: Tensor) -> tuple[Tensor, Tensor]:
            latent, rope = self._pool.gather(index, slots, query.dtype)
            return _expand(module, latent, rope.unsqueeze(1), batch)

        out = query.new_zeros(query.shape[0], layer.tp_q_head_num, layer.v_head_dim)
        rows = slice(0, step.num_queries)
        out[rows] = attend_prefill(
            query[rows], (key[rows], value[rows]), prefill, expand, float(layer.scaling), self._dense
        )
        return out.view(out.shape[0], -1)

    def _prefill_of(self, batch: Any, step: Step) -> Prefill:
        """The prefill plan that all layers of a step share."""
        if self._prefill is None or self._prefill[0] is not step:
            plan = plan_prefill(
                list(batch.extend_seq_lens_cpu), list(batch.extend_prefix_lens_cpu), step, self._tables.page_size,
                batch.get_max_chunk_capacity(),
            )  # fmt: skip
            self._prefill = step, plan
        return self._prefill[1]


def _expand(module: Any, latent: Tensor, rope: Tensor, batch: Any) -> tuple[Tensor, Tensor]:
    """latent [tokens, latent_dim], rope [tokens, 1, rope_dim] -> K and V of the module's heads."""
    nope, value = module.qk_nope_head_dim, module.v_head_dim
    expanded = module.kv_b_proj(latent)[0].view(-1, module.num_local_heads, nope + value)
    return module._concat_and_cast_mha_k(expanded[..., :nope], rope, batch), expanded[..., nope:]


def _attention_modules(model: torch.nn.Module) -> dict[int, Any]:
    """The model's latent-attention modules by layer; raises for a layer with any other attention."""
    refusals.check_layers(model, max_head_dim=math.inf)  # formats limit the sizes of latents
    modules: list[Any] = [x for x in model.modules() if type(x) is DeepseekV2AttentionMLA]
    known = {id(x) for module in modules for x in refusals.attention_layers(module)}
    for layer in refusals.attention_layers(model):
        if id(layer) not in known:
            raise UnsupportedError(
                f"slimkv knows SGLang's own latent attention ({DeepseekV2AttentionMLA.__name__}), and layer "
                f"{layer.layer_id} of this model has another; use SGLang's own attention backend"
            )
    return {module.attn_mqa.layer_id: module for module in modules}
