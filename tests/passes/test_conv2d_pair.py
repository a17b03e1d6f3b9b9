"""Pairs of convolutions: the rewrites that make them, their records, and which engines have them."""

from __future__ import annotations

from dataclasses import replace

import fake_cuda
import numpy as np
import pytest
from engines import built
from graphs import Builder, resnet
from halves import HALVES
from lowered import fuse, lay_channels_last
from regions import conv2d_beside, conv2d_sum, fused, why_not

from cnn_engine import Engine
from cnn_engine.errors import InputError
from cnn_engine.graph import passes, reference
from cnn_engine.graph.graph import Graph, Value
from cnn_engine.graph.passes.fuse.patterns import CONV2D_SUM
from cnn_engine.operators.binary import Add
from cnn_engine.operators.channels_last import Conv2dNhwc
from cnn_engine.operators.conv2d import Conv2d
from cnn_engine.operators.max_pool2d import MaxPool2d
from cnn_engine.operators.shaping import Concat
from cnn_engine.operators.unary import Relu
from cnn_engine.plan import early_reads
from cnn_engine.plan.builder import plan_memory


def biased(b: Builder, x: str, filters: int, kernel: int, stride: int = 1) -> str:
    weight = b.constant((filters, b.shapes[x][1], kernel, kernel))
    border = 4 * (kernel // 2,)
    return b.add(Conv2d((stride, stride), border), x, weight, b.constant((filters,)))


def block(kernel: int = 3, order: int = 1, last=None, size: int = 14, batch: int = 1) -> Graph:
    """A residual block whose input is convolved by itself, 2 apart, with one layer before and behind it."""
    b = Builder((batch, 64, size, size))
    x = b.relu(b.conv("images", 64, 1))
    y = biased(b, b.relu(b.conv(x, 64, 3, 2)), 128, kernel)
    z = (last or biased)(b, x, 128, 1, 2)
    y = b.relu(b.add(Add(), *((y, z)[::order])))
    return b.graph(b.head(b.relu(b.conv(y, 64, 1)), 10))


def summed(graph: Graph, takes=lambda *_: True) -> Graph:
    return fused(lay_channels_last(fuse(graph), "cuda", run=8), CONV2D_SUM, takes=takes)


def sums(graph: Graph) -> list:
    return [node for node in graph.nodes if node.op.kind == "conv2d_sum"]


def close(graph: Graph, after: Graph) -> None:
    images = np.random.default_rng(1).normal(size=graph.inputs[0].shape)
    found, wanted = (reference.reference(g, {"images": images}) for g in (after, graph))
    for name, array in wanted.items():
        np.testing.assert_allclose(found[name], array, rtol=1e-10, atol=1e-10)


# ---- the record ----


def test_a_sum_is_both_convolutions(rng):
    op = conv2d_sum(
        Conv2dNhwc((2, 2), (1, 1, 1, 1)), Conv2dNhwc((1, 1), (0, 1, 0, 1), (1, 2)), Relu()
    )
    arrays = [
        rng.normal(size=shape)
        for shape in ((2, 9, 9, 4), (2, 5, 5, 3), (6, 4, 3, 3), (6, 3, 1, 2), (6,), (6,))
    ]
    x, other, weight, other_weight, bias, other_bias = arrays
    first = op["first"].reference(x, weight, bias)
    second = replace(op["second"], activation=None).reference(other, other_weight, other_bias)
    np.testing.assert_allclose(op.reference(*arrays), np.maximum(first + second, 0), atol=1e-12)
    values = [Value("", array.shape) for array in arrays]
    assert op.infer(values) == (((2, 5, 5, 6), "float32"),)
    assert op.infer(values[:4]) == op.infer(values)
    assert op.terms(values) == 4 * 9
    y = Value("", (2, 5, 5, 6))
    assert op.flops(values, [y]) == 2 * y.size * (36 + 6)


@pytest.mark.parametrize(
    ("place", "shape", "said"),
    [
        (1, (2, 6, 5, 3), "second: residual: expected"),
        (4, (5,), "first: bias: expected shape"),
        (5, (7,), "second: bias: expected shape"),
        (2, (6, 5, 3, 3), "first: expected a weight of 4 channels"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(place, shape, said):
    op = conv2d_sum(Conv2dNhwc((2, 2), (1, 1, 1, 1)), Conv2dNhwc((1, 1), (0, 1, 0, 1), (1, 2)))
    shapes = [(2, 9, 9, 4), (2, 5, 5, 3), (6, 4, 3, 3), (6, 3, 1, 2), (6,), (6,)]
    shapes[place] = shape
    with pytest.raises(InputError, match=said):
        op.infer([Value("", one) for one in shapes])


def test_one_beside_the_other_is_both_convolutions(rng):
    op = conv2d_beside(Conv2dNhwc(padding=(1, 1, 1, 1)), Conv2dNhwc((2, 1)), Relu())
    arrays = [
        rng.normal(size=shape)
        for shape in ((2, 5, 5, 4), (2, 9, 5, 3), (6, 4, 3, 3), (7, 3, 1, 1), (6,), (7,))
    ]
    x, other, weight, other_weight, bias, other_bias = arrays
    found = op.reference(*arrays)
    first = op["first"].reference(x, weight, bias)
    second = op["second"].reference(other, other_weight, other_bias)
    assert min(first.min(), second.min()) == 0
    assert np.array_equal(found, np.concatenate([first, second], 3))
    values = [Value("", array.shape) for array in arrays]
    assert op.infer(values) == (((2, 5, 5, 13), "float32"),)
    assert op.terms(values) == 4 * 9
    assert op.flops(values, [Value("", found.shape)]) == 2 * 50 * (6 * 36 + 7 * 3)
    with pytest.raises(InputError, match="join: expected"):
        op.infer([values[0], Value("", (2, 5, 5, 3)), *values[2:]])


# ---- sums ----


@pytest.mark.parametrize("kernel", [1, 3])
@pytest.mark.parametrize("order", [1, -1])
def test_two_convolutions_become_one(kernel, order):
    graph = block(kernel, order)
    after = summed(graph)
    (node,) = sums(after)
    close(graph, after)
    convolutions = [n for n in after.nodes if n.op.kind == "conv2d_nhwc"]
    assert len(convolutions) == 3
    # What the block reads was made first, whatever is added to what.
    assert [len(after.consumers[name]) for name in node.inputs[:2]] == [2, 1]
    assert node.op["first"].stride == (2, 2)
    assert node.op.nodes[-1].op.activation == Relu()
    assert len(node.covers) == 4
    assert "together they are conv2d_sum" in {note.why for note in after.notes}


def test_every_first_block_of_a_residual_network_has_one():
    for bottleneck, wanted in ((True, 4), (False, 3)):
        graph = resnet((2, 1, 1, 2), (1, 3, 64, 64), bottleneck=bottleneck, width=8)
        after = summed(graph)
        assert len(sums(after)) == wanted
        close(graph, after)


def test_a_device_is_asked_for_each_pair():
    asked = []

    def takes(graph, node):
        asked.append([node.op[role].stride for role in ("first", "second")])
        return False

    assert not sums(summed(block(), takes))
    assert asked == [[(2, 2), (1, 1)]]


def grouped(b, x, filters, kernel, stride):
    weight = b.constant((filters, b.shapes[x][1] // 2, kernel, kernel))
    return b.add(Conv2d((stride, stride), groups=2), x, weight)


def bent(b, x, filters, kernel, stride):
    return b.relu(b.conv(x, filters, kernel, stride))


def test_what_is_not_a_sum_of_two_convolutions_stays():
    assert not sums(summed(block(last=grouped)))
    both = block()
    (last,) = (node for node in both.nodes if node.op.kind == "add")
    seen = replace(both, outputs=(*both.outputs, *last.inputs))
    assert not sums(summed(seen))  # what is added is an output
    # What has a function before it is added can only be the residual of the other.
    after = summed(block(last=bent))
    assert not sums(after)
    b = Builder((1, 16, 8, 8))
    y = b.conv("images", 16, 1)
    assert not sums(
        summed(b.graph(b.add(Add(), b.conv(y, 16, 1), y)))
    )  # the second reads the first


# ---- neighbours in concatenations ----


def fire(parts: int = 2, batch: int = 1, width: int = 64, size: int = 14, last=None) -> Graph:
    """Convolutions of one image and of what others made of it, beside each other."""
    b = Builder((batch, 64, size, size))
    x = b.relu(b.conv("images", 16, 1))
    made = [b.relu(biased(b, x, width, 1)), b.relu(biased(b, x, width + 8, 3))]
    if parts > 2:
        made.append(b.relu(biased(b, b.relu(b.conv(x, 24, 1)), width, 5)))
    if parts > 3:
        made.append(b.relu(b.conv(b.add(MaxPool2d((3, 3), (1, 1), (1, 1, 1, 1)), x), 2 * width, 1)))
    made += [last(b, x)] if last else []
    y = b.add(Concat(1), *made)
    return b.graph(b.head(b.relu(b.conv(y, 64, 1)), 10))


def beside(graph: Graph) -> list:
    return [node for node in graph.nodes if node.op.kind == "conv2d_beside"]


def neighboured(graph: Graph, takes=lambda *_: True) -> Graph:
    laid = lay_channels_last(fuse(graph), "cuda", run=8)
    names = (name for node in laid.nodes for name in node.outputs)
    laid = replace(laid, storage_dtype=dict.fromkeys(names, "float16"))
    return passes.fuse_conv_pairs(laid, why_not(takes))


@pytest.mark.parametrize("parts", [2, 3, 4])
def test_neighbours_become_one(parts):
    graph = fire(parts)
    after = neighboured(graph)
    close(graph, after)
    found = beside(after)
    assert len(found) == parts // 2
    joined = [node for node in after.nodes if node.op.kind == "concat"]
    assert [len(node.inputs) for node in joined] == {2: [], 3: [2], 4: [2]}[parts]
    for node in found:
        assert node.op.activation("first") == node.op.activation("second") == Relu()
        assert after.values[node.outputs[0]].storage_dtype == "float16"
    assert "together they are conv2d_beside" in {note.why for note in after.notes}


def test_what_are_no_neighbours_stays():
    def pooled(b, x):
        return b.add(MaxPool2d((3, 3), (1, 1), (1, 1, 1, 1)), x)

    assert not beside(neighboured(fire(), lambda *_: False))
    assert len(beside(neighboured(fire(3, last=pooled)))) == 1
    graph = fire()
    (joined,) = (node for node in graph.nodes if node.op.kind == "concat")
    assert not beside(neighboured(replace(graph, outputs=(*graph.outputs, joined.inputs[0]))))

    def same_twice(b, x):
        y = b.conv(x, 64, 1)
        return b.add(Concat(1), y, y)

    after = neighboured(fire(last=same_twice))
    assert len(beside(after)) == 1


# ---- engines ----


@pytest.fixture
def hopper(monkeypatch):
    """A GPU that is not there, whose wgmma takes all that it can, sums too."""
    fake_cuda.install_hopper(
        monkeypatch, pair_takes=lambda *how: True, pair_packed=lambda *how: 64,
        pair_pack=lambda *how: None,
    )  # fmt: skip


def test_engines_have_sums(hopper):
    for dtype in (*HALVES, "float32"):
        graph, steps = built(block(), dtype, 1)
        (node,) = sums(graph)
        assert steps[node.name].kernel == "wgmma_sum"
        assert steps[node.name].flops == graph.cost_of(node).flops
        assert node.op.compute_dtype == dtype
        storage_dtype = dtype if dtype in HALVES else ""
        for name in (*node.inputs[:2], *node.outputs):
            assert graph.values[name].storage_dtype == storage_dtype
    # What rounds more than the other one is not added to it before it is rounded.
    with Engine(block(), device="cuda", dtype="tf32") as engine:
        graph = engine._plans.open().placed(1, False).graph
        assert {node.op.compute_dtype for node in sums(graph)} <= {"tf32", "float32"}


def test_engines_have_neighbours(hopper):
    for dtype in (*HALVES, "float32"):
        graph, steps = built(fire(4), dtype, 1)
        found = beside(graph)
        assert len(found) == 2
        for node in found:
            assert steps[node.name].kernel == "wgmma_beside"
            assert graph.values[node.outputs[0]].storage_dtype == (dtype if dtype in HALVES else "")


def test_a_device_without_them_has_none(hopper, monkeypatch):
    fakes = fake_cuda.FakeTensorCores
    monkeypatch.setattr(fakes, "conv2d_nhwc_wgmma_pair_takes", staticmethod(lambda *how: False))
    with Engine(block(), device="cuda", dtype="float16") as engine:
        assert not sums(engine._plans.open().placed(1, False).graph)


def test_what_a_block_reads_is_known_to_its_sum(hopper):
    b = Builder((1, 64, 14, 14))
    x = b.relu(b.conv("images", 64, 1))
    y = b.conv(b.relu(b.conv(b.relu(b.conv(x, 64, 1)), 64, 3)), 128, 1)
    y = b.relu(b.add(Add(), y, b.conv(x, 128, 1)))
    with Engine(b.graph(b.head(y, 10)), device="cuda", dtype="float16") as engine:
        program = engine._plans.open()
        placed = program.placed(1, False)
        memory = plan_memory(placed, program.device_of, 1)
        found = early_reads.plan(placed, memory, program.prepared)
    (node,) = sums(placed.graph)
    assert found.known == {node.name: 64}
    (holder,) = found.holders
    assert placed.graph.nodes[placed.graph.positions[holder]].inputs[0] == node.inputs[0]
