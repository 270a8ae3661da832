#!/usr/bin/env bash
# SGLang on one GPU, from the repository's root:  bash benchmarks/sglang_h200.sh OUT [serve|tokens|all]
# SGLang's packages must be importable. Where slimkv is not installed with pip, its plugin is made known here.
set -euo pipefail
out=$1; what=${2:-all}; mkdir -p "$out"
plugin=$(mktemp -d)
mkdir "$plugin/slimkv-0.dist-info"
printf 'Metadata-Version: 2.1\nName: slimkv\nVersion: 0\n' > "$plugin/slimkv-0.dist-info/METADATA"
printf '[sglang.srt.plugins]\nslimkv = slimkv.integrations.sglang.plugin:register\n' > "$plugin/slimkv-0.dist-info/entry_points.txt"
export PYTHONPATH=$PWD/src:$plugin${PYTHONPATH:+:$PYTHONPATH} HF_HUB_OFFLINE=1 PYTHONUNBUFFERED=1
python3 -c 'from slimkv.doctor import _SGLANG, _plugin; print(_plugin(_SGLANG))'
if [ "$what" != tokens ]; then
    python3 -m slimkv bench serve --engine sglang --systems "${SYSTEMS:-bf16,k4v4}" --phases "${PHASES:-decode,full}" \
        --max-num-seqs "${MOST:-208}" --limit-seconds "${LIMIT:-400}" --folder "$out/serve" --output "$out/serve-sglang-h200.json"
fi
if [ "$what" != serve ]; then
    python3 benchmarks/sglang_tokens.py "$out/sglang-tokens-h200.json"
fi
