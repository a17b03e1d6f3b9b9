#!/usr/bin/env bash
# Builds, tests and measures on any machine with an NVIDIA GPU, nvcc, Python, CuPy and pytest; needs no network.
#
#   scripts/gpu.sh [build] [test] [sanitize] [tables] [laboratory] [documented] [peers]  (no step named: these)
#   scripts/gpu.sh [openacc] [chains] [low-batch] [autotuned] [strangers] [dense] [int8] [cudnn] [sizes] [study] [models] [loadgen] ...
#
# OUT           folder for results (default: gpu-results)
# CNN_ENGINE_TEST_DATA   the real data; tests that need it skip without
# SANITIZE      test files for the sanitizers (default: every test of a kernel), SANITIZE_JOBS processes at a time
#
# SHARD         K/N: of test, low-batch and models, the K-th of N parts (default: 1/1); merge the latter with --merge
# WORKERS       processes of test, which needs pytest-xdist for several (default: 1)
# MODELS        folder of exported networks, which steps share (default: $OUT/networks)
# LIMIT         seconds after which low-batch and what stands behind it, up to sizes, begin nothing more (default: 500)
#
# laboratory needs the extras lab and profile, and torchvision; peers needs PyTorch and JAX, chains PyTorch; low-batch
# and what comes after it torchvision and timm, int8 and cudnn nvidia-cudnn-frontend, loadgen mlcommons-loadgen. On a machine with four GPUs and 64 cores, in less than 520 s:
#
#   export OUT MODELS=/tmp/networks LIMIT=440
#   for i in 0 1 2 3; do
#     CUDA_VISIBLE_DEVICES=$i SHARD=$((i + 1))/4 timeout 520 taskset -c $((16 * i))-$((16 * i + 15)) scripts/gpu.sh low-batch &
#   done; wait
#   python3 -m benchmarks.low_batch --merge "$OUT"/low-batch-?.json --json low.json --markdown low.md --chart low.png
set -euo pipefail
cd "$(dirname "$0")/.."
export OUT="${OUT:-gpu-results}"
export PYTHONUNBUFFERED=1
mkdir -p "$OUT"
data="${CNN_ENGINE_TEST_DATA:-../shared/data}"
steps=("$@")
[ ${#steps[@]} -gt 0 ] || steps=(build test sanitize tables laboratory documented peers)

build() {  # OPTION...: of CMake's; for the GPU that is here, into this folder
  CNN_ENGINE_CUDA=on CMAKE_ARGS="${CMAKE_ARGS:-} $*" python3 -m pip install --no-build-isolation --no-deps -e . >"$OUT/build.log" 2>&1 ||
    { tail -n 60 "$OUT/build.log"; return 1; }
  python3 -m cnn_engine.doctor | tee "$OUT/doctor.txt"
}

run_tests() {  # those that look at times come behind all others, with the first part
  local part="${shard%/*}" parts="${shard#*/}" workers="${WORKERS:-1}" files all=(tests/*/test_*.py)
  mapfile -t files < <(printf '%s\n' "${all[@]}" | awk "NR % $parts == $part % $parts")
  tests_of() {
    python3 -m pytest -q -p no:cacheprovider "${@:2}" 2>&1 | tee "$OUT/$1.txt" | tail -n 25
  }
  if [ "$workers" = 1 ]; then
    tests_of "test-$part" -m gpu "${files[@]}"
    return
  fi
  tests_of "test-$part" -m "gpu and not alone" -n "$workers" --dist worksteal "${files[@]}"
  if [ "$part" = 1 ]; then tests_of test-alone -m "gpu and alone"; fi
}

operators=(tests/*/test_{computed_inputs,extremes_cuda,kernel_rows,conv2d,reduce,copy_nd,stored_functions,norm,unary,binary,elementwise,softmax}.py
  tests/*/test_{linear,linear_layers,linear_rows,matmul,lrn,max_pool2d,average_pool2d,pool2d_nhwc,conv_transpose2d,pad2d,squeeze_excite}.py)

watched() {  # TOOL OPTION...: one process of tests; its output is named by the tool and by what it runs
  local tool=$1 name
  shift
  name="$tool-$(basename "$1" | sed 's/[^a-z0-9_].*//')"
  timeout "${SANITIZE_SECONDS:-580}" compute-sanitizer --tool "$tool" --error-exitcode 9 \
    python3 -m pytest -q -m gpu -p no:cacheprovider -x "$@" >"$OUT/$name.txt" 2>&1 ||
    { tail -n 20 "$OUT/$name.txt"; echo "$name: FAILED"; return 1; }
  echo "$name: $(grep -E '[0-9]+ passed' "$OUT/$name.txt" | tail -n 1); $(grep -E '(ERROR|RACECHECK) SUMMARY' "$OUT/$name.txt" | tail -n 1)"
}

watched_by() {  # TOOL: the commands of its processes
  local tool=$1 file fused left='not real_images and not torch'
  # Billions of elements, none of them in shared memory: racecheck takes minutes.
  [ "$tool" != racecheck ] || left="$left and not 32_bits"
  # shellcheck disable=SC2086
  for file in ${SANITIZE:-"${operators[@]}"}; do echo "watched $tool $file -k '$left'"; done
  [ -z "${SANITIZE:-}" ] || return 0
  # What a warp's sums take is estimated from the clock, which the tool slows unevenly.
  [ "$tool" != initcheck ] || left="$left and not timed_parts"
  fused="tests/kernels_cuda/test_fused_cuda.py tests/engine/test_engine.py tests/engine/test_predict.py"
  if [ "$tool" = racecheck ]; then  # an hour for all: each route of the fused kernels, in each dtype
    fused=$(echo tests/kernels_cuda/test_fused_cuda.py::test_against_reference\[{cifar10,ece408}-{float32,float16,bfloat16}-{1,33,133}\] \
      tests/kernels_cuda/test_fused_cuda.py::test_clusters_that_take_several_images\[{cifar10,ece408}-{float32,float16,bfloat16}-{34,96}\] \
      tests/kernels_cuda/test_fused_cuda.py::test_with_the_shared_memory_of_smaller_devices\[cifar10-{float32,float16}-{101376,166912}-133\] \
      tests/kernels_cuda/test_fused_cuda.py::test_timed_parts\[cifar10-float{32,16}-None\])
  fi
  echo "watched $tool $fused -k '$left'"
}

sanitize() {  # CUPTI's tests are left out: two tools cannot watch one process
  local tool failed=0
  export -f watched
  export CNN_ENGINE_TEST_REPEATS=1  # a tool sees a race in one pass, and takes seconds for it
  for tool in memcheck initcheck synccheck racecheck; do
    # racecheck does not follow barriers at which one lane arrives for its warp: in a build of its own all do.
    [ "$tool" != racecheck ] || build -DCMAKE_CUDA_FLAGS=-DCNN_ENGINE_FOR_RACECHECK
    watched_by "$tool" | xargs -d '\n' -n 1 -P "${SANITIZE_JOBS:-1}" bash -c || failed=1
  done
  build -DCMAKE_CUDA_FLAGS=
  return "$failed"
}

tables() {  # the published tables: every variant in every data mode, one image a pass
  python3 -m benchmarks.tables --device cuda --images 1200,50000 --repeats 3 --limit-seconds 1.0 \
    --output "$OUT/tables" | tee "$OUT/tables.txt" | tail -n 20
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
  CNN_ENGINE_OPENACC_GPU=1 python3 -m pytest -q -p no:cacheprovider tests/commands/test_openacc*.py 2>&1 |
    tee "$OUT/openacc-test.txt" | tail -n 5  # last: each process has GCC's code compiled by the driver
}

chains() {  # networks that are compiled at first use, beside PyTorch
  python3 -m benchmarks.fused_networks --json "$OUT/chains.json" --markdown "$OUT/chains.md" | tee "$OUT/chains.txt"
}

shard="${SHARD:-1/1}"
exported="${MODELS:-$OUT/networks}"
limit="${LIMIT:-500}"
turns=(--rounds 5 --milliseconds 10 --models "$exported")

low_batch() {  # imported networks beside PyTorch: 10 networks, 3 data types, 5 batches
  python3 -m benchmarks.low_batch --shard "$shard" --jobs 24 --prepare $((limit / 2)) --limit "$limit" "${turns[@]}" \
    --json "$OUT/low-batch-${shard%/*}.json" >"$OUT/low-batch-${shard%/*}.txt"
}

autotuned() {  # the same beside torch.compile's longest search, and JAX
  TORCHINDUCTOR_COMPILE_THREADS=2 python3 -m benchmarks.low_batch --jobs 8 --prepare $((limit * 3 / 4)) --limit "$limit" \
    "${turns[@]}" --network resnet18 resnet50 mobilenet_v3_large vgg16 --batch 1 20 --dtype float16 \
    --peers torch default max-autotune jax --json "$OUT/autotuned.json" >"$OUT/autotuned.txt"
}

strangers() {  # networks that no one tuned for
  python3 -m benchmarks.low_batch --jobs 10 --prepare $((limit / 2)) --limit "$limit" "${turns[@]}" \
    --network dla34 ese_vovnet19b_dw ghostnet_100 res2net50_26w_4s xception41 --batch 1 20 \
    --dtype float16 float32 --peers torch --json "$OUT/strangers.json" --markdown "$OUT/strangers.md"
}

dense() {  # segmentation, detection and super-resolution networks
  python3 -m benchmarks.low_batch --jobs 16 --prepare $((limit / 2)) --limit "$limit" "${turns[@]}" --bits 100 \
    --network dense --batch 1 4 --dtype float16 --json "$OUT/dense.json" --markdown "$OUT/dense.md"
}

int8() {  # quantized networks beside cuDNN's int8 graphs, and the same in float16 beside torch.compile
  python3 -m benchmarks.low_batch --jobs 12 --prepare $((limit / 2)) --limit "$limit" "${turns[@]}" --bits 100 --steps \
    --network resnet18 resnet50 mobilenet_v3_large efficientnet_b0 --batch 20 8 64 256 1 --dtype int8 float16 \
    --peers default cudnn --json "$OUT/int8.json" --markdown "$OUT/int8.md"
}

cudnn() {  # cuDNN's graphs in float16; step int8 has those of int8
  python3 -m benchmarks.low_batch --jobs 10 --prepare $((limit / 2)) --limit "$limit" "${turns[@]}" --bits 100 \
    --batch 1 20 --dtype float16 --peers cudnn --json "$OUT/cudnn.json" --markdown "$OUT/cudnn.md"
}

sizes() {  # logits alone, of odd images and all batches; a process a network, as exports take a core each
  local network networks=(resnet18 resnet50 densenet121 mobilenet_v3_large efficientnet_b0 convnext_tiny squeezenet1_1)
  for network in "${networks[@]}"; do
    OMP_NUM_THREADS=1 python3 -m benchmarks.low_batch --check --network "$network" --limit "$limit" --models "$exported" \
      --size 33x47 192x160 225 224 --batch 1 2 7 16 33 --json "$OUT/sizes-$network.json" >"$OUT/sizes-$network.txt" &
  done
  OMP_NUM_THREADS=1 python3 -m benchmarks.low_batch --check --network resnet18 mobilenet_v3_large --limit "$limit" \
    --size 33x47 --batch $(seq 1 33) --json "$OUT/sizes-batches.json" >"$OUT/sizes-batches.txt" &
  wait
  python3 -m benchmarks.low_batch --merge "$OUT"/sizes-*.json --json "$OUT/sizes.json" --markdown "$OUT/sizes.md"
  rm "$OUT"/sizes-*.json
}

torchvision_file() {  # NAME: exports the network where it is not there yet, and prints its path
  local file="$exported/$1-224x224.onnx"  # as benchmarks.low_batch keeps them
  mkdir -p "$exported"
  [ -e "$file" ] ||
    python3 -m cnn_engine.export "torchvision.models:$1" --output "$file" --exporter torchscript >&2
  echo "$file"
}

study() {  # the seed study's table: a GPU's utilisation and memory at low batch, ours beside PyTorch's
  local network file
  for network in ${STUDY:-resnet152 densenet201}; do
    file=$(torchvision_file "$network")
    python3 -m cnn_engine.characterize --device cuda --model "$file" --dtype float16 --torch-dtype float16 \
      --torch "torchvision.models:$network" --batch 1,5,10,15,20 --images 60 --no-check --settle 0.6 --duration 0.6 \
      --sample-period 0.05 --output "$OUT/study-$network" >"$OUT/study-$network.txt"
    cat "$OUT/study-$network.txt"
  done
}

models() {  # logits of imported networks in float32: timm's, and torchvision's from PyTorch's newer exporter
  local found=0
  python3 -m benchmarks.models --device cuda --networks timm --together --jobs 14 --exporter torchscript \
    --shard "$shard" --json "$OUT/timm-${shard%/*}.json" --markdown "$OUT/timm-${shard%/*}.md" || found=$?
  python3 -m benchmarks.models --device cuda --networks torchvision --together --jobs 14 \
    --shard "$shard" --json "$OUT/models-${shard%/*}.json" --markdown "$OUT/models-${shard%/*}.md" || found=$?
  return $found
}

loadgen() {  # MLPerf's load generator: 60 s of each scenario; Server under QPS queries a second
  python3 -m cnn_engine.loadgen --model "$(torchvision_file resnet50)" --device cuda --dtype float16 \
    --scenario SingleStream --scenario Offline --scenario Server --target-qps "${QPS:-2500}" \
    --output "$OUT/loadgen" --json "$OUT/loadgen.json" | tee "$OUT/loadgen.txt"
}

for step in "${steps[@]}"; do
  echo "== $step"
  case "$step" in
    build) build ;;
    test) run_tests ;;
    sanitize) sanitize ;;
    tables) tables ;;
    laboratory) laboratory ;;
    documented) documented ;;
    peers) peers ;;
    openacc | chains | autotuned | strangers | dense | int8 | cudnn | sizes | study | models | loadgen) "$step" ;;
    low-batch) low_batch ;;
    *) echo "error: expected a step that the head of this file names, found '$step'" >&2; exit 2 ;;
  esac
done
