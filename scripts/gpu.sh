#!/usr/bin/env bash
# Builds, tests and measures on any machine with an NVIDIA GPU, nvcc, Python, CuPy and pytest; needs no network.
#
#   scripts/gpu.sh [build] [test] [sanitize] [table] ...      (no step named: all of them)
#
# OUT           folder for results (default: gpu-results)
# CNN_ENGINE_TEST_DATA   the real data; tests that need it skip without
# SANITIZE      what the sanitizers run (default: every gpu test but those over all real images)
set -euo pipefail
cd "$(dirname "$0")/.."
export OUT="${OUT:-gpu-results}"
export PYTHONUNBUFFERED=1
mkdir -p "$OUT"
data="${CNN_ENGINE_TEST_DATA:-../shared/data}"
steps=("$@")
[ ${#steps[@]} -gt 0 ] || steps=(build test sanitize table)

build() {  # for the GPU that is here, into this folder
  local capability
  capability=$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader | head -n 1 | tr -d .)
  [ "$capability" = 90 ] && capability=90a
  CNN_ENGINE_CUDA=on CNN_ENGINE_CUDA_ARCHITECTURES="${capability}-real" \
    python3 -m pip install --no-build-isolation --no-deps -e . >"$OUT/build.log" 2>&1 ||
    { tail -n 60 "$OUT/build.log"; return 1; }
  python3 -m cnn_engine.doctor | tee "$OUT/doctor.txt"
}

run_tests() {
  python3 -m pytest -q -m gpu -p no:cacheprovider 2>&1 | tee "$OUT/test.txt" | tail -n 25
}

sanitize() {
  local tool
  for tool in memcheck racecheck initcheck synccheck; do
    # shellcheck disable=SC2086
    timeout 280 compute-sanitizer --tool "$tool" --error-exitcode 9 \
      python3 -m pytest -q -m gpu -p no:cacheprovider -x ${SANITIZE:--k "not real_images and not TestOnAGpu"} \
      >"$OUT/$tool.txt" 2>&1 || { tail -n 40 "$OUT/$tool.txt"; echo "$tool: FAILED"; return 1; }
    echo "$tool: $(grep -E '[0-9]+ passed' "$OUT/$tool.txt" | tail -n 1)"
    echo "$tool: $(grep -E 'ERROR SUMMARY|RACECHECK SUMMARY' "$OUT/$tool.txt" | tail -n 1)"
  done
}

table() {  # the thesis' table: every variant in every data mode, one image a pass
  local mode variant reduction name
  for mode in resident transfer managed; do
    for variant in if pad; do
      for reduction in --no-reduction --reduction; do
        name="$mode-$variant$reduction"
        python3 -m cnn_engine.run --device cuda --data-mode "$mode" --variant "$variant" "$reduction" \
          --weights "$data/convnetjs-cifar10" --data "$data/cifar-10-batches-bin" --images 1102 --batch 1 \
          --warmup 50 --iterations 3 --json "$OUT/$name.json" >"$OUT/$name.txt"
        printf '%-32s %s\n' "$name" "$(grep -E 'Net Forward total|Net Accuracy:' "$OUT/$name.txt" | tr '\n' ' ')"
      done
    done
  done
}

for step in "${steps[@]}"; do
  echo "== $step"
  case "$step" in
    build) build ;;
    test) run_tests ;;
    sanitize) sanitize ;;
    table) table ;;
    *) echo "error: expected build, test, sanitize or table, found '$step'" >&2; exit 2 ;;
  esac
done
