#!/usr/bin/env bash
# The standing GPU run: the first calls, tests that need a GPU, the recorded bits, the count of
# bits, memory, host time, the sanitizer, speed. Results go to bench/results/.
#
#     bash bench/gpu.sh [first_call|tests|golden|bits|identical|memory|host|gradients|sanitizer|speed|
#                        soak|claims|explain ...]
#
# Without an argument all but soak, claims and explain. CUFLASH_CAPTURES names a folder of captures
# for the count of bits, the gradients, the claims and explain.
set -uo pipefail
cd "$(dirname "$0")/.."
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
mkdir -p bench/results
parts="${*:-first_call tests golden bits identical memory host gradients sanitizer speed}"
status=0

tests() {
  # Only the files that hold GPU tests: the others may need packages that a GPU machine lacks.
  local parallel=()
  python3 -c 'import xdist' 2> /dev/null && parallel=(-n 12)
  local run=(python3 -m pytest -m gpu -o addopts= -o filterwarnings= -q -rfEs)
  # What takes the time of compiling, or other kernels off the GPU, runs by itself.
  local alone="first_call or few_multiprocessors"
  local failed=0
  "${run[@]}" -k "$alone" tests/test_gpu_calls.py tests/test_sm90_backward.py || failed=1
  run+=("${parallel[@]}")
  grep -l "mark.gpu" tests/test_*.py | xargs "${run[@]}" -k "not ($alone)" || failed=1
  # The portable kernels, where a Hopper would take its own.
  CUFLASH_KERNELS=sm80 "${run[@]}" tests/test_sm80_*.py tests/test_bugs_gpu.py || failed=1
  return "$failed"
}

first_call() {
  # Seconds of the first calls; wants a host that does nothing else.
  python3 -W ignore -m bench.first_call
}

golden() {
  # The kernels still give the bits that are recorded (and that the emulator is held to).
  local fresh
  fresh="$(mktemp -d)/golden.npz"
  python3 -m bench.record_golden "$fresh" && python3 -m bench.golden --fresh "$fresh"
}

bits() {
  # Kernels against the emulator, more than 10^8 elements each way: 0 differ.
  local data=(${CUFLASH_CAPTURES:+--data "$CUFLASH_CAPTURES"})
  python3 -W ignore -m bench.bits "${data[@]}" &&
    CUFLASH_KERNELS=sm80 python3 -W ignore -m bench.bits "${data[@]}" --rounds 8
}

identical() {
  # A thousand backward runs of each of eight problems, N up to 64k.
  python3 -W ignore -m bench.identical
}

memory() {
  python3 -W ignore -m bench.memory
}

host() {
  python3 -W ignore -m bench.host
}

gradients() {
  # Errors of dQ, dK and dV beside the peers', in units of rounding the exact gradient.
  python3 -W ignore -m bench.gradients ${CUFLASH_CAPTURES:+--data "$CUFLASH_CAPTURES"}
}

sanitizer() {
  # compute-sanitizer over forward and backward of every format: 0 findings are wanted. What
  # racecheck and initcheck do not see: bench/hazards.py, bench/sanitized.py.
  local kernels tool log part
  log="$(mktemp -d)/log.txt"
  for kernels in "" sm80; do # compiles, eight processes at a time
    local started=()
    for part in 0/8 1/8 2/8 3/8 4/8 5/8 6/8 7/8; do
      CUFLASH_KERNELS=$kernels python3 -m bench.sanitized --part "$part" &
      started+=($!)
    done
    for part in "${started[@]}"; do wait "$part" || return 1; done
  done
  for tool in memcheck racecheck synccheck initcheck; do
    for kernels in "" sm80; do
      local watched=(python3 -m bench.sanitized) judged=() error=9 limit=5
      echo "-- $tool ${kernels:-of this GPU}"
      [[ $tool == initcheck ]] && watched+=(--fill)
      [[ $tool == racecheck ]] && judged=(python3 -m bench.hazards "$log") error=0 limit=10000
      CUFLASH_KERNELS=$kernels compute-sanitizer --tool "$tool" --error-exitcode "$error" \
        --print-limit "$limit" "${watched[@]}" > "$log" 2>&1
      local rc=$?
      tail -6 "$log"
      [[ $rc == 0 ]] || return 1
      ((${#judged[@]} == 0)) || "${judged[@]}" || return 1
    done
  done
}

speed() {
  local name
  for name in sm80_forward sm80_backward; do
    CUFLASH_KERNELS=sm80 python3 -W ignore -m "bench.$name" || return 1
  done
  python3 -W ignore -m bench.sm90_forward --more && python3 -W ignore -m bench.sm90_backward
}

soak() {
  # Ten minutes of changing shapes on two streams.
  python3 -W ignore -m bench.soak
}

explain() {
  # Public kernels' bits against their Plans, verdicts on their outputs, seconds of an 8k verdict.
  python3 -W ignore -m bench.explain --gpu --elements 2e8 --workers 14 \
    ${CUFLASH_CAPTURES:+--data "$CUFLASH_CAPTURES"}
}

claims() {
  # Every claim at the published size; bench/results/claims.json is what docs/why-they-differ.md is made of.
  python3 -W ignore -m cuflash claims --full ${CUFLASH_CAPTURES:+--data "$CUFLASH_CAPTURES"} \
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
