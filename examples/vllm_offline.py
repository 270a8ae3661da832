"""vLLM from Python with packed pages in vLLM's own blocks. Requires ``pip install "slimkv[vllm]"``.

python examples/vllm_offline.py --model meta-llama/Llama-3.1-8B-Instruct
python examples/vllm_offline.py --cpu          # a small packaged model, on vLLM's CPU build
"""

import argparse
import os

from slimkv.lab import models

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--model", help="a folder or a hub name; default: a packaged model")
parser.add_argument("--format", default="k4v4", help="how keys and values are stored")
parser.add_argument("--calibration", help="a file from slimkv calibrate, for this model")
parser.add_argument("--cpu", action="store_true", help="small sizes for vLLM's CPU build")
arguments = parser.parse_args()


def main() -> None:
    """Generates answers to two prompts in one batch."""
    sizes = {}
    if arguments.cpu:
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
        sizes = {"max_model_len": 512, "block_size": 32, "enforce_eager": True, "dtype": "float32"}
    from vllm import LLM, SamplingParams

    settings = {"format": arguments.format}
    if arguments.calibration:
        settings["calibration"] = arguments.calibration
    llm = LLM(
        arguments.model or str(models.folder(models.DEFAULT)),
        attention_backend="CUSTOM",  # slimkv's plugin
        additional_config={"slimkv": settings},
        **sizes,
    )
    prompts = ["The capital of France is", "Water is made of"]
    for output in llm.generate(prompts, SamplingParams(temperature=0, max_tokens=16)):
        print(f"{output.prompt!r} ->{output.outputs[0].text!r}")


if __name__ == "__main__":  # vLLM starts processes that import this file
    main()
