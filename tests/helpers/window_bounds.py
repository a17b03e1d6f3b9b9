"""Random convolutions, and how far each of their outputs may be from float64's: by its own window alone.

    |found - wanted| <= (16 + K / 8) u sum |x||w| + rounding of the output

over the K terms of the output's window, with u the unit roundoff of what is multiplied. So an output whose x
are all 0 is exactly its bias, and a value, infinity or NaN acts on the windows that hold it. A bound from the
largest output of a tensor passes what this one finds: values that leak into windows that do not hold them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np

from cnn_engine.operators.conv2d import Conv2d

#: Half of the distance from 1 to the next number of each type.
UNITS = {"float32": 2.0**-24, "tf32": 2.0**-11, "float16": 2.0**-11, "bfloat16": 2.0**-8}

FLOAT32 = np.finfo(np.float32)

INPUTS = (
    "normal", "relu", "pixels", "positive", "sparse", "dark", "dark corner", "half zero", "one pixel",
    "outlier", "huge", "infinity", "channel", "constant border",
)  # fmt: skip
SMOOTH_INPUTS = ("gradient", "waves", "photograph", "letterboxed")
WEIGHTS = ("normal", "positive", "sparse", "outlier", "one tap", "channel")

#: Kernels, strides and dilations of the usual layers, beside those that are drawn at random.
USUAL = [
    ((size, size), (stride, stride), (1, 1)) for size, stride in ((3, 1), (7, 2), (5, 1), (1, 1))
]


@dataclass(frozen=True, eq=False)
class Photographs:
    """Real images, uint8 [N, 3, H, W]."""

    pixels: np.ndarray


@dataclass(frozen=True, eq=False)
class Case:
    """A convolution: x [N, C, H, W], weight [K, C / groups, R, S], bias [K], and Conv2d's parameters."""

    name: str
    x: np.ndarray
    weight: np.ndarray
    bias: np.ndarray
    stride: tuple[int, int] = (1, 1)
    padding: tuple[int, int, int, int] = (0, 0, 0, 0)
    dilation: tuple[int, int] = (1, 1)
    groups: int = 1

    @property
    def operator(self) -> Conv2d:
        return Conv2d(self.stride, self.padding, self.dilation, self.groups)

    @property
    def terms(self) -> int:
        """How many products an output is the sum of."""
        return math.prod(self.weight.shape[1:])

    @cached_property
    def wanted(self) -> np.ndarray:
        """float64's outputs."""
        with np.errstate(all="ignore"):
            return self.operator.reference(self.x, self.weight, self.bias)

    @cached_property
    def magnitude(self) -> np.ndarray:
        """Sum |x||w| of each output's window; NaN or infinite where the window holds such a value."""
        with np.errstate(all="ignore"):
            return self.operator.reference(np.abs(self.x), np.abs(self.weight), None)

    @cached_property
    def below_normal(self) -> np.ndarray:
        """What each output's window loses where subnormal numbers are taken as 0, and sums that are so."""
        least = float(FLOAT32.smallest_normal)
        lost = np.full(self.wanted.shape, 2 * self.terms * least)
        x, weight = np.abs(self.x), np.abs(self.weight)
        # Rounded to fewer bits, a number just below the least normal one may become it, or not.
        small_x, small_w = x <= least, weight <= least
        with np.errstate(all="ignore"):
            if (small_x & (x > 0)).any():
                lost += self.operator.reference(np.where(small_x, x, 0), weight, None)
            if (small_w & (weight > 0)).any():
                lost += self.operator.reference(x, np.where(small_w, weight, 0), None)
        return lost

    def bound(
        self, dtype: str = "float32", output: str = "float32", flushes: bool = False
    ) -> np.ndarray:
        """Returns how far each output may be from ``wanted``; infinite where float32 may overflow.

        Args:
            dtype: what x and the weights are rounded to before they are multiplied.
            output: what outputs are rounded to.
            flushes: whether the instruction takes subnormal numbers as 0, and gives 0 for them.
        """
        size, unit = self.magnitude, UNITS[dtype]
        with np.errstate(all="ignore"):
            bound = (16 + self.terms / 8) * unit * size
            bound += UNITS[output] * np.abs(self.wanted) * (1 + 2 * unit)
            # Products below the normal numbers are rounded by as much as the smallest of all.
            bound += np.where(size > 0, self.terms * float(FLOAT32.smallest_subnormal), 0.0)
            if flushes:
                bound += np.where(size > 0, self.below_normal, 0.0)
            overflows = size + np.abs(self.bias.astype(np.float64))[:, None, None] >= 0.99 * float(
                FLOAT32.max
            )
        bound[overflows & np.isfinite(size)] = np.inf
        return bound


def excess(
    case: Case,
    found: np.ndarray,
    dtype: str = "float32",
    output: str = "float32",
    flushes: bool = False,
) -> np.ndarray:
    """Returns each output's error as a part of its bound: above 1 is a fault.

    Where float64 gives NaN or an infinity, NaN or the same infinity is asked for (infinities of both signs
    may also cancel before an overflow would: such positions are left to the types' own rules).
    """
    wanted, bound = case.wanted, case.bound(dtype, output, flushes)
    assert found.shape == wanted.shape, f"{case.name}: shape {found.shape}, expected {wanted.shape}"
    found = np.asarray(found, np.float64)
    with np.errstate(all="ignore"):
        part = np.abs(found - wanted) / bound
        part = np.where((found == wanted) | (np.isnan(found) & np.isnan(wanted)), 0.0, part)
    part = np.where(np.isnan(part), np.inf, part)
    return np.where(np.isposinf(bound) & np.isfinite(wanted), 0.0, part)


def check(
    case: Case,
    conv: Callable[..., np.ndarray],
    dtype: str = "float32",
    output: str = "float32",
    flushes: bool = False,
) -> float:
    """Asserts that ``conv`` keeps each output within its bound; returns the largest part of it that it needs.

    Args:
        conv: called as ``conv(x, weight, bias, stride=, padding=, dilation=, groups=)`` with float32 arrays;
            returns [N, K, OH, OW]. ``padding`` is zeros above, on the left, below, on the right.
        dtype, output, flushes: see :meth:`Case.bound`.
    """
    found = conv(
        case.x, case.weight, case.bias, stride=case.stride, padding=case.padding,
        dilation=case.dilation, groups=case.groups,
    )  # fmt: skip
    part = excess(case, found, dtype, output, flushes)
    worst = float(part.max(initial=0.0))
    if worst > 1:
        place = tuple(int(i) for i in np.unravel_index(np.argmax(part), part.shape))
        raise AssertionError(
            f"{case.name}: {int((part > 1).sum())} of {part.size} outputs past their bound; worst at "
            f"{place}: found {np.asarray(found)[place]!r}, expected {case.wanted[place]!r} within "
            f"{case.bound(dtype, output, flushes)[place]:.3g}, sum |x||w| {case.magnitude[place]:.3g}"
        )
    return worst


def images(rng: np.random.Generator, kind: str, shape: tuple[int, int, int, int]) -> np.ndarray:
    """Returns float32 images [N, C, H, W] of one of :data:`INPUTS`."""
    _, c, h, w = shape
    x = rng.standard_normal(shape)
    inside = tuple(int(rng.integers(size)) for size in shape)
    if kind == "relu":
        x = np.maximum(x, 0)
    elif kind == "pixels":
        x = rng.integers(0, 256, shape)
    elif kind == "positive":
        x = rng.random(shape)
    elif kind == "sparse":
        x = np.where(rng.random(shape) < rng.choice([0.005, 0.05, 0.3]), x, 0)
    elif kind == "dark":
        x = x * 10.0 ** -rng.integers(3, 38)
    elif kind == "dark corner":
        x[:, :, : h // 2, : w // 2] *= 10.0 ** -rng.integers(2, 12)
    elif kind == "half zero":
        x[:, :, :, : w // 2] = 0
        x[:, :, (h + 1) // 2 :] = 0
    elif kind == "one pixel":
        value, x = x[inside], np.zeros(shape)
        x[inside] = value
    elif kind == "outlier":
        x[inside] = 1e6
    elif kind == "huge":
        x[inside] = 3e38
    elif kind == "infinity":
        x[inside] = rng.choice([np.inf, -np.inf, np.nan])
    elif kind == "channel":
        x[:, inside[1]] *= 1e5
    elif kind == "constant border":
        border = rng.standard_normal((c, 1))
        x[:, :, : h // 3] = border[..., None]
        x[:, :, h - h // 3 :] = border[..., None]
    return x.astype(np.float32)


def weights(rng: np.random.Generator, kind: str, shape: tuple[int, int, int, int]) -> np.ndarray:
    """Returns float32 weights [K, C / groups, R, S] of one of :data:`WEIGHTS`."""
    w = rng.standard_normal(shape) / math.sqrt(math.prod(shape[1:]))
    if kind == "positive":
        w = np.abs(w)
    elif kind == "sparse":
        w = np.where(rng.random(shape) < rng.choice([0.02, 0.1, 0.5]), w, 0)
    elif kind == "outlier":
        w[tuple(int(rng.integers(size)) for size in shape)] = 1e4
    elif kind == "one tap":
        values = rng.standard_normal(shape[0])
        w = np.zeros(shape)
        for k, value in enumerate(values):
            w[k, k % shape[1], rng.integers(shape[2]), rng.integers(shape[3])] = value
    elif kind == "channel":
        w[:, rng.integers(shape[1])] *= 1e4
    return w.astype(np.float32)


def waves(rng: np.random.Generator, shape: tuple[int, ...], reach: float = 1.0) -> np.ndarray:
    """Returns float64 planes [..., H, W]: sums of a few cosines, the slower the larger, about 1 in size."""
    *planes, h, w = shape
    y, x = np.mgrid[:h, :w]
    found = np.zeros(shape)
    for speed in (0.5, 1, 2, 4):
        along = rng.uniform(-1, 1, (2, *planes, 1, 1)) * speed * reach
        phase = rng.uniform(0, 2 * np.pi, (*planes, 1, 1))
        cosines = np.cos(2 * np.pi * (along[0] * y / h + along[1] * x / w) + phase)
        found += rng.standard_normal((*planes, 1, 1)) * cosines / speed
    return found


def smooth_images(
    rng: np.random.Generator, kind: str, shape: tuple[int, int, int, int]
) -> np.ndarray:
    """Returns float32 images [N, C, H, W] of one of :data:`SMOOTH_INPUTS`.

    Neighbours are nearly equal, and so are channels: mixtures of three colours, which are nearly grey.
    """
    n, c, h, w = shape
    y, x = np.mgrid[:h, :w]
    if kind == "gradient":
        slope = rng.uniform(-1, 1, (2, n, 1, 1, 1)) * np.ones((1, 1, 3, 1, 1))
        colours = slope[0] * y / h + slope[1] * x / w + rng.uniform(-0.5, 0.5, (n, 3, 1, 1))
    elif kind == "waves":
        colours = waves(rng, (n, 1, h, w)) + 0.1 * waves(rng, (n, 3, h, w))
    else:  # a disc before a background, with grain
        centre = rng.uniform(0, 1, (2, n, 1, 1, 1)) * np.array([h, w]).reshape(2, 1, 1, 1, 1)
        disc = np.hypot(y - centre[0], x - centre[1]) < rng.uniform(0.2, 0.5) * max(h, w)
        colours = waves(rng, (n, 1, h, w)) + 0.2 * waves(rng, (n, 3, h, w))
        colours += rng.uniform(-1.5, 1.5, (n, 3, 1, 1)) * disc
        colours += rng.choice([0.02, 0.1]) * rng.standard_normal((n, 3, h, w))
    pixels = np.clip(np.round(127.5 + 70 * colours), 0, 255)
    if kind == "letterboxed":
        pixels[:, :, : h // 4] = pixels[:, :, h - h // 4 :] = 0
    colours = pixels / 255 - rng.choice([0.0, 0.5, 0.45])
    if c <= 3:
        return colours[:, :c].astype(np.float32)
    mixed = np.einsum("kc,nchw->nkhw", rng.standard_normal((c, 3)), colours)
    return np.maximum(mixed + rng.uniform(-0.5, 0.5, (c, 1, 1)), 0).astype(np.float32)


def smooth_weights(rng: np.random.Generator, shape: tuple[int, int, int, int]) -> np.ndarray:
    """Returns float32 weights [K, C, R, S] of slow waves, as first layers learn them: channels alike."""
    k, c, r, s = shape
    each = 1 + rng.choice([0.0, 0.3]) * rng.standard_normal((k, c, 1, 1))
    w = waves(rng, (k, 1, r, s), rng.choice([0.3, 0.7, 1.0])) * each
    return (w / math.sqrt(c * r * s)).astype(np.float32)


@lru_cache(128)
def smooth_case(
    seed: int,
    kernel: tuple[int, int],
    stride: tuple[int, int] = (1, 1),
    channels: tuple[int, int] = (3, 3),
    photographs: Photographs | None = None,
) -> Case:
    """Returns a convolution of smooth or photograph-like images by smooth filters, kept for the next caller.

    Args:
        channels: the fewest and the most of them.
        photographs: of which some are taken in the place of generated ones.
    """
    rng = np.random.default_rng(seed)
    kind = "a photograph"
    if photographs is None:
        kind = SMOOTH_INPUTS[seed % len(SMOOTH_INPUTS)]
        c = int(rng.integers(channels[0], channels[1] + 1))
        x = smooth_images(rng, kind, (4, c, *(int(side) for side in rng.integers(24, 41, 2))))
    else:
        pixels = photographs.pixels
        x = pixels[rng.permutation(len(pixels))[:16]] / 255 - rng.choice([0.0, 0.45, 0.5])
    weight = smooth_weights(rng, (16, x.shape[1], *kernel))
    padding = (kernel[0] // 2, kernel[1] // 2) * 2
    name = f"smooth seed {seed}, {kind}, x {x.shape}, weight {weight.shape}, stride {stride}"
    return Case(name, x.astype(np.float32), weight, np.zeros(16, np.float32), stride, padding)


def random_case(
    seed: int,
    kernel: tuple[int, int] | None = None,
    stride: tuple[int, int] | None = None,
    dilation: tuple[int, int] | None = None,
    groups: int | None = None,
    channels: tuple[int, int] = (1, 64),
    filters: tuple[int, int] = (1, 64),
    largest: int = 26,
) -> Case:
    """Returns the convolution of a seed: what is None is drawn, sizes are odd as often as even.

    Args:
        channels, filters: the fewest and the most of them.
        largest: rows and columns of an image, at most.
    """
    rng = np.random.default_rng(seed)
    usual = USUAL[rng.integers(len(USUAL))]
    if rng.random() < 0.3:
        usual = (
            tuple(int(v) for v in rng.integers(1, 6, 2)),
            tuple(int(v) for v in rng.integers(1, 4, 2)),
            tuple(int(v) for v in rng.integers(1, 3, 2)),
        )
    kernel, stride, dilation = kernel or usual[0], stride or usual[1], dilation or usual[2]
    if groups is None:
        groups = int(rng.choice([1, 1, 1, 2, 4]))
    c, k = (
        groups * int(rng.integers(-(-least // groups), max(1, most // groups) + 1))
        for least, most in (channels, filters)
    )
    if rng.random() < 0.15 and groups > 1:
        groups = k = c  # depthwise
    reach = [d * (size - 1) + 1 for size, d in zip(kernel, dilation, strict=True)]
    padding = tuple(int(rng.integers(0, size // 2 + 1)) for size in (*reach, *reach))
    if rng.random() < 0.5:
        padding = (reach[0] // 2, reach[1] // 2) * 2
    h, w = (
        int(rng.integers(max(1, size - a - b), max(largest, size) + 1))
        for size, a, b in zip(reach, padding[:2], padding[2:], strict=True)
    )
    kinds = rng.choice(INPUTS), rng.choice(WEIGHTS)
    n = int(rng.integers(1, 3))
    x = images(rng, kinds[0], (n, c, h, w))
    weight = weights(rng, kinds[1], (k, c // groups, *kernel))
    bias = rng.standard_normal(k) * rng.choice([0.0, 1.0])
    name = f"seed {seed}, {kinds[0]} x {kinds[1]}, x {x.shape}, weight {weight.shape}, stride {stride}, "
    name += f"padding {padding}, dilation {dilation}, groups {groups}"
    return Case(name, x, weight, bias.astype(np.float32), stride, padding, dilation, groups)


_kept = lru_cache(256)(random_case)  # with float64's outputs, for what runs the same cases next


def cases(count: int, first: int = 0, **fixed: object) -> Iterator[Case]:
    """Yields the convolutions of so many seeds; ``fixed``: what :func:`random_case` is not to draw."""
    for seed in range(first, first + count):
        yield _kept(seed, **fixed)
