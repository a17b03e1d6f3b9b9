#!/usr/bin/env bash
# Builds and runs tests/native without Python:
#
#   scripts/native_test.sh thread     under ThreadSanitizer, on this machine
#   scripts/native_test.sh aarch64    for 64-bit Arm, under qemu (needs aarch64-linux-gnu-g++ and qemu-aarch64)
set -euo pipefail
cd "$(dirname "$0")/.."
build=$(mktemp -d)
trap 'rm -rf "$build"' EXIT
shopt -s extglob
kernels=(csrc/cpu/!(dispatch|*_bfloat16).cpp csrc/cpu/fused/{direct,pointwise,winograd}.cpp)
runtime=(csrc/runtime/{adaptive_threads,parallel,thread_pool}.cpp)
once=(csrc/cpu/dispatch.cpp csrc/cpu/fused/{network,operations,pack,plan,why_not}.cpp)
flags=(-std=c++17 -g1 -Icsrc -fopenmp-simd -fno-math-errno -fno-trapping-math)
compiler=g++ link=() run=()
declare -A sets=([baseline]="")
case "${1:-}" in
  thread)
    flags+=(-O1 -fsanitize=thread)  # -O2 takes twice as long to compile, and what races does so at -O1
    # ThreadSanitizer itself stops a forked child that starts threads, unless told not to.
    export TSAN_OPTIONS="die_after_fork=0 halt_on_error=1"
    wide="-mavx2 -mfma -mavx512f -mavx512vl -mavx512bw -mavx512dq"
    [ "$(uname -m)" != x86_64 ] ||
      sets+=([avx2]="-mavx2 -mfma" [avx512]="$wide" [avx512bf16]="$wide -mavx512bf16"
        [avx_vnni]="-mavx2 -mfma -mavxvnni" [avx512_vnni]="$wide -mavx512vnni"
        [amx]="$wide -mavx512vnni -mamx-tile -mamx-int8")
    ;;
  aarch64) flags+=(-O2) compiler=aarch64-linux-gnu-g++ link=(-static) run=(qemu-aarch64) ;;
  *) echo "error: expected thread or aarch64, found '${1:-}'" >&2; exit 2 ;;
esac
$compiler "${flags[@]}" "${runtime[@]}" tests/native/pool_test.cpp "${link[@]}" -pthread -o "$build/pool_test"
"${run[@]}" "$build/pool_test"
$compiler "${flags[@]}" -Itests/native/cuda_stand_in csrc/runtime/file_reader.cpp tests/native/file_reader_test.cpp \
  "${link[@]}" -pthread -o "$build/file_reader_test"
"${run[@]}" "$build/file_reader_test"
compile() {  # FLAGS NAME SOURCE: one command, on a line
  echo "$compiler ${flags[*]} $1 -c $3 -o $build/$2-${3//\//-}.o"
}
{
  for set in "${!sets[@]}"; do
    sources=("${kernels[@]}")
    case "$set" in
      avx512bf16) sources=(csrc/cpu/conv2d_nhwc_bfloat16.cpp csrc/cpu/fused/bfloat16.cpp) ;;
      *vnni | amx) sources=(csrc/cpu/quantized_conv2d.cpp) ;;
    esac
    for source in "${sources[@]}"; do compile "${sets[$set]} -DCNN_ENGINE_ISA=$set" "$set" "$source"; done
  done
  for source in "${once[@]}" "${runtime[@]}"; do compile "" once "$source"; done
} | xargs -d '\n' -n 1 -P "$(nproc)" sh -c
for test in fused_test nhwc_test; do
  $compiler "${flags[@]}" "tests/native/$test.cpp" "$build"/*.o "${link[@]}" -pthread -o "$build/$test"
  "${run[@]}" "$build/$test"
done
