"""CUDA's kernels of 8-bit integers: the CPU's rows, whose functions take a stream in place of threads."""

from __future__ import annotations

from dataclasses import replace

from ..cpu import quantized
from ..kernel import Kernel
from .requirements import MMA_INT8


def _row(row: Kernel) -> Kernel:
    if row.op not in quantized.LAYERS:
        return replace(row, device="cuda")
    # Weights are packed alike for every GPU, and nothing is set aside.
    return replace(
        row,
        device="cuda",
        requires=MMA_INT8,
        packed_for=Kernel.packed_for,
        workspace=Kernel.workspace,
    )


ROWS = [_row(row) for row in quantized.SHARED]
