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
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from ..graph import reference
from ..graph.graph import Graph, Node

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

#: FLOPs that one check spends on the reference, so that a large network is checked on fewer images.
MOST_FLOPS = 2e10


@dataclass
class Check:
    """How far the outputs are from the float64 reference, on ``images`` images.

    ``passed`` is whether ``max_abs_diff`` is within ``tolerance``. ``not_finite`` counts the reference's own
    NaNs and infinities, which the outputs must have in the same positions.
    """

    reference: str
    images: int
    max_abs_diff: float
    top1_agreement: float
    tolerance: float
    not_finite: int = 0

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


def disturbed(
    rng: np.random.Generator, dtype: str | Callable[[Node], str]
) -> Callable[[Node, Graph], Callable]:
    """Returns what runs a node's reference as if each of its numbers were rounded."""
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
            deviations.append(
                ROUNDING[of(node)] / 2
            )  # the standard deviation of what rounding does
        found = node.op.reference(*(around(array, *deviations) for array in arrays))
        # A running sum of terms of one sign is rounded at every step: more than independent signs show.
        result = SUM_ROUNDING * (1 + math.sqrt(terms / 3))
        if isinstance(found, tuple):
            return tuple(around(np.asarray(array), result) for array in found)
        return around(np.asarray(found), result)

    return run


def tolerance(
    graph: Graph,
    inputs: Mapping[str, np.ndarray],
    outputs: Mapping[str, np.ndarray],
    dtype: str | Callable[[Node], str] = "float32",
) -> dict[str, float]:
    """Returns how far each floating output may be from ``outputs``, the reference's for ``inputs``.

    What float32 holds as infinity says nothing of how far the others may be.
    """
    with np.errstate(over="ignore"):
        held = {
            name: np.where(np.isinf(array.astype(np.float32)), np.inf, array)
            for name, array in outputs.items()
            if array.dtype.kind == "f"
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
        for name, array in outputs.items()
        if array.dtype.kind == "f"
    }
    for trial in range(TRIALS):
        found = run(np.random.default_rng(trial))
        for name in most:
            with np.errstate(invalid="ignore"):
                change = np.abs(found[name] - outputs[name])
            most[name] = max(most[name], float(change[np.isfinite(change)].max(initial=0.0)))
    return {name: SLACK * change for name, change in most.items()}


def images_for(flops_an_image: int, images: int) -> int:
    """Returns how many of ``images`` a check takes."""
    return min(images, max(1, int(MOST_FLOPS // max(flops_an_image, 1))))


def check(
    predict: Callable[[np.ndarray], np.ndarray],
    graph_of: Callable[[int, bool], Graph],
    images: np.ndarray,
    dtype: str | Callable[[Node], str],
    batch: int | None = None,
) -> Check:
    """Compares one row an image with the reference's.

    Args:
        graph_of: the graph for a batch, whose images are pixels or not.
        images: uint8 or float32 [N, C, H, W].
        dtype: what the engine computes in, or a function from nodes to that.
        batch: for which alone the graph is made, or None.
    """
    pixels = images.dtype == np.uint8
    probe = graph_of(batch or 1, pixels)
    flops = sum(probe.cost_of(node).flops for node in probe.nodes) // (batch or 1)
    count = images_for(flops, len(images)) if len(images) else 0
    part = batch or min(count, reference.PART) or 1
    if batch is not None:
        count = max(count // batch, 1) * batch if len(images) >= batch else 0
    images = images[:count]
    found = predict(images)
    wanted, allowed = [], 0.0
    for first in range(0, count, part):
        some = images[first : first + part]
        graph = graph_of(len(some), pixels)
        inputs = {graph.inputs[0].name: some}
        outputs = reference.reference(graph, inputs)
        (rows,) = outputs.values()
        wanted.append(rows.reshape(len(some), -1))
        if first == 0:
            (allowed,) = tolerance(graph, inputs, outputs, dtype).values()
    exact = np.concatenate(wanted) if wanted else np.empty_like(found, np.float64)
    return Check(
        reference="NumPy float64",
        images=count,
        max_abs_diff=float(differences(found, exact).max(initial=0.0)),
        top1_agreement=float(np.mean(found.argmax(1) == exact.argmax(1))) if count else 1.0,
        tolerance=allowed,
        not_finite=int(exact.size - np.isfinite(exact).sum()),
    )
