"""Which kernels of CUDA give an image the same bits in every batch, for ``Engine(batch_invariant=True)``.

An output has the same bits when its sum has the same order. Kernels that are named here add up each output
in an order that neither the batch nor the image's place decides, once products take the tile and the split
that serve every batch (``ANY_BATCH``). Any other kernel is launched for each image by itself.
"""

from __future__ import annotations

from ...graph.graph import Graph, Node
from ...operators.region import records_of
from ..kernel import Kernel

#: Operators of which each output depends on few elements, or is the sum of one thread.
_EACH_OUTPUT = frozenset({
    "average_pool2d", "average_pool2d_nhwc", "batch_norm", "concat", "copy", "depth_to_space",
    "expand", "gather", "lp_pool2d", "lrn", "max_pool2d", "max_pool2d_nhwc", "normalize", "pad",
    "pad2d", "pointwise", "resize", "slice", "space_to_depth", "split", "tile", "transpose", "where",
})  # fmt: skip

#: Kernels that divide the work by the shape of one image, or of one row, by operator and name; and products.
_EACH_IMAGE = frozenset({
    ("bottleneck", "bottleneck"), ("conv2d_beside", "wgmma_beside"),
    ("conv2d_nhwc", "implicit_gemm"), ("conv2d_pool", "stem_pool"), ("conv2d_pool", "wgmma_pool"),
    ("conv2d_sum", "wgmma_sum"), ("depthwise_means", "depthwise_means"),
    ("expand_depthwise", "expand_depthwise"), ("group_norm", "normalize_rows"),
    ("instance_norm", "normalize_rows"), ("layer_norm", "normalize_rows"),
    ("linear", "implicit_gemm"), ("log_softmax", "softmax_axis"), ("rms_norm", "normalize_rows"),
    ("softmax", "softmax_axis"), ("squeeze_excite", "squeeze_excite"),
    ("squeeze_excite", "squeeze_excite_scale"),
})  # fmt: skip

#: Kernels of one function for each element.
_ELEMENTWISE = frozenset({"binary", "int8", "normalize", "relu", "tanh", "unary"})


def is_batch_invariant(kernel: Kernel, node: Node, graph: Graph) -> bool:
    """Whether one call of a kernel gives every image the bits that it has in any other batch."""
    if kernel.op == "conv2d_nhwc" and kernel.name == "depthwise":
        return not _may_be_on_tensor_cores(node, graph)
    return (
        kernel.op in _EACH_OUTPUT
        or kernel.name in _ELEMENTWISE
        or (kernel.op, kernel.name) in _EACH_IMAGE
    )


def _may_be_on_tensor_cores(node: Node, graph: Graph) -> bool:
    """Whether a depthwise convolution is on tensor cores or not by the size of its output."""
    (op,) = (op for op in records_of(node.op) if op.kind == "conv2d_nhwc")
    return (
        bool(graph.values[node.inputs[0]].storage_dtype)
        and graph.values[node.inputs[1]].shape[2:] in ((5, 5), (7, 7))
        and op.stride == (1, 1)
    )
