#!/usr/bin/env bash
# All that needs a GPU, in one call: the gpu tests, the goldens through the kernels, the benches.
#
#   kernels/bench/gpu.sh [OUT]      OUT: a folder for logs and figures, default a temporary one
#
# GOLDEN names a folder of golden oracles with its check.py; without it that step is left out.
# BENCH holds arguments for run.py. Exits 1 where any step failed.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
out=${1:-$(mktemp -d)}
export PYTHONPATH="$PWD/kernels:$PWD${PYTHONPATH:+:$PYTHONPATH}"
failed=0

python3 -m pytest -q -m gpu -p no:cacheprovider >"$out/tests.txt" 2>&1 || failed=1
tail -15 "$out/tests.txt"
if [ -n "${GOLDEN:-}" ]; then
    LOWBIT_GOLDEN_PATH=cuda python3 "$GOLDEN/check.py" --callable '*=tests.golden_adapter:quantize' \
        --finite --roles codes,scales,gscale >"$out/golden.txt" 2>&1 || failed=1
    tail -3 "$out/golden.txt"
fi
# shellcheck disable=SC2086
timeout "${BENCH_SECONDS:-900}" python3 kernels/bench/run.py --json "$out/bench.json" ${BENCH:-} \
    >"$out/bench.txt" 2>&1 || failed=1
head -2 "$out/bench.txt"
grep -E "lowbit|Error" "$out/bench.txt"
exit $failed
