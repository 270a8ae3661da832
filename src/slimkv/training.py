"""``fake_quantize``: keys and values as read from a packed cache, with a straight-through gradient for training."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from slimkv.arguments import describe, typed
from slimkv.cache import PagedPool
from slimkv.calibration import Calibration
from slimkv.calibration.positions import matrix_index
from slimkv.codec.key_offset import OFFSET_DTYPE, offset_of_keys, wants_offset
from slimkv.config import CALIBRATED, KVCacheConfig
from slimkv.errors import InputError
from slimkv.formats import format_of_kind
from slimkv.spec import Kind

_BLOCK = 64


class _StraightThrough(torch.autograd.Function):
    """Returns the second argument; the gradient goes to the first."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, quantized: Tensor) -> Tensor:
        return quantized

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0], None


@typed
def fake_quantize(
    key: Tensor,
    value: Tensor,
    config: KVCacheConfig | str = "k4v4",
    calibration: Calibration | None = None,
    *,
    layer: int = 0,
    num_layers: int = 1,
    key_offset: Tensor | None = None,
    first_position: int = 0,
) -> tuple[Tensor, Tensor]:
    """Keys and values as attention reads them from a packed cache, in the dtype of the input.

    The forward values equal those of engines, bit for bit: the vectors go through ``store_kv`` and ``gather_kv``.
    The gradient is straight-through.

    Args:
        key, value: [batch, num_kv_heads, tokens, dim], after rotary embedding.
        config: a format or a ``KVCacheConfig``; its ``layers``, ``center_keys``, scale policies, ``seed`` and
            ``backend`` are used.
        calibration: statistics for rounding and centring keys; by default ``config.calibration``, if it is loaded.
        layer, num_layers: the layer's number, used by a calibration and by ``layers``, and the number of layers.
        key_offset: float [num_kv_heads, key_dim]: the offset that an engine subtracts from the keys of this layer.
            None: the offset of the calibration, or one learnt from these keys, as engines learn it from a prompt.
        first_position: the position of the first token, for a calibration whose rounding depends on it.
    """
    settings = config if isinstance(config, KVCacheConfig) else KVCacheConfig(format=config)
    if calibration is None and isinstance(settings.calibration, Calibration):
        calibration = settings.calibration
    if key.ndim != 4 or value.ndim != 4 or key.shape[:3] != value.shape[:3]:
        raise InputError(
            f"key and value must be [batch, num_kv_heads, tokens, dim] with the same first three sizes, not "
            f"{list(key.shape)} and {list(value.shape)}"
        )
    batch, heads, tokens, dim = key.shape
    if key_offset is not None and (key_offset.shape != (heads, dim) or not key_offset.is_floating_point()):
        raise InputError(f"key_offset must be float [{heads}, {dim}] for these keys, not {describe(key_offset)}")
    bounds = (("layer", layer, 0), ("num_layers", num_layers, 1), ("first_position", first_position, 0))
    for name, number, least in bounds:
        if number < least:
            raise InputError(f"{name} must be {least} or more, not {number}")
    format = format_of_kind(settings.format_of(layer, num_layers), latent=False)
    if format == CALIBRATED:
        if calibration is None or calibration.formats is None:
            raise InputError("format 'calibrated' needs a calibration made for a budget (slimkv calibrate --budget)")
        format = calibration.formats[layer]
    spec = settings.spec_of(format, dim, value.shape[-1], str(key.dtype))
    with torch.no_grad():
        rows = [x.detach().transpose(1, 2).reshape(batch * tokens, heads, -1).contiguous() for x in (key, value)]
        pool = PagedPool(spec, -(-batch * tokens // _BLOCK) or 1, heads, _BLOCK, key.device, settings.backend)
        if settings.center_keys and wants_offset(spec):
            if key_offset is None and calibration is not None:
                key_offset = calibration.key_offset(layer, pool.codec)
            if key_offset is None:
                first = key.detach()[:, :, 0].float().mean(0)
                key_offset = offset_of_keys(rows[0].float().mean(0), first, pool.codec)
            pool.key_offset = key_offset.detach().to(key.device, OFFSET_DTYPE).contiguous()
        index = None
        if calibration is not None and spec.key.kind == Kind.LLOYD:
            pool.query_aware = calibration.query_aware_matrices(layer, pool.codec)
            positions = torch.arange(first_position, first_position + tokens, device=key.device).repeat(batch)
            if pool.query_aware is not None and pool.query_aware.ndim == 4:
                index = matrix_index(positions, calibration.position_edges())
        slots = torch.arange(batch * tokens, device=key.device)
        pool.store(rows[0], rows[1], slots, index)
        stored = [x.unflatten(0, (batch, tokens)).transpose(1, 2) for x in pool.gather(slots, key.dtype)]
    return _StraightThrough.apply(key, stored[0]), _StraightThrough.apply(value, stored[1].to(value.dtype))
