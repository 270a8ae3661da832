"""``SlimKVMLAImpl``: latent attention of one layer in vLLM. It stores latents as codes and attends to them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from slimkv import ops
from slimkv.errors import UnsupportedError
from slimkv.integrations.serving.model import shared_codec
from slimkv.integrations.vllm.compat import AttentionType, get_current_vllm_config
from slimkv.integrations.vllm.connectors import wants_cross_layer_blocks
from slimkv.integrations.vllm.mla import compat
from slimkv.integrations.vllm.mla.metadata import SlimKVMLAMetadata
from slimkv.integrations.vllm.model import find_layer, layer_spec, served_model
from slimkv.integrations.vllm.page_sizes import backend_for_spec
from slimkv.integrations.vllm.refusals import check_engine, check_latents
from slimkv.integrations.vllm.settings import parse
from slimkv.integrations.vllm.warmup import kernel_block, verified_tokens
from slimkv.ops.latent.folding import fold_key_projection, fold_value_projection
from slimkv.ops.latent.warmup import LatentKind, run_latent_steps
from slimkv.ops.warmup import Step, decoding_steps
from slimkv.spec import LatentSpec, page_layout


class SlimKVMLAImpl(compat.MLACommonImpl):
    """Latent attention of one layer.

    Decode and verification attend to packed pages with absorbed queries. Prefill expands latents into K and V, as vLLM
    does; latents of the context are first decoded into vLLM's workspace.
    """

    supports_dcp = False
    supports_pcp = False
    token_rows = False  # whether pages hold each token's bytes contiguously
    _spec: LatentSpec  # set when the weights are loaded

    def __init__(
        self, num_heads: int, head_size: int, scale: float, num_kv_heads: int, alibi_slopes: list[float] | None,
        sliding_window: int | None, kv_cache_dtype: str, logits_soft_cap: float | None, attn_type: str,
        kv_sharing_target_layer_name: str | None, **mla: Any,
    ) -> None:  # fmt: skip
        self._config = get_current_vllm_config()
        self._settings = parse(self._config.additional_config)
        check_engine(self._config)
        features = {
            "ALiBi": alibi_slopes,
            "sliding windows": sliding_window,
            "soft caps": logits_soft_cap or None,
            "caches shared with another layer": kv_sharing_target_layer_name,
            f"attention of type {attn_type}": attn_type != AttentionType.DECODER,
        }
        check_latents(self._config, kv_cache_dtype, features, mla)
        compat.forbid_fused_cache_updates(self._config)
        compat.call_after_loading()
        super().__init__(
            num_heads, head_size, scale, num_kv_heads, alibi_slopes, sliding_window, kv_cache_dtype, logits_soft_cap,
            attn_type, kv_sharing_target_layer_name, **mla,
        )  # fmt: skip
        self.sliding_window = None  # for the fingerprint: every layer keeps all tokens
        self._unbound: Any = None  # the layer's backend before a format was set
        self._folded = FoldedProjections()
        self._fresh_codes = not self._settings.reads_fresh_raw(shared_pages=True)

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        """Finds this implementation's layer and sets the layer's backend class to the one of its format."""
        name, layer = find_layer(self._config, self)
        compat.check_layer(layer, self)
        dims = self.kv_lora_rank, self.qk_rope_head_dim
        spec, _ = layer_spec(served_model(self._config), self._config, name, dims, act_dtype, latent=True)
        assert isinstance(spec, LatentSpec)
        self._spec = spec
        self._unbound = self._unbound or layer.attn_backend  # weights may be loaded again
        layer.attn_backend = backend_for_spec(
            self._unbound, spec, cross_layer_blocks=wants_cross_layer_blocks(self._config)
        )

    def absorbed_weights_ready(self, layer: Any) -> None:
        """Folds the latent's rotation into the layer's absorbed projections, and compiles kernels."""
        rotation = ops.latent_rotation(shared_codec(self._spec, torch.device("cpu")))
        if rotation is not None:
            self._folded.fold(layer, rotation)
        weight = next(layer.kv_b_proj.parameters())
        if weight.device.type != "cpu":  # warm-up is for GPU kernels
            codec, model = shared_codec(self._spec, weight.device), self._config.model_config
            layout = page_layout(self._spec, kernel_block(self._config), self.token_rows)
            kind = LatentKind(codec, layout, self.num_heads, self.scale, model.dtype, self._settings.backend)
            run_latent_steps(kind, self._warmup_steps())

    def _warmup_steps(self) -> list[Step]:
        """The steps that are run once before any request."""
        return decoding_steps(self._config.model_config.max_model_len, verified_tokens(self._config))

    def whole_key_offset(self) -> None:
        """None, because latents are not centred; fingerprints and prompt files ask for it."""

    def _packed(self, kv_cache: Tensor) -> ops.PackedKV:
        """vLLM's uint8 [blocks, tokens, bytes] as pages [blocks, page_bytes]."""
        blocks, tokens, size = kv_cache.shape
        layout = page_layout(self._spec, tokens, self.token_rows)
        return ops.PackedKV(kv_cache.view(blocks, tokens * size), shared_codec(self._spec, kv_cache.device), layout)

    def do_kv_cache_update(
        self, kv_c_normed: Tensor, k_pe: Tensor, kv_cache: Tensor, slot_mapping: Tensor, kv_cache_dtype: str,
        k_scale: Tensor,
    ) -> None:  # fmt: skip
        """Stores kv_c_normed [tokens, latent_dim] and k_pe [tokens, 1, rope_dim]; padding has negative slots."""
        if kv_cache.numel() == 0:  # there is no cache while vLLM profiles memory
            return
        slots = slot_mapping.flatten()
        latent, rope = kv_c_normed[: len(slots)], k_pe[: len(slots)]
        ops.store_latent(latent, rope, self._packed(kv_cache), slots, backend=self._settings.backend)

    def forward_mqa(
        self, q: Tensor | tuple[Tensor, Tensor], kv_c_and_k_pe_cache: Tensor, attn_metadata: Any, layer: Any
    ) -> tuple[Tensor, Tensor | None]:
        """Absorbed queries ([tokens, heads, latent_dim], [tokens, heads, rope_dim]) -> [tokens, heads, latent_dim].

        Queries and output are in the rotated space of the stored latents: the layer's projections are folded.
        """
        latent, rope = q if isinstance(q, tuple) else q.split([self.kv_lora_rank, self.qk_rope_head_dim], dim=-1)
        out = ops.attend_latent(
            latent, rope, self._packed(kv_c_and_k_pe_cache), attn_metadata.decode.batch, softmax_scale=self.scale,
            query_is_rotated=True, output_is_rotated=True, backend=self._settings.backend,
        )  # fmt: skip
        return out, None

    def forward_mha(
        self, q: Tensor, kv_c_normed: Tensor, k_pe: Tensor, kv_c_and_k_pe_cache: Tensor,
        attn_metadata: SlimKVMLAMetadata, k_scale: Tensor, output: Tensor, output_scale: Tensor | None = None,
    ) -> None:  # fmt: skip
        """Prefill. With ``fresh: codes``, new tokens attend to one another through their codes."""
        if self._fresh_codes and not self._spec.is_lossless_for(str(kv_c_normed.dtype)):
            first = attn_metadata.num_decode_tokens
            slots = attn_metadata.slot_mapping[first : first + len(kv_c_normed)]
            kv_c_normed, rope = ops.gather_latent(self._packed(kv_c_and_k_pe_cache), slots, dtype=kv_c_normed.dtype)
            k_pe = rope.unsqueeze(1)
        super().forward_mha(
            q, kv_c_normed, k_pe, kv_c_and_k_pe_cache, attn_metadata, k_scale, output, output_scale=output_scale
        )

    def _compute_prefill_context(
        self, q: Tensor, kv_c_and_k_pe_cache: Tensor, attn_metadata: SlimKVMLAMetadata, k_scale: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Attention of prefill queries to cached tokens, which are decoded in chunks into vLLM's workspace."""
        assert attn_metadata.prefill is not None
        context, backend = attn_metadata.prefill.chunked_context, attn_metadata.prefill.prefill_backend
        kv = self._packed(kv_c_and_k_pe_cache)
        total: tuple[Tensor, Tensor] | None = None
        for chunk, slots in zip(context.chunks, attn_metadata.context_slots, strict=True):
            latent, rope = context.workspace[: len(slots)].split([self.kv_lora_rank, self.qk_rope_head_dim], dim=-1)
            ops.gather_latent(kv, slots, out=(latent, rope))
            expanded = self.kv_b_proj(latent)[0].view(-1, self.num_heads, self.qk_nope_head_dim + self.v_head_dim)
            key, value = expanded.split([self.qk_nope_head_dim, self.v_head_dim], dim=-1)
            part = backend.run_prefill_context_chunk(
                chunk=chunk, q=q[chunk.token_slice], k=self._concat_k_nope_k_pe(key, rope.unsqueeze(1)), v=value
            )
            if total is None:
                total = compat.init_mla_context_partial(context, *part, num_tokens=q.shape[0])
            compat.accumulate_mla_context_chunk(chunk, *part, *total)
        assert total is not None
        return total


class FoldedProjections:
    """Folds the latent's rotation into a layer's absorbed projections, each time vLLM creates new ones."""

    FOLDS = (("W_UK_T", fold_key_projection), ("W_UV", fold_value_projection))

    def __init__(self) -> None:
        self._own: dict[str, torch.nn.Parameter] = {}

    @torch.no_grad()
    def fold(self, layer: Any, rotation: Tensor) -> None:
        """Folds ``rotation`` into the layer's projections.

        vLLM creates them as views of a weight that prefill reads unfolded, so the layer gets new parameters. When
        weights are reloaded, vLLM fills these in place, and captured graphs need them at the same addresses.
        """
        for name, fold in self.FOLDS:
            weight = getattr(layer, name, None)
            if not isinstance(weight, torch.nn.Parameter):
                raise UnsupportedError(
                    f"vLLM has absorbed the projections of {layer.layer_name} into other weights than {name}, so that "
                    "slimkv cannot fold its rotation into them; use a format that is stored unrotated, such as 'craw' "
                    "or 'cu4'"
                )
            folded = fold(weight, rotation)
            if self._own.get(name) is weight:
                weight.copy_(folded)
                continue
            self._own[name] = torch.nn.Parameter(folded.contiguous(), requires_grad=False)
            setattr(layer, name, self._own[name])
