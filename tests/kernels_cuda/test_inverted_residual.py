"""inverted_residual: the rewrite that makes it, its record, and its kernel on CUDA against float64."""

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
from native import NONE, call, epilogue, packed
from test_expand_depthwise import ids
from test_passes import Builder, kinds, same

from cnn_engine import _cpu
from cnn_engine.devices import cuda_module
from cnn_engine.engine.check import ROUNDING
from cnn_engine.graph.passes.fuse.patterns import INVERTED_RESIDUAL
from cnn_engine.kernels.cuda.requirements import CLUSTERS_OF_HOPPER
from cnn_engine.operators.binary import Add
from cnn_engine.operators.channels_last import Conv2dNhwc
from cnn_engine.operators.conv2d import Conv2d
from cnn_engine.operators.unary import HardSwish, Relu, Swish

Function = _cpu.UnaryFunction

# n, c or None where nothing is expanded, h, w, k, filters, kernel, stride, (above, left, below, right), adds
IMAGES = [
    (1, None, 112, 112, 16, 16, 3, (1, 1), (1, 1, 1, 1), True),
    (1, 16, 112, 112, 64, 24, 3, (2, 2), (1, 1, 1, 1), False),
    (1, 24, 56, 56, 72, 24, 3, (1, 1), (1, 1, 1, 1), True),
    (2, 40, 28, 28, 240, 80, 3, (2, 2), (1, 1, 1, 1), False),
    (1, 80, 14, 14, 200, 80, 3, (1, 1), (1, 1, 1, 1), True),
    (5, 80, 14, 14, 184, 80, 3, (1, 1), (1, 1, 1, 1), True),
    (3, 56, 7, 7, 256, 8, 3, (1, 1), (1, 1, 1, 1), False),
    (2, 32, 28, 28, 192, 32, 3, (1, 1), (1, 1, 1, 1), True),
    (2, 8, 9, 33, 8, 8, 3, (1, 2), (0, 2, 3, 1), False),
    (1, 64, 5, 3, 24, 256, 3, (2, 1), (2, 0, 1, 1), False),
    (2, None, 3, 20, 40, 56, 3, (1, 1), (9, 7, 6, 5), False),
    (1, 16, 6, 6, 48, 16, 3, (1, 1), (0, 2, 2, 0), True),
    (0, 16, 4, 4, 48, 16, 3, (1, 1), (1, 1, 1, 1), True),
]  # fmt: skip


def block(batch=2, channels=8, wide=24, filters=8, add=True, expands=True, stride=(1, 1)):
    """An inverted residual block behind a convolution, and another convolution behind it."""
    b = Builder(batch, 3, 11, 9)
    x = y = b.add(Relu(), b.conv("x", 3, channels))
    if expands:
        weight, bias = b.constant(wide, channels, 1, 1), b.constant(wide)
        y = b.add(Swish(), b.add(Conv2d(), y, weight, bias))
    else:
        wide = channels
    second = b.constant(wide, 1, 3, 3), b.constant(wide)
    y = b.add(Relu(), b.add(Conv2d(stride, (1, 1, 1, 1), groups=wide), y, *second))
    y = b.add(Conv2d(), y, b.constant(filters, wide, 1, 1), b.constant(filters))
    return b, (b.add(Add(), y, x) if add else y), x


def ended(b, y, filters=8):
    return b.graph(b.add(Conv2d(), y, b.constant(16, filters, 1, 1)))


def fused(graph, takes=lambda *_: True):
    laid = lay_channels_last(fuse(graph), "cuda", run=8)
    return regions.fused(laid, INVERTED_RESIDUAL, takes=takes)


def found_in(graph):
    return [node for node in graph.nodes if node.op.kind == "inverted_residual"]


# ---- the rewrite ----


@pytest.mark.parametrize("expands", [True, False])
@pytest.mark.parametrize("add", [True, False])
def test_three_convolutions_become_one_node(add, expands):
    b, y, _ = block(add=add, expands=expands)
    after = same(ended(b, y), fused)
    (node,) = found_in(after)
    assert (node.inputs[1] is not None) == expands
    assert ("first.0" in node.op.nodes[-1].inputs) == add
    assert node.op.activation("first") == (Swish() if expands else None)
    assert node.op.activation("second") == Relu()
    assert node.op.activation("third") is None
    assert "together they are inverted_residual" in {note.why for note in after.notes}
    assert kinds(after).count("conv2d_nhwc") == 2


def test_a_device_is_asked_for_each_block():
    b, y, _ = block()
    asked = []

    def takes(graph, node):
        asked.append([part.op.kind for part in node.op.nodes])
        return False

    assert not found_in(same(ended(b, y), lambda graph: fused(graph, takes)))
    assert asked == [["conv2d_nhwc"] * 3]


def test_what_does_not_fit_stays_as_it_is():
    """Sums that others read, another addend, a last convolution that moves on."""
    b, y, _ = block(add=False)
    other = b.add(Relu(), b.conv("x", 3, 8))
    assert not found_in(same(ended(b, b.add(Add(), y, other)), fused))
    b, y, _ = block(add=False)
    inner = next(node.outputs[0] for node in b.nodes if node.op.kind == "swish")
    (node,) = found_in(same(b.graph(y, inner), fused))
    assert node.inputs[1] is None  # it reads what others read, too
    b, *_ = block()
    y = b.add(Conv2d(stride=(2, 2)), b.nodes[-3].outputs[0], b.constant(8, 24, 1, 1))
    assert not found_in(same(b.graph(y), fused))


def test_chains_of_blocks_share_no_convolution():
    b, y, _ = block(add=False, filters=16)
    y = b.add(Conv2d(padding=(1, 1, 1, 1), groups=16), y, b.constant(16, 1, 3, 3))
    y = b.add(Conv2d(), y, b.constant(8, 16, 1, 1))
    after = same(ended(b, y), fused)
    first, second = found_in(after)
    assert second.inputs[:2] == (first.outputs[0], None)


@pytest.mark.parametrize("dtype", [*HALVES, "tf32", "float32"])
def test_engines_join_blocks_where_images_lie_in_16_bits(monkeypatch, dtype):
    fake_cuda.install(monkeypatch, tensor_cores=True, stores=True)
    b, y, _ = block()
    graph, steps = built(single(ended(b, y)), dtype)
    found = found_in(graph)
    assert len(found) == (dtype in HALVES)
    assert [node.name for node in found] == running(steps, "inverted_residual")
    for node in found:
        assert node.op.compute_dtype == dtype
        assert {graph.values[name].storage_dtype for name in (node.inputs[0], *node.outputs)} == {
            dtype
        }


# ---- the kernel ----


def arrays(rng, case):
    n, c, h, w, k, filters, kernel, *_ = case
    first = None if c is None else (k, c, 1, 1)
    shapes = (n, h, w, c or k), first, (k, 1, kernel, kernel), (filters, k, 1, 1)
    shapes += None if c is None else (k,), (k,), (filters,)
    made = (None if one is None else rng.standard_normal(one) for one in shapes)
    return [None if one is None else one.astype(np.float32) for one in made]


def shape_of(case, n=None):
    given, c, h, w, k, filters, kernel, stride, padding, _ = case
    n = given if n is None else n
    shape = _cpu.Conv2dShape(n, k, h, w, k, kernel, kernel, *stride, *padding, 1, 1, k)
    return shape, c or k, filters, c is not None


def record(case, *functions, adds=None):
    _, c, _, _, k, *_, stride, padding, added = case
    inner, middle, last = (*functions, *[None] * 3)[:3]
    first = None if c is None else Conv2dNhwc(activation=inner)
    second = Conv2dNhwc(stride, padding, groups=k, activation=middle)
    third = Conv2dNhwc(activation=last)
    return regions.inverted_residual(first, second, third, added if adds is None else adds)


def run(case, given, compute_dtype, functions=(NONE, NONE, NONE), overflow=halves.NO_FLAG):
    device, (x, *weights), biases = Device("cuda"), given[:4], given[4:]
    how, kind = shape_of(case, len(x)), getattr(_cpu.ElementType, compute_dtype)
    shape, _, filters, _ = how
    out = halves.Output(device, (len(x), shape.out_h, shape.out_w, filters), compute_dtype)
    call(
        device, "inverted_residual", halves.put(device, x, compute_dtype),
        packed(device, "inverted_residual", weights, *how, kind), out.array, *how, case[-1], kind,
        *(part for bias, one in zip(biases, functions, strict=True)
          for part in epilogue(device.put(bias), one, overflow)),
    )  # fmt: skip
    return out.get()


@pytest.fixture
def hopper():
    targets.need(CLUSTERS_OF_HOPPER)


@pytest.mark.gpu
@pytest.mark.parametrize("compute_dtype", HALVES)
@pytest.mark.parametrize("case", IMAGES, ids=ids)
def test_whole_numbers_are_exact(rng, hopper, case, compute_dtype):
    """As long as all that is rounded has few bits."""
    given = [
        None if one is None else rng.integers(-1, 2, one.shape).astype(np.float32)
        for one in arrays(rng, case)
    ]
    for place, share in (
        (0, 0.1),
        (1, 0.5),
        (2, 0.5),
        (3, 0.1),
    ):  # so that bfloat16 holds every sum
        if given[place] is not None:
            given[place] *= rng.random(given[place].shape) < share
    relu = Function.relu, 0, 0
    for biases in (given[4:], [None] * 3):
        wanted = record(case, Relu()).reference(*given[:4], *biases)
        found = run(case, [*given[:4], *biases], compute_dtype, (relu, NONE, NONE))
        assert np.abs(wanted).max(initial=0) <= 256
        assert np.array_equal(found, wanted)


@pytest.mark.gpu
@pytest.mark.parametrize("compute_dtype", HALVES)
@pytest.mark.parametrize(
    ("ops", "functions"),
    [((Swish(), Swish(), None), ((Function.swish, 1, 0), (Function.swish, 1, 0), NONE)),
     ((HardSwish(), Relu(), Swish()),
      ((Function.hard_swish, 0, 0), (Function.relu, 0, 0), (Function.swish, 1, 0))),
     ((HardSwish(), HardSwish(), Relu()),
      ((Function.hard_swish, 0, 0), (Function.hard_swish, 0, 0), (Function.relu, 0, 0))),
     ((None, Relu(), None), (NONE, (Function.relu, 0, 0), NONE))],
    ids=["swish", "mixed", "hard_swish", "none"],
)  # fmt: skip
@pytest.mark.parametrize("case", IMAGES, ids=ids)
def test_against_reference(rng, hopper, case, ops, functions, compute_dtype):
    x, first, second, third, *biases = arrays(rng, case)
    x = halves.rounded(x, compute_dtype)
    if first is not None:
        first /= math.sqrt(first.shape[1])
    third /= math.sqrt(third.shape[1])
    given = x, first, second, third, *biases
    wanted = record(case, *ops).reference(*given)
    found = run(case, given, compute_dtype, functions)
    size = record(case).reference(*(None if one is None else np.abs(one) for one in given))
    terms = (0 if first is None else first.shape[1]) + second[0].size + third.shape[1] + 2
    # Weights, what is between and the result are rounded; functions are no steeper than 1.1, 1.5.
    limit = tolerances.sum_of_products(terms, size) + 9 * ROUNDING[compute_dtype] * size
    tolerances.assert_close(found, wanted, limit)


@pytest.mark.gpu
@pytest.mark.parametrize("case", [IMAGES[0], IMAGES[3], IMAGES[4]], ids=ids)
def test_the_same_bits_again(rng, hopper, case):
    given = arrays(rng, case)
    found = run(case, given, "float16")
    for _ in range(3):
        assert np.array_equal(run(case, given, "float16"), found)


@pytest.mark.gpu
def test_nan_reaches_what_reads_it_alone(rng, hopper):
    case = (2, 16, 14, 14, 24, 16, 3, (1, 1), (1, 1, 1, 1), True)
    given = arrays(rng, case)
    given[0][1, 5, 6, 2] = np.nan
    found = run(case, given, "float16", ((Function.swish, 1, 0), (Function.hard_swish, 0, 0), NONE))
    assert np.isnan(found[1, 4:7, 5:8]).all()
    assert np.isnan(found).sum() == 9 * 16


@pytest.mark.gpu
@pytest.mark.parametrize("where", ["first", "second", "third", "nowhere"])
def test_results_past_float16_are_told(rng, hopper, where):
    """Of the convolutions that no one else sees, and of the last."""
    case = (1, 8, 7, 7, 24, 16, 3, (1, 1), (1, 1, 1, 1), False)
    given = [0 * one for one in arrays(rng, case)]
    given[2][5, 0, 1, 1] = given[3][7, 5] = 1.0
    given[4 + ["first", "second", "third", "nowhere"].index(where) % 3][5] = 70000.0
    if where == "nowhere":
        given[4][5] = 60000.0
    flag = halves.OverflowFlag()
    run(case, given, "float16", overflow=flag.overflow)
    assert flag.is_set() == (where != "nowhere")


@pytest.mark.gpu
def test_what_does_not_fit_is_refused(hopper):
    module = cuda_module.load()
    fine = (1, 16, 9, 9, 24, 16, 3, (1, 1), (1, 1, 1, 1), True)

    def changed(**new):
        names = ("n", "c", "h", "w", "k", "filters", "kernel", "stride", "padding", "adds")
        return tuple(new.get(name, value) for name, value in zip(names, fine, strict=True))

    assert module.inverted_residual_takes(*shape_of(fine), True, targets.native())
    for case, expected in (
        (changed(c=12), "channels in eights"), (changed(k=264), "at most 256"),
        (changed(filters=12), "channels in eights"), (changed(c=88), "80 that are expanded"),
        (changed(kernel=5), "a kernel of 3x3"), (changed(stride=(3, 1)), "strides of at most 2"),
        (changed(h=5000), "at most 4096"), (changed(h=4000, w=4000), "4194304 places"),
    ):  # fmt: skip
        assert not module.inverted_residual_takes(*shape_of(case), False, targets.native())
        with pytest.raises(ValueError, match=expected):
            module.inverted_residual_packed(*shape_of(case), _cpu.ElementType.float16, 0)
    for case, compute_dtype, x, expected in (
        (changed(filters=24), "float16", 256, "as large as what is added"),
        (changed(stride=(2, 1)), "float16", 256, "as large as what is added"),
        (fine, "tf32", 256, "float16 or bfloat16"), (fine, "float16", 8, "of 16"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=expected):
            module.inverted_residual(
                x, 256, 512, *shape_of(case), True, getattr(_cpu.ElementType, compute_dtype),
                *3 * epilogue(), 0,
            )  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("batch", [1, 2, 20])
@pytest.mark.parametrize("expands", [True, False])
def test_engine(dtype, batch, expands):
    b, y, _ = block(batch, wide=48, expands=expands)
    _, kernels = on_gpu(single(ended(b, y)), dtype)
    k = 48 if expands else 8
    case = (batch, 8 if expands else None, 11, 9, k, 8, 3, (1, 1), (1, 1, 1, 1), True)
    takes = cuda_module.load().inverted_residual_takes(*shape_of(case), True, targets.native())
    assert ("inverted_residual" in kernels) == bool(takes)
