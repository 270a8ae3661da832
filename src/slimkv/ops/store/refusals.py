"""Requests that store kernels leave to the reference, with the reason."""

from __future__ import annotations

from functools import cache

from slimkv.ops.store.api import StoreRequest
from slimkv.spec import Kind, PageLayout, ScalePolicy


@cache
def refuses_policy(layout: PageLayout) -> str | None:
    """Why kernels do not support the layout's scale policies, or None; they only support ``norm``."""
    for name, side in (("key_policy", layout.key), ("value_policy", layout.value)):
        policy = side.format.policy
        if side.format.kind == Kind.LLOYD and policy != ScalePolicy.NORM:
            return f"kernels encode with the scale policy 'norm'; {name}={str(policy)!r} needs backend='reference'"
    return None


def refuses_raw_dtype(request: StoreRequest) -> str | None:
    """Why raw sides cannot hold the request's K and V, or None."""
    spec = request.layout.spec
    for name, fmt, x in (("key", spec.key, request.key), ("value", spec.value, request.value)):
        if fmt.kind == Kind.RAW and str(x.dtype) != f"torch.{fmt.raw_dtype}":
            return f"the raw format holds {fmt.raw_dtype} bit for bit, but the {name} is {x.dtype}"
    return None
