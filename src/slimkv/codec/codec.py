"""``Codec``: a spec together with the tensors it needs on one device."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from slimkv.arguments import describe, typed
from slimkv.codec import pack, quantize
from slimkv.codec.codebook import LEVEL_DENOMINATOR, codebook
from slimkv.codec.quantize import Encoded, SideTables
from slimkv.codec.rotation import block_size, signed_hadamard
from slimkv.errors import InputError
from slimkv.spec import CodecSpec, Kind, PageLayout, TensorFormat

FLOAT_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def _float32(number: float) -> float:
    return float(np.float32(number))


def _indexed(device: torch.device | str) -> torch.device:
    """``device`` as tensors report it: ``cuda`` becomes ``cuda:0``."""
    return torch.zeros(0, device=device).device


def _magnitude_entries(fmt: TensorFormat, levels_by_code: np.ndarray) -> np.ndarray:
    """The look-up table of store kernels, by magnitude: the level in units of 1 / LEVEL_DENOMINATOR.

    Up to 4 bits: the square of twice the level, with the magnitude's index above the low 16 bits.
    """
    positive = levels_by_code[len(levels_by_code) // 2 :]
    if fmt.bits > 4:
        return positive * LEVEL_DENOMINATOR
    return (2 * positive) ** 2 + (np.arange(len(positive)) << 16)


def _side_tables(fmt: TensorFormat, dim: int, seed: int, device: torch.device) -> SideTables:
    block = block_size(dim)
    levels, boundaries, unit, error_steps = np.empty(0), np.empty(0), 1.0, 1.0
    if fmt.kind == Kind.LLOYD:
        book = codebook(fmt.bits, dim)
        levels, boundaries, unit = book.levels_by_code, book.boundaries, book.unit
        error_steps = book.error_steps
    return SideTables(
        hadamard=torch.tensor(signed_hadamard(dim, seed), dtype=torch.float64, device=device),
        levels=torch.tensor(levels, dtype=torch.float32, device=device),
        boundaries=torch.tensor(boundaries, dtype=torch.float32, device=device),
        unit=_float32(unit * math.sqrt(dim / block)),
        plain_scale=_float32(1 / (unit * math.sqrt(dim))),
        orthonormal=_float32(1 / math.sqrt(block)),
        root_dim=_float32(math.sqrt(block)),
        error_steps=error_steps,
        signs=torch.tensor(signed_hadamard(dim, seed), dtype=torch.bfloat16, device=device),
        bounds=torch.tensor(boundaries[boundaries > 0], dtype=torch.float32).view(torch.int32).to(device),
        entries=torch.tensor(_magnitude_entries(fmt, levels), dtype=torch.int32, device=device),
    )


class Codec:
    """Encodes and decodes K and V vectors of one ``CodecSpec`` on one device.

    Shapes are ``[..., dim]`` with any batch shape; inputs are float16, bfloat16 or float32. A rotation acts on the last
    axis: ``rotated = x @ rotation``. Attention on rotated queries and keys, with the output rotated back, equals
    attention on the original vectors.
    """

    @typed
    def __init__(self, spec: CodecSpec, device: torch.device | str = "cpu") -> None:
        self.spec = spec
        self.device = _indexed(device)
        self.key_tables = _side_tables(spec.key, spec.key_dim, spec.seed, self.device)
        self.value_tables = _side_tables(spec.value, spec.value_dim, spec.seed, self.device)
        self.key_rotation = (self.key_tables.hadamard * (1 / math.sqrt(block_size(spec.key_dim)))).float()
        self.value_rotation = (self.value_tables.hadamard * (1 / math.sqrt(block_size(spec.value_dim)))).float()
        self._rows = PageLayout(spec, 1)

    def __repr__(self) -> str:
        dims = f"key_dim={self.spec.key_dim}, value_dim={self.spec.value_dim}"
        return f"Codec({self.spec.format}, {dims}, device={self.device})"

    @classmethod
    @typed
    def from_format(
        cls, format: str, head_dim: int, value_dim: int | None = None, device: torch.device | str = "cpu"
    ) -> Codec:
        """``Codec(CodecSpec.parse(format, head_dim, value_dim), device)``."""
        return cls(CodecSpec.parse(format, head_dim, value_dim), device)

    @typed
    def to(self, device: torch.device | str) -> Codec:
        """This codec with its tensors on ``device``; itself if they are already there."""
        target = _indexed(device)
        return self if target == self.device else Codec(self.spec, target)

    @typed
    def compression_ratio(self, block_size: int = 16) -> float:
        """bf16 bytes over the bytes that pages of ``block_size`` tokens allocate."""
        return PageLayout(self.spec, block_size).compression_ratio

    @typed
    def encode_key(self, x: Tensor, *, query_aware: Tensor | None = None, mark_invalid: bool = False) -> Encoded:
        """[..., key_dim] -> ``Encoded``.

        ``query_aware``: from ``slimkv.codec.query_aware.query_aware_matrix``, int8 broadcastable to
        [..., key_dim, key_dim] (one matrix per KV head if x is [..., num_kv_heads, key_dim]), for ``lloyd`` keys
        only. Decoding does not need it.

        Raises ``InputError`` for vectors with NaN, Inf or a norm beyond the range of scales. With ``mark_invalid``,
        such vectors are marked instead, as kernels do.
        """
        return self._encode(x, self.spec.key, self.key_tables, "key", mark_invalid, query_aware)

    @typed
    def encode_value(self, x: Tensor, *, mark_invalid: bool = False) -> Encoded:
        """[..., value_dim] -> ``Encoded``; see ``encode_key``."""
        return self._encode(x, self.spec.value, self.value_tables, "value", mark_invalid)

    def _encode(
        self, x: Tensor, fmt: TensorFormat, tables: SideTables, name: str, mark: bool, query_aware: Tensor | None = None
    ) -> Encoded:
        self._check(x, len(tables.hadamard), name)
        if query_aware is not None:
            self._check_query_aware(query_aware, x)
        if fmt.kind == Kind.RAW:
            return quantize.encode_raw(x, fmt)
        short = quantize.becomes_short(fmt, x.dtype, x.shape[-1])
        x = x.float().contiguous()
        if fmt.kind == Kind.LLOYD:
            encoded = quantize.encode_lloyd(x, fmt, tables, query_aware, short)
        elif fmt.kind == Kind.UNIFORM:
            encoded = quantize.encode_uniform(x, fmt, tables)
        else:
            encoded = quantize.encode_fp8(x)
        bad = quantize.invalid_vectors(x, encoded)
        if mark:
            return quantize.mark_invalid(encoded, bad)
        if bad.any():
            where = tuple(bad.nonzero()[0].tolist())
            reason = "NaN or Inf" if not torch.isfinite(x[where]).all() else "a norm beyond the range of scales"
            raise InputError(
                f"{int(bad.sum())} {name} vector(s) cannot be encoded; the first, at index {where}, has {reason}"
            )
        return encoded

    def _check_query_aware(self, query_aware: Tensor, x: Tensor) -> None:
        if self.spec.key.kind != Kind.LLOYD:
            raise InputError(f"query-aware rounding needs Lloyd-Max keys; the key format is {self.spec.key.name}")
        wanted = torch.Size((*x.shape, x.shape[-1]))
        try:
            fits = query_aware.shape[-2:] == wanted[-2:] and torch.broadcast_shapes(query_aware.shape, wanted) == wanted
        except RuntimeError:
            fits = False
        if not fits or query_aware.dtype != torch.int8:
            raise InputError(
                f"query_aware must be int8 and broadcast to {list(wanted)}, not {query_aware.dtype} "
                f"{list(query_aware.shape)}"
            )
        if query_aware.device != x.device:
            raise InputError(f"query_aware is on {query_aware.device}, the keys on {x.device}")

    def _check(self, x: Tensor, dim: int, name: str) -> None:
        if x.ndim == 0 or x.shape[-1] != dim:
            found = x.shape[-1] if x.ndim else 0
            raise InputError(f"{name} vectors have {found} dimensions; this codec needs {dim}: {describe(x)}")
        if x.dtype not in FLOAT_DTYPES:
            raise InputError(f"{name} dtype {x.dtype} is not supported; use float16, bfloat16 or float32")
        if x.device != self.device:
            raise InputError(
                f"{name} tensor is on {x.device}, the codec on {self.device}; use codec.to({str(x.device)!r})"
            )

    @typed
    def decode_key(self, encoded: Encoded, *, rotated: bool = False) -> Tensor:
        """``Encoded`` -> float32 [..., key_dim] (the raw dtype for raw).

        With ``rotated``, the result stays in the rotated space in which attention reads it.
        """
        return self._decode(encoded, self.spec.key, self.key_tables, self.key_rotation, rotated)

    @typed
    def decode_value(self, encoded: Encoded, *, rotated: bool = False) -> Tensor:
        """``Encoded`` -> float32 [..., value_dim]; see ``decode_key``."""
        return self._decode(encoded, self.spec.value, self.value_tables, self.value_rotation, rotated)

    def _decode(
        self, encoded: Encoded, fmt: TensorFormat, tables: SideTables, rotation: Tensor, rotated: bool
    ) -> Tensor:
        if fmt.kind == Kind.RAW:
            return quantize.decode_raw(encoded, fmt)
        if fmt.kind == Kind.LLOYD:
            x = quantize.decode_lloyd(encoded, tables)
        elif fmt.kind == Kind.UNIFORM:
            x = quantize.decode_uniform(encoded)
        else:
            x = quantize.decode_fp8(encoded)
        return x @ rotation.T if fmt.rotated and not rotated else x

    @typed
    def pack_key(self, x: Tensor) -> Tensor:
        """K [..., key_dim] -> uint8 [..., bytes]: codes, then fields, one row per vector."""
        return pack.pack_vectors(self._rows.key, self.encode_key(x))

    @typed
    def pack_value(self, x: Tensor) -> Tensor:
        """V [..., value_dim] -> uint8 [..., bytes]."""
        return pack.pack_vectors(self._rows.value, self.encode_value(x))

    @typed
    def unpack_key(self, rows: Tensor) -> Tensor:
        """The rows of ``pack_key`` -> float32 [..., key_dim] in the original space (the raw dtype for raw)."""
        return self.decode_key(pack.unpack_vectors(self._rows.key, rows))

    @typed
    def unpack_value(self, rows: Tensor) -> Tensor:
        """The rows of ``pack_value`` -> float32 [..., value_dim] in the original space."""
        return self.decode_value(pack.unpack_vectors(self._rows.value, rows))

    @typed
    def rotate_query(self, q: Tensor) -> Tensor:
        """Queries [..., key_dim] -> float32 in the stored space of the keys."""
        self._check(q, self.spec.key_dim, "query")
        return q.float() @ self.key_rotation if self.spec.key.rotated else q.float()

    @typed
    def rotate_value(self, value: Tensor) -> Tensor:
        """Values [..., value_dim] -> float32 in their stored space."""
        self._check(value, self.spec.value_dim, "value")
        return value.float() @ self.value_rotation if self.spec.value.rotated else value.float()

    @typed
    def unrotate_output(self, out: Tensor) -> Tensor:
        """Attention output [..., value_dim] in the stored space of the values -> float32 in the original space."""
        self._check(out, self.spec.value_dim, "out")
        return out.float() @ self.value_rotation.T if self.spec.value.rotated else out.float()
