"""GPU features that CUDA's kernels need: the ``requires`` column of their rows, which passes ask as well.

A row's own shapes are its ``why_not``; here is what instructions and measurements ask of the architecture.
"""

from __future__ import annotations

from dataclasses import replace

from ...target import Requires

#: Kernels over images [N, H, W, C] and over rows of features, on tensor cores.
TENSOR_CORES = Requires(frozenset({"async_copy", "mma_bfloat16", "mma_tf32"}), folder="sm80")

#: Tensor cores of Turing and later: float16 alone.
MMA_FLOAT16 = Requires(frozenset({"mma_float16"}), folder="sm75")

#: The same of 8-bit integers.
MMA_INT8 = Requires(frozenset({"mma_int8"}), folder="sm75")

#: Hopper's matrix multiplications of warpgroups, which read what TMA loads.
WGMMA = Requires(frozenset({"wgmma"}), folder="sm90")

#: Kernels whose blocks send each other sums, and wait for the kernel before by themselves.
CLUSTERS = Requires(frozenset({"clusters", "dependent_launch"}), folder="sm80")

#: The same, where only Hopper was measured to be faster than one kernel after another.
CLUSTERS_OF_HOPPER = replace(CLUSTERS, architectures=("sm_90",))

#: What runs anywhere, and was measured to be faster on Hopper.
HOPPER = replace(TENSOR_CORES, architectures=("sm_90",))
