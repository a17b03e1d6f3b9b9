"""Layers and arithmetic of 8-bit integers in the engine: compiled kernels make what the records say."""

from __future__ import annotations

import numpy as np
import pytest
from integer_nodes import cases, f32, graph_of, numbers, scale

from cnn_engine import Engine, _cpu
from cnn_engine.engine import inspection
from cnn_engine.graph.graph import Graph, Node, Value
from cnn_engine.operators.quantized import DynamicQuantizeLinear
from cnn_engine.operators.quantized_conv2d import QuantizedConv2dNhwc
from cnn_engine.operators.quantized_linear import QuantizedLinear


@pytest.mark.parametrize("one", ["int8", "uint8"])
def test_what_the_engine_makes_is_the_reference(rng, instruction_set, one):
    for record, arrays in cases(rng, one, "uint8" if one == "int8" else "int8"):
        graph, given = graph_of(record, arrays)
        for threads in (1, 2):
            with Engine(graph, device="cpu", threads=threads) as engine:
                found = engine.run(given)["y"]
            wanted = record.reference(*arrays).astype(found.dtype)
            np.testing.assert_array_equal(found, wanted, err_msg=str(record))
        (layer,) = inspection.inspect(graph).on["cpu"].running
        assert layer.kernel == "int8", (record, layer)


def test_weights_are_there_until_they_are_packed(rng, monkeypatch):
    """A transposed constant is copied first: memory of the copy must not be free while it is read."""
    weight, x = numbers(rng, "int8", 33, 14).T, numbers(rng, "int8", 5, 33)
    op, pack = QuantizedLinear("float32"), _cpu.quantized_conv2d_pack

    def overwrite_what_is_free(*arguments):
        free = [np.full(weight.size, 99, np.int16) for _ in range(8)]
        pack(*arguments)
        del free

    monkeypatch.setattr(_cpu, "quantized_conv2d_pack", overwrite_what_is_free)
    constants = {"w": weight, "s": scale(rng, 14)}
    node = Node("layer", op, ("x", "w", "s"), ("y",))
    graph = Graph("layer", (Value("x", x.shape, "int8"),), ("y",), (node,), constants)
    found = Engine(graph, device="cpu").run({"x": x})["y"]
    np.testing.assert_array_equal(found, op.reference(x, weight, constants["s"]).astype(f32))


def test_packed_weights_of_other_instructions_are_refused(rng):
    shape = _cpu.Conv2dShape(1, 4, 1, 1, 4, 1, 1, 1, 1, 0, 0)
    kind = _cpu.ElementType.int8
    types = _cpu.QuantizedTypes(kind, 0, _cpu.ElementType.int32, 0, 0, 0, kind, 0, 0.0)
    weight = np.ones((4, 4, 1, 1), np.int16)
    before, (first, *others) = _cpu.selected_integer_instructions(), _cpu.integer_instructions()
    if not others:
        pytest.skip("this CPU has one set of instructions alone")
    try:
        _cpu.select_integer_instructions(first)
        packed = np.zeros(_cpu.quantized_conv2d_packed(shape, 1), np.uint8)
        _cpu.quantized_conv2d_pack(
            _cpu.address_of(weight), 0, 0, _cpu.address_of(packed), shape, types, 1
        )
        _cpu.select_integer_instructions(others[-1])
        workspace = np.zeros(_cpu.quantized_conv2d_workspace(shape, False, 1), np.uint8)
        x, y = np.ones(4, np.int8), np.zeros(4, np.int32)
        with pytest.raises(
            ValueError, match=f"expected those of {others[-1]}, found those of {first}"
        ):
            _cpu.quantized_conv2d(
                _cpu.address_of(x), _cpu.address_of(packed), 0, 0, _cpu.address_of(y),
                _cpu.address_of(workspace), shape, _cpu.Conv2dPitches(4, 4, 0), types, False, 1,
            )  # fmt: skip
    finally:
        _cpu.select_integer_instructions(before)


def test_scales_zero_points_and_biases_that_are_computed(rng, instruction_set):
    """Dense, of groups, depthwise and of one place; weights of 8 and of more bits; planar images; rows."""
    x, planar = numbers(rng, "uint8", 2, 9, 7, 20), numbers(rng, "uint8", 1, 3, 15, 21)
    rows = numbers(rng, "uint8", 5, 33)
    for groups, filters, one_scale in (
        (1, 24, False),
        (4, 8, True),
        (20, 20, False),
        (20, 20, True),
    ):
        weight = numbers(rng, "int8", filters, 20 // groups, 3, 3)
        factors = scale(rng)[()] if one_scale else scale(rng, filters)
        bias, w_zero = numbers(rng, "int32", filters) // 2**16, numbers(rng, "int8", filters)
        layer = QuantizedConv2dNhwc("float32", padding=(1, 0, 1, 1), stride=(2, 1), groups=groups)
        zero = numbers(rng, "uint8")
        check(layer, [x, weight, factors, bias, zero, None if one_scale else w_zero])
    check(QuantizedConv2dNhwc("int32"), [x, numbers(rng, "int8", 5, 20, 1, 1), None, None, zero])
    stem = [
        planar,
        numbers(rng, "int8", 8, 3, 5, 5),
        scale(rng)[()],
        None,
        numbers(rng, "uint8", 1),
    ]
    check(QuantizedConv2dNhwc("float32", planar=True, padding=(2, 2, 2, 2)), stem)
    weight, bias = numbers(rng, "int8", 18, 33), numbers(rng, "int32", 18) // 2**16
    check(QuantizedLinear("float32"), [rows, weight, scale(rng, 1), bias, zero])


def check(record, arrays):
    """Compares a layer's kernel for computed parameters with the reference."""
    graph, given = graph_of(record, arrays, {0, 2, 3, 4})
    for threads in (1, 2):
        with Engine(graph, device="cpu", threads=threads) as engine:
            found = engine.run(given)["y"]
        wanted = record.reference(*arrays).astype(found.dtype)
        np.testing.assert_array_equal(found, wanted, err_msg=str(record))
    (layer,) = inspection.inspect(graph).on["cpu"].running
    assert layer.kernel == "int8_computed", (record, layer)


@pytest.mark.parametrize("special", [0, np.nan, np.inf, -np.inf])
def test_dynamic_quantization(rng, instruction_set, special):
    """More than a block of a thread, and fewer than a vector; NaN and infinities wherever they are."""
    for size in (1, 3, 40, 9001):
        x = numbers(rng, "float32", size)
        x[-1] = special
        wanted = DynamicQuantizeLinear().reference(x)
        names = "q", "scale", "zero"
        node = Node("layer", DynamicQuantizeLinear(), ("x",), names)
        graph = Graph("layer", (Value("x", x.shape),), names, (node,), {})
        with Engine(graph, device="cpu", threads=2) as engine:
            found = engine.run({"x": x})
        for name, exact in zip(names, wanted, strict=True):
            np.testing.assert_array_equal(found[name], np.asarray(exact), err_msg=f"{size} {name}")
        (layer,) = inspection.inspect(graph).on["cpu"].running
        assert layer.kernel == "int8"
