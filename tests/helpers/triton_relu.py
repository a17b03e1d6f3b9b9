"""A ReLU in Triton, as a user writes one: it lies in a file, which Triton reads its source from."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def relu_kernel(x, y, count, BLOCK: tl.constexpr):
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = place < count
    tl.store(y + place, tl.maximum(tl.load(x + place, mask=inside), 0.0), mask=inside)


def relu(x, y, shape):
    """Writes max(x, 0) to ``y``; both are PyTorch's."""
    relu_kernel[(triton.cdiv(shape.count, 1024),)](x, y, shape.count, BLOCK=1024)
