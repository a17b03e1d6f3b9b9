#!/usr/bin/env bash
# Builds the compiled modules for another machine's Python, with what OpenACC needs to offload there beside them:
#
#   scripts/openacc_carry.sh PYTHON [FOLDER]        (FOLDER: .local/openacc)
#
# PYTHON has the version of the other machine's (3.12 for 3.12.3). Needs GCC's offload compiler and nvcc
# (CNN_ENGINE_CUDA=off leaves the CUDA kernels out). There, scripts/gpu.sh openacc copies the folder into cnn_engine/.
# All modules are from one build, for they share types; libgomp and its plugin are this compiler's, and found beside the
# module before any that the other machine has.
set -euo pipefail
cd "$(dirname "$0")/.."
python="$1"
folder="$(mkdir -p "${2:-.local/openacc}" && cd "${2:-.local/openacc}" && pwd)"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"$python" -m venv "$work/venv"
"$work/venv/bin/pip" install -q --disable-pip-version-check 'pybind11>=2.13' 'cmake>=3.25' ninja
PATH="$work/venv/bin:$PATH" cmake -S . -B "$work/build" -G Ninja -DCMAKE_BUILD_TYPE=Release -DCNN_ENGINE_OUTPUT="$folder" \
  -DPython_EXECUTABLE="$work/venv/bin/python" -DCNN_ENGINE_CUDA="${CNN_ENGINE_CUDA:-on}" -DCNN_ENGINE_OPENACC=on \
  -DCNN_ENGINE_CUDA_ARCHITECTURES="${CNN_ENGINE_CUDA_ARCHITECTURES:-90a-real}" \
  -DCNN_ENGINE_OPENACC_SHAPE="${CNN_ENGINE_OPENACC_SHAPE:-}" >"$work/configure.log"
grep OpenACC "$work/configure.log"
"$work/venv/bin/cmake" --build "$work/build" >/dev/null
for library in libgomp.so.1 libgomp-plugin-nvptx.so.1; do
  cp -L "$(ldconfig -p | sed -n "s/.*$library .*x86-64.* => //p" | head -n 1)" "$folder/$library"
done
ls -l "$folder"
