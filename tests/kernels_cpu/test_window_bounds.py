"""Each output of a convolution is as near to float64's as the values of its own window allow.

    CNN_ENGINE_WINDOW_CASES=1000 pytest tests/kernels_cpu/test_window_bounds.py

tries so many random convolutions of each kernel in the place of a few.
"""

from __future__ import annotations

import os
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import window_bounds
from onnx_models import one_node
from test_conv2d_nhwc import Method, run
from test_fused_cpu import build, needs_bfloat16
from test_fused_cpu import run as run_fused

from cnn_engine import Engine, ops
from cnn_engine.graph.network import Conv2d, MaxPool2d, Network, Relu

CASES = int(os.environ.get("CNN_ENGINE_WINDOW_CASES", "40"))

#: What a random convolution of a method of conv2d_nhwc is not to draw.
FIXED: dict[str, dict] = {
    "direct": {},
    "planar": {"groups": 1},
    "stem": {
        "groups": 1,
        "kernel": (7, 7),
        "stride": (2, 2),
        "dilation": (1, 1),
        "channels": (1, 4),
        "filters": (16, 64),
        "largest": 40,
    },
    "winograd2": {"groups": 1, "kernel": (3, 3), "stride": (1, 1), "dilation": (1, 1)},
    "winograd4": {"groups": 1, "kernel": (3, 3), "stride": (1, 1), "dilation": (1, 1)},
}


def nhwc(name):
    """Returns a method of conv2d_nhwc as :func:`window_bounds.check` calls it."""

    def conv(x, weight, bias, *, stride, padding, dilation, groups):
        case = (*x.shape, len(weight), weight.shape[2:], stride, padding, dilation, groups)
        method = Method.planar if name == "stem" else getattr(Method, name)
        return run(case, method, x, weight, bias)

    return conv


@pytest.mark.parametrize("name", FIXED)
def test_channels_last(instruction_set, name):
    for case in window_bounds.cases(CASES, **FIXED[name]):
        window_bounds.check(case, nhwc(name))


@pytest.mark.parametrize(
    ("variant", "reduction"), [("if", False), ("if", True), ("pad", False), ("blocked", False)]
)
def test_operator(instruction_set, variant, reduction):
    def conv(x, weight, bias, **parameters):
        return ops.conv2d(
            x, weight, bias, variant=variant, reduction=reduction, threads=1, **parameters
        )

    for case in window_bounds.cases(CASES):
        window_bounds.check(case, conv)


def fused(x, weight, bias, *, padding, dtype="float32", last=False, **_):
    """A network of one convolution, its output as it is; ``last``: behind one that hands x on."""
    (_, c, h, w), (k, _, r, s) = x.shape, weight.shape
    top, left, bottom, right = padding
    x = np.pad(x, ((0, 0), (0, 0), (top, bottom), (left, right)))
    layers, parameters = [Conv2d("conv", k, r)], {"conv.weight": weight, "conv.bias": bias}
    if last:
        layers.insert(0, Conv2d("same", c, 1))
        parameters["same.weight"] = np.eye(c, dtype=np.float32)[:, :, None, None].copy()
        parameters["same.bias"] = np.zeros(c, np.float32)
    network = Network("one", x.shape[1:], tuple(layers))
    found = run_fused(build(network, parameters, dtype), x)
    return found.reshape(len(x), k, h + top + bottom - r + 1, w + left + right - s + 1)


def finite_cases(kernel, channels):
    """Cases that the fused networks run: images with NaN or infinity are computed layer by layer."""
    fixed = {"kernel": kernel, "stride": (1, 1), "dilation": (1, 1), "groups": 1}
    for case in window_bounds.cases(CASES, channels=channels, **fixed):
        if np.isfinite(case.x).all():
            yield case


@pytest.mark.parametrize("channels", [(1, 6), (8, 40)])
@pytest.mark.parametrize("kernel", [(3, 3), (5, 5)])
def test_fused(instruction_set, kernel, channels):
    for case in finite_cases(kernel, channels):
        window_bounds.check(case, fused)


def test_fused_last(instruction_set):
    """The last convolution of a network has tiles of its own."""
    for case in finite_cases((5, 5), (8, 40)):
        # The first convolution's sums of the largest numbers and zeros are theirs, too.
        window_bounds.check(case, partial(fused, last=True))


@pytest.mark.parametrize("channels", [(1, 6), (8, 40)])
@pytest.mark.parametrize("kernel", [(3, 3), (5, 5)])
def test_fused_bfloat16(kernel, channels):
    """Tiles are of float32 there, and the largest: what leaks is far more than float32's bound."""
    needs_bfloat16()
    for case in finite_cases(kernel, channels):
        window_bounds.check(case, partial(fused, dtype="bfloat16"), "bfloat16", flushes=True)


@pytest.mark.parametrize(("seed", "channels"), [(195, (1, 6)), (276, (8, 40))])
def test_fused_bfloat16_of_subnormal_numbers(seed, channels):
    """VDPBF16PS takes them as 0, whatever the floating-point mode is; the bound counts no more than that."""
    needs_bfloat16()
    case = window_bounds.random_case(seed, (3, 3), (1, 1), (1, 1), 1, channels)
    conv = partial(fused, dtype="bfloat16")
    window_bounds.check(case, conv, "bfloat16", flushes=True)
    with pytest.raises(AssertionError, match="past their bound"):
        window_bounds.check(case, conv, "bfloat16")
    lifted = replace(case, x=case.x * np.float32(2.0**60))
    window_bounds.check(lifted, conv, "bfloat16")


LAYERED = {
    "3x3": {"kernel": (3, 3), "stride": (1, 1), "dilation": (1, 1), "groups": 1},
    "stem": FIXED["stem"],
    "any": {},
}


@pytest.mark.parametrize("name", LAYERED)
def test_engine(name):
    """A model of one convolution, with the engine's own choice of kernels."""

    def conv(x, weight, bias, *, stride, padding, dilation, groups):
        proto, inputs = one_node(
            "Conv", [x, weight, bias], known=(1, 2), strides=stride, pads=padding,
            dilations=dilation, group=groups,
        )  # fmt: skip
        with Engine(proto, device="cpu", threads=1) as engine:
            (found,) = engine.run(inputs).values()
        return found

    for case in window_bounds.cases(max(CASES // 2, 10), **LAYERED[name]):
        window_bounds.check(case, conv)


@pytest.mark.parametrize("channels", [4, 8, 9, 16])
def test_an_infinity_stays_in_its_group(instruction_set, rng, channels):
    """However few channels a group has: the same windows of other groups stay finite."""
    groups, side = 6, 15
    x = rng.standard_normal((2, groups * channels, side, side)).astype(np.float32)
    x[0, 2 * channels + 1, 7, 7] = np.inf
    x[1, 3 * channels, 0, 14] = np.nan
    weight = rng.standard_normal((groups * channels, channels, 3, 3)).astype(np.float32)
    proto, inputs = one_node("Conv", [x, weight], known=(1,), pads=[1] * 4, group=groups)
    with Engine(proto, device="cpu", threads=1) as engine:
        (found,) = engine.run(inputs).values()
    finite = np.isfinite(found)
    wanted = np.ones_like(finite)
    wanted[0, 2 * channels : 3 * channels, 6:9, 6:9] = False
    wanted[1, 3 * channels : 4 * channels, 0:2, 13:15] = False
    np.testing.assert_array_equal(finite, wanted)


def pooled(x, weight, bias, *, padding, **_):
    """A network of one convolution and a pool."""
    top, left, bottom, right = padding
    x = np.pad(x, ((0, 0), (0, 0), (top, bottom), (left, right)))
    layers = (Conv2d("conv", len(weight), weight.shape[2:]), MaxPool2d("pool", 2))
    network = Network("pooled", x.shape[1:], layers)
    return run_fused(build(network, {"conv.weight": weight, "conv.bias": bias}), x)


def check_pooled(case):
    """A pooled output is within the largest bound of its four windows."""

    def pool(values):
        values = values[:, :, : values.shape[2] // 2 * 2, : values.shape[3] // 2 * 2]
        n, k, h, w = values.shape
        return values.reshape(n, k, h // 2, 2, w // 2, 2).max((3, 5))

    found = pooled(case.x, case.weight, case.bias, padding=case.padding)
    wanted = pool(case.wanted)
    error = np.abs(found.reshape(wanted.shape) - wanted)
    assert (error <= pool(case.bound())).all(), case.name


@pytest.mark.parametrize("channels", [3, 16])
def test_fused_pooled(instruction_set, channels):
    """Of a pooled output, by the largest bound of the four: many windows are computed directly."""
    fixed = {"kernel": (5, 5), "stride": (1, 1), "dilation": (1, 1), "groups": 1}
    for case in window_bounds.cases(CASES, channels=(channels, channels), largest=40, **fixed):
        if np.isfinite(case.x).all() and min(case.wanted.shape[2:]) > 1:
            check_pooled(case)


#: A method, kernel, stride and channels.
SMOOTH = {
    "winograd2": (nhwc("winograd2"), (3, 3), (1, 1), (3, 32)),
    "winograd4": (nhwc("winograd4"), (3, 3), (1, 1), (3, 32)),
    "stem": (nhwc("stem"), (7, 7), (2, 2), (3, 3)),
    "fused 3x3": (fused, (3, 3), (1, 1), (3, 3)),
    "fused 5x5": (fused, (5, 5), (1, 1), (3, 3)),
    "fused features": (fused, (5, 5), (1, 1), (8, 32)),
    "pooled 3x3": (None, (3, 3), (1, 1), (3, 3)),
    "pooled 5x5": (None, (5, 5), (1, 1), (3, 3)),
    "pooled features": (None, (5, 5), (1, 1), (8, 32)),
}


def check_smooth(name, photographs=None):
    conv, kernel, stride, channels = SMOOTH[name]
    for seed in range(max(8, CASES // 5)):
        case = window_bounds.smooth_case(seed, kernel, stride, channels, photographs)
        if conv is None:
            check_pooled(case)
        else:
            window_bounds.check(case, conv)


@pytest.mark.parametrize("name", SMOOTH)
def test_smooth_images(instruction_set, name):
    """Products of one sign add up to partial sums, and roundings, that are larger than random ones."""
    check_smooth(name)


@pytest.fixture(scope="module")
def photographs(test_data):
    records = np.fromfile(test_data("cifar-10-batches-bin/data_batch_1.bin"), np.uint8)
    images = records.reshape(-1, 3073)[:400, 1:].reshape(-1, 3, 32, 32)
    letterboxed = images[:100].copy()
    letterboxed[:, :, :6] = letterboxed[:, :, 26:] = 0
    return window_bounds.Photographs(np.concatenate([images, letterboxed]))


@pytest.mark.parametrize("name", [name for name in SMOOTH if "features" not in name])
def test_photographs(instruction_set, photographs, name):
    check_smooth(name, photographs)


def test_products_that_are_rounded_too(instruction_set, photographs):
    """Without fused multiply-adds, an output of this photograph was past its bound by a tenth."""
    conv, kernel, stride, channels = SMOOTH["stem"]
    case = window_bounds.smooth_case(22, kernel, stride, channels, photographs)
    window_bounds.check(case, conv)


@pytest.mark.parametrize("kernel", [3, 5])
@pytest.mark.parametrize("channels", [3, 16])
def test_fused_windows_of_zeros_stay_zero(instruction_set, rng, kernel, channels):
    """In the network's second convolution, too, whose border is what a ReLU left, and before a pool."""
    layers = (
        Conv2d("first", 16, kernel, padding=kernel // 2), Relu("relu"),
        Conv2d("second", 20, kernel, padding=kernel // 2), MaxPool2d("pool", 2),
    )  # fmt: skip
    network = Network("two", (channels, 24, 24), layers)
    parameters = {name: np.abs(array) for name, array in network.random_weights(3).items()}
    for name in ("first.bias", "second.bias"):
        parameters[name][:] = 0
    x = rng.random((2, channels, 24, 24)).astype(np.float32)
    x[:, :, 7:] = 0
    found = run_fused(build(network, parameters), x).reshape(2, 20, 12, 12)
    below = -(-(7 + kernel - 1) // 2)
    assert (found[:, :, below:] == 0).all()
    assert (found[:, :, : below - 1] > 0).all()


def test_a_leak_is_found():
    """What a bound of a whole tensor passes: one residue in a window of zeros, a large value's rounding."""
    rng = np.random.default_rng(0)
    x = np.zeros((1, 16, 12, 12), np.float32)
    x[:, :, :, 6:] = rng.standard_normal((1, 16, 12, 6))
    weight = rng.standard_normal((8, 16, 3, 3)).astype(np.float32)
    case = window_bounds.Case("leak", x, weight, np.zeros(8, np.float32))
    exact = case.wanted.astype(np.float32)
    assert window_bounds.excess(case, exact).max() <= 1
    residue = exact.copy()
    residue[0, 3, 2, 1] = 1e-12
    assert (window_bounds.excess(case, residue) > 1).sum() == 1
    x[0, 4, 8, 9] = 1e6
    case = window_bounds.Case("leak", x, weight, np.zeros(8, np.float32))
    leaked = case.wanted.astype(np.float32)
    leaked[0, :, :, 6:] += 0.01
    parts = window_bounds.excess(case, leaked)
    assert (parts[0, :, 6:9, 7:10] <= 1).all()
    assert (parts[0, :, :5, 6:] > 1).all()
