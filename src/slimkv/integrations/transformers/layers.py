"""A packed cache layer of full attention, the base of the other packed layers."""

from __future__ import annotations

import copy
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from slimkv.cache import PagedPool
from slimkv.codec.key_offset import offset_of_keys, wants_offset
from slimkv.errors import InputError, UnsupportedError
from slimkv.formats import is_latent_format
from slimkv.integrations.transformers.compat import CacheLayerMixin
from slimkv.integrations.transformers.layer_settings import LayerSettings
from slimkv.integrations.transformers.lazy_kv import LazyKV, PackedStates, PagedKV, token_rows
from slimkv.integrations.transformers.tables import Step, lasting
from slimkv.ops import AttendOptions, AttentionBatch, PackedKV
from slimkv.ops.plan import AttendPlan, plan_attend
from slimkv.spec import CodecSpec, Kind

_unchecked: WeakValueDictionary[int, PackedLayer] = WeakValueDictionary()  # by the id of the keys they returned


def unchecked_layer(key: Tensor) -> PackedLayer | None:
    """The layer whose ``update`` returned ``key``, if the guard has not checked it yet; removes it from the list."""
    return _unchecked.pop(id(key), None) if _unchecked else None


class PackedLayer(CacheLayerMixin):
    """A full-attention layer in packed pages."""

    is_sliding = False
    is_croppable = True
    is_compileable = False
    window: int | None = None
    chunked = False
    tier: int | None = None  # index among the layer's tiers, if it has several

    def __init__(self, format: str, settings: LayerSettings, number: int = 0) -> None:
        # Does not call the base class, which would assign keys and values: they are views here.
        self.format = format
        self.number = number  # the layer's number in its model
        self.settings = settings
        self.is_initialized = False
        self.tokens = 0
        self._unchecked: Tensor | None = None  # keys of the last update that the guard has not checked

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.format}, tokens={self.tokens}, bytes={self.nbytes})"

    def __deepcopy__(self, memo: dict[int, Any]) -> PackedLayer:
        """Copies pages and tables; codec and matrices are immutable and shared."""
        if self.is_initialized:
            for shared in (self.pool.codec, self.pool.layout, self.pool.query_aware, self.pool.key_offset):
                memo[id(shared)] = shared
        twin = memo[id(self)] = type(self).__new__(type(self))
        twin.__dict__.update({name: copy.deepcopy(value, memo) for name, value in self.__getstate__().items()})
        return twin

    @property
    def nbytes(self) -> int:
        """Bytes allocated for keys and values, wherever they are now."""
        return self.pool.nbytes if self.is_initialized else 0

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Takes batch, heads, sizes, dtype and device from K and V [batch, num_kv_heads, tokens >= 0, dim]."""
        self.dtype, self.device = key_states.dtype, key_states.device
        batch, self.num_kv_heads = key_states.shape[:2]
        config = self.settings.config
        if is_latent_format(self.format) and self.num_kv_heads != 1:
            raise UnsupportedError(
                f"format {self.format!r} is for latents, and layer {self.number} of this model caches K and V of "
                f"{self.num_kv_heads} heads: use a format for K and V, such as 'k4v4'"
            )
        spec = self._spec(key_states, value_states)
        with lasting():
            self.tables = self.settings.tables.get(batch, self.device, self.window, self.tier)
            blocks, size, backend = self.tables.blocks, self.settings.block_size, self.settings.config.backend
            self.pool = PagedPool(spec, blocks, self.num_kv_heads, size, self.device, backend)
        if self.settings.calibration is not None:
            self.pool.query_aware = self.settings.calibration.query_aware_matrices(self.number, self.pool.codec)
        self._learns_offset = False
        if config.center_keys and not is_latent_format(self.format) and wants_offset(spec):
            self.pool.key_offset = self.settings.known_offset(self.number, self.pool.codec, self.num_kv_heads)
            self._learns_offset = self.pool.key_offset is None
            if self._learns_offset and config.deterministic:
                raise InputError(
                    "deterministic needs key offsets that are known beforehand, not learnt from the first tokens: give "
                    "the model instead of its config, a calibration, or center_keys=False"
                )
        self._plan: AttendPlan | None = None
        self._prefill = config.prefill_of(spec, shared_pages=False)
        self.tables.join(self)
        self.is_initialized = True

    def _spec(self, key_states: Tensor, value_states: Tensor) -> CodecSpec:
        """The spec for keys and values of these sizes and this dtype."""
        dims = key_states.shape[-1], value_states.shape[-1]
        return self.settings.config.spec_of(self.format, *dims, str(key_states.dtype))

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Stores K and V [batch, num_kv_heads, new, dim]; returns the tensors for attention. These are the new tensors
        themselves if nothing else is cached and the mode allows it; otherwise ``PackedStates``.
        """
        self._prepare(key_states, value_states)
        new, past = key_states.shape[2], self.tokens
        raw = self.settings.attends_raw(new)
        step = self.tables.advance(past, new, needs_past=past > 0 or not raw)
        self._store(key_states, value_states, step, past)
        self.tokens += new
        returned: tuple[Tensor, Tensor] = (key_states, value_states)
        if past or not raw:
            kv = self._kv(step, new, returned if raw else None)
            returned = self._states(kv)
        guard = self.settings.guard
        if guard is not None and guard.wants(str(self.number), new):
            self._unchecked = key_states
            _unchecked[id(returned[0])] = self
        return returned

    def check_scores(self, query: Tensor, softmax_scale: float) -> None:
        """Compares scores from the stored keys of the last ``update`` with exact scores (``slimkv.calibration.guard``).

        query [batch, num_heads, new, key_dim] is of the same tokens; only the first sequence is compared.
        """
        key, self._unchecked = self._unchecked, None
        guard = self.settings.guard
        if key is None or guard is None or query.shape[2] != key.shape[2]:
            return
        new = min(key.shape[2], self._visible(key.shape[2]))  # a sliding layer stores no more
        slots = self.tables.slots(self.tokens - new, new)[0]
        queries, keys = (x[0, :, -new:].transpose(0, 1) for x in (query, key))
        guard.compare(str(self.number), queries, keys, lambda rows: self.pool.gather(slots[rows])[0], softmax_scale)

    def _store(self, key_states: Tensor, value_states: Tensor, step: Step, first: int) -> None:
        """Stores K and V [batch, num_kv_heads, tokens, dim] from position ``first`` on in the slots of ``step``.

        Inputs of a raw format are converted to its dtype. A calibration has one matrix per range of positions.
        """
        spec = self.pool.layout.spec
        key, value = (
            x if side.kind != Kind.RAW else x.to(getattr(torch, side.raw_dtype))
            for x, side in ((key_states, spec.key), (value_states, spec.value))
        )
        if self._learns_offset and key.shape[2]:  # before the first token is stored; fixed from now on
            with lasting():
                mean, first_key = key.float().mean((0, 2)), key[:, :, 0].float().mean(0)
                self.pool.key_offset = offset_of_keys(mean, first_key, self.pool.codec).to(self.device)
            self._learns_offset = False
        index, matrices, chosen = self.settings.matrix_index, self.pool.query_aware, None
        if index is not None and matrices is not None and matrices.ndim == 4:
            chosen = index(first, key_states.shape[2], self.tables.pads, self.device)
        slots = step.batch.slot_mapping
        assert slots is not None
        self.pool.store(token_rows(key), token_rows(value), slots, chosen)

    def _prepare(self, key_states: Tensor, value_states: Tensor) -> None:
        """Initializes the layer from its first keys and values; raises for tensors that do not match the layer."""
        if torch.is_grad_enabled() and (key_states.requires_grad or value_states.requires_grad):
            raise UnsupportedError(
                "a packed cache does not pass gradients to its keys and values; run the model under torch.no_grad() or "
                "torch.inference_mode(), or train with use_cache=False"
            )
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        batch, heads, new, _ = key_states.shape
        if batch != self.tables.batch:
            raise InputError(
                f"the cache holds {self.tables.batch} sequences and was given {batch}; use "
                "batch_repeat_interleave or batch_select_indices to change the batch, or reset the cache"
            )
        if heads != self.num_kv_heads or value_states.shape[:3] != (batch, heads, new):
            raise InputError(
                f"keys {list(key_states.shape)} and values {list(value_states.shape)} do not fit a layer of "
                f"{self.num_kv_heads} KV heads"
            )
        if key_states.dtype != self.dtype:
            raise InputError(f"the cache holds {self.dtype} and was given {key_states.dtype}")

    def _kv(self, step: Step, new: int, fresh: tuple[Tensor, Tensor] | None) -> PagedKV:
        visible = self._visible(new)
        return self._paged(step, self.tokens - visible, visible, fresh)

    def _paged(self, step: Step, first: int, positions: int, fresh: tuple[Tensor, Tensor] | None = None) -> PagedKV:
        config = self.settings.config
        return PagedKV(
            self.pool.kv, self.tables, step, first, positions, self.dtype, self.window, self.chunked, fresh,
            config.backend, self.attend_codes, self._prefill, config.deterministic,
        )  # fmt: skip

    def attend_codes(self, query: Tensor, kv: PackedKV, batch: AttentionBatch, options: AttendOptions) -> Tensor:
        """query [queries, num_heads, key_dim] -> [queries, num_heads, value_dim]; reuses the last step's plan if the
        arguments are the same.

        ``kv`` refers to the pages of the step; offloading may have moved the layer's pages since.
        """
        plan = self._plan
        if plan is None or not plan.fits(query, kv, batch, options):
            plan = self._plan = plan_attend(query, kv, batch, options, backend=self.settings.config.backend)
        return plan.run(query, batch.seq_lens)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_plan": None, "_unchecked": None}  # a plan is bound to its pages

    def _visible(self, new: int) -> int:
        """The number of last positions that a step of ``new`` tokens may attend to."""
        return self.tokens

    def _states(self, kv: LazyKV) -> tuple[PackedStates, PackedStates]:
        """The tensors that ``update`` returns for ``kv``."""
        spec, kind = self.pool.layout.spec, (self.dtype, self.device)
        return PackedStates(kv, 0, spec.key_dim, *kind), PackedStates(kv, 1, spec.value_dim, *kind)

    def _whole(self) -> LazyKV:
        """All cached keys and values."""
        return self._kv(self.tables.current(), 0, None)

    def _view(self, side: int) -> PackedStates | None:
        if not self.is_initialized or self.tokens == 0:
            return None
        return self._states(self._whole())[side]

    @property
    def keys(self) -> PackedStates | None:
        """The cached keys, decoded on use: [batch, num_kv_heads, tokens, key_dim]."""
        return self._view(0)

    @property
    def values(self) -> PackedStates | None:
        """The cached values, decoded on use."""
        return self._view(1)

    def get_seq_length(self) -> int:
        """Positions seen so far, padding included."""
        return self.tokens

    def get_max_length(self) -> int:
        """-1: the cache grows as needed."""
        return -1

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """(length, offset) of the keys that a step of ``query_length`` will return."""
        return self.tokens + query_length, 0

    def offload(self) -> None:
        """Moves the pages to the CPU."""
        if self.is_initialized:
            with lasting():
                self.pool.to("cpu")
            self._plan = None

    def prefetch(self) -> None:
        """Moves the pages back."""
        if self.is_initialized:
            with lasting():
                self.pool.to(self.device)

    def reset(self) -> None:
        """Empties the layer and frees its memory."""
        if self.is_initialized:
            del self.pool, self.tables, self._plan
        self.is_initialized = False
        self.tokens = 0

    def crop(self, tokens_to_remove: int) -> None:
        """Removes the last ``-tokens_to_remove`` tokens; the tables are already updated."""
        if self.is_initialized:
            self.tokens = max(self.tokens + tokens_to_remove, 0)

    def check_crop(self, tokens: int) -> None:
        """Raises if ``tokens`` tokens cannot be removed."""

    def _no_change(self, sequences: Any) -> None:
        """Does nothing: the tables move the pages."""

    reorder_cache = batch_repeat_interleave = batch_select_indices = _no_change

    def grow(self, blocks: int) -> None:
        """Appends blocks until there are ``blocks``."""
        self._plan = None
        with lasting():
            self.pool.grow(blocks)

    def relocate(self, source: Tensor, target: Tensor, blocks: int) -> None:
        """Allocates new pages of ``blocks`` blocks and copies block ``source[i]`` to ``target[i]``."""
        self._plan = None
        with lasting():
            self.pool.rearrange(source, target, blocks)
