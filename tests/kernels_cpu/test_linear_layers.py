"""linear_layers: the rewrite that makes it, its record, and its kernel on CUDA."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
import regions
import targets
import tolerances
from conftest import Device
from native import address, check_guards, guarded
from test_passes import Builder, same

from cnn_engine import _cpu
from cnn_engine.devices import cuda_module
from cnn_engine.graph import passes
from cnn_engine.graph.passes.fuse.patterns import LINEAR_LAYERS
from cnn_engine.operators.linear import Linear
from cnn_engine.operators.softmax import LogSoftmax, Softmax
from cnn_engine.operators.unary import Relu, Sigmoid, Tanh

FUNCTIONS = {None: (_cpu.UnaryFunction.clip, -math.inf, math.inf)} | {
    record: (getattr(_cpu.UnaryFunction, record().function), 0.0, 0.0)
    for record in (Relu, Tanh, Sigmoid)
}


def built(*sizes, function=Tanh, ends=Softmax, bias=True, batch=3):
    """Linear layers of these features and outputs, with a function behind all but the last."""
    b = Builder(batch, 2, 3, 4)
    y, features = "x", 24
    for place, size in enumerate(sizes):
        y = b.add(Linear(), y, b.constant(size, features), *([b.constant(size)] if bias else []))
        if place + 1 < len(sizes):
            y = b.add(function(), y)
        features = size
    return b, y, b.graph(b.add(ends(), y) if ends else y)


def joined(graph, takes=True):
    fused = passes.fuse_linear_activations(graph)
    return regions.fused(fused, LINEAR_LAYERS, takes=lambda *_: takes)


def found_in(graph):
    return [node for node in graph.nodes if node.op.kind == "linear_layers"]


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("sizes", [(7,), (5, 6, 7), (9, 8, 7, 6)], ids=str)
@pytest.mark.parametrize("ends", [Softmax, None])
def test_layers_become_one_node(sizes, ends, bias):
    *_, graph = built(*sizes, ends=ends, bias=bias)
    after = same(graph, joined)
    if len(sizes) == 1 and ends is None:
        assert not found_in(after)
        return
    (node,) = found_in(after)
    assert len(after.nodes) == 1
    functions = [part.op.activation for part in node.op.nodes if part.role != "softmax"]
    assert functions == [Tanh()] * (len(sizes) - 1) + [None]
    assert len(node.op.nodes) == len(sizes) + (ends is Softmax)
    assert len(node.covers) == len(graph.nodes)
    assert "together they are linear_layers" in {note.why for note in after.notes}


def test_more_than_a_kernel_has_room_for():
    *_, graph = built(5, 6, 7, 8, 9)
    first, second = found_in(same(graph, joined))
    assert [part.role for part in first.op.nodes] == [f"layer{number}" for number in range(4)]
    assert [part.role for part in second.op.nodes] == ["layer0", "softmax"]


def test_what_does_not_fit_stays_as_it_is():
    """What others read, other ends, computed weights, and what the device does not take."""
    b, y, _ = built(5, 6, ends=None)
    graphs = [b.graph(y, b.nodes[1].outputs[0]), built(5, ends=LogSoftmax)[-1]]
    b = Builder(3, 2, 3, 4)
    y = b.add(Linear(), "x", b.add(Relu(), b.constant(5, 24)))
    graphs.append(b.graph(b.add(Softmax(), y)))
    b = Builder(3, 2, 3, 4)
    graphs.append(b.graph(b.add(Softmax(axis=0), b.add(Linear(), "x", b.constant(5, 24)))))
    for graph in graphs:
        assert not found_in(same(graph, joined))
    *_, graph = built(5, 6)
    assert not found_in(same(graph, lambda graph: joined(graph, takes=False)))


def test_shape():
    function = FUNCTIONS[None]
    layer = _cpu.RowLayer(5, 6, *function)
    _cpu.RowLayers(1, True, layer, _cpu.RowLayer(6, 7, *function))
    with pytest.raises(ValueError, match="layer 2: expected 6 features, found 5"):
        _cpu.RowLayers(1, True, layer, layer)
    with pytest.raises(ValueError, match="batch"):
        _cpu.RowLayers(-1, True, layer)
    with pytest.raises(ValueError, match="output features"):
        _cpu.RowLayer(5, 0, *function)
    with pytest.raises(TypeError):
        _cpu.RowLayers(1, True)


# ---- the kernel ----

#: Features and outputs of each layer; LeNet-5's first. Layers that one block has, that all have, and
#: both in turn; outputs that blocks share unevenly, fewer than there are blocks; more than threads.
CHAINS = [
    (400, 120, 84, 10),
    (512, 100),
    (1, 1, 1),
    (3, 5),
    (1200, 14, 1200, 3),
    (5000, 6, 2, 1),
    (29, 1000, 31),
    (130, 130, 131, 132, 33),
    (4, 9000),
]


def run(x, layers, functions, softmax):
    """Returns the rows of x after ``layers``, pairs of weight and bias."""
    device, kernels = Device("cuda"), cuda_module.load()
    rows = [
        _cpu.RowLayer(*reversed(weight.shape), *FUNCTIONS[function])
        for (weight, _), function in zip(layers, functions, strict=True)
    ]
    shape = _cpu.RowLayers(len(x), softmax, *rows)
    packed = device.library.full(kernels.linear_layers_packed(shape, 0), 0xA5, np.uint8)
    for number, arrays in enumerate(layers):
        there = [None if array is None else device.put(array) for array in arrays]
        addresses = [0 if array is None else address(array) for array in there]
        kernels.linear_layers_pack(*addresses, address(packed), shape, number, 0)
    out, memory = guarded(device, (len(x), len(layers[-1][0])), np.float32)
    there = device.put(x)
    kernels.linear_layers(address(there), address(packed), address(out), shape, 0)
    check_guards(device, memory, np.float32)
    return device.get(out)


def made(rng, sizes, bias=True):
    return [
        (
            (rng.standard_normal((m, f)) / math.sqrt(f)).astype(np.float32),
            rng.standard_normal(m).astype(np.float32) if bias else None,
        )
        for f, m in pairwise(sizes)
    ]


@pytest.mark.gpu
@pytest.mark.parametrize("softmax", [True, False])
@pytest.mark.parametrize("n", [0, 1, 3, 32])
@pytest.mark.parametrize("sizes", CHAINS, ids=str)
def test_against_reference(rng, sizes, n, softmax):
    layers = made(rng, sizes, bias=n != 3)
    functions = [[Relu, Tanh, Sigmoid, None][(place + n) % 4] for place in range(len(layers))]
    x = rng.standard_normal((n, sizes[0])).astype(np.float32)
    op = regions.linear_layers(tuple(function and function() for function in functions), softmax)
    wanted = op.reference(x, *(array for pair in layers for array in pair))
    found = run(x, layers, functions, softmax)
    # Of the sums of layers whose weights keep numbers near 1, one after another.
    limit = sum(tolerances.sum_of_products(f, 4 * math.sqrt(f)) for f in sizes[:-1]) + 1e-6
    tolerances.assert_close(found, wanted, limit)
    assert np.array_equal(found, run(x, layers, functions, softmax)), "other bits"


@pytest.mark.gpu
@pytest.mark.parametrize("sizes", CHAINS, ids=str)
def test_each_row_has_the_same_bits_among_others(rng, sizes):
    layers = made(rng, sizes)
    x = rng.standard_normal((8, sizes[0])).astype(np.float32)
    functions = [Tanh] * (len(layers) - 1) + [None]
    together = run(x, layers, functions, True)
    assert np.array_equal(run(x[3:4], layers, functions, True)[0], together[3])


@pytest.mark.gpu
def test_softmax_of_what_is_no_number(rng):
    """As PyTorch has it: a row with NaN or +inf comes out NaN, -inf beside finite numbers gives 0."""
    layers = [(np.eye(40, dtype=np.float32), None)]
    x = rng.standard_normal((4, 40)).astype(np.float32)
    found = run(x, layers, [None], True)
    assert np.allclose(found, Softmax().reference(x), atol=1e-6)
    x[0, 3], x[1, 7] = np.nan, np.inf
    found = run(x, layers, [None], True)
    assert np.isnan(found[:2]).all()
    assert np.isfinite(found[2:]).all()


@pytest.mark.gpu
def test_what_is_taken():
    takes = cuda_module.load().linear_layers_takes

    def asked(n, *sizes):
        rows = [_cpu.RowLayer(*pair, *FUNCTIONS[None]) for pair in pairwise(sizes)]
        return takes(_cpu.RowLayers(n, True, *rows), targets.native())

    assert asked(1, 400, 120, 84, 10)
    assert asked(32, 512, 100)
    assert not asked(33, 512, 100)
    assert not asked(1, 960, 1280, 1000)
    assert not asked(1, 2**31 - 1, 2**31 - 1)
