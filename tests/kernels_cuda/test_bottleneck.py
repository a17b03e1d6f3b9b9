"""bottleneck: the rewrite that makes it, its record, and its kernel on CUDA against float64."""

from __future__ import annotations

import math

import fake_cuda
import halves
import numpy as np
import pytest
import regions
import targets
import tolerances
from conftest import Device
from engines import built, on_gpu, running, single
from halves import HALVES
from lowered import fuse, lay_channels_last
from native import NONE, RELU, call, epilogue, images, packed
from regions import bottleneck
from test_expand_depthwise import ids
from test_passes import Builder, kinds, same

from cnn_engine import _cpu
from cnn_engine.devices import cuda_module
from cnn_engine.engine.check import ROUNDING
from cnn_engine.graph.passes.fuse.patterns import BOTTLENECK, BOTTLENECK_AND_NEXT
from cnn_engine.kernels.cuda.requirements import WGMMA
from cnn_engine.operators.binary import Add
from cnn_engine.operators.channels_last import Conv2dNhwc
from cnn_engine.operators.conv2d import Conv2d
from cnn_engine.operators.unary import Relu, Swish

Function = _cpu.UnaryFunction

#: Images, channels, rows, columns, filters, outputs: of ResNets; of channels that fill no 64 of a block,
#: filters that fill no eight, odd images, of one row or column, and with rows and columns of tiles beyond.
CASES = [
    (1, 64, 56, 56, 64, 256),
    (1, 128, 28, 28, 128, 512),
    (1, 256, 14, 14, 256, 1024),
    (2, 256, 14, 14, 256, 1024),
    (3, 128, 7, 7, 128, 512),
    (1, 8, 5, 9, 8, 8),
    (2, 72, 13, 33, 40, 264),
    (1, 40, 3, 65, 72, 96),
    (1, 200, 15, 15, 136, 600),
    (1, 136, 2, 1, 250, 1016),
    (8, 64, 1, 4, 64, 64),
    (0, 64, 4, 4, 64, 256),
]  # fmt: skip


def laid(graph, takes=lambda *_: True):
    graph = lay_channels_last(fuse(graph), "cuda", run=8)
    return regions.fused(graph, BOTTLENECK_AND_NEXT, BOTTLENECK, takes=takes)


def block(batch=2, channels=8, inner=Relu, residual=True, stride=(1, 1), size=(11, 9)):
    """A residual block; its three sums and its output."""
    b = Builder(batch, 3, *size)
    x = b.conv("x", 3, 4 * channels, padding=(1, 1, 1, 1))
    first = b.add(Conv2d(), x, b.constant(channels, 4 * channels, 1, 1), b.constant(channels))
    y = second = b.conv(b.add(Relu(), first), channels, channels, padding=(1,) * 4, stride=stride)
    y = b.add(inner(), y) if inner else y
    y = third = b.add(Conv2d(), y, b.constant(4 * channels, channels, 1, 1))
    if residual:
        y = b.add(Add(), y, x)
    return b, (first, second, third), b.add(Relu(), y)


def next_block(b, y, channels=8, filters=8):
    """What the next block begins with, and something else that reads what the block before made."""
    z = b.add(Conv2d(), y, b.constant(filters, 4 * channels, 1, 1), b.constant(filters))
    return b.conv(b.add(Relu(), z), filters, 8), b.conv(y, 4 * channels, 8)


def found_in(graph):
    return [node for node in graph.nodes if node.op.kind == "bottleneck"]


# ---- the rewrite ----


@pytest.mark.parametrize("residual", [True, False])
def test_two_convolutions_become_one_node(residual):
    b, _, y = block(residual=residual)
    after = same(b.graph(y), laid)
    (node,) = found_in(after)
    assert node.op.activation("first") == node.op.activation("second") == Relu()
    assert (node.inputs[5] is not None) == residual
    assert len(node.covers) == 4 + residual
    assert kinds(after).count("conv2d_nhwc") == 2
    assert "together they are bottleneck" in {note.why for note in after.notes}


@pytest.mark.parametrize("third", [True, False])
def test_a_third_is_part_of_it_where_a_kernel_makes_it_too(third):
    b, _, y = block()
    graph = b.graph(*next_block(b, y))
    after = same(
        graph, lambda graph: laid(graph, lambda graph, node: third or not node.op["third"])
    )
    (node,) = found_in(after)
    assert (node.op["third"] is not None) == third == (len(node.outputs) == 2)
    assert node.op.activation("third") == (Relu() if third else None)
    assert len(node.covers) == 5 + 2 * third


def test_what_does_not_fit_stays_as_it_is():
    """Sums that others read; what no kernel takes."""
    b, sums, y = block()
    assert not found_in(same(b.graph(y, sums[1]), laid))
    asked = []

    def takes(graph, node):
        weights = (node.inputs[place] for place in (1, 2, 6))
        asked.append([name and graph.values[name].shape[2:] for name in weights])
        return False

    assert not found_in(same(b.graph(y), lambda graph: laid(graph, takes)))
    assert asked == [[(3, 3), (1, 1), None]]


@pytest.mark.parametrize("inner", [Relu, Swish])
@pytest.mark.parametrize("dtype", [*HALVES, "tf32", "float32"])
def test_engines_join_where_images_lie_in_16_bits(monkeypatch, dtype, inner):
    fake_cuda.install(monkeypatch, tensor_cores=True, stores=True)
    takes = staticmethod(lambda *_: True)
    monkeypatch.setattr(fake_cuda.FakeTensorCores, "bottleneck_takes", takes)
    b, _, y = block(inner=inner)
    graph = b.graph(*next_block(b, y))
    laid_out, steps = built(single(graph), dtype)
    found = found_in(laid_out)
    assert len(found) == (dtype in HALVES and inner is Relu)
    assert [node.name for node in found] == running(steps, "bottleneck")
    for node in found:
        assert node.op["third"]
        around = (node.inputs[0], node.inputs[5], *node.outputs)
        assert (
            {laid_out.values[name].storage_dtype for name in around}
            == {node.op.compute_dtype}
            == {dtype}
        )


# ---- the kernel ----


def shape_of(case, batch):
    _, c, h, w, k, _ = case
    return _cpu.Conv2dShape(batch, c, h, w, k, 3, 3, 1, 1, 1, 1, 1, 1)


def arrays(rng, case):
    n, c, h, w, k, outputs = case
    shapes = (n, h, w, c), (k, c, 3, 3), (outputs, k, 1, 1), (k,), (outputs,), (n, h, w, outputs)
    return [rng.uniform(-1, 1, shape).astype(np.float32) for shape in shapes]


def run(
    case, x, window, last, given, compute_dtype, third=None, *, inner=RELU, outer=RELU, after=RELU,
    overflow=halves.NO_FLAG,
):  # fmt: skip
    """Returns what both convolutions make, and with a third one's weights and bias what it makes."""
    device, shape, outputs = Device("cuda"), shape_of(case, len(x)), len(last)
    kind, reduced = (
        getattr(_cpu.ElementType, compute_dtype),
        0 if third is None else len(third[0]),
    )
    next_, next_bias = (None, None) if third is None else third
    weights, how = (window, last, next_), (shape, outputs, reduced)
    out, reduced_out = (
        halves.Output(device, (*x.shape[:3], channels), compute_dtype) for channels in how[1:]
    )
    *biases, residual = given
    added = halves.put(device, residual, compute_dtype)
    call(
        device, "bottleneck", halves.put(device, x, compute_dtype),
        packed(device, "bottleneck", weights, *how, kind),
        out.array, reduced_out.array if reduced else None, *how, kind,
        *epilogue(device.put(biases[0]), inner),
        *epilogue(
            device.put(biases[1]), outer, residual=images(added, storage_dtype=compute_dtype)
        ),
        *epilogue(device.put(next_bias), after, overflow),
    )  # fmt: skip
    both = out.get(), reduced_out.get()
    return both[0] if third is None else both


def record(inner=None, outer=None, after=None, reduces=False):
    third = Conv2dNhwc(activation=after) if reduces else None
    return bottleneck(Conv2dNhwc(padding=(1,) * 4, activation=inner), outer, third)


def third_of(rng, case, whole=False):
    """A third convolution's weights and bias: as many filters as the first one has, up to eights."""
    shape = -(-case[4] // 8) * 8, case[5], 1, 1
    if not whole:
        return rng.uniform(-1, 1, shape).astype(np.float32), np.float32(
            rng.uniform(-1, 1, shape[0])
        )
    weight = rng.integers(-1, 2, shape) * (rng.random(shape) < 0.05)
    return weight.astype(np.float32), rng.integers(-1, 2, shape[0]).astype(np.float32)


def is_narrow(case):
    """Whether a kernel makes the third convolution, too."""
    return max(case[1], case[4], -(-case[5] // 4)) <= 128


@pytest.fixture
def hopper():
    targets.need(WGMMA)


@pytest.mark.gpu
@pytest.mark.parametrize("compute_dtype", HALVES)
@pytest.mark.parametrize("case", CASES, ids=ids)
def test_whole_numbers_are_exact(rng, hopper, case, compute_dtype):
    """As long as all that is rounded has few bits."""
    whole = [rng.integers(-1, 2, array.shape).astype(np.float32) for array in arrays(rng, case)]
    x, window, last, *given = whole
    x *= rng.random(x.shape) < 0.1  # so that bfloat16 holds every sum
    window *= rng.random(window.shape) < 0.2
    last *= rng.random(last.shape) < 0.2
    for of, outer in ((given, (Relu(), RELU)), ((None,) * 3, (None, NONE))):
        wanted = record(Relu(), outer[0]).reference(x, window, last, *of)
        found = run(case, x, window, last, of, compute_dtype, outer=outer[1])
        assert np.array_equal(found, halves.rounded(wanted, compute_dtype))
        if not is_narrow(case):
            continue
        third = third_of(rng, case, whole=True)
        both = run(case, x, window, last, of, compute_dtype, third, outer=outer[1])
        wide = record(Relu(), outer[0], Relu(), reduces=True)
        sums = wide.reference(x, window, last, *of, *third)
        assert np.array_equal(both[0], found)
        assert np.array_equal(both[1], halves.rounded(sums[1], compute_dtype))


@pytest.mark.gpu
@pytest.mark.parametrize("compute_dtype", HALVES)
@pytest.mark.parametrize("functions", [((Relu(), RELU), (Relu(), RELU)), ((None, NONE),) * 2])
@pytest.mark.parametrize("case", CASES, ids=ids)
def test_against_reference(rng, hopper, case, functions, compute_dtype):
    x, window, last, *given = arrays(rng, case)
    x, given[2] = halves.rounded(x, compute_dtype), halves.rounded(given[2], compute_dtype)
    window /= math.sqrt(window[0].size)
    (inner, first), (outer, second) = functions
    wanted = record(inner, outer).reference(x, window, last, *given)
    found = run(case, x, window, last, given, compute_dtype, inner=first, outer=second)
    size = record().reference(*map(np.abs, (x, window, last, *given)))
    terms = window[0].size + len(window) + 2
    # Weights, what is between and the result are rounded.
    limit = tolerances.sum_of_products(terms, size) + 4 * ROUNDING[compute_dtype] * size
    tolerances.assert_close(found, wanted, limit)
    if not is_narrow(case):
        return
    # Of what is made of the result as it is stored.
    weight, bias = third_of(rng, case)
    both = run(
        case, x, window, last, given, compute_dtype, (weight, bias), inner=first, outer=second
    )
    product = Conv2dNhwc(activation=Relu())
    wanted, size = (
        product.reference(*of)
        for of in ((both[0], weight, bias), map(np.abs, (both[0], weight, bias)))
    )
    limit = tolerances.sum_of_products(len(last) + 1, size) + 2 * ROUNDING[compute_dtype] * size
    assert np.array_equal(both[0], found)
    tolerances.assert_close(both[1], wanted, limit)


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES[1:4], ids=ids)
def test_each_image_has_the_same_bits_among_others_and_again(rng, hopper, case):
    case = (5, *case[1:])
    x, window, last, *given = arrays(rng, case)
    third = third_of(rng, case) if is_narrow(case) else None

    def made(images, arrays):
        found = run(case, images, window, last, arrays, "float16", third)
        return found if third else (found,)

    together = made(x, given)
    for _ in range(10):
        assert all(map(np.array_equal, made(x, given), together))
    for n in (0, 4):
        alone = *given[:2], given[2][n : n + 1]
        for one, all_of_them in zip(made(x[n : n + 1], alone), together, strict=True):
            assert np.array_equal(one[0], all_of_them[n])


@pytest.mark.gpu
@pytest.mark.parametrize("case", [CASES[1], CASES[3], CASES[6]], ids=ids)
def test_nan_reaches_its_window_of_all_channels_alone(rng, hopper, case):
    case = (2, *case[1:])
    x, window, last, *given = arrays(rng, case)
    x[1, 1, 13, 2] = np.nan
    found = run(case, x, window, last, given, "float16")
    reached = np.isnan(found).any(-1)
    assert np.isnan(found[1, :3, 12:15]).all()
    assert reached.sum() == reached[1, :3, 12:15].size


@pytest.mark.gpu
@pytest.mark.parametrize("where", ["between", "after", "last", "nowhere", "beyond"])
def test_results_past_float16_are_told(rng, hopper, where):
    """Of the first convolution, which no one else sees, and of the second; not of places beyond the image."""
    case = (1, 72, 3, 7, 72, 80)
    x, window, last, *given = (0 * array for array in arrays(rng, case))
    given[0][5] = 70000.0 if where == "between" else 40000.0
    last[5, 5] = 2.0 if where == "after" else 1.0
    if where == "beyond":  # what reaches the last place from the row and the column past it
        given[0][5], x[0, -1, -1] = 0.0, 4.0
        window[5, 0, 0, 1:], window[5, 0, 1, 0] = 30000.0, 30000.0
    flag = halves.OverflowFlag()
    third = np.zeros((72, 80, 1, 1), np.float32), np.zeros(72, np.float32)
    third[0][7, 5] = 2.0 if where == "last" else 1.0
    run(case, x, window, last, given, "float16", third, overflow=flag.overflow)
    assert flag.is_set() == (where in ("between", "after", "last"))


@pytest.mark.gpu
def test_what_does_not_fit_is_refused(hopper):
    module, kind = cuda_module.load(), _cpu.ElementType.float16
    one, ones = (1, 1), (1, 1, 1, 1)
    for numbers, filters, expected in (
        ((1, 12, 9, 9, 8, 3, 3, *one, *ones), (8, 0), "channels and outputs in eights"),
        ((1, 8, 9, 9, 8, 3, 3, *one, *ones), (12, 0), "channels and outputs in eights"),
        ((1, 8, 9, 9, 8, 3, 3, *one, *ones), (8, 12), "channels and outputs in eights"),
        ((1, 8, 9, 9, 8, 5, 5, *one, *ones), (8, 0), "a kernel of 3x3"),
        ((1, 8, 9, 9, 8, 3, 3, 2, 1, *ones), (8, 0), "a kernel of 3x3"),
        ((1, 8, 9, 9, 8, 3, 3, *one, 0, 1, 1, 1), (8, 0), "a kernel of 3x3"),
        ((1, 8, 9, 9, 8, 3, 3, *one, *ones, 1, 2), (8, 0), "a kernel of 3x3"),
        ((1, 8, 9, 9, 8, 3, 3, *one, *ones, 1, 1, 8), (8, 0), "one group"),
        ((1, 264, 9, 9, 8, 3, 3, *one, *ones), (8, 0), "at most 256 channels"),
        ((1, 8, 9, 9, 8, 3, 3, *one, *ones), (1032, 0), "at most 256 channels"),
        ((1, 8, 9, 9, 8, 3, 3, *one, *ones), (8, 136), "at most 128 channels"),
        ((1, 136, 9, 9, 8, 3, 3, *one, *ones), (8, 8), "at most 128 channels"),
        ((1, 8, 9, 9, 136, 3, 3, *one, *ones), (8, 8), "at most 128 channels"),
        ((1, 8, 9, 9, 8, 3, 3, *one, *ones), (520, 8), "at most 128 channels"),
    ):  # fmt: skip
        shape = _cpu.Conv2dShape(*numbers)
        assert not module.bottleneck_takes(shape, *filters, targets.native())
        with pytest.raises(ValueError, match=expected):
            module.bottleneck_packed(shape, *filters, kind, 0)
    shape = shape_of(CASES[0], 1)
    for compute_dtype, x, function, expected in (
        ("tf32", 256, RELU, "float16 or bfloat16"), ("float16", 8, RELU, "of 16"),
        ("float16", 256, (Function.swish, 1, 0), "relu or clip"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=expected):
            module.bottleneck(
                x, 256, 512, 0, shape, 256, 0, getattr(_cpu.ElementType, compute_dtype),
                *epilogue(0, function), *2 * epilogue(0, RELU), 0,
            )  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("batch", [1, 2, 20])
def test_engine(dtype, batch):
    b, _, y = block(batch, 64, size=(14, 14))
    graph = single(b.graph(*next_block(b, y, 64, 64)[:1]))
    _, kernels = on_gpu(graph, dtype)
    shape = shape_of((batch, 64, 14, 14, 64, 256), batch)
    takes = any(
        cuda_module.load().bottleneck_takes(shape, 256, third, targets.native())
        for third in (0, 64)
    )
    assert ("bottleneck" in kernels) == takes
