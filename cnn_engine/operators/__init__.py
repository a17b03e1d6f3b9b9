"""The operators: one file each, with attributes, shape inference, a NumPy float64 reference and costs.

A new operator is its file and its line in the list here. :mod:`.region` is several of them as one.
"""

import importlib

from .operator import Cost, Operator, Value

__all__ = ["KINDS", "Cost", "Operator", "Value"]

_FILES = (
    "average_pool2d",
    "binary",
    "cast",
    "channels_last",
    "conv2d",
    "conv_transpose2d",
    "copy",
    "data_dependent",
    "det",
    "gather",
    "linear",
    "logic",
    "lp_normalization",
    "mathematics",
    "matmul",
    "max_pool2d",
    "norm",
    "normalize",
    "order",
    "overlap",
    "pad",
    "pad2d",
    "partial_means",
    "quantized",
    "quantized_conv2d",
    "quantized_linear",
    "quantized_pointwise",
    "recurrent",
    "reduce",
    "resize",
    "reverse_sequence",
    "sampling",
    "shaping",
    "signal",
    "softmax",
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
