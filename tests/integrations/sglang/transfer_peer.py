"""One engine that reads requests as lines of JSON from stdin and prints each answer as a line of JSON after ``>``.

``python transfer_peer.py ARGUMENTS``. A request has ``prompt``, ``max_tokens`` and ``more`` (further arguments of
``Engine.generate``). An answer has ``tokens``.
"""

from __future__ import annotations

import json
import os
import sys


def main() -> None:
    import sglang

    engine = sglang.Engine(**json.loads(sys.argv[1]))
    print(">ready", flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        params = {"temperature": 0, "max_new_tokens": asked["max_tokens"], "ignore_eos": True}
        found = engine.generate(input_ids=asked["prompt"], sampling_params=params, **asked["more"])
        print(f">{json.dumps({'tokens': found['output_ids']})}", flush=True)
    engine.shutdown()
    os._exit(0)  # NIXL's threads outlive the engine


if __name__ == "__main__":
    main()
