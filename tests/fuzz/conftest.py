"""Fuzz tests. ``SLIMKV_FUZZ=10`` runs ten times as many cases, new ones each time. By default, cases are fixed.

``make test`` runs the short tests here, ``make test-slow`` the long ones.
"""

import sys
from pathlib import Path

HERE = Path(__file__).parent
for folder in (
    HERE,
    HERE.parent / "wire",
    HERE.parent / "ops",
    HERE.parent / "ops" / "cuda",
    HERE.parent / "integrations" / "transformers",
):
    sys.path.insert(0, str(folder))
