"""Prefill and decode in different engines: both must read the transferred pages in the same way.

Before a transfer, SGLang's decode engine compares the name of its cache's dtype with that of the prefill engine and
stops if they differ. slimkv puts the formats, the number of ranks and the fingerprint into that name.
"""

from __future__ import annotations

from typing import Any

from slimkv.calibration.identity import weights_digest
from slimkv.errors import InputError
from slimkv.integrations.sglang.compat import attention_tp, logger
from slimkv.integrations.sglang.sizing import CachePlan
from slimkv.wire.fingerprint import Fingerprint, LayerFingerprint
from slimkv.wire.model import model_fields

WRITER = "SGLang"


def state_in_handshake(runner: Any, plan: CachePlan) -> None:
    """Sets the name that peers compare, if pages leave the engine."""
    if not plan.transfers:
        return
    found = fingerprint(runner, plan)
    formats = ",".join(sorted({layer.format for layer in found.layers}))
    runner.kv_cache_dtype_str = f"slimkv {formats}, {attention_tp()[1]} ranks, fingerprint {found.hash}"
    logger.info("slimkv: peers must have %s.", runner.kv_cache_dtype_str)


def fingerprint(runner: Any, plan: CachePlan) -> Fingerprint:
    """The fingerprint of this process's layers, with the KV heads of all ranks."""
    served, dtype = plan.model, str(runner.dtype).removeprefix("torch.")
    weights = weights_digest(served.name)
    if weights is None:
        raise InputError(
            f"{served.name} contains no weight files, which identify the model of the pages that leave this engine: "
            "leave out --disaggregation-mode"
        )
    heads = 1 if runner.use_mla_backend else runner.model_config.get_total_num_kv_heads()
    specs = {number: pages.layout.spec for number, pages in plan.layers.items()}
    layers = [
        LayerFingerprint.of(number, spec, heads, dtype, key_offset=served.whole_offset(number, spec))
        for number, spec in specs.items()
    ]
    return Fingerprint.of(
        layers, block_size=plan.page_size, seed=plan.config.seed, dtype=dtype,
        model=model_fields(served.config, WRITER), weights=weights,
    )  # fmt: skip
