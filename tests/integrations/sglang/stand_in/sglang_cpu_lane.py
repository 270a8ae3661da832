"""Makes SGLang importable on a machine without its CUDA packages. A ``.pth`` file runs this when Python starts.

The packaged torchvision is built for CUDA. Its compiled part does not load with a CPU torch, and importing torchvision
then fails on undeclared operators. Declaring them is enough, since the tests never call them.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder

_libraries: list[object] = []


class _DeclareOperators(MetaPathFinder):
    """Declares torchvision's operators when torchvision is first imported. Finds no modules itself."""

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: object = None) -> None:
        if fullname == "torchvision" and not _libraries:
            import torch

            library = torch.library.Library("torchvision", "DEF")
            _libraries.append(library)
            for name in ("nms", "qnms"):
                library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


sys.meta_path.insert(0, _DeclareOperators())
