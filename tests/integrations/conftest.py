"""Makes ``shared``, the helpers for all engines, importable. This folder itself must not be on the path: where vLLM is
not installed, ``import vllm`` would find the folder ``vllm`` here."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "shared"))
