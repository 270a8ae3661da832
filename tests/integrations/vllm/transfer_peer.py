"""One engine that reads requests as lines of JSON from stdin and prints each answer as a line of JSON after ``>``.

``python transfer_peer.py ARGUMENTS``. A request has ``prompt``, ``max_tokens`` and ``transfer`` (vLLM's
``kv_transfer_params``). An answer has ``tokens``, the finish ``reason``, ``transfer`` for a peer, and counters of
tokens and bytes that came from peers.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

COUNTERS = ("vllm:external_prefix_cache_hits", "vllm:nixl_bytes_transferred")


def main() -> None:
    from vllm import LLM, SamplingParams

    llm = LLM(**json.loads(sys.argv[1]))
    print(">ready", flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        params = SamplingParams(
            temperature=0, max_tokens=asked["max_tokens"], ignore_eos=True, detokenize=False,
            extra_args={"kv_transfer_params": asked["transfer"]} if asked["transfer"] else None,
        )  # fmt: skip
        (output,) = llm.generate([{"prompt_token_ids": asked["prompt"]}], params, use_tqdm=False)
        answer: dict[str, Any] = {
            "tokens": list(output.outputs[0].token_ids), "transfer": output.kv_transfer_params,
            "reason": output.outputs[0].finish_reason,
        }  # fmt: skip
        for name in COUNTERS:
            found = [m for m in llm.get_metrics() if m.name == name]
            answer[name] = sum(getattr(m, "sum", None) or getattr(m, "value", 0) for m in found)
        print(f">{json.dumps(answer)}", flush=True)
    os._exit(0)  # NIXL's threads outlive the engine


if __name__ == "__main__":
    main()
