"""Calibrate a model and measure the gain: with the same bytes, outputs are closer to those of the unquantised cache.

    python examples/calibrate_and_compare.py
    python examples/calibrate_and_compare.py --model gemma-3-270m --format k4v4,k4v4+cal,k5v4+cal --windows 4

The same from the command line: ``slimkv calibrate MODEL -o FILE``, then ``slimkv eval agreement --calibration FILE``.
"""

import argparse

import slimkv
from slimkv.lab import models
from slimkv.lab.evals.agreement import measure_agreement
from slimkv.lab.evals.texts import load_text, token_windows

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--model", default=models.DEFAULT, help="a packaged model, a folder, or a hub name")
parser.add_argument("--format", default="k4v4,k4v4+cal", help="formats to compare; +cal uses the calibration")
parser.add_argument("--windows", type=int, default=1, help="windows of 256 tokens to compare on; more reduce the noise")
parser.add_argument("--out", help="keep the calibration in this file")
arguments = parser.parse_args()

model, tokenizer, name = models.load(arguments.model)
# 512 tokens are enough to see the effect; slimkv calibrate samples 8,192.
calibration = slimkv.calibrate_model(model, arguments.out, samples=(1, 512))

text = token_windows(tokenizer, load_text(), arguments.windows, 256)
report = measure_agreement(model, text, arguments.format.split(","), name=name, calibration=calibration)
print(f"{'cache':<12}{'bytes/token':>12}{'KL':>10}{'same next token':>17}")
for row in report.rows:
    print(f"{row.format:<12}{row.bytes_per_token:>12,.0f}{row.kl:>10.4f}{row.top1:>17.1%}")
