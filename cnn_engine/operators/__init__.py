"""The operators: one file each, with attributes, shape inference, a NumPy float64 reference and costs.

A new operator is its file and its line in the list here.
"""

import importlib

from .operator import Cost, Operator, Value

__all__ = ["KINDS", "Cost", "Operator", "Value"]

_FILES = (
    "average_pool2d",
    "binary",
    "bottleneck",
    "cast",
    "channels_last",
    "conv2d",
    "conv2d_pair",
    "conv2d_pool",
    "conv_transpose2d",
    "copy",
    "dense_layer",
    "depthwise_means",
    "depthwise_norm",
    "det",
    "expand_depthwise",
    "gather",
    "inverted_residual",
    "linear",
    "linear_layers",
    "logic",
    "lp_normalization",
    "matmul",
    "max_pool2d",
    "mean_linear",
    "norm",
    "normalize",
    "order",
    "overlap",
    "pad",
    "pad2d",
    "recurrent",
    "reduce",
    "resize",
    "reverse_sequence",
    "sampling",
    "shaping",
    "signal",
    "softmax",
    "squeeze_excite",
    "stem_pair",
    "unary",
    "where",
)


def _records(file: str) -> dict[str, type[Operator]]:
    module = importlib.import_module(f"{__name__}.{file}")
    return {
        value.kind: value
        for value in vars(module).values()
        if isinstance(value, type)
        and value.__module__ == module.__name__
        and issubclass(value, Operator)
        and hasattr(value, "kind")
    }


#: Every record by its kind.
KINDS: dict[str, type[Operator]] = {
    kind: record for file in _FILES for kind, record in _records(file).items()
}
