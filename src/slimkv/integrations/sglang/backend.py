"""``SlimKVAttnBackend``: attention on packed pages for SGLang's layers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from slimkv import ops
from slimkv.calibration.guard import Guard
from slimkv.integrations.serving.layer import warm_guard
from slimkv.integrations.sglang import refusals
from slimkv.integrations.sglang.compat import HybridLinearKVPool, SWAKVPool, logger, window_of
from slimkv.integrations.sglang.metadata import BlockTables, Step
from slimkv.integrations.sglang.packed_backend import PackedBackend, check_pool, refuse_unknown
from slimkv.integrations.sglang.pool import SlimKVPool
from slimkv.integrations.sglang.transfer import state_in_handshake
from slimkv.ops.attention.api import SIXTEEN_BIT
from slimkv.ops.warmup import LayerKind, run_steps, serving_steps, start_compiling
from slimkv.ops.warmup import Step as WarmupStep
from slimkv.spec import Kind

_PREFILL = 1024  # tokens; longer passes run the same kernels


class SlimKVAttnBackend(PackedBackend):
    """Prefill, decode and verification: stores codes in the pool's pages and attends to them."""

    def __init__(self, model_runner: Any) -> None:
        super().__init__(model_runner)
        refusals.check_layers(model_runner.model)
        self._window_pool = self.token_to_kv_pool if isinstance(self.token_to_kv_pool, SWAKVPool) else None
        plain = self._plain_pools()
        if isinstance(self.token_to_kv_pool, HybridLinearKVPool):
            self.token_to_kv_pool.dtype = torch.uint8  # models read the dtype from this pool
        self._config = plain[0].plan.config
        state_in_handshake(model_runner, plain[0].plan)
        refusals.forbid_new_weights(model_runner.model, plain[0].plan)
        self._raw = self._config.reads_fresh_raw(shared_pages=True)
        self._prefill = SIXTEEN_BIT
        for pages in (pages for one in plain for pages in one.layers):  # equal for all layers, or raises
            self._prefill = self._config.prefill_of(pages.layout.spec, shared_pages=True)
        self._tables = BlockTables(
            model_runner.req_to_token_pool.req_to_token, model_runner.page_size, self._window_pool,
            plain[0].plan.position_edges, self._config.deterministic,
        )  # fmt: skip
        lossy = [x for one in plain for x in one.layers if x.layout.spec.key.kind != Kind.RAW]
        self._guard = Guard(self._config.max_score_error, (str(x.layer) for x in lossy), logger.info)
        self._options: dict[tuple[int, bool | None], ops.AttendOptions] = {}
        verified = model_runner.server_args.speculative_num_draft_tokens or 1
        self._compile_kernels(model_runner.model, model_runner.dtype, verified)

    def _compile_kernels(self, model: torch.nn.Module, dtype: torch.dtype, verified: int) -> None:
        """Runs every kind of step on a scratch page, once per kind of layer, so that no request waits for compilation.

        The steps are prefill, decode, verification of ``verified`` tokens, and the uncached ends of cached prompts.
        """
        kinds: dict[tuple[object, ...], LayerKind] = {}
        for layer in refusals.attention_layers(model):
            pool, index, _ = self._pool_of(layer.layer_id)
            heads, options = pool.layers[index].num_kv_heads, self._attend_options(layer, None)
            kind = pool.served[index].kind(layer.tp_q_head_num, heads, dtype, pool.layers[index].layout, options)
            kinds[kind.signature] = kind
        longest = self._tables.width * self._tables.page_size
        steps = [WarmupStep(1, min(_PREFILL, longest), longest), *serving_steps(longest, verified)]
        for kind in kinds.values():
            start_compiling(kind, steps)
        for kind in kinds.values():
            run_steps(kind, steps)
            warm_guard(kind)

    def _plain_pools(self) -> list[SlimKVPool]:
        """The pools that hold pages, inside SGLang's composite pools; raises unless they are slimkv's."""
        pool = self.token_to_kv_pool
        if isinstance(pool, SWAKVPool):
            found = [pool.full_kv_pool, pool.swa_kv_pool]
        elif isinstance(pool, HybridLinearKVPool):
            found = [pool.full_kv_pool]
        else:
            found = [pool]
        for one in found:
            check_pool(one, SlimKVPool)
        return found

    @torch.compiler.disable
    def _forward(
        self, q: Tensor, k: Tensor | None, v: Tensor | None, layer: Any, batch: Any, save_kv_cache: bool,
        sinks: Tensor | None = None, **others: Any,
    ) -> Tensor:  # fmt: skip
        """Stores k, v [tokens, num_kv_heads, dim]. Maps q [tokens, heads * dim] to [tokens, heads * value_dim]."""
        refuse_unknown(others)
        step = self.forward_metadata
        assert step is not None
        query = q.reshape(-1, layer.tp_q_head_num, layer.qk_head_dim)
        out = query.new_empty(query.shape[0], layer.tp_q_head_num, layer.v_head_dim)
        if query.shape[0] > step.num_queries:  # padding rows, which attention does not write
            out[step.num_queries :].zero_()
        fresh = None if k is None or v is None else (k, v)
        if save_kv_cache and fresh is not None:
            self._store(query, *fresh, layer, step, batch.out_cache_loc)
        self._attend(query, fresh if self._raw else None, layer, step, sinks, out)
        return out.view(out.shape[0], -1)

    def _store(self, query: Tensor, key: Tensor, value: Tensor, layer: Any, step: Step, slots: Tensor) -> None:
        """Stores the new tokens and checks their scores (``ServedLayer.check_scores``).

        When prefill runs in pieces, ``slots`` has only those of the first tokens.
        """
        pool, index, windowed = self._pool_of(layer.layer_id)
        if windowed:
            assert step.window_slots is not None
            slots = step.window_slots[: len(slots)]
        ranges = None if step.matrix_index is None else step.matrix_index[: len(slots)]
        starts = step.parts[0].batch.cu_seqlens_q if self._config.deterministic else None
        pool.store(index, slots, key, value, ranges, starts)
        name, count = str(layer.layer_id), min(step.num_queries, len(slots))
        if self._guard.wants(name, count):
            kv, scale = pool.packed(index), float(layer.scaling)
            pool.served[index].check_scores(self._guard, name, query, key, kv, slots[:count], scale)

    def _attend(
        self, query: Tensor, fresh: tuple[Tensor, Tensor] | None, layer: Any, step: Step, sinks: Tensor | None,
        out: Tensor,
    ) -> None:  # fmt: skip
        pool, index, windowed = self._pool_of(layer.layer_id)
        kv = pool.packed(index)
        for part in step.parts:
            rows, batch = part.rows, part.window_batch if windowed else part.batch
            options = self._attend_options(layer, sinks, part.prompt)
            assert batch is not None
            ops.attend(
                query[rows], kv, batch, options, fresh=None if fresh is None else (fresh[0][rows], fresh[1][rows]),
                out=out[rows], backend=self._config.backend,
            )  # fmt: skip

    def _pool_of(self, layer_id: int) -> tuple[SlimKVPool, int, bool]:
        """A layer's pool, its index in the pool, and whether the pool is that of sliding-window layers."""
        pool = self.token_to_kv_pool
        if isinstance(pool, SWAKVPool):
            index, windowed = pool.layers_mapping[layer_id]
            return pool.swa_kv_pool if windowed else pool.full_kv_pool, index, windowed
        if isinstance(pool, HybridLinearKVPool):
            return pool.full_kv_pool, pool.full_attention_layer_id_mapping[layer_id], False
        return pool, layer_id - pool.start_layer, False

    def _attend_options(self, layer: Any, sinks: Tensor | None, prompt: bool | None = None) -> ops.AttendOptions:
        """The attention options of a layer."""
        found = self._options.get((id(layer), prompt))
        if found is None or found.sinks is not sinks:
            found = self._options[id(layer), prompt] = ops.AttendOptions(
                softmax_scale=float(layer.scaling),
                sliding_window=window_of(layer),
                softcap=float(layer.logit_cap or 0.0),
                sinks=sinks,
                prefill=self._prefill,
                deterministic=self._config.deterministic,
                prompt=prompt,
            )
        return found
