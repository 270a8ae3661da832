"""Tests beside this file share helpers by plain import."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
