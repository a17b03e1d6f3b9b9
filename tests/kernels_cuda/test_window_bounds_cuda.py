"""Random convolutions on a GPU, each output within the bound of its own window: every variant, every type."""

from __future__ import annotations

import numpy as np
import pytest
import window_bounds
from onnx import helper
from onnx_models import model, tensor

from cnn_engine import Engine
from cnn_engine.errors import UnsupportedError

pytestmark = pytest.mark.gpu

#: Kinds of inputs whose numbers float16 does not have.
PAST_FLOAT16 = ("dark", "outlier", "huge", "channel")


def convolution(**options: object):
    """Returns what runs a convolution as an engine does."""

    def run(x, weight, bias, *, stride, padding, dilation, groups) -> np.ndarray:
        node = helper.make_node(
            "Conv", ["x", "w", "b"], ["y"], "conv", group=groups, strides=list(stride),
            pads=list(padding), dilations=list(dilation),
        )  # fmt: skip
        made = helper.make_empty_tensor_value_info("y")
        constants = {"w": weight, "b": bias}
        network = model([node], [tensor("x", x.shape)], [made], constants)
        with Engine(network.SerializeToString(), device="cuda", **options) as engine:
            return engine.run({"x": x})["y"]

    return run


def check(case: window_bounds.Case, dtype: str) -> None:
    """Asserts that each output is within its window's bound, and within what the scales of places cost.

    Hopper's float32 is two parts of float16, in one scale for 32 channels of a place. Of a number below 2^-39
    of the largest of these it has nothing, which shows where the largest ones' weights are 0.
    """
    found = convolution(dtype=dtype)(
        case.x, case.weight, case.bias, stride=case.stride, padding=case.padding,
        dilation=case.dilation, groups=case.groups,
    )  # fmt: skip
    part = window_bounds.excess(case, found, dtype)
    if dtype == "float32":
        size = np.abs(np.where(np.isfinite(case.x), case.x, 0))
        most = np.broadcast_to(size.max(axis=1, keepdims=True), size.shape).astype(np.float64)
        lost = case.operator.reference(most, np.abs(case.weight), None) * 2.0**-38
        with np.errstate(all="ignore"):
            part = np.where(np.abs(found - case.wanted) <= case.bound(dtype) + lost, 0, part)
    if 1 < case.groups < case.x.shape[1]:  # those that are joined have weights of 0 for each other
        none = np.broadcast_to(~np.isfinite(case.x).all(axis=1, keepdims=True), case.x.shape)
        reached = (
            case.operator.reference(none.astype(np.float64), np.ones_like(case.weight), None) > 0
        )
        part = np.where(np.isnan(found) & reached, 0, part)
    assert part.max(initial=0) <= 1, f"{case.name}: {int((part > 1).sum())} of {part.size}"


@pytest.mark.parametrize("seed", range(0, 60, 6))
@pytest.mark.parametrize("dtype", window_bounds.UNITS)
def test_every_type(dtype, seed):
    for case in window_bounds.cases(6, seed):
        if dtype == "float16" and any(f", {kind}" in case.name for kind in PAST_FLOAT16):
            continue
        check(case, dtype)


@pytest.mark.parametrize("channels", [(1, 4), (32, 128)])
@pytest.mark.parametrize("dtype", window_bounds.UNITS)
def test_what_hopper_multiplies(dtype, channels):
    """Few channels, which are read as the caller has them, and many in one group."""
    for case in window_bounds.cases(12, 500, channels=channels, groups=1, dilation=(1, 1)):
        if dtype == "float16" and any(f", {kind}" in case.name for kind in PAST_FLOAT16):
            continue
        check(case, dtype)


@pytest.mark.parametrize("variant", ["if", "pad", "tiled", "blocked"])
def test_every_variant(variant):
    run = 0
    for case in window_bounds.cases(24, 100):
        try:
            window_bounds.check(case, convolution(variant=variant))
        except UnsupportedError:
            continue
        run += 1
    assert run > 5
