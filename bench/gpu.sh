#!/bin/bash
# What a run is asked on a machine with a GPU, in one call of at most 4 minutes:
#   bench/gpu.sh OUT [FAST] [DISK]
# FAST is a folder of a memory file system (/dev/shm, 25 GB), DISK one of a disk (/tmp, 6 GB). OUT gets
# what the tests said, and the text and the JSON line of each bench. Each step has a limit of its own, so
# that one that hangs does not take the others' time (SLOWER=4: four times as much). The tests come
# first: where they fail, the rate of `together` means nothing.
set -u
out=${1:?OUT}; fast=${2:-/dev/shm}; disk=${3:-/tmp}
root=$(cd "$(dirname "$0")/.." && pwd)
mkdir -p "$out"; out=$(cd "$out" && pwd); cd "$root" || exit 1
export PYTHONPATH="$root:$root/kernels${PYTHONPATH:+:$PYTHONPATH}"
python=${PYTHON:-python}; sizes=${SIZES:-1 4 16}; some=${SOME:-4}; failed=0

step() {  # NAME LIMIT COMMAND...
  local name=$1 limit=$(($2 * ${SLOWER:-1})) started=$SECONDS; shift 2
  timeout -k 5 "$limit" "$@" > "$out/$name.txt" 2>&1
  local code=$?
  [ $code -eq 0 ] || failed=1
  echo "$name: exit $code after $((SECONDS - started)) s of $limit"
  grep -E "^[a-z0-9].*( x floor|allowed|the bytes:|passed|failed|skipped)|^stages" "$out/$name.txt" | tail -24
}

bench() { echo "$python bench/pipeline.py --repeats ${REPEATS:-1} $*"; }

step tests 45 $python -m pytest -q tests/gpu/test_together.py
step cached 95 $(bench --gb $sizes --no-peer --folder "$fast")
step disk 40 $(bench --gb $some --no-peer --cold --folder "$disk")
step experts 25 $(bench --gb $some --no-peer --experts --folder "$fast")
step devices 30 $(bench --gb $some --no-peer --devices "${DEVICES:-cuda:0,cuda:0}" --folder "$fast")
rm -rf "$fast"/lowbit-bench-* "$disk"/lowbit-bench-*
exit $failed
