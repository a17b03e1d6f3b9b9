"""Quantized networks on CUDA: the CPU's integers, by kernels that are emulated on the host, and by a GPU."""

from __future__ import annotations

from dataclasses import replace

import emulated_cuda
import numpy as np
import pytest
from fake_cuda import FakeCuda
from integer_graphs import Generator
from integer_nodes import cases, graph_of, numbers, scale

from cnn_engine import Engine, kernels
from cnn_engine.graph.graph import Graph, Node, Value
from cnn_engine.kernels.cuda import quantized
from cnn_engine.lower.placement import Placement, place
from cnn_engine.operators.pad import Pad
from cnn_engine.operators.quantized import DynamicQuantizeLinear, Lookup
from cnn_engine.operators.quantized_conv2d import QuantizedConv2dNhwc
from cnn_engine.operators.quantized_linear import QuantizedLinear
from cnn_engine.operators.shaping import Transpose


@pytest.fixture(
    params=[80, 75, 90, pytest.param(0, marks=pytest.mark.gpu)],
    ids=["sm_80", "sm_75", "sm_90", "gpu"],
)
def architecture(request, monkeypatch):
    """Kernels as compiled for an architecture and emulated, or a GPU."""
    if request.param:
        emulated_cuda.install(monkeypatch, request.param)
    return request.param


def check(record, arrays) -> None:
    """Runs a node in an engine on CUDA, by a kernel there."""
    graph, given = graph_of(record, arrays)
    with Engine(graph, device="cuda") as engine:
        found = engine.run(given)["y"]
        assert not engine.plan(*engine._plans.open().first).fallbacks, record
    np.testing.assert_array_equal(
        found, record.reference(*arrays).astype(found.dtype), err_msg=str(record)
    )


@pytest.mark.parametrize("one", ["int8", "uint8"])
def test_nodes_are_their_references(rng, architecture, one):
    for record, arrays in cases(rng, one, "uint8" if one == "int8" else "int8"):
        check(record, arrays)


def layer(rng, x_type: str, w_type: str, sizes, filters: int, kernel, y: str, extra: str, **more):
    """Returns a convolution and its inputs; ``extra``: the residual, the inner scale or the table it has."""
    n, h, w, c = sizes
    groups = more.get("groups", 1)
    shape = (n, c, h, w) if more.get("planar") else sizes
    zero, w_zero = numbers(rng, x_type), numbers(rng, w_type, filters)
    weight = numbers(rng, w_type, filters, c // groups, *kernel)
    bias = numbers(rng, "int32", filters) // 2**12
    factors = scale(rng, filters) / (80 * np.sqrt(weight[0].size))
    arrays = [numbers(rng, x_type, *shape), weight, factors.astype(np.float32), bias, zero, w_zero]
    if y in ("int32", "float32"):
        arrays[2] = None if y == "int32" else arrays[2]
        return QuantizedConv2dNhwc(y, **more), arrays
    arrays.append(numbers(rng, y))
    if extra == "inner":
        more["inner"] = (-100, 90)
    record = QuantizedConv2dNhwc(y, **more)
    if extra in ("residual", "inner"):
        of_type = ("int8", "uint8")[rng.integers(2)]
        made = record_shape(record, arrays)
        arrays += [numbers(rng, of_type, *made), scale(rng)[()], numbers(rng, of_type)]
        arrays += [None, scale(rng)[()]] if extra == "inner" else []
    if extra == "table":
        arrays += [None, None, None, numbers(rng, "uint8", 256)]
    return record, arrays


def record_shape(record, arrays) -> tuple[int, ...]:
    plain = QuantizedConv2dNhwc(
        "int32", None, None, record.stride, record.padding, record.dilation, record.groups,
        planar=record.planar,
    )  # fmt: skip
    return plain.reference(arrays[0], arrays[1]).shape


#: Each way of reading x (16, 8, 4 bytes, one; planes), tiles of both sizes, groups, and what follows the sum.
CONVOLUTIONS = [
    ("int8", "int8", (2, 9, 7, 32), 70, (3, 3), "uint8", "residual", {"padding": (1, 1, 1, 1)}),
    ("uint8", "int8", (1, 17, 19, 16), 64, (3, 3), "int8", "table", {"stride": (2, 1), "dilation": (2, 1)}),
    ("uint8", "uint8", (1, 33, 31, 8), 24, (1, 1), "uint8", "inner", {}),
    ("int8", "uint8", (2, 7, 6, 24), 12, (2, 3), "int8", "", {"groups": 3, "padding": (0, 2, 1, 0)}),
    ("int8", "int8", (1, 8, 8, 20), 9, (5, 1), "float32", "", {"padding": (2, 0, 2, 0)}),
    ("uint8", "uint8", (1, 6, 5, 7), 5, (3, 3), "int32", "", {"padding": (1, 1, 1, 1)}),
    ("uint8", "int8", (2, 15, 13, 3), 33, (7, 7), "uint8", "", {"planar": True, "stride": (2, 2)}),
    ("int8", "int8", (1, 1, 1, 300), 10, (1, 1), "int8", "", {}),
    ("uint8", "int8", (1, 9, 11, 36), 36, (3, 3), "int8", "residual", {"groups": 36, "stride": (2, 2)}),
    ("int8", "uint8", (2, 7, 9, 12), 12, (5, 5), "int8", "residual", {"groups": 12, "padding": (2, 1, 2, 3)}),
    ("uint8", "int8", (3, 8, 6, 8), 8, (5, 5), "uint8", "table", {"groups": 8, "stride": (2, 2)}),
    ("int8", "int8", (2, 5, 3, 20), 20, (3, 3), "uint8", "", {"groups": 20, "padding": (1, 1, 1, 1)}),
    ("int8", "uint8", (2, 6, 6, 15), 15, (5, 3), "uint8", "inner", {"groups": 15, "padding": (2, 1, 2, 1)}),
    ("int8", "int8", (1, 6, 6, 12), 24, (3, 3), "uint8", "", {"groups": 12, "padding": (1, 1, 1, 1)}),
    ("uint8", "int8", (1, 40, 30, 48), 130, (1, 1), "int8", "residual", {}),
]  # fmt: skip


@pytest.mark.parametrize("case", CONVOLUTIONS, ids=lambda case: "-".join(map(str, case[2:6])))
def test_convolutions_are_their_references(rng, architecture, case):
    *plain, more = case
    check(*layer(rng, *plain, **more))


#: What wgmma multiplies: steps of 64 and 128 bytes, borders, tails of filters and of positions.
OF_WGMMA = [
    ("int8", "int8", (2, 9, 7, 64), 72, (3, 3), "uint8", "residual", {"padding": (1, 1, 1, 1)}),
    ("uint8", "int8", (1, 13, 11, 48), 200, (1, 1), "int8", "table", {"stride": (2, 2)}),
    ("uint8", "int8", (3, 5, 6, 160), 33, (2, 3), "float32", "", {"padding": (0, 2, 1, 0)}),
    ("int8", "int8", (1, 9, 8, 80), 96, (3, 2), "uint8", "", {"padding": (3, 1, 2, 1), "dilation": (2, 1)}),
    ("int8", "int8", (1, 12, 12, 208), 272, (1, 1), "uint8", "residual", {}),
    ("uint8", "int8", (5, 1, 1, 512), 70, (1, 1), "int32", "", {}),
    ("uint8", "int8", (1, 10, 9, 16), 64, (5, 5), "uint8", "inner", {"padding": (2, 2, 2, 2)}),
]  # fmt: skip


@pytest.mark.parametrize("rank", range(4))
@pytest.mark.parametrize("case", OF_WGMMA, ids=lambda case: "-".join(map(str, case[2:6])))
@pytest.mark.parametrize("device", ["emulated", pytest.param("gpu", marks=pytest.mark.gpu)])
def test_all_tiles_of_wgmma_make_the_reference(rng, monkeypatch, device, case, rank):
    """Each rank is another tile; the bits are those of all."""
    if device == "emulated":
        emulated_cuda.install(monkeypatch, 90)
    (row,) = kernels.of("quantized_conv2d_nhwc", "cuda")

    def make(call):
        assert call.prepared.function == "quantized_conv2d_wgmma"
        return row.make(call, rank=rank)

    monkeypatch.setitem(kernels._BY_OPERATOR, (row.op, "cuda"), [replace(row, make=make)])
    monkeypatch.setattr(quantized, "_may_be_unaligned", lambda *_: False)  # x is the caller's
    *plain, more = case
    record, arrays = layer(rng, *plain, **more)
    arrays[5] = np.zeros_like(arrays[5])  # weights of 8 bits
    check(record, arrays)


def random_layer(rng):
    """Returns a convolution of any size, and its inputs."""

    def pick(*values):
        return values[rng.integers(len(values))]

    groups = pick(1, 1, 1, 2, 3, 5)
    depthwise, planar = pick(False, False, True), groups == 1 and pick(False, False, False, True)
    channels = pick(1, 3, 4) if planar else groups * pick(1, 2, 4, 7, 8, 16, 24, 32, 48, 80)
    filters = groups * pick(1, 3, 4, 8, 13, 20, 32, 65, 96)
    if depthwise and not planar:
        groups = filters = channels
    kernel = pick((1, 1), (1, 1), (3, 3), (2, 3), (5, 5), (7, 1))
    dilation, stride = pick((1, 1), (1, 1), (2, 1), (3, 2)), pick((1, 1), (2, 2), (1, 3))
    least = [1 + (k - 1) * d for k, d in zip(kernel, dilation, strict=True)]
    sizes = pick(1, 1, 2, 5, 8, 20), *(n + int(rng.integers(24)) for n in least), channels
    padding = tuple(int(n) for n in rng.integers(0, 3, 4)) if pick(False, True) else (0, 0, 0, 0)
    y = pick("int8", "uint8", "int8", "uint8", "float32", "int32")
    types = pick("int8", "uint8"), pick("int8", "int8", "uint8")
    extra = pick("", "residual", "inner", "table")
    return layer(
        rng, *types, sizes, filters, kernel, y, extra,
        stride=stride, padding=padding, dilation=dilation, groups=groups, planar=planar,
    )  # fmt: skip


def test_random_convolutions_are_their_references(architecture):
    """Any stride, dilation, padding, group, batch and alignment; a GPU is fast enough for many."""
    for seed in range(4 if architecture else 200):
        check(*random_layer(np.random.default_rng(seed)))


@pytest.mark.parametrize("order", range(4))
def test_no_order_of_threads_changes_a_convolution(rng, monkeypatch, order):
    emulated_cuda.install(monkeypatch, 80)
    emulated_cuda.module(80).set_order(order)
    try:
        check(*layer(rng, *CONVOLUTIONS[0][:-1], **CONVOLUTIONS[0][-1]))
    finally:
        emulated_cuda.module(80).set_order(0)


def test_scales_that_are_computed_stay_on_the_host():
    """CUDA has no kernels for them: its rows are not all of the CPU's."""
    x, weight = Value("x", (4, 32), "float32"), np.ones((8, 32), np.int8)
    nodes = (
        Node("range", DynamicQuantizeLinear(), ("x",), ("q", "scale", "zero")),
        Node("layer", QuantizedLinear("float32"), ("q", "w", "scale", None, "zero"), ("y",)),
    )
    graph = Graph("dynamic", (x,), ("y",), nodes, {"w": weight})
    placed = place(graph, Placement(FakeCuda(tensor_cores=True), "resident", 1), None, None)
    assert placed.fallbacks.keys() == {"range", "layer"}


def test_what_moves_integers_stays_beside_a_table(rng, architecture):
    """A network whose only function became a table: its pad and its transpose are CUDA's as well."""
    x, table = Value("x", (2, 3, 5, 7), "int8"), numbers(rng, "int8", 256)
    nodes = (
        Node("pad", Pad((0, 0, 1, 0, 0, 0, 2, 1), value=9), ("x",), ("wide",)),
        Node("table", Lookup(), ("wide", "t"), ("made",)),
        Node("turned", Transpose((0, 1, 3, 2)), ("made",), ("y",)),
    )
    graph = Graph("table", (x,), ("y",), nodes, {"t": table})
    given = {"x": numbers(rng, "int8", *x.shape)}
    with Engine(graph, device="cuda") as engine, Engine(graph, device="cpu") as cpu:
        np.testing.assert_array_equal(engine.run(given)["y"], cpu.run(given)["y"])
        assert not engine.plan(2, "int8").fallbacks


def test_sums_are_modulo_2_to_the_32(rng, architecture):
    """A bias near the end of int32, which the sum passes."""
    x, weight = np.full((1, 64), 127, np.int8), np.full((3, 64), 127, np.int8)
    bias = np.array([2**31 - 1, -(2**31), 2**31 - 10], np.int32)
    check(QuantizedLinear("int32"), [x, weight, None, bias])


def test_random_networks_make_the_integers_of_the_cpu(architecture):
    """What has a kernel on the CPU does not leave CUDA. With the first seeds something was once wrong."""
    for seed in (3, 5, 9, 24, 36, 51, 74, 168, *range(0 if architecture else 60)):
        generator = Generator(seed)
        proto = generator.network(1 + seed % 6)
        with Engine(proto, device="cpu") as cpu, Engine(proto, device="cuda") as engine:
            for batch in (2,) if architecture else (1, 2, 7, 20):
                x = generator.input(batch)
                wanted = cpu.run({"x": x})
                for name, found in engine.run({"x": x}).items():
                    np.testing.assert_array_equal(found, wanted[name], f"{name} of {seed}, {batch}")
                # Where what is left only moves numbers, no integer stands for a float.
                ran = engine._plans.open().placed(batch, False).graph
                left = set(engine.plan(batch, x.dtype).fallbacks)
                left -= set(cpu.plan(batch, x.dtype).fallbacks)  # what has no kernel there either
                assert not left or not ran.is_quantized, (seed, left)
