#!/usr/bin/env bash
# Builds, tests and measures on any machine with an NVIDIA GPU, nvcc, Python, CuPy and pytest; needs no network.
#
#   scripts/gpu.sh [build] [test] [sanitize] [table] [laboratory] [documented] [peers] [openacc] ...
#                                                                        (no step named: all but openacc)
#
# OUT           folder for results (default: gpu-results)
# CNN_ENGINE_TEST_DATA   the real data; tests that need it skip without
# SANITIZE      what the sanitizers run, as pytest takes it (default: every test of a kernel)
#
# laboratory needs the extras lab and profile, and torchvision; peers needs PyTorch and JAX.
set -euo pipefail
cd "$(dirname "$0")/.."
export OUT="${OUT:-gpu-results}"
export PYTHONUNBUFFERED=1
mkdir -p "$OUT"
data="${CNN_ENGINE_TEST_DATA:-../shared/data}"
steps=("$@")
[ ${#steps[@]} -gt 0 ] || steps=(build test sanitize table laboratory documented peers)

build() {  # for the GPU that is here, into this folder
  CNN_ENGINE_CUDA=on python3 -m pip install --no-build-isolation --no-deps -e . >"$OUT/build.log" 2>&1 ||
    { tail -n 60 "$OUT/build.log"; return 1; }
  python3 -m cnn_engine.doctor | tee "$OUT/doctor.txt"
}

run_tests() {
  python3 -m pytest -q -m gpu -p no:cacheprovider 2>&1 | tee "$OUT/test.txt" | tail -n 25
}

operators=(tests/test_{conv2d,pad2d,elementwise,max_pool2d,linear,softmax}.py
  tests/test_{unary,binary,copy_nd,reduce,norm}.py)

sanitize() {  # CUPTI's tests are left out: two tools cannot watch one process
  local tool chosen
  for tool in memcheck racecheck initcheck synccheck; do
    chosen=("${operators[@]}" tests/test_{fused_cuda,engine,predict}.py -k "not real_images and not torch")
    if [ "$tool" = racecheck ]; then  # an hour for all: each route of the fused kernels, in each dtype
      chosen=("${operators[@]}" tests/test_fused_cuda.py::test_against_reference\[{cifar10,ece408}-{float32,float16,bfloat16}-{1,33,133}\]
        tests/test_fused_cuda.py::test_clusters_that_take_several_images\[ece408-{float32,float16,bfloat16}-{34,96}\]
        tests/test_fused_cuda.py::test_with_the_shared_memory_of_smaller_devices\[cifar10-{float32,float16}-{101376,166912}-133\]
        tests/test_fused_cuda.py::test_timed_parts\[cifar10-float{32,16}-None\])
    fi
    # What a warp's sums take is estimated from the clock, which the tool slows unevenly.
    [ "$tool" != initcheck ] || chosen+=(-k "not real_images and not torch and not timed_parts")
    # shellcheck disable=SC2206
    [ -z "${SANITIZE:-}" ] || chosen=($SANITIZE)
    timeout 580 compute-sanitizer --tool "$tool" --error-exitcode 9 \
      python3 -m pytest -q -m gpu -p no:cacheprovider -x "${chosen[@]}" \
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

laboratory() {  # transfers, utilisation at low batch, and what fills the time in each data mode
  local mode
  python3 -m cnn_engine.transfer --network cifar10 ece408 --shape 3,224,224 --batch 1-256 --memory both \
    --hold-out 20 --output "$OUT/transfer" | tee "$OUT/transfer.txt"
  python3 -m cnn_engine.characterize --device cuda --variant if,pad,tiled,fused --data "$data/cifar-10-batches-bin" \
    --torch torchvision.models:resnet152 --torch torchvision.models:densenet201 \
    --output "$OUT/characterize" | tee "$OUT/characterize.txt"
  for mode in resident transfer managed; do
    python3 -m cnn_engine.run --device cuda --variant pad --data-mode "$mode" --batch 100 --profile --top 90 \
      --data "$data/cifar-10-batches-bin" --images 1102 --json "$OUT/profile-$mode.json" \
      --trace "$OUT/profile-$mode.trace.json" | tee "$OUT/profile-$mode.txt"
  done
}

documented() {  # every command of the README and the docs that needs a GPU, as written
  [ -e .venv ] || ln -s "$(python3 -c 'import sys; print(sys.prefix)')" .venv
  python3 scripts/documented.py gpu 2>&1 | tee "$OUT/documented.txt"
}

peers() {  # beside PyTorch and JAX, and what a call costs the host
  python3 -m benchmarks.predict_cost --device cuda --json "$OUT/predict_cost.json" | tee "$OUT/predict_cost.txt"
  python3 -m benchmarks.gpu_peers --json "$OUT/peers.json" --markdown "$OUT/peers.md" --chart "$OUT/peers.png" |
    tail -n 60
}

openacc() {  # directives on the GPU: modules that scripts/openacc_carry.sh made, with libgomp and its plugin
  local carried="${OPENACC_MODULES:-.local/openacc}"
  [ ! -d "$carried" ] || cp "$carried"/*.so* cnn_engine/
  python3 -m cnn_engine.doctor >"$OUT/openacc-doctor.txt" || true  # of other things that are missing it tells too
  grep -A 1 OpenACC "$OUT/openacc-doctor.txt"
  python3 -m cnn_engine.inspect --device openacc --json "$OUT/openacc-mapping.json" >"$OUT/openacc-mapping.txt"
  python3 -m cnn_engine.run --device openacc --variant if --data-mode transfer --batch 1 --images 1200 --data synthetic \
    --iterations 1 --profile --json "$OUT/openacc-profile.json" >"$OUT/openacc-profile.txt"
  sed -n '/Accelerator Kernel Timing/,$p' "$OUT/openacc-profile.txt" | head -n 40
  local cells="${OPENACC_CELLS:-.local/openacc-cells}"  # kept, so that another run goes on
  python3 -m benchmarks.openacc_table --limit "${OPENACC_LIMIT:-400}" --output "$cells"
  tar czf "$OUT/openacc-cells.tar.gz" -C "$cells" .
  CNN_ENGINE_OPENACC_GPU=1 python3 -m pytest -q -p no:cacheprovider tests/test_openacc*.py 2>&1 |
    tee "$OUT/openacc-test.txt" | tail -n 5  # last: each process has GCC's code compiled by the driver
}

for step in "${steps[@]}"; do
  echo "== $step"
  case "$step" in
    build) build ;;
    test) run_tests ;;
    sanitize) sanitize ;;
    table) table ;;
    laboratory) laboratory ;;
    documented) documented ;;
    peers) peers ;;
    openacc) openacc ;;
    *) echo "error: expected build, test, sanitize, table, laboratory, documented, peers or openacc, found '$step'" >&2; exit 2 ;;
  esac
done
