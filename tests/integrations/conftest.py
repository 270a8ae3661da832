"""What is in ``shared`` serves the tests of every engine. This folder itself is no place to import from: its ``vllm``
would be found where vLLM is not installed."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "shared"))
