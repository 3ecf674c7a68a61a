#!/bin/bash
# What a run is asked on a machine with a GPU, step by step:
#   bench/gpu.sh OUT [FAST] [DISK]
#   STEPS="experts devices disk" bench/gpu.sh OUT
# FAST is a folder of a memory file system (/dev/shm, 25 GB), DISK one of a disk (/tmp, 6 GB). OUT gets
# what the tests said, and the text and the JSON line of each bench.
#
#   tests    together's bytes are one by one's; where they fail, the rates of `experts` mean nothing
#   cached   1, 4 and 16 GB from page cache, and a first process that compiles its kernels
#   disk     4 GB from a cold disk
#   experts  1 GB of weights of 3 MB, together and one by one
#   devices  4 GB by two processes
#   peer     4 GB the plain way
#
# A step has a limit of its own, so that one that hangs does not take the others' time: some twice of
# what it took on an H200 with 16 processors, of which 5 s are for each `import torch`, and a bench has two
# to five. Together they take some 4 minutes and at most 8. SLOWER=4: four times the limits. A bench
# that is cut prints what it has.
set -u
out=${1:?OUT}; fast=${2:-/dev/shm}; disk=${3:-/tmp}
root=$(cd "$(dirname "$0")/.." && pwd)
mkdir -p "$out"; out=$(cd "$out" && pwd); cd "$root" || exit 1
export PYTHONPATH="$root:$root/kernels${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
python=${PYTHON:-python}; sizes=${SIZES:-1 4 16}; some=${SOME:-4}; few=${FEW:-1}; failed=0

step() {  # NAME LIMIT COMMAND...
  local name=$1 limit=$(($2 * ${SLOWER:-1})) started=$SECONDS; shift 2
  timeout -k 5 "$limit" "$@" > "$out/$name.txt" 2>&1
  local code=$?
  [ $code -eq 0 ] || failed=1
  echo "$name: exit $code after $((SECONDS - started)) s of $limit"
  grep -E "^[a-z0-9].*( x floor|allowed|the bytes:|together$|process$|passed|failed|skipped)|^(stages|first|[0-9.]+ GB)" \
    "$out/$name.txt" | tail -32
  rm -rf "$fast"/lowbit-bench-* "$disk"/lowbit-bench-*
}

bench() {  # NAME LIMIT ARGUMENTS...
  local name=$1 limit=$2; shift 2
  step "$name" "$limit" "$python" bench/pipeline.py --repeats "${REPEATS:-1}" "$@"
}

for one in ${STEPS:-tests cached disk experts devices peer}; do
  case $one in
    tests) step tests 60 "$python" -m pytest -q tests/gpu/test_together.py ;;
    cached) bench cached 120 --gb $sizes --no-peer --folder "$fast" ;;
    disk) bench disk 90 --gb "$some" --no-peer --no-first --cold --folder "$disk" ;;
    experts) bench experts 60 --gb "$few" --no-peer --no-first --experts --folder "$fast" ;;
    devices)
      bench devices 75 --gb "$some" --no-peer --no-first --devices "${DEVICES:-cuda:0,cuda:0}" \
        --folder "$fast" ;;
    peer) bench peer 60 --gb "$some" --no-first --no-process --folder "$fast" ;;
    *) echo "no step $one" >&2; exit 2 ;;
  esac
done
exit $failed
