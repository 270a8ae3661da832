"""Bytes of the recurrent states of hybrid models, from a model's configuration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


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
    """The states of a model with states in ``layers`` layers; None without states or if their kind is unknown."""
    numbers = _numbers(config) if layers else None
    if numbers is None:
        return None
    convolution, recurrent = numbers
    dtype = config.get("mamba_ssm_dtype") or config.get("mamba_ssm_cache_dtype")
    return StateShape(layers, 2 * convolution + _DTYPE_BYTES.get(str(dtype), 2) * recurrent)


def _numbers(config: Mapping[str, Any]) -> tuple[int, int] | None:
    """(values of the convolution state, values of the recurrent state) in one layer."""

    def get(*names: str) -> int | None:
        return next((int(config[name]) for name in names if config.get(name)), None)

    if keys := get("linear_num_key_heads"):  # gated delta net
        key_dim, value_dim = get("linear_key_head_dim"), get("linear_value_head_dim")
        values, kernel = get("linear_num_value_heads"), get("linear_conv_kernel_dim")
        if not (key_dim and value_dim and values and kernel):
            return None
        return (kernel - 1) * (2 * keys * key_dim + values * value_dim), values * value_dim * key_dim
    kernel, state = get("mamba_d_conv", "conv_kernel"), get("mamba_d_state", "ssm_state_size")
    if not kernel or not state:
        return None
    heads, head_dim = get("mamba_n_heads", "mamba_num_heads"), get("mamba_d_head", "mamba_head_dim")
    if heads and head_dim:  # Mamba 2
        groups = get("mamba_n_groups", "n_groups") or 1
        return (kernel - 1) * (heads * head_dim + 2 * groups * state), heads * head_dim * state
    hidden, expand = get("hidden_size"), get("mamba_expand")
    if hidden and expand:  # Mamba 1
        return (kernel - 1) * hidden * expand, hidden * expand * state
    return None


def aligned_block_size(state_bytes: int, token_bytes: float, alignment: int) -> int:
    """The block size, in tokens, at which a block of an attention layer is as large as one layer's state.

    vLLM stores states in blocks of the same pool, so its attention blocks are as large as a state.
    """
    return max(1, -(-state_bytes // int(token_bytes * alignment))) * alignment
