#!/usr/bin/env bash
# The standing GPU run: tests that need a GPU, the recorded bits, speed. Results go to bench/results/.
#
#     bash bench/gpu.sh [tests|golden|sanitizer|speed|claims ...]     (the first four without an argument)
#
# claims takes the folder of captures from $CAPTURES, if that is set.
set -uo pipefail
cd "$(dirname "$0")/.."
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
mkdir -p bench/results
parts="${*:-tests golden sanitizer speed}"
status=0

tests() {
  # Only the files that hold GPU tests: the others may need packages that a GPU machine lacks.
  local parallel=()
  python3 -c 'import xdist' 2> /dev/null && parallel=(-n 12)
  grep -l "mark.gpu" tests/test_*.py |
    xargs python3 -m pytest -m gpu -o addopts= -o filterwarnings= -q -rfEs "${parallel[@]}"
}

golden() {
  # The kernels still give the bits that are recorded (and that the emulator is held to).
  local fresh
  fresh="$(mktemp -d)/golden.npz"
  python3 bench/record_golden.py "$fresh" &&
    python3 - "$fresh" <<'PY'
import sys
import numpy as np
with np.load(sys.argv[1]) as a, np.load("tests/golden/cuflash_h200.npz") as b:
    assert a.files == b.files, "other problems are recorded"
    wrong = [x for x in a.files if a[x].tobytes() != b[x].tobytes()]
print(f"golden bits: {len(wrong)} of {len(b.files)} arrays differ", *wrong)
sys.exit(bool(wrong))
PY
}

sanitizer() {
  # compute-sanitizer over forward and backward of every recorded problem: 0 findings.
  local tool
  for tool in memcheck racecheck synccheck initcheck; do
    echo "-- $tool"
    compute-sanitizer --tool "$tool" --error-exitcode 9 --print-limit 5 \
      python3 bench/record_golden.py /dev/shm/sanitized.npz 2>&1 | tail -6 || return 1
  done
}

speed() {
  python3 -W ignore bench/sm80_forward.py && python3 -W ignore bench/sm80_backward.py
}

claims() {
  # Every claim at the published size; bench/results/claims.json is what docs/why-they-differ.md is made of.
  python3 -W ignore -m cuflash claims --full ${CAPTURES:+--data "$CAPTURES"} \
    -o "${RESULTS:-bench/results}/claims.html"
}

{
  date -u +%F
  nvidia-smi --query-gpu=name,driver_version,clocks.sm,clocks.max.sm,power.limit --format=csv
  python3 -c 'import cupy, numpy; print("cupy", cupy.__version__, "numpy", numpy.__version__)'
  for part in $parts; do
    echo "== $part"
    "$part" || status=1
  done
  exit "$status"
} 2>&1 | tee bench/results/gpu.txt
exit "${PIPESTATUS[0]}"
