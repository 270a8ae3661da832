"""The constant part of keys in SGLang: where each layer's offset comes from."""

from __future__ import annotations

import torch

from slimkv.calibration.learned_offset import LayerOffset, kept_path
from slimkv.calibration.serving import rank_offset
from slimkv.codec.key_offset import wants_offset
from slimkv.integrations.sglang.compat import attention_tp
from slimkv.integrations.sglang.sizing import CachePlan, LayerPages


def layer_offset(plan: CachePlan, pages: LayerPages, device: torch.device) -> LayerOffset | None:
    """The offset of a layer's keys on this rank; None where they are not centred.

    From the calibration, else as an earlier process kept it, else learnt from the first prompt.
    """
    spec = pages.layout.spec
    if not plan.config.center_keys or not wants_offset(spec):
        return None
    if plan.calibration is not None and pages.layer in plan.calibration.layers:
        known = rank_offset(plan.calibration, pages.layer, pages.num_kv_heads, *attention_tp(), device)
        if known is not None:
            return LayerOffset(pages.num_kv_heads, spec.key_dim, device, known)
    path = kept_path(plan.model, pages.layer, *attention_tp()) if plan.model is not None else None
    return LayerOffset.kept(path, pages.num_kv_heads, spec.key_dim, device)
