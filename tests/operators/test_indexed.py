"""Reading and writing where computed indices say: the kernels beside the references, bit by bit."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx_models import one_node
from test_kernel_rows import run

from cnn_engine import Engine
from cnn_engine.devices.cpu import CpuDevice
from cnn_engine.errors import InputError
from cnn_engine.operators.gather import (
    Gather,
    GatherElements,
    GatherND,
    ScatterElements,
    ScatterND,
)

JOINS = ("none", "add", "mul", "max", "min")


def check(op, *arrays):
    """Asserts that the kernel gives the reference's bits."""
    (found,), steps = run(CpuDevice(), op, *arrays)
    assert steps == ["scatter_at" if len(arrays) > 2 else "gather_at"]
    np.testing.assert_array_equal(found, op.reference(*arrays))


def numbers(rng, shape, dtype="float32"):
    return (rng.standard_normal(shape) * 40).astype(dtype)


def indices(rng, size, shape, dtype="int64"):
    return rng.integers(-size, size, shape).astype(dtype)


@pytest.mark.parametrize("dtype", ["float32", "float64", "int8", "int16", "bool"])
@pytest.mark.parametrize("kind", ["int32", "int64"])
@pytest.mark.parametrize("axis", [0, 1, -1])
def test_gather(rng, dtype, kind, axis):
    x = numbers(rng, (5, 6, 7), dtype)
    check(Gather(axis), x, indices(rng, x.shape[axis], (3, 4), kind))
    check(GatherElements(axis), x, indices(rng, x.shape[axis], (4, 5, 6), kind))
    check(Gather(axis), x, indices(rng, x.shape[axis], (), kind))


@pytest.mark.parametrize(
    ("shape", "shared", "rows", "columns"),
    [
        ((5, 6, 7), 0, (4,), 1), ((5, 6, 7), 0, (2, 3), 3), ((2, 3, 4, 5), 1, (2, 6), 2),
        ((2, 3, 4), 2, (2, 3), 1),
    ],
)  # fmt: skip
def test_gather_and_scatter_slices(rng, shape, shared, rows, columns):
    x = numbers(rng, shape)
    positions = np.stack(
        [indices(rng, size, rows) for size in shape[shared : shared + columns]], axis=-1
    )
    check(GatherND(shared), x, positions)
    if shared == 0:
        for join in JOINS:
            check(ScatterND(join), x, positions, numbers(rng, (*rows, *shape[columns:])))


@pytest.mark.parametrize("join", JOINS)
@pytest.mark.parametrize("axis", [0, 1])
def test_scatter_elements_of_which_several_go_to_one_place(rng, join, axis):
    x = numbers(rng, (4, 3))
    x[0, 0] = np.nan
    at = indices(rng, x.shape[axis], (4, 3))
    check(ScatterElements(axis, join), x, at, numbers(rng, at.shape))


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_any_shapes(data):
    shape = tuple(data.draw(st.lists(st.integers(0, 4), min_size=1, max_size=4)))
    axis = data.draw(st.integers(0, len(shape) - 1))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    size = max(shape[axis], 1)
    x = numbers(rng, shape)
    some = tuple(data.draw(st.integers(0, s)) for s in shape)
    if shape[axis] == 0:
        some = (*some[:axis], 0, *some[axis + 1 :])
    at = indices(rng, size, some)
    check(GatherElements(axis), x, at)
    check(ScatterElements(axis, data.draw(st.sampled_from(JOINS))), x, at, numbers(rng, some))
    if shape[axis]:
        check(Gather(axis), x, indices(rng, size, (2, 0)[: data.draw(st.integers(0, 2))]))


@pytest.mark.parametrize("wrong", [7, -8, 2**40])
@pytest.mark.parametrize(
    "operator", ["Gather", "GatherElements", "GatherND", "ScatterElements", "ScatterND"]
)
def test_indices_of_no_place(rng, operator, wrong):
    at = indices(rng, 7, (500, 1))
    at[321] = wrong
    arrays = [numbers(rng, (7, 1)), at]
    if operator.startswith("Scatter"):
        arrays.append(numbers(rng, (500, 1)))
    proto, inputs = one_node(operator, arrays, 13)
    for threads in (1, 2):
        with pytest.raises(InputError, match=f"indices: expected positions of 7, found {wrong}"):
            Engine(proto, device="cpu", threads=threads).run(inputs)


def test_the_first_wrong_index_is_named_whatever_the_threads(rng):
    at = indices(rng, 9, (40_000,))
    at[[20_000, 39_999]] = 100, 200
    proto, inputs = one_node("Gather", [numbers(rng, (9, 3)), at], 13)
    with pytest.raises(InputError, match="found 100$"):
        Engine(proto, device="cpu", threads=2).run(inputs)


def test_what_is_written_to_is_not_the_callers(rng):
    x, at = numbers(rng, (6, 2)), np.int64([[1], [1]])
    proto, inputs = one_node("ScatterND", [x, at, numbers(rng, (2, 2))], 13)
    kept = {name: array.copy() for name, array in inputs.items()}
    found = Engine(proto, device="cpu").run(inputs)["y0"]
    for name, array in kept.items():
        np.testing.assert_array_equal(inputs[name], array)
    np.testing.assert_array_equal(found[1], inputs["x2"][1])
