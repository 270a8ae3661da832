"""``prompts`` beside this file serves the tests of every engine."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
