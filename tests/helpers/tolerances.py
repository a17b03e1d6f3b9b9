"""The one table of tolerances, with its reasons; no test has its own.

The kernels compute in float32, the reference in float64. A sum of n products has a rounding error of at
most about n * eps * sum |x||w| in any order (Higham, Accuracy and Stability of Numerical Algorithms, 2002,
section 3.1); with random signs it grows as sqrt(n) * eps. The bounds below take that as it is: the scale
of the sum, sum |x||w|, is computed for each element, so they tighten as well as widen with the data.
"""

from __future__ import annotations

import numpy as np

from cnn_engine.engine.check import LIMITS

EPS = np.finfo(np.float32).eps

#: Times sqrt(n): the slack over the expected error of random signs, so that a tail event is not a failure.
SLACK = 8.0

#: exp, tanh and the division of softmax: a few units in the last place each (CUDA C++ Programming Guide,
#: "Mathematical Functions": expf 2 ulp, tanhf 2 ulp, division 0 to 2 ulp), on numbers of at most 1.
FUNCTION_ULPS = 8.0

#: Probabilities of a whole network in float32: three layers of sums; the project's own limit.
PROBABILITY = LIMITS["cpu"]["float32"]

#: Outputs of a network of some tens of layers, as a part of the largest, beside another float32 computation
#: of it: the requirement is 1e-5 of the largest logit from float64's.
NETWORK_LOGITS = 1e-5

#: Of a few layers, as a part of the largest result: a GPU's beside the CPU's, which are float32's. Of 16 bits
#: some units in the last place, since each layer rounds what it reads, its weights and what it makes.
FEW_LAYERS = {"float32": 1e-5, "tf32": 4e-3, "float16": 4e-3, "bfloat16": 3e-2}


def sum_of_products(terms: int, magnitude: np.ndarray) -> np.ndarray:
    """The bound for sums of ``terms`` products whose absolute values sum to ``magnitude``."""
    return SLACK * np.sqrt(terms) * EPS * magnitude + np.finfo(np.float32).tiny


def _winograd_transforms(m: int, taps: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """|B^T|, |G| and |A^T| of m outputs."""
    points = [0.0, 1.0, -1.0, 0.5, -0.5][: m + taps - 2]
    side = m + taps - 1
    transform_in = np.zeros((side, side))
    for i, p in enumerate(points):
        others = np.poly([q for q in points if q != p])[::-1]
        transform_in[i, : len(others)] = np.abs(others)
    transform_in[-1, : len(points) + 1] = np.abs(np.poly(points)[::-1])
    powers = np.arange(taps)
    kernel = [
        np.abs(p**powers / np.prod([p - q for q in points if q != p])) for p in map(float, points)
    ]
    kernel.append((powers == taps - 1).astype(float))
    out = np.array([[abs(p**t) for p in points] + [float(t == m - 1)] for t in range(m)])
    return transform_in, np.array(kernel), out


def winograd_row_magnitude(x: np.ndarray, weight: np.ndarray, m: int) -> np.ndarray:
    """The same as :func:`winograd_magnitude` of tiles of m columns, with a stride of 2 from row to row.

    Nothing is padded; ``x`` may have more columns than are read.
    """
    rows, taps = weight.shape[2:]
    transform_in, kernel, out = _winograd_transforms(m, taps)
    columns = x.shape[3] - taps + 1
    wide = -(-columns // m) * m
    padded = np.pad(np.abs(x.astype(np.float64)), ((0, 0),) * 3 + ((0, wide - columns),))
    windows = np.lib.stride_tricks.sliding_window_view(padded, (rows, m + taps - 1), axis=(2, 3))
    v = np.einsum("ai,nchwri->nchwra", transform_in, windows[:, :, ::2, ::m], optimize=True)
    u = np.einsum("ai,kcri->kcra", kernel, np.abs(weight.astype(np.float64)))
    y = np.einsum("nchwra,kcra,ja->nkhwj", v, u, out, optimize=True)
    return y.reshape(*y.shape[:3], wide)[..., :columns]


def winograd_magnitude(
    x: np.ndarray, weight: np.ndarray, padding: tuple[int, int, int, int], m: int
) -> np.ndarray:
    """The sizes that Winograd's form of a 3x3 convolution adds up for each output, in tiles of m x m.

    |A^T| ((|G| |g| |G^T|) (|B^T| |d| |B|)) |A|, summed over channels: what the form of the sum costs in
    accuracy (Barabasz et al., Error Analysis and Improving the Accuracy of Winograd Convolution, 2020).
    """
    transform_in, kernel, out = _winograd_transforms(m, 3)
    side = m + 2
    top, left, bottom, right = padding
    n, _, h, w = x.shape
    rows, columns = h + top + bottom - 2, w + left + right - 2
    tall, wide = -(-rows // m) * m, -(-columns // m) * m
    padded = np.pad(
        np.abs(x.astype(np.float64)),
        ((0, 0), (0, 0), (top, tall + 2 - h - top), (left, wide + 2 - w - left)),
    )
    tiles = np.lib.stride_tricks.sliding_window_view(padded, (side, side), axis=(2, 3))
    tiles = tiles[:, :, ::m, ::m]
    v = np.einsum("ai,nchwij,bj->nchwab", transform_in, tiles, transform_in, optimize=True)
    u = np.einsum(
        "ai,kcij,bj->kcab", kernel, np.abs(weight.astype(np.float64)), kernel, optimize=True
    )
    y = np.einsum("nchwab,kcab,ia,jb->nkhiwj", v, u, out, out, optimize=True)
    return y.reshape(n, len(weight), tall, wide)[:, :, :rows, :columns]


def softmax(x: np.ndarray, axis: int = 1) -> np.ndarray:
    """The bound for the softmax of lines ``x``: the rounding of x - max is amplified by exp."""
    finite = np.abs(np.where(np.isfinite(x), x, 0)).max(axis=axis, keepdims=True, initial=0)
    return FUNCTION_ULPS * EPS * (1 + finite) * np.ones_like(x)


def functions(magnitude: np.ndarray) -> np.ndarray:
    """The bound for a few functions of float32 one after another, of results of ``magnitude``."""
    with np.errstate(all="ignore"):
        bound = FUNCTION_ULPS * EPS * np.abs(magnitude) + np.finfo(np.float32).tiny
    return np.where(np.isfinite(bound), bound, 0)


def rounding(wanted: np.ndarray) -> np.ndarray:
    """The bound for one rounding to float32 of nearly exact results: a little over half a unit."""
    return 0.51 * EPS * np.abs(wanted) + 0.51 * np.finfo(np.float32).smallest_subnormal


def unary(name: str, x: np.ndarray, wanted: np.ndarray, alpha: float, beta: float) -> np.ndarray:
    """The bound for the unary function ``name`` of ``x``.

    An exponential's argument that is itself a rounded product amplifies that rounding by its own size
    (``swish``, ``celu``, ``gelu_tanh``); where terms of a sum cancel, their sizes count (``affine``,
    ``hard_sigmoid``, ``shrink``). The references of ``gelu`` and ``gelu_tanh`` lose what is below 2^-53 of
    x, which is less than EPS^2 * x.
    """
    x = np.abs(np.asarray(x, np.float64))
    wanted = np.abs(wanted)
    with np.errstate(all="ignore"):
        sizes = {
            "swish": wanted * (1 + abs(alpha) * x),
            "gelu": wanted + EPS * x,
            "celu": wanted * (1 + np.minimum(x / abs(alpha or 1.0), 100)),
            "gelu_tanh": wanted * (1 + 1.6 * (x + 0.044715 * x**3)) + EPS * x,
            "affine": abs(alpha) * x + abs(beta),
            "hard_sigmoid": np.minimum(abs(alpha) * x + abs(beta), 1.0),
            "shrink": x + abs(beta),
        }
    return functions(sizes.get(name, wanted))


def reduction(name: str, wanted: np.ndarray, magnitude: np.ndarray) -> np.ndarray:
    """The bound for a reduction: sums are of float64, so that only what is rounded at the end counts.

    A float64 sum of up to 2^24 numbers whose sizes sum to ``magnitude`` errs by less than 2^-29 of that.
    ``log_sum_exp`` adds exponentials of float32 (CUDA), whose relative errors the logarithm makes absolute.
    """
    with np.errstate(all="ignore"):
        if name == "log_sum_exp":
            return functions(1 + np.abs(wanted))
        sums = 2.0**-29 * magnitude if name in ("sum", "mean", "log_sum") else 0.0
        if name == "log_sum":
            sums = sums / np.exp(wanted)
        bound = functions(wanted) + sums
    return np.where(np.isfinite(bound), bound, 0)


def normalized(x, wanted, scale, shift, centered: bool) -> np.ndarray:
    """The bound for rows ``x`` [rows, ...] after normalisation: a few roundings of numbers of its own size.

    Before scale and shift, results are at most sqrt(n) in size; x - mean is made of two differences from the
    row's first element, each rounded in units of the longer of them, and so of the row's spread.
    """
    if x.size == 0:
        return np.zeros(wanted.shape)
    rows = x.astype(np.float64).reshape(len(x), -1)
    deviation = np.maximum(rows.std(axis=1), np.finfo(np.float32).tiny)
    spread = (np.ptp(rows, axis=1) / deviation if centered else 0 * deviation)[:, None, None]
    factor = 1.0 if scale is None else np.abs(scale).max()
    offset = 0.0 if shift is None else np.abs(shift).max()
    return functions(np.abs(wanted) + np.minimum(spread, 2e4) * factor + offset)


def power_of_sum(wanted: np.ndarray, terms: int, power: float) -> np.ndarray:
    """The bound for a power of a sum of ``terms`` positive numbers: its relative error times that power."""
    with np.errstate(all="ignore"):
        bound = functions(wanted) + power * terms * EPS * np.abs(wanted)
    return np.where(np.isfinite(bound), bound, 0)


def assert_close(found: np.ndarray, wanted: np.ndarray, bound, **parameters: object) -> None:
    """Asserts |found - wanted| <= bound; on failure names the worst place and all ``parameters``.

    NaN must meet NaN, and an infinity the same infinity.
    """
    assert found.shape == wanted.shape, (
        f"shape {found.shape}, expected {wanted.shape}; {parameters}"
    )
    found = np.asarray(found, np.float64)
    bound = np.broadcast_to(bound, wanted.shape)
    with np.errstate(invalid="ignore"):
        same = (found == wanted) | (np.isnan(found) & np.isnan(wanted))
        excess = np.where(same, -np.inf, np.abs(found - wanted) - bound)
    excess = np.where(np.isnan(excess), np.inf, excess)
    if not (excess <= 0).all():
        worst = np.unravel_index(np.argmax(excess), excess.shape)
        place = tuple(int(i) for i in worst)
        raise AssertionError(
            f"{int((excess > 0).sum())} of {excess.size} elements differ; worst at {place}: found "
            f"{found[worst]!r}, expected {wanted[worst]!r} +- {bound[worst]:.3g}; {parameters}"
        )


def assert_same_function(found: np.ndarray, wanted: np.ndarray) -> None:
    """Asserts that two ways of computing one thing in float64 agree.

    A rewrite changes the order of sums and folds factors together: a few roundings a node, over some twenty
    nodes whose sums have up to 40 terms: 2^13 units in the last place of the largest number there is.
    """
    scale = np.abs(wanted).max(initial=1.0)
    bound = 2**13 * np.finfo(np.float64).eps * scale
    assert_close(found, wanted, bound)


#: Relative, of the mean losses of two epochs that train one model in two processes and in one. Batch
#: normalisation has the statistics of 16 images in place of 32: means differ by some 1/sqrt(16) of the
#: spread, which a loss near log(10) shows a tenth of.
DATA_PARALLEL_LOSS = 0.1
