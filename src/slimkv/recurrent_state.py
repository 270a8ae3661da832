"""Bytes of the recurrent states of hybrid models, from a model's configuration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from slimkv.errors import UnsupportedError

_DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "auto": 2}


@dataclass(frozen=True)
class StateShape:
    """The states of one sequence: number of layers and bytes per layer."""

    layers: int
    layer_bytes: int

    @property
    def sequence_bytes(self) -> int:
        """Bytes of the states of all layers."""
        return self.layers * self.layer_bytes


def state_shape(config: Mapping[str, Any], layers: int) -> StateShape | None:
    """The states of a model with ``layers`` recurrent layers; None if it has none. Raises if their size is unknown."""
    if not layers:
        return None
    numbers, dtype = _numbers(config), config.get("mamba_ssm_dtype") or config.get("mamba_ssm_cache_dtype") or "auto"
    if config.get("linear_num_heads"):  # engines always keep the states of Kimi delta attention in float32
        dtype = "float32"
    if numbers is None or dtype not in _DTYPE_BYTES:
        what = "of unknown size" if numbers is None else f"in {dtype} (known are {', '.join(_DTYPE_BYTES)})"
        raise UnsupportedError(
            f"model type {config.get('model_type')!r} has {layers} layers with a recurrent state {what}, which this "
            "plan cannot count"
        )
    convolution, recurrent = numbers
    return StateShape(layers, 2 * convolution + _DTYPE_BYTES[dtype] * recurrent)


def _numbers(config: Mapping[str, Any]) -> tuple[int, int] | None:
    """(values of the convolution state, values of the recurrent state) in one layer."""

    def get(*names: str) -> int | None:
        return next((int(config[name]) for name in names if config.get(name)), None)

    hidden, kernel = get("hidden_size"), get("linear_conv_kernel_dim")
    keys, key_dim = get("linear_num_key_heads"), get("linear_key_head_dim")
    values, value_dim = get("linear_num_value_heads"), get("linear_value_head_dim")
    if keys and key_dim and values and value_dim and kernel:  # gated delta net
        return (kernel - 1) * (2 * keys * key_dim + values * value_dim), values * value_dim * key_dim
    heads, head_dim = get("linear_num_heads"), get("linear_head_dim")
    if heads and head_dim and kernel:  # Kimi delta attention
        return (kernel - 1) * 3 * heads * head_dim, heads * head_dim**2
    if hidden and (kernel := get("conv_L_cache")):  # short convolutions, without a recurrent state
        return (kernel - 1) * hidden, 0
    heads = get("num_attention_heads")
    if config.get("model_type") == "minimax" and hidden and heads:  # lightning attention
        return 0, heads * (get("head_dim") or hidden // heads) ** 2
    kernel, state = get("mamba_d_conv", "conv_kernel"), get("mamba_d_state", "ssm_state_size")
    if not kernel or not state:
        return None
    heads, head_dim = get("mamba_n_heads", "mamba_num_heads"), get("mamba_d_head", "mamba_head_dim")
    if heads and head_dim:  # Mamba 2
        groups = get("mamba_n_groups", "n_groups") or 1
        return (kernel - 1) * (heads * head_dim + 2 * groups * state), heads * head_dim * state
    if hidden and (expand := get("mamba_expand")):  # Mamba 1
        return (kernel - 1) * hidden * expand, hidden * expand * state
    return None


def aligned_block_size(state_bytes: int, token_bytes: float, alignment: int) -> int:
    """The block size, in tokens, at which a block of an attention layer is at least as large as one layer's state.

    vLLM stores states in blocks of the same pool, so a state must fit an attention block.
    """
    return max(1, -(-state_bytes // int(token_bytes * alignment))) * alignment
