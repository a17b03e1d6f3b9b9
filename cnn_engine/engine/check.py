"""The check against the float64 reference, with a tolerance that follows from the graph.

How far rounding may take an output from the exact one depends on the network: on how many terms its sums
have, how large they are, and how what comes after amplifies or drowns an error. So it is tried out: the
reference is run again on the checked images with every operator's operands and results disturbed at random by
as much as rounding disturbs them there (backward error analysis: Higham, Accuracy and Stability of Numerical
Algorithms, 2002, sections 1.5 and 3.1). The tolerance is :data:`SLACK` times the largest change that this
makes to any output. It grows with depth as rounding does, about with its root, where a bound that takes the
worst case at every node grows past any error worth finding within a few layers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..graph import reference
from ..graph.graph import Graph, Node
from ..workload import Samples

#: Half of the distance from 1 to the next number, by what is computed in: operands of sums are rounded to it.
ROUNDING = {"float32": 2.0**-24, "tf32": 2.0**-11, "float16": 2.0**-11, "bfloat16": 2.0**-8}

#: Sums are kept in float32, whatever their operands are rounded to.
SUM_ROUNDING = ROUNDING["float32"]

#: By device, the largest error of a probability that one of the project's own networks may have in a data
#: type: what tests and benchmarks ask for, whatever the images. On CUDA 40 roundings of 11 or 8 bits through
#: three layers; on a CPU Winograd's products stay float32 in bfloat16 too.
LIMITS = {
    "cpu": {"float32": 1e-5, "bfloat16": 2e-2, "float64": 1e-12},
    "cuda": {"float32": 1e-5, **{dtype: 40 * ROUNDING[dtype] for dtype in ("tf32", "float16", "bfloat16")}},
}  # fmt: skip

#: How often the reference is disturbed, on the first images of the check.
TRIALS = 2

#: Times the largest change of the trials: room for what they are too few to show, and for orders of summation
#: (Winograd's transforms, blocks) whose errors are a few times those of a plain sum.
SLACK = 3.0

#: How often constants are rounded on their way from a model to a graph: a batch norm's scale is a root, a
#: quotient and a product.
FOLDS = 3

#: Of outputs that are no floats, such as masks, the share of elements that may differ for each that rounding
#: changes in the trials, which are too few to find all.
MISSED = 1e-5

#: FLOPs that one check spends on the reference, so that a large network is checked on fewer images.
MOST_FLOPS = 2e10


@dataclass
class OutputCheck:
    """Difference of one output from the float64 reference.

    Attributes:
        name, shape: of all that was compared.
        max_abs_diff, tolerance: of floats. Of whole numbers and bools the share of elements that differ, and
            of those that may, since rounding decides them.
        close: places at which rounding decides what a user reads off: which of two is the largest, or which
            side of a mask's border they are on.
        places: among so many.
        reads: what is read off there: ``largest`` of an axis, or ``border``; empty: nothing.
    """

    name: str
    shape: list[int]
    max_abs_diff: float
    tolerance: float
    close: int = 0
    places: int = 0
    reads: str = ""

    @property
    def passed(self) -> bool:
        return self.max_abs_diff <= self.tolerance  # False for NaN


@dataclass
class Check:
    """Differences of all outputs from the float64 reference, on ``images`` images.

    ``passed`` is whether ``max_abs_diff`` is within ``tolerance``; of several both are of the output that
    is furthest off, beside what it may be; ``outputs`` has each. ``not_finite`` counts the reference's own
    NaNs and infinities, which the outputs must have in the same positions.
    """

    reference: str
    images: int
    max_abs_diff: float
    top1_agreement: float
    tolerance: float
    not_finite: int = 0
    outputs: list[OutputCheck] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        return self.max_abs_diff <= self.tolerance  # False for NaN


def differences(found: np.ndarray, exact: np.ndarray) -> np.ndarray:
    """Returns how far each element of ``found`` is from ``exact``, which is float64.

    Where both are NaN, or the same infinity in the type of ``found``, that is 0; where one of them is, NaN or
    infinity.
    """
    with np.errstate(invalid="ignore", over="ignore"):
        rounded = exact.astype(found.dtype)  # what is too large for it is infinite in it
        same = (np.isnan(found) & np.isnan(exact)) | (np.isinf(found) & (found == rounded))
        return np.where(same, 0.0, np.abs(found - exact))


def disturbed(rng: np.random.Generator, dtype: str | Callable[[Node], str]) -> Callable[..., Any]:
    """Returns a function that runs a node's reference as if each of its numbers were rounded."""
    of = (lambda node: dtype) if isinstance(dtype, str) else dtype

    def around(array: np.ndarray | None, *scales: float) -> np.ndarray | None:
        if array is None or array.dtype.kind != "f":
            return array
        factor = 1.0
        for scale in scales:
            factor = factor + scale * rng.standard_normal(array.shape)
        return array * factor

    def run(node: Node, graph: Graph, *arrays: np.ndarray | None):
        terms = node.op.terms(graph.inputs_of(node))
        deviations = [SUM_ROUNDING * math.sqrt(terms) / 2]
        if of(node) != "float32" and terms > 1:
            # The standard deviation of what rounding does.
            deviations.append(ROUNDING[of(node)] / 2)
        found = _results(node, *(around(array, *deviations) for array in arrays))
        if any(array.dtype.kind == "f" and np.isnan(array).any() for array in found):
            # A disturbed operand may leave what a function is defined on, as (-2) ** 2.0001 does.
            exact = _results(node, *arrays)
            found = [
                np.where(np.isnan(array), one, array)
                for array, one in zip(found, exact, strict=True)
            ]
        # A running sum of terms of one sign is rounded at every step: more than independent signs show.
        result = SUM_ROUNDING * (1 + math.sqrt(terms / 3))
        return tuple(around(array, result) for array in found)

    return run


def _results(node: Node, *arrays: np.ndarray | None) -> list[np.ndarray]:
    with np.errstate(invalid="ignore"):
        found = node.op.reference(*arrays)
    return [np.asarray(array) for array in (found if isinstance(found, tuple) else (found,))]


def tolerance(
    graph: Graph,
    inputs: Mapping[str, np.ndarray],
    outputs: Mapping[str, np.ndarray],
    dtype: str | Callable[[Node], str] = "float32",
) -> dict[str, float]:
    """Returns how far each output may be from ``outputs``, the reference's for ``inputs``.

    Of outputs that are no floats that is the share of elements that may differ. What float32 holds as
    infinity says nothing of how far the others may be.
    """
    with np.errstate(over="ignore"):
        held = {
            name: np.where(np.isinf(array.astype(np.float32)), np.inf, array)
            if array.dtype.kind == "f"
            else array
            for name, array in outputs.items()
        }
    return _tried(held, lambda rng: reference.reference(graph, inputs, disturbed(rng, dtype)))


def tolerance_of_constants(
    graph: Graph, inputs: Mapping[str, np.ndarray], outputs: Mapping[str, np.ndarray]
) -> dict[str, float]:
    """Returns how far outputs in float64 may be from ``outputs`` where constants were rounded to float32.

    That is less than :func:`tolerance`, which rounds what is computed, too. What writes a file and what reads
    it fold scales into weights: each number is rounded, and a filter's scale for all of its numbers,
    :data:`FOLDS` times.
    """

    def run(rng: np.random.Generator) -> dict[str, np.ndarray]:
        constants = {name: _rounded(rng, array) for name, array in graph.constants.items()}

        def with_those(node: Node, _: Graph, *arrays: np.ndarray | None):
            given = zip(node.inputs, arrays, strict=True)
            return node.op.reference(*(constants.get(name, array) for name, array in given))

        return reference.reference(graph, inputs, with_those)

    return _tried(outputs, run)


def _rounded(rng: np.random.Generator, array: np.ndarray) -> np.ndarray:
    """Returns floats as if each, and a factor that each filter has, had been rounded to float32."""
    if array.dtype.kind != "f":
        return array
    filters = (*array.shape[:1], *[1] * (array.ndim - 1))
    relative = rng.standard_normal(array.shape) + rng.standard_normal(filters)
    return array * (1 + FOLDS * SUM_ROUNDING * relative)


def _tried(
    outputs: Mapping[str, np.ndarray],
    run: Callable[[np.random.Generator], Mapping[str, np.ndarray]],
) -> dict[str, float]:
    """Returns, for each floating output, :data:`SLACK` times the largest change in :data:`TRIALS` runs."""
    most = {
        name: SUM_ROUNDING * float(np.abs(array[np.isfinite(array)]).max(initial=0.0))
        if array.dtype.kind == "f"
        else 0.0
        for name, array in outputs.items()
    }
    for trial in range(TRIALS):
        found = run(np.random.default_rng(trial))
        for name, array in outputs.items():
            if array.dtype.kind != "f":
                change = differing(found[name], array)
                most[name] = max(most[name], change and change + MISSED)
                continue
            with np.errstate(invalid="ignore"):
                change = np.abs(found[name] - array)
            most[name] = max(most[name], float(change[np.isfinite(change)].max(initial=0.0)))
    return {name: SLACK * change for name, change in most.items()}


def differing(found: np.ndarray, exact: np.ndarray) -> float:
    """Returns the share of elements that differ."""
    return float(np.mean(found != exact)) if exact.size else 0.0


def axis_of(shape: tuple[int, ...]) -> int | None:
    """Returns the axis of an output's classes, of images or of pixels; None where it has none.

    That is dimension 1 of [N, C] and [N, C, H, W ...], and the last one of [N, T, C].
    """
    axis = 2 if len(shape) == 3 else 1
    return axis if len(shape) > 1 and shape[axis] > 1 else None


def close_calls(exact: np.ndarray, most: float) -> tuple[int, int, str]:
    """Returns how many positions rounding may decide, of how many, and which kind: ``largest`` or ``border``.

    Args:
        exact: an output in float64.
        most: how far elements may be from it.
    """
    if exact.dtype.kind != "f" or not exact.size:
        return 0, 0, ""
    axis = axis_of(exact.shape)
    with np.errstate(invalid="ignore"):
        if axis is not None:
            two = np.partition(exact, -2, axis=axis).take([-2, -1], axis=axis)
            apart = np.diff(two, axis=axis)
            return int(np.sum(apart <= 2 * most)), apart.size, "largest"
        if exact.ndim < 3:
            return 0, 0, ""
        border = 0.5 if exact.min() >= 0 and exact.max() <= 1 else 0.0
        return int(np.sum(np.abs(exact - border) <= most)), exact.size, "border"


def images_for(flops_an_image: int, images: int) -> int:
    """Returns how many of ``images`` a check takes."""
    return min(images, max(1, int(MOST_FLOPS // max(flops_an_image, 1))))


def check(
    predict: Callable[[Any], Any],
    graph_of: Callable[[int, bool], Graph],
    images: np.ndarray | Samples,
    dtype: str | Callable[[Node], str],
    batch: int | None = None,
    in_parts: bool = True,
) -> Check:
    """Compares all outputs of a network with the reference's.

    Args:
        predict: returns the outputs for images: an array, or arrays by name in the network's order.
        graph_of: the graph for a batch, whose images are pixels or not.
        images: uint8 or float32 [N, C, H, W], or all inputs.
        dtype: what the engine computes in, or a function from nodes to that.
        batch: for which alone the graph is made, or None.
        in_parts: whether outputs have a row per image; else all images are of one pass.
    """
    pixels = images.dtype == np.uint8
    probe = graph_of(batch or 1, pixels)
    flops = sum(probe.cost_of(node).flops for node in probe.nodes) // (batch or 1)
    count = images_for(flops, len(images)) if len(images) else 0
    count = count if in_parts else min(count, reference.PART)
    part = batch or min(count, reference.PART) or 1
    if batch is not None:
        count = max(count // batch, 1) * batch if len(images) >= batch else 0
        count = count if in_parts else min(count, batch)
    images = images[:count]
    found = predict(images)
    found = list(found.values()) if isinstance(found, Mapping) else [found]
    wanted: dict[str, list[np.ndarray]] = {name: [] for name in probe.outputs}
    allowed = dict.fromkeys(probe.outputs, 0.0)
    for first in range(0, count, part):
        some = images[first : first + part]
        graph = graph_of(len(some) if batch is None else batch, pixels)
        inputs = some.arrays if isinstance(some, Samples) else {graph.inputs[0].name: some}
        outputs = reference.reference(graph, inputs)
        for name, rows in outputs.items():
            wanted[name].append(rows)
        if first == 0:
            allowed = tolerance(graph, inputs, outputs, dtype)
    compared: list[OutputCheck] = []
    agreement, not_finite = 1.0, 0
    for (name, parts), array in zip(wanted.items(), found, strict=True):
        exact = np.concatenate(parts) if len(parts) > 1 else parts[0] if parts else None
        if exact is None:
            exact = np.empty_like(array, np.float64 if array.dtype.kind == "f" else array.dtype)
        exact = exact.reshape(array.shape)
        floats = array.dtype.kind == "f"
        axis = axis_of(exact.shape)
        if not compared and floats and exact.size and axis is not None:
            agreement = float(np.mean(array.argmax(axis) == exact.argmax(axis)))
        not_finite += int(exact.size - np.isfinite(exact).sum()) if floats else 0
        compared.append(compare_output(name, array, exact, allowed[name]))
    return check_of(compared, count, agreement, not_finite)


def compare_output(name: str, array: np.ndarray, exact: np.ndarray, allowed: float) -> OutputCheck:
    """Returns the difference of an output from the reference's of the same shape."""
    error = differing(array, exact)
    if array.dtype.kind == "f":
        error = float(differences(array, exact).max(initial=0.0))
    return OutputCheck(name, list(exact.shape), error, allowed, *close_calls(exact, allowed))


def check_of(
    compared: Sequence[OutputCheck], images: int, agreement: float = 1.0, not_finite: int = 0
) -> Check:
    """Returns the check that these outputs are, led by the one that is furthest off."""
    worst = max(compared, key=_beyond)
    return Check(
        reference="NumPy float64",
        images=images,
        max_abs_diff=worst.max_abs_diff,
        top1_agreement=agreement,
        tolerance=worst.tolerance,
        not_finite=not_finite,
        outputs=list(compared),
    )


def _beyond(found: OutputCheck) -> float:
    """Returns how far an output is off, in what it may be: for the one that is furthest off."""
    if not found.passed:
        return math.inf if math.isnan(found.max_abs_diff) else 1e300 + found.max_abs_diff
    return found.max_abs_diff / found.tolerance if found.tolerance else 0.0
