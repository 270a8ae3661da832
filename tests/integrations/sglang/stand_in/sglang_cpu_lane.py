"""Lets SGLang import on a machine without its CUDA packages; run at interpreter start by a ``.pth`` file.

The packaged torchvision is built for a CUDA torch. Its compiled part does not load beside a CPU torch, and importing it
then fails on operators that were never declared. Declaring them is enough: nothing on the lane calls them.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder

_libraries: list[object] = []


class _DeclareOperators(MetaPathFinder):
    """Declares torchvision's operators when torchvision is first looked for; finds nothing itself."""

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: object = None) -> None:
        if fullname == "torchvision" and not _libraries:
            import torch

            library = torch.library.Library("torchvision", "DEF")
            _libraries.append(library)
            for name in ("nms", "qnms"):
                library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


sys.meta_path.insert(0, _DeclareOperators())
