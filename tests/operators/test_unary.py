"""The kernel unary: every function against its record's reference."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import tolerances
from conftest import Device
from native import SPECIAL, call, rounded

from cnn_engine import _cpu
from cnn_engine.operators import KINDS
from cnn_engine.operators.unary import Gelu, Unary

NAMES = [
    name for name in dir(_cpu.UnaryFunction) if name[0] != "_" and name not in ("name", "value")
]

#: Every record whose function the kernel has, and some with other numbers than the default.
RECORDS = [
    record()
    for record in KINDS.values()
    if issubclass(record, Unary) and record.kind in NAMES
] + [
    Gelu("tanh"),
    KINDS["affine"](1.5, -0.25),
    KINDS["scaled_tanh"](1.7159, 0.6667),
    KINDS["leaky_relu"](0.2),
    KINDS["elu"](2.5),
    KINDS["celu"](0.3),
    KINDS["swish"](1.7),
    KINDS["clip"](-0.5, 3.0),
    KINDS["clip"](2.0, -1.0),
    KINDS["hard_sigmoid"](0.1666667, 0.4),
    KINDS["shrink"](1.0, 0.25),
]  # fmt: skip


def name_of(record: Unary) -> str:
    fields = [f"{getattr(record, field.name)}" for field in dataclasses.fields(record)]
    return "-".join([record.function, *fields])


def apply(device, record, x, out, **options):
    function = getattr(_cpu.UnaryFunction, record.function)
    call(
        device,
        "unary",
        x,
        out,
        x.size,
        function,
        float(record.alpha),
        float(record.beta),
        **options,
    )


def check(device, record, x):
    out, memory = device.guarded(x.shape)
    apply(device, record, device.put(x), out)
    device.check_guards(memory)
    wanted = rounded(record.reference(x))
    bound = tolerances.unary(record.function, x, wanted, record.alpha, record.beta)
    tolerances.assert_close(device.get(out), wanted, bound, record=record)


def test_every_function_has_a_record():
    assert {record.function for record in RECORDS} == set(NAMES)


@pytest.mark.parametrize("record", RECORDS, ids=name_of)
def test_against_reference(device, rng, record):
    small = rng.standard_normal(3001).astype(np.float32) * 3
    large = rng.uniform(-110, 110, 2000).astype(np.float32)
    any_bits = rng.integers(0, 2**32, 5000, dtype=np.uint32).view(np.float32)
    any_bits = any_bits[np.isfinite(any_bits)]
    check(device, record, np.concatenate([SPECIAL, small, large, any_bits]))


@pytest.mark.parametrize("instruction_set", _cpu.instruction_sets())
@pytest.mark.parametrize("function", ["log", "mish", "softplus"])
def test_nearly_correctly_rounded_on_the_cpu(instruction_set, rng, function):
    record = KINDS[function]()
    x = np.concatenate([rng.standard_normal(20000) * 4, rng.uniform(-90, 90, 20000)])
    x = x.astype(np.float32)
    before = _cpu.selected_instruction_set()
    _cpu.select_instruction_set(instruction_set)
    try:
        out = np.empty_like(x)
        _cpu.unary(
            x.ctypes.data, out.ctypes.data, x.size, getattr(_cpu.UnaryFunction, function), 0, 0, 1
        )
    finally:
        _cpu.select_instruction_set(before)
    wanted = record.reference(x)
    bound = tolerances.rounding(wanted)
    if function == "mish":  # whose reference cancels, below 2^-53 of x
        bound = bound + tolerances.EPS * tolerances.EPS * np.abs(x)
    tolerances.assert_close(out, rounded(wanted), bound, function=function, isa=instruction_set)


#: Units in the last place that functions in float32 may be off on the CPU: 0.5 is a correct rounding.
ULPS = {"exp": 1.1, "tanh": 1.5, "erf": 1.5, "sin": 0.51, "cos": 0.51, "tan": 0.51, "atan": 0.51}


def many_floats(rng) -> np.ndarray:
    """Of all exponents, subnormal numbers too; near 0 and near turns; far out; what is not finite."""
    bits = rng.integers(0, 2**32, 60000, dtype=np.uint32)
    turns = np.arange(-700000, 700000, 137) * (math.pi / 4)
    x = np.concatenate([
        bits.view(np.float32), bits.view(np.int32).astype(np.float32), rng.uniform(-110, 110, 60000),
        rng.standard_normal(60000), rng.uniform(-1.2, 1.2, 60000), rng.uniform(-(2**21), 2**21, 60000),
        turns, np.array([0.6, 0.9, 1, 4, 10, 2**20, 1e10, 3e38, 1e-45, 1e-39]), -SPECIAL, SPECIAL,
    ])  # fmt: skip
    return x.astype(np.float32)


@pytest.mark.parametrize("instruction_set", _cpu.instruction_sets())
@pytest.mark.parametrize("function", ULPS)
def test_errors_on_the_cpu_are_of_few_units(instruction_set, rng, function):
    """In place, and of sizes that are no whole vectors."""
    with np.errstate(invalid="ignore"):
        x = many_floats(rng)
    wanted = KINDS[function]().reference(x)
    before = _cpu.selected_instruction_set()
    _cpu.select_instruction_set(instruction_set)
    try:
        for size in (x.size, 1, 5, 255, 257):
            y = x[-size:].copy()
            _cpu.unary(
                y.ctypes.data, y.ctypes.data, size, getattr(_cpu.UnaryFunction, function), 0, 0, 1
            )
            exact = wanted[-size:]
            nearest = rounded(exact).astype(np.float32)
            np.testing.assert_array_equal(np.isnan(y), np.isnan(nearest))
            infinite = np.isinf(nearest) | np.isinf(y)
            np.testing.assert_array_equal(y[infinite], nearest[infinite])
            some = np.isfinite(nearest)
            unit = np.spacing(np.abs(nearest[some]))
            errors = np.abs(y[some] - exact[some]) / unit
            worst = errors.argmax()
            assert errors[worst] <= ULPS[function], (x[-size:][some][worst], y[some][worst])
            zero = (x[-size:] == 0) & (nearest == 0)
            np.testing.assert_array_equal(np.signbit(y[zero]), np.signbit(nearest[zero]))
    finally:
        _cpu.select_instruction_set(before)


def exact_gelu(x):
    """x times the normal distribution's integral, whose reference cancels far below 0."""
    wide = x.astype(np.float64)
    return wide * np.vectorize(math.erfc)(wide / -math.sqrt(2)) / 2


@pytest.mark.parametrize("instruction_set", _cpu.instruction_sets())
def test_errors_of_gelu_on_the_cpu_are_small_and_to_either_side(instruction_set, rng):
    before = _cpu.selected_instruction_set()
    _cpu.select_instruction_set(instruction_set)
    try:
        for low, high in ((-13, -8), (-8, -2), (-2, 0), (-1e-30, 0), (0, 2), (2, 60)):
            x = rng.uniform(low, high, 1 << 15).astype(np.float32)
            out = np.empty_like(x)
            _cpu.unary(x.ctypes.data, out.ctypes.data, x.size, _cpu.UnaryFunction.gelu, 0, 0, 1)
            exact = exact_gelu(x)
            errors = (out - exact) / np.abs(exact) / tolerances.EPS
            assert np.abs(errors).max() < 6, (low, high)
            assert abs(errors.mean()) < 0.7, (low, high)
        ends = np.array([-np.inf, -3e38, -16, 16, 3e38, np.inf, np.nan, -0.0], np.float32)
        out = np.empty_like(ends)
        _cpu.unary(ends.ctypes.data, out.ctypes.data, ends.size, _cpu.UnaryFunction.gelu, 0, 0, 1)
        np.testing.assert_array_equal(out, [np.nan, 0, 0, 16, *ends[4:7], 0])
    finally:
        _cpu.select_instruction_set(before)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["sigmoid", "swish", "gelu"])
def test_errors_on_cuda_are_small_and_to_either_side(rng, name):
    """An error that all results share stays in a network's means, where others cancel."""
    device, record = Device("cuda"), KINDS[name]()
    for low, high in ((-60, -8), (-8, -2), (-2, 0), (0, 2), (2, 60)):
        x = rng.uniform(low, high, 1 << 17).astype(np.float32)
        out, memory = device.guarded(x.shape)
        apply(device, record, device.put(x), out)
        device.check_guards(memory)
        exact = record.reference(x)
        if name == "gelu":
            exact = exact_gelu(x)
        some = np.abs(exact) > 1e-37
        errors = (device.get(out) - exact)[some] / np.abs(exact[some]) / tolerances.EPS
        if some.any():
            assert np.abs(errors).max() < (6 if name == "gelu" else 2.5), (low, high)
            assert abs(errors.mean()) < (0.5 if name == "gelu" else 0.1), (low, high)


@pytest.mark.gpu
def test_sixths_on_cuda_are_the_nearest_numbers(rng):
    device, record = Device("cuda"), KINDS["hard_swish"]()
    x = rng.uniform(-3.5, 3.5, 1 << 20).astype(np.float32)
    x[: 1 << 19] *= np.exp2(-rng.integers(0, 24, 1 << 19)).astype(np.float32)
    out, memory = device.guarded(x.shape)
    apply(device, record, device.put(x), out)
    device.check_guards(memory)
    ramp = np.clip(x + np.float32(3), np.float32(0), np.float32(6))
    np.testing.assert_array_equal(device.get(out), x * (ramp / np.float32(6)))


@pytest.mark.parametrize("size", [0, 1, 2, 3, 4, 5, 31, 1023, 70_001])
@pytest.mark.parametrize("offset", [0, 1])
def test_sizes_and_alignments(device, rng, size, offset):
    x = rng.standard_normal(size + offset).astype(np.float32)
    out, memory = device.guarded((size + offset,))
    out[:offset] = 0
    apply(device, KINDS["sigmoid"](), device.put(x)[offset:], out[offset:])
    device.check_guards(memory)
    wanted = KINDS["sigmoid"]().reference(x[offset:])
    bound = tolerances.functions(wanted)
    tolerances.assert_close(device.get(out)[offset:], wanted, bound, size=size, offset=offset)


@pytest.mark.parametrize("name", ["relu", "gelu", "abs"])
def test_in_place(device, rng, name):
    x = rng.standard_normal(1001).astype(np.float32)
    y = device.put(x.copy())
    apply(device, KINDS[name](), y, y)
    wanted = KINDS[name]().reference(x)
    tolerances.assert_close(device.get(y), wanted, tolerances.functions(wanted), name=name)


def test_bits_do_not_depend_on_threads(rng):
    x = rng.standard_normal(300_007).astype(np.float32)
    found = []
    for threads in (1, 2, 3, 7):
        out = np.empty_like(x)
        _cpu.unary(x.ctypes.data, out.ctypes.data, x.size, _cpu.UnaryFunction.gelu, 0, 0, threads)
        found.append(out)
    for other in found[1:]:
        np.testing.assert_array_equal(found[0], other)
