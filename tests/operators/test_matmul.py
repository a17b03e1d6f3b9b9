from __future__ import annotations

import numpy as np
import pytest
import tolerances
from hypothesis import given, settings
from hypothesis import strategies as st

from cnn_engine import InputError, UnsupportedError, _cpu, ops
from cnn_engine.operators.matmul import Matmul

CASES = [
    ((1, 1), (1, 1)), ((3, 5), (5, 4)), ((70, 33), (33, 65)), ((7,), (7,)), ((4,), (4, 9)),
    ((9, 4), (4,)), ((0, 3), (3, 2)), ((2, 0), (0, 3)), ((2, 3, 4, 5), (2, 3, 5, 6)),
    ((3, 1, 4, 5), (2, 5, 6)), ((2, 8, 16), (16, 3)), ((5, 16), (4, 16, 2)),
    ((2, 1, 3, 1, 4, 6), (2, 5, 1, 2, 6, 3)), ((1, 2048), (2048, 1000)), ((130, 300), (300, 140)),
    ((3, 700), (700, 5)),
]  # fmt: skip


def swapped(array):
    return np.ascontiguousarray(np.swapaxes(array, -1, -2)) if array.ndim > 1 else array


def check(device, rng, shapes, transpose=(False, False), blocked=True, threads=None):
    a, b = (rng.standard_normal(shape).astype(np.float32) for shape in shapes)
    record = Matmul()
    wanted, magnitude = record.reference(a, b), record.reference(np.abs(a), np.abs(b))
    given_ = [
        swapped(array) if flag else array for array, flag in zip((a, b), transpose, strict=True)
    ]
    out, memory = device.guarded(wanted.shape)
    found = ops.matmul(
        *map(device.put, given_), transpose=transpose, blocked=blocked, out=out, threads=threads
    )
    assert found is out
    device.check_guards(memory)
    bound = tolerances.sum_of_products(a.shape[-1], magnitude)
    tolerances.assert_close(device.get(out), wanted, bound, shapes=shapes, transpose=transpose)


@pytest.mark.parametrize("blocked", [False, True])
@pytest.mark.parametrize("shapes", CASES, ids=str)
def test_against_reference(device, rng, shapes, blocked):
    for transpose in ((False, False), (True, False), (False, True), (True, True)):
        check(device, rng, shapes, transpose, blocked)


@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(0, 40), columns=st.integers(0, 40), depth=st.integers(0, 40),
    batch=st.lists(st.tuples(st.integers(0, 3), st.sampled_from("abx")), max_size=4),
    transpose=st.tuples(st.booleans(), st.booleans()), blocked=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
)  # fmt: skip
def test_random_shapes(rows, columns, depth, batch, transpose, blocked, seed):
    """Batch dimensions that both have, or that one repeats."""
    from conftest import Device

    left = tuple(1 if who == "a" else size for size, who in batch)
    right = tuple(1 if who == "b" else size for size, who in batch)
    shapes = ((*left, rows, depth), (*right, depth, columns))
    check(Device("cpu"), np.random.default_rng(seed), shapes, transpose, blocked, threads=3)


@pytest.mark.parametrize("isa", _cpu.instruction_sets())
def test_on_every_instruction_set(rng, isa):
    from conftest import Device

    selected = _cpu.selected_instruction_set()
    _cpu.select_instruction_set(isa)
    try:
        for shapes in CASES:
            check(Device("cpu"), rng, shapes)
    finally:
        _cpu.select_instruction_set(selected)


def test_threads_do_not_change_the_result(rng):
    for shapes in (((3, 100, 64), (3, 64, 50)), ((500, 300), (300, 9))):
        a, b = (rng.standard_normal(shape).astype(np.float32) for shape in shapes)
        one = ops.matmul(a, b, threads=1)
        for threads in (2, 5, 16):
            np.testing.assert_array_equal(ops.matmul(a, b, threads=threads), one)


@pytest.mark.parametrize("blocked", [False, True])
def test_bias_and_clamp(device, rng, blocked):
    a, b = (
        rng.standard_normal((9, 20)).astype(np.float32),
        rng.standard_normal((20, 13)).astype(np.float32),
    )
    bias = rng.standard_normal(13).astype(np.float32)
    wanted = a.astype(np.float64) @ b + bias
    bound = tolerances.sum_of_products(21, np.abs(a).astype(np.float64) @ np.abs(b) + np.abs(bias))
    put = [device.put(array) for array in (a, b, bias)]
    for lowest, highest in ((-np.inf, np.inf), (0.0, np.inf), (-1.0, 2.0)):
        found = device.get(ops.matmul(*put, blocked=blocked, lowest=lowest, highest=highest))
        tolerances.assert_close(found, np.clip(wanted, lowest, highest), bound, lowest=lowest)


@pytest.mark.parametrize(
    ("n", "features", "outputs"),
    [(3, 320, 10), (1, 5184, 140), (0, 8, 3), (1, 1, 1), (5, 33, 31), (130, 9, 2), (70, 64, 200),
     (300, 7, 4)],
)  # fmt: skip
def test_linear_in_blocks(device, rng, n, features, outputs):
    x = rng.standard_normal((n, features)).astype(np.float32)
    w = rng.standard_normal((outputs, features)).astype(np.float32)
    bias = rng.standard_normal(outputs).astype(np.float32)
    wanted = x.astype(np.float64) @ w.T.astype(np.float64) + bias
    magnitude = np.abs(x).astype(np.float64) @ np.abs(w.T).astype(np.float64) + np.abs(bias)
    bound = tolerances.sum_of_products(features + 1, magnitude)
    for lowest in (-np.inf, 0.0):
        out, memory = device.guarded(wanted.shape)
        arguments = [device.put(array) for array in (x, w, bias)]
        assert ops.linear_blocked(*arguments, lowest=lowest, out=out) is out
        device.check_guards(memory)
        tolerances.assert_close(device.get(out), np.maximum(wanted, lowest), bound, lowest=lowest)


def test_errors():
    def zeros(*shape):
        return np.zeros(shape, np.float32)

    with pytest.raises(InputError, match=r"as many columns as rows, found \[2, 3\] and \[4, 5\]"):
        ops.matmul(zeros(2, 3), zeros(4, 5))
    with pytest.raises(InputError, match=r"bias: expected shape \[5\], found \[2\]"):
        ops.matmul(zeros(2, 3), zeros(3, 5), zeros(2))
    with pytest.raises(UnsupportedError, match="at most 4 batch dimensions"):
        ops.matmul(zeros(2, 1, 2, 1, 2, 1, 1), zeros(1, 2, 1, 2, 1, 1, 1))
