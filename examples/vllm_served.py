"""Send a request to a vLLM server with packed pages; clients do not change.

vllm serve MODEL --attention-backend CUSTOM --additional-config '{"slimkv": {"format": "k4v4"}}'
python examples/vllm_served.py --url http://127.0.0.1:8000/v1
"""

import argparse
import json
import urllib.request

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--url", default="http://127.0.0.1:8000/v1", help="the server's address")
parser.add_argument("--prompt", default="Name the three primary colours.")
parser.add_argument("--new-tokens", type=int, default=24)
arguments = parser.parse_args()

with urllib.request.urlopen(f"{arguments.url}/models") as answer:
    model = json.load(answer)["data"][0]["id"]
asked = {
    "model": model, "max_tokens": arguments.new_tokens, "temperature": 0,
    "messages": [{"role": "user", "content": arguments.prompt}],
}  # fmt: skip
request = urllib.request.Request(
    f"{arguments.url}/chat/completions", json.dumps(asked).encode(), {"Content-Type": "application/json"}
)
with urllib.request.urlopen(request) as answer:
    print(json.load(answer)["choices"][0]["message"]["content"])
