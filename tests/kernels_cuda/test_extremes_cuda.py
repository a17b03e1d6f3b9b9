"""Infinities, NaN and numbers near the ends of the types' ranges in convolutions on a GPU, beside float64."""

from __future__ import annotations

import numpy as np
import pytest
import tolerances
from onnx import helper
from onnx_models import model, tensor

from cnn_engine import Engine
from cnn_engine.graph.reference import reference

pytestmark = pytest.mark.gpu

#: Channels, filters, side of a kernel, stride and groups.
CONVOLUTIONS = [
    (64, 64, 3, 1, 1), (96, 40, 1, 1, 1), (128, 256, 3, 2, 1), (3, 64, 3, 1, 1), (3, 32, 7, 2, 1),
    (1, 16, 5, 1, 1), (4, 24, 6, 1, 1), (10, 12, 3, 1, 1), (64, 64, 3, 1, 4), (64, 64, 3, 1, 64),
    (64, 64, 7, 1, 64), (128, 128, 3, 1, 32), (48, 96, 3, 2, 12),
]  # fmt: skip


def beside_float64(
    engine: Engine,
    x: np.ndarray,
    terms: int,
    dtype: str = "float32",
    joined: np.ndarray | None = None,
) -> None:
    """Compares an engine's outputs with float64's; where ``joined`` [N, K, H, W] holds, NaN is right, too."""
    with np.errstate(all="ignore"):
        ((_, wanted),) = reference(engine._base, {"x": x}).items()
    ((_, found),) = engine.run({"x": x}).items()
    if joined is not None:
        found = np.where(np.isnan(found) & joined, wanted.astype(np.float32), found)
    finite = np.isfinite(wanted) & (np.abs(wanted) < 3e38)
    there = np.abs(wanted[finite]).max(initial=1e-30)
    unit = {"float32": tolerances.EPS, "tf32": 2.0**-10, "bfloat16": 2.0**-7}[dtype]
    bound = np.where(finite, 8 * np.sqrt(terms) * unit * there, 0)
    tolerances.assert_close(found, wanted.astype(np.float32), bound, terms=terms)


def network(
    channels, filters, side, stride, groups, scale=1.0, positive=False, clip=False
) -> bytes:
    rng = np.random.default_rng(channels + side)
    weight = rng.standard_normal((filters, channels // groups, side, side)) * scale
    weight = np.abs(weight) if positive else weight
    how = {"pads": [side // 2] * 4, "strides": [stride] * 2, "group": groups}
    nodes = [helper.make_node("Conv", ["x", "w"], ["a"], "conv", **how)]
    constants = {"w": weight.astype(np.float32), "lo": np.float32(0), "hi": np.float32(6)}
    if clip:
        nodes.append(helper.make_node("Clip", ["a", "lo", "hi"], ["y"], "clip"))
    made = helper.make_empty_tensor_value_info(nodes[-1].output[0])
    return model(nodes, [tensor("x", [2, channels, 13, 13])], [made], constants).SerializeToString()


def in_windows(x: np.ndarray, filters: int, side: int, stride: int, groups: int) -> np.ndarray:
    """Returns the outputs [N, K, H, W] whose windows hold what is no finite number, in their group."""
    n, channels, *sizes = x.shape
    none = ~np.isfinite(x.reshape(n, groups, channels // groups, *sizes)).all(axis=2)
    none = np.pad(none, ((0, 0), (0, 0), *[(side // 2, side // 2)] * 2))
    windows = np.lib.stride_tricks.sliding_window_view(none, (side, side), axis=(2, 3))
    reached = windows[:, :, ::stride, ::stride].any(axis=(-2, -1))
    return np.repeat(reached, filters // groups, axis=1)


def in_joined_groups(engine: Engine, x: np.ndarray, case: tuple[int, ...]) -> np.ndarray:
    """Returns the outputs of other groups than its own that what is no finite number reaches."""
    _, filters, side, stride, groups = case
    ran = engine._plans.open().placed(len(x), False).graph
    (left,) = (node.op.groups for node in ran.nodes if node.op.kind.startswith("conv2d"))
    own = in_windows(x, filters, side, stride, groups)
    return in_windows(x, filters, side, stride, left) & ~own


@pytest.mark.parametrize("dtype", ["float32", "tf32", "bfloat16"])
@pytest.mark.parametrize("case", CONVOLUTIONS, ids=str)
def test_an_infinity_reaches_its_windows_alone(case, dtype):
    """As infinities of the weights' signs, which clip holds; where both signs meet, as NaN.

    It reaches the same windows of the groups that are joined with its own, as NaN: their weights for it are
    0. Of no other group.
    """
    rng = np.random.default_rng(9)
    x = np.abs(rng.standard_normal((2, case[0], 13, 13))).astype(np.float32)
    for positions in ({(0, 0, 5, 5): np.inf}, {(0, 0, 5, 5): np.inf, (0, 0, 6, 6): -np.inf},
                   {(1, 0, 0, 12): np.nan}, {(1, 0, 12, 0): -np.inf}):  # fmt: skip
        some = x.copy()
        for place, value in positions.items():
            some[place] = value
        for options in ({}, {"positive": True, "clip": True}):
            with Engine(network(*case, **options), device="cuda", dtype=dtype) as engine:
                joined = in_joined_groups(engine, some, case) if case[4] > 1 else None
                beside_float64(engine, some, case[0] // case[4] * case[2] ** 2, dtype, joined)


@pytest.mark.parametrize("case", CONVOLUTIONS, ids=str)
def test_numbers_near_the_largest(case):
    """A part that rounds to infinity would make one of what is none."""
    rng = np.random.default_rng(9)
    x = rng.uniform(3.39e38, 3.4028e38, (2, case[0], 13, 13)).astype(np.float32)
    x *= rng.choice([-1, 1], x.shape).astype(np.float32)
    with Engine(network(*case, scale=1e-6), device="cuda") as engine:
        beside_float64(engine, x, case[0] // case[4] * case[2] ** 2)


@pytest.mark.parametrize("case", CONVOLUTIONS[:6], ids=str)
def test_weights_that_are_infinite_or_tiny(case):
    """An infinity times the smallest of a filter's weights is one, too."""
    rng = np.random.default_rng(9)
    channels, filters, side, stride, groups = case
    weight = np.abs(rng.standard_normal((filters, channels // groups, side, side))) + 0.1
    weight[:, 0, side // 2, side // 2] = 1e-20
    weight[3, 0, 0, 0] = np.inf
    how = {"pads": [side // 2] * 4, "strides": [stride] * 2, "group": groups}
    node = helper.make_node("Conv", ["x", "w"], ["a"], "conv", **how)
    made = helper.make_empty_tensor_value_info("a")
    inputs = [tensor("x", [2, channels, 13, 13])]
    built = model([node], inputs, [made], {"w": weight.astype(np.float32)})
    x = rng.uniform(0.5, 1, (2, channels, 13, 13)).astype(np.float32)
    x[0, 0, 6, 6] = np.inf
    with Engine(built.SerializeToString(), device="cuda") as engine:
        beside_float64(engine, x, channels // groups * side**2)


@pytest.mark.parametrize("activation", [np.inf, -np.inf])
def test_two_products_with_gelu_between_them(activation):
    """ConvNeXt's blocks, which one kernel makes."""
    rng = np.random.default_rng(2)
    constants = {
        "w": rng.standard_normal((96, 96, 1, 1)), "v": rng.standard_normal((384, 96, 1, 1)) * 0.1,
        "u": np.abs(rng.standard_normal((96, 384, 1, 1)) * 0.1), "z": np.zeros(384), "a": np.full(96, 0.5),
    }  # fmt: skip
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["p"], "first"),
        helper.make_node("Conv", ["p", "v", "z"], ["q"], "second"),
        helper.make_node("Gelu", ["q"], ["r"], "gelu"),
        helper.make_node("Conv", ["r", "u", "a"], ["s"], "third"),
        helper.make_node("Add", ["s", "p"], ["y"], "sum"),
    ]
    made = helper.make_empty_tensor_value_info("y")
    built = model(
        nodes, [tensor("x", [1, 96, 14, 14])], [made],
        {name: array.astype(np.float32) for name, array in constants.items()},
    )  # fmt: skip
    x = rng.standard_normal((1, 96, 14, 14)).astype(np.float32)
    x[0, 7, 3, 3] = activation
    with Engine(built.SerializeToString(), device="cuda") as engine:
        with np.errstate(all="ignore"):
            ((_, wanted),) = reference(engine._base, {"x": x}).items()
        ((_, found),) = engine.run({"x": x}).items()
    there = np.isfinite(wanted)
    assert there.sum() == wanted.size - 96
    np.testing.assert_allclose(found[there], wanted[there], rtol=1e-4, atol=1e-4)
    assert (np.isnan(found) <= np.isnan(wanted)).all()
