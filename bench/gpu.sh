#!/usr/bin/env bash
# The standing GPU run: tests that need a GPU, then the recorded bits on that GPU. Results go to bench/results/.
#
#     bash bench/gpu.sh
set -uo pipefail
cd "$(dirname "$0")/.."
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
results="bench/results"
mkdir -p "$results"
log="$results/gpu.txt"
{
  date -u +%F
  nvidia-smi --query-gpu=name,driver_version,clocks.sm,clocks.max.sm,power.limit --format=csv
  python3 -c 'import cupy, numpy; print("cupy", cupy.__version__, "numpy", numpy.__version__)'
  # Only the files that hold GPU tests: the others may need packages that a GPU machine lacks.
  grep -l "mark.gpu" tests/test_*.py | xargs python3 -m pytest -m gpu -o addopts= -o filterwarnings= -q -rfEs
} 2>&1 | tee "$log"
exit "${PIPESTATUS[0]}"
