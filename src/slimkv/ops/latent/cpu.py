"""attend_latent on CPUs: tokens decoded by the compiled gather, products and softmax by torch."""

from __future__ import annotations

from torch import Tensor

from slimkv.codec import Codec
from slimkv.ops.batch import PackedKV
from slimkv.ops.gather.api import gather_kv
from slimkv.ops.latent.api import LatentRequest
from slimkv.ops.latent.reference import attend_decoded, supports
from slimkv.spec import PageLayout

__all__ = ["run", "supports"]


def run(request: LatentRequest) -> None:
    """See ``slimkv.ops.attend_latent``."""
    attend_decoded(request, _decode)


def _decode(pages: Tensor, slots: Tensor, codec: Codec, layout: PageLayout) -> tuple[Tensor, Tensor]:
    return gather_kv(PackedKV(pages, codec, layout), slots, rotated=True, backend="cpu")
