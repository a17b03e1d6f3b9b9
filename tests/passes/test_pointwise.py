"""Regions of functions of numbers at the same position: which nodes they take, and the bits they make."""

from __future__ import annotations

import numpy as np
import pytest
from graphs import Builder

from cnn_engine import Engine, _cpu
from cnn_engine.errors import InputError
from cnn_engine.graph import passes, reference
from cnn_engine.graph.graph import Graph, Value
from cnn_engine.graph.passes.fuse.pointwise import MOST_INPUTS, MOST_STEPS, POINTWISE
from cnn_engine.kernels.pointwise import steps_of
from cnn_engine.lower import pipeline
from cnn_engine.operators import KINDS
from cnn_engine.operators.binary import Add, Binary, Div, Max, Mul, Pow, Sub
from cnn_engine.operators.mathematics import Exp, Sin
from cnn_engine.operators.reduce import ReduceL2
from cnn_engine.operators.unary import HardSwish, LeakyRelu, Mish, Sigmoid, Swish, Unary


def fused(graph: Graph) -> Graph:
    return passes.fuse_pointwise(graph)


def regions(graph: Graph) -> list:
    return [node for node in graph.nodes if node.op.kind == POINTWISE]


def without_the_pass(monkeypatch, graph: Graph, images: np.ndarray) -> dict[str, np.ndarray]:
    entries = [
        entry for entry in pipeline.PIPELINE if getattr(entry, "name", "") != "fuse_pointwise"
    ]
    assert len(entries) == len(pipeline.PIPELINE) - 2  # one a kind of device
    with monkeypatch.context() as patch:
        patch.setattr(pipeline, "PIPELINE", tuple(entries))
        return Engine(graph, device="cpu", threads=1).run({"images": images})


def response_norm(b: Builder, x: str) -> str:
    """Global response normalisation, as ConvNeXt V2 (Woo et al., 2023) has it."""
    channels = b.shapes[x][1]
    size = b.add(ReduceL2((2, 3)), x)
    scaled = b.add(Mul(), x, size)
    gamma, beta = b.constant((channels, 1, 1)), b.constant((channels, 1, 1))
    return b.add(Add(), b.add(Add(), b.add(Mul(), scaled, gamma), beta), x)


def random_tree(rng: np.random.Generator) -> Graph:
    """Functions of values that were made before, of shapes that broadcast to the image's."""
    channels, height, width = (int(n) for n in rng.choice([1, 2, 3, 7, 16, 33, 300], 3))
    shape = (int(rng.integers(1, 3)), channels, min(height, 40), width)
    b = Builder(shape, seed=int(rng.integers(1 << 30)), batched=False)
    values = ["images"]
    for _ in range(int(rng.integers(2, 24))):
        kinds = [(), shape[3:], (channels, 1, 1), (1, channels, 1, 1), (shape[2], 1), shape]
        op = rng.choice([Add(), Mul(), Sub(), Max(), HardSwish(), LeakyRelu(0.1), Swish(), Sin()])
        x = values[int(rng.integers(max(len(values) - 2, 0), len(values)))]
        if op.kind in ("hard_swish", "leaky_relu", "swish", "sin"):
            values.append(b.add(op, x))
            continue
        again = rng.random() < 0.4
        y = str(rng.choice(values)) if again else b.constant(kinds[int(rng.integers(len(kinds)))])
        values.append(b.add(op, *((x, y) if rng.random() < 0.7 or not again else (y, x))))
    return b.graph(values[-1])


@pytest.mark.parametrize("isa", _cpu.instruction_sets())
def test_random_trees_have_the_bits_of_their_functions(rng, isa, monkeypatch):
    selected, taken = _cpu.selected_instruction_set(), 0
    _cpu.select_instruction_set(isa)
    try:
        for _ in range(25):
            graph = random_tree(rng)
            images = rng.normal(size=graph.inputs[0].shape).astype(np.float32)
            engine = Engine(graph, device="cpu", threads=int(rng.integers(1, 3)))
            found, alone = (
                engine.run({"images": images}),
                without_the_pass(monkeypatch, graph, images),
            )
            for name, array in alone.items():
                np.testing.assert_array_equal(found[name], array)
            after = fused(graph)
            taken += len(regions(after))
            for name, array in reference.reference(graph, {"images": images}).items():
                np.testing.assert_array_equal(
                    reference.reference(after, {"images": images})[name], array
                )
    finally:
        _cpu.select_instruction_set(selected)
    assert taken > 20  # or the trees are none


def test_response_norm_is_one_region_beside_its_reduction():
    b = Builder((2, 8, 6, 5))
    graph = fused(b.graph(response_norm(b, b.conv("images", 8))))
    (region,) = regions(graph)
    assert [part.op.kind for part in region.op.nodes] == ["mul", "mul", "add", "add"]
    assert graph.values[region.inputs[0]].shape == (2, 8, 6, 5)  # which it may be written over
    assert len(region.inputs) == MOST_INPUTS


def test_a_value_that_others_read_stays():
    b = Builder((1, 4, 5, 5))
    inner = b.add(Mul(), "images", b.constant((4, 1, 1)))
    middle = b.add(Exp(), inner)
    last = b.add(Add(), b.add(Sigmoid(), middle), inner)
    graph = fused(b.graph(last))
    (region,) = regions(graph)
    assert len(region.op.nodes) == 4  # all readers of both are inside

    whole = b.graph(last)
    seen = Graph(whole.name, whole.inputs, (last, middle), whole.nodes, whole.constants)
    found = {part.op.kind for region in regions(fused(seen)) for part in region.op.nodes}
    assert fused(seen).outputs == (last, middle)
    assert "exp" not in found


def test_regions_keep_to_what_kernels_take():
    b = Builder((1, 4, 5, 5))
    x = "images"
    for _ in range(40):
        x = b.add(Add(), x, b.constant((4, 1, 1)))
    graph = fused(b.graph(x))
    found = regions(graph)
    assert all(len(node.inputs) <= MOST_INPUTS for node in found)
    x = "images"
    b = Builder((1, 4, 5, 5))
    for _ in range(40):
        x = b.add(HardSwish(), x)
    found = regions(fused(b.graph(x)))
    assert [len(node.op.nodes) for node in found] == [8, MOST_STEPS, MOST_STEPS]


def test_narrow_values_stay_out_of_wide_trees():
    b = Builder((1, 4, 5, 5))
    scale = b.add(Sigmoid(), b.add(Exp(), b.constant((4, 1, 1))))
    graph = fused(b.graph(b.add(Add(), b.add(Mul(), "images", scale), "images")))
    assert sorted(len(node.op.nodes) for node in regions(graph)) == [2, 2]


def test_kernels_have_every_function_that_regions_take():
    for record in KINDS.values():
        if issubclass(record, Unary | Binary):
            functions = _cpu.BinaryFunction if issubclass(record, Binary) else _cpu.UnaryFunction
            takes = [
                Value(name, (2,), "float32") for name in "xy"[: 1 + issubclass(record, Binary)]
            ]
            try:
                ((_, dtype),) = record().infer(takes)
            except InputError:  # of integers or booleans
                continue
            assert dtype != "float32" or hasattr(functions, record().function), record


def test_powers_and_infinities_are_those_of_each_function(monkeypatch):
    b = Builder((1, 3, 4, 4))
    b.constants["two"] = np.float32(2.0)
    square = b.add(Pow(), "images", "two")
    graph = b.graph(b.add(Mish(), b.add(Div(), square, "images")))
    images = np.full((1, 3, 4, 4), 1.5, np.float32)
    images[0, 0, 0] = [np.inf, -np.inf, np.nan, 0.0]
    found = Engine(graph, device="cpu").run({"images": images})
    for name, array in without_the_pass(monkeypatch, graph, images).items():
        np.testing.assert_array_equal(found[name], array)


def test_steps_that_read_what_is_not_there_are_refused():
    aligned = np.zeros(16, np.float32)
    b = Builder((1, 4, 2, 2))
    (region,) = regions(fused(b.graph(b.add(Exp(), b.add(Sin(), "images")))))
    steps, at = steps_of(region.op), _cpu.address_of(aligned)
    shape = _cpu.PointwiseShape(*[1] * 7, 16, *[0] * 7, 1, *[0] * 24, *[0] * 7, 1, 2)
    _cpu.pointwise(at, at, at, at, at, shape, _cpu.address_of(steps), 1)
    for field, wrong in (("x", 5), ("x", -1), ("function", 99)):
        bad = steps.copy()
        bad[0][field] = wrong
        with pytest.raises(ValueError, match="steps: expected a function"):
            _cpu.pointwise(at, at, at, at, at, shape, _cpu.address_of(bad), 1)
    with pytest.raises(ValueError, match="steps: expected 1 to 16, found 17"):
        _cpu.PointwiseShape(*[1] * 8, *[0] * 40, 17)
