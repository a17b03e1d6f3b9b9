"""Matrix products: matmul and linear."""

from __future__ import annotations

import math
from typing import Any

from .. import _cpu
from ..devices import arrays
from ..devices.arrays import view
from ..errors import InputError, UnsupportedError
from ..operators.matmul import Matmul
from ..operators.operator import Value
from .call import call_kernel, make_output, make_shape, make_workspace, refuse_overlap


def matmul(
    a: Any,
    b: Any,
    bias: Any = None,
    *,
    transpose: tuple[bool, bool] = (False, False),
    blocked: bool = True,
    lowest: float = -math.inf,
    highest: float = math.inf,
    out: Any = None,
    threads: int | None = None,
    stream: Any = None,
) -> Any:
    """Computes ``min(max(a @ b + bias, lowest), highest)`` by NumPy's rules for ``@``.

    Args:
        a, b: [..., I, F] and [..., F, J], batch dimensions broadcasting; or vectors.
        bias: [J], or None.
        transpose: whether a's, and b's, last two dimensions are exchanged first.
        blocked: sum in tiles; else each element by itself, in order.
    """
    x, y = view("matmul: a", a), view("matmul: b", b)
    shapes = [
        (*v.shape[:-2], *v.shape[:-3:-1]) if swapped and len(v.shape) > 1 else v.shape
        for v, swapped in zip((x, y), transpose, strict=True)
    ]
    values = [Value(name, shape) for name, shape in zip("ab", shapes, strict=True)]
    try:
        ((result, _),) = Matmul().infer(values)
    except InputError as error:
        raise InputError(f"matmul: {error}") from None
    numbers = Matmul.numbers(x.shape, y.shape, transpose)
    if numbers is None:
        raise UnsupportedError(
            f"matmul: expected at most 4 batch dimensions that cannot be taken together, "
            f"found {list(x.shape)} and {list(y.shape)}"
        )
    shape = make_shape("matmul", _cpu.MatmulShape, *numbers)
    z = make_output("matmul", out, x, result)
    v = None if bias is None else view("matmul: bias", bias, shape=(numbers[1],))
    refuse_overlap("matmul", z, x, y, v)
    if blocked:
        space = make_workspace(x, "matmul_blocked_workspace", shape, threads)
        call_kernel(
            "matmul_blocked", (x, y, v, z, space), (shape, lowest, highest), threads, stream
        )
    else:
        call_kernel("matmul", (x, y, v, z), (shape, lowest, highest), threads, stream)
    return z.array


def linear_blocked(
    input: Any,
    weight: Any,
    bias: Any = None,
    *,
    lowest: float = -math.inf,
    highest: float = math.inf,
    out: Any = None,
    threads: int | None = None,
    stream: Any = None,
) -> Any:
    """Computes :func:`linear` in tiles, clamped. Packs the weights in each call; an engine does it once."""
    name = "linear_blocked"
    x, w, b, y, shape = _linear_views(name, input, weight, bias, out)
    packed = arrays.empty_beside(x, (shape.packed_size,))
    call_kernel("linear_pack", (w, packed), (shape,), threads, stream)
    space = make_workspace(x, "linear_blocked_workspace", shape, threads)
    call_kernel(name, (x, packed, b, y, space), (shape, lowest, highest), threads, stream)
    return y.array


def linear(
    input: Any,
    weight: Any,
    bias: Any = None,
    *,
    reduction: bool = False,
    out: Any = None,
    threads: int | None = None,
    stream: Any = None,
) -> Any:
    """Computes ``input @ weight.T + bias`` for ``input`` [N, F], ``weight`` [M, F], ``bias`` [M]; [N, M]."""
    x, w, b, y, shape = _linear_views("linear", input, weight, bias, out)
    call_kernel("linear", (x, w, b, y), (shape, bool(reduction)), threads, stream)
    return y.array


def _linear_views(name, input, weight, bias, out):
    x = view(f"{name}: input", input, ndim=2)
    w = view(f"{name}: weight", weight, ndim=2)
    if w.shape[1] != x.shape[1]:
        raise InputError(
            f"{name}: weight: expected {x.shape[1]} input features, found {w.shape[1]} "
            f"(shape {list(w.shape)})"
        )
    shape = make_shape(name, _cpu.LinearShape, *x.shape, w.shape[0])
    b = None if bias is None else view(f"{name}: bias", bias, shape=(w.shape[0],))
    y = make_output(name, out, x, (x.shape[0], w.shape[0]))
    refuse_overlap(name, y, x, w, b)
    return x, w, b, y, shape
