"""expand_depthwise: the rewrite that makes it, its record, and its kernel on the CPU."""

from __future__ import annotations

import functools
import math

import numpy as np
import pytest
import regions
import tolerances
from engines import plan_of, single
from lowered import fuse, lay_channels_last
from native import NONE
from test_passes import Builder, kinds, same

from cnn_engine import Engine, _cpu
from cnn_engine.devices import cpu
from cnn_engine.graph.passes.fuse.patterns import EXPAND_DEPTHWISE_MEAN
from cnn_engine.operators.binary import Mul
from cnn_engine.operators.channels_last import Conv2dNhwc
from cnn_engine.operators.conv2d import Conv2d
from cnn_engine.operators.reduce import ReduceMax, ReduceMean
from cnn_engine.operators.unary import Clip, HardSwish, Relu, Sigmoid, Swish

Function = _cpu.UnaryFunction


def laid(graph):
    return regions.fused(lay_channels_last(fuse(graph)), EXPAND_DEPTHWISE_MEAN)


def found_in(graph):
    return [node for node in graph.nodes if node.op.kind == "expand_depthwise"]


def block(batch=2, channels=8, wide=24, inner=Swish, outer=Relu, kernel=3, mean=ReduceMean, **how):
    """An inverted residual block, with its gate where there is a mean; its two first sums, its output."""
    b = Builder(batch, 3, 11, 9)
    x = b.conv("x", 3, channels)
    first = y = b.add(Conv2d(), x, b.constant(wide, channels, 1, 1), b.constant(wide))
    y = b.add(inner(), y) if inner else y
    weight = b.constant(wide, 1, kernel, kernel)
    second = b.add(Conv2d(**{"groups": wide, **how}), y, weight, b.constant(wide))
    y = b.add(outer(), second) if outer else second
    if mean is not None:
        gate = b.add(Conv2d(), b.add(mean((2, 3), True), y), b.constant(wide, wide, 1, 1))
        y = b.add(Mul(), y, b.add(Sigmoid(), gate))
    y = b.add(Conv2d(), y, b.constant(channels, wide, 1, 1))
    return b, first, second, y


@pytest.mark.parametrize("how", [{}, {"stride": (2, 2), "padding": (1, 0, 2, 1)}], ids=str)
@pytest.mark.parametrize("mean", [ReduceMean, None])
def test_two_convolutions_and_a_mean_become_one_node(how, mean):
    b, *_, y = block(mean=mean, **how)
    after = same(b.graph(y), laid)
    (node,) = found_in(after)
    assert node.op.activation("first") == Swish()
    assert node.op.activation("second") == Relu()
    assert (node.op["mean"] is not None) == (mean is not None) == (len(node.outputs) == 2)
    assert len(node.covers) == 4 + (mean is not None)
    assert "reduce_mean" not in kinds(after)
    assert "together they are expand_depthwise" in {note.why for note in after.notes}


def test_what_does_not_fit_stays_as_it_is():
    """Sums that others read, channels that are not alone, other reductions, large windows."""
    b, first, second, y = block()
    large, *_, out = block(kernel=9, padding=(4, 4, 4, 4))
    graphs = [b.graph(y, first), block(groups=1, wide=1)[0].graph("conv2d0.out"), large.graph(out)]
    for graph in graphs:
        assert not found_in(same(graph, laid))
    (node,) = found_in(same(b.graph(y, second), laid))  # whose function is another node
    assert len(node.outputs) == 1
    assert node.op.activation("second") is None
    b, *_, y = block(mean=ReduceMax)
    (node,) = found_in(same(b.graph(y), laid))
    assert len(node.outputs) == 1


# ---- the kernel ----

# n, c, h, w, k, kernel, stride, (above, left, below, right), dilation
CASES = [
    (2, 16, 20, 18, 96, (3, 3), (2, 2), (1, 1, 1, 1), (1, 1)),
    (1, 24, 56, 56, 72, (3, 3), (1, 1), (1, 1, 1, 1), (1, 1)),
    (1, 40, 28, 28, 240, (5, 5), (1, 1), (2, 2, 2, 2), (1, 1)),
    (3, 192, 7, 7, 700, (5, 5), (1, 1), (2, 2, 2, 2), (1, 1)),
    (1, 3, 120, 130, 33, (5, 5), (2, 2), (2, 1, 2, 3), (1, 1)),
    (2, 130, 5, 9, 40, (3, 3), (1, 2), (0, 2, 1, 0), (1, 1)),
    (1, 8, 9, 300, 513, (3, 3), (3, 1), (1, 1, 1, 1), (1, 1)),
    (2, 7, 13, 11, 5, (7, 3), (2, 1), (3, 1, 3, 1), (2, 3)),
    (1, 4, 3, 2, 20, (3, 3), (5, 5), (7, 7, 7, 7), (1, 1)),
    (1, 12, 4, 3, 16, (4, 3), (1, 1), (0, 0, 0, 0), (1, 1)),
    (2, 9, 1, 1, 50, (1, 1), (1, 1), (0, 0, 0, 0), (1, 1)),
    (0, 9, 4, 4, 50, (3, 3), (1, 1), (1, 1, 1, 1), (1, 1)),
]  # fmt: skip


def ids(case):
    return "-".join(str(part).replace(" ", "") for part in case)


def address(array):
    return 0 if array is None else array.ctypes.data


def arrays(rng, case):
    n, c, h, w, k, kernel, *_ = case
    shapes = (n, h, w, c), (k, c, 1, 1), (k, 1, *kernel), (k,), (k,)
    return [rng.standard_normal(shape).astype(np.float32) for shape in shapes]


def shapes_of(case, n):
    _, c, h, w, k, kernel, stride, padding, dilation = case
    return (
        _cpu.Conv2dShape(n, c, h, w, k, 1, 1, 1, 1, 0, 0),
        _cpu.Conv2dShape(n, k, h, w, k, *kernel, *stride, *padding, *dilation, k),
    )


def packed(weight, shape, method):
    to = np.empty(_cpu.conv2d_nhwc_packed(shape, method), np.float32)
    _cpu.conv2d_nhwc_pack(address(weight), address(to), shape, method, 1)
    return to


def run(
    case, x, first, second, biases, *, inner=NONE, outer=NONE, threads=1, more=(0, 0, 0), mean=True
):
    """Calls the kernel with pitches of ``more`` floats than channels; what lies between must stay."""
    (n, h, w, c), k = x.shape, len(first)
    expand, shape = shapes_of(case, n)
    images = np.full((n, h, w, c + more[0]), np.nan, np.float32)
    images[..., :c] = x
    weights = (
        packed(first, expand, _cpu.Conv2dMethod.direct),
        packed(second, shape, _cpu.Conv2dMethod.depthwise),
    )
    out = np.full((n, shape.out_h, shape.out_w, k + more[1]), 7, np.float32)
    means = np.full((n, k + more[2]), 7, np.float32) if mean else None
    size = _cpu.expand_depthwise_workspace(shape, threads) // 4
    workspace = np.full(size + 64, np.nan, np.float32)
    workspace[size:] = 5
    _cpu.expand_depthwise(
        *map(address, (images, *weights, *biases, out, means, workspace)), shape, c,
        _cpu.Conv2dPitches(c + more[0], k + more[1]), k + more[2], *inner, *outer, threads,
    )  # fmt: skip
    assert (out[..., k:] == 7).all()
    assert (workspace[size:] == 5).all()
    if not mean:
        return out[..., :k]
    assert (means[:, k:] == 7).all()
    return out[..., :k], means[:, :k]


def record(case, inner=None, outer=None):
    _, _, _, _, k, _, stride, padding, dilation = case
    second = Conv2dNhwc(stride, padding, dilation, k, outer)
    return regions.expand_depthwise(Conv2dNhwc(activation=inner), second, ReduceMean((1, 2), True))


@pytest.mark.parametrize("case", CASES, ids=ids)
@pytest.mark.parametrize("bias", [True, False])
def test_against_reference(rng, instruction_set, case, bias):
    x, first, second, *biases = arrays(rng, case)
    if not bias:
        biases = [None, None]
    y, mean = record(case).reference(x, first, second, *biases)
    found, found_mean = run(case, x, first, second, biases, more=(5, 3, 2))
    sizes = [None if array is None else np.abs(array) for array in (x, first, second, *biases)]
    size, size_mean = record(case).reference(*sizes)
    terms = first.shape[1] + second[0].size + 1
    tolerances.assert_close(found, y, tolerances.sum_of_products(terms, size))
    if y.size:
        limit = tolerances.sum_of_products(terms, size_mean[:, 0, 0])
        tolerances.assert_close(found_mean, mean[:, 0, 0], limit)


@pytest.mark.parametrize("case", CASES, ids=ids)
@pytest.mark.parametrize(
    ("inner", "outer"),
    [((Function.swish, 1, 0), (Function.swish, 1, 0)),
     ((Function.hard_swish, 0, 0), (Function.relu, 0, 0)),
     ((Function.gelu, 0, 0), (Function.sigmoid, 1, 0))],
    ids=["swish", "hard_swish", "gelu"],
)  # fmt: skip
def test_bits_of_both_convolutions_with_any_threads_and_batch(
    rng, instruction_set, case, inner, outer
):
    x, first, second, *biases = arrays(rng, case)
    how = {"inner": inner, "outer": outer}
    one, means = run(case, x, first, second, biases, **how)
    assert np.array_equal(one, apart(case, x, first, second, biases, inner, outer))
    for threads in (2, 3, 8):
        y, mean = run(case, x, first, second, biases, threads=threads, **how)
        assert np.array_equal(y, one)
        assert np.array_equal(mean, means)
    assert np.array_equal(run(case, x, first, second, biases, mean=False, **how), one)
    for n in range(len(x)):
        y, mean = run(case, x[n : n + 1], first, second, biases, **how)
        assert np.array_equal(y[0], one[n])
        assert np.array_equal(mean[0], means[n])


def apart(case, x, first, second, biases, inner, outer):
    """Returns the same by conv2d_nhwc, one convolution after the other."""
    for weight, bias, shape, method, function in zip(
        (first, second), biases, shapes_of(case, len(x)),
        (_cpu.Conv2dMethod.direct, _cpu.Conv2dMethod.depthwise), (inner, outer), strict=True,
    ):  # fmt: skip
        workspace = np.empty(_cpu.conv2d_nhwc_workspace(shape, method, 1), np.uint8)
        weights, k = packed(weight, shape, method), len(weight)
        out = np.empty((len(x), shape.out_h, shape.out_w, k), np.float32)
        _cpu.conv2d_nhwc(
            *map(address, (x, weights, bias, None, None, None, out, workspace)), shape,
            _cpu.Conv2dPitches(x.shape[3], k), method, False, -math.inf, *function, 1,
        )  # fmt: skip
        x = out
    return x


def test_nan_stays_in_what_reads_it(rng):
    case = (2, 4, 12, 12, 24, (3, 3), (1, 1), (1, 1, 1, 1), (1, 1))
    x, first, second, *biases = arrays(rng, case)
    x[1, 5, 6, 2] = np.nan
    y, mean = run(case, x, first, second, biases, outer=(Function.relu, 0, 0))
    assert np.isnan(y[1, 4:7, 5:8]).all()
    assert np.isnan(y).sum() == 24 * 9
    assert np.isnan(mean[1]).all()
    assert np.isfinite(mean[0]).all()


# ---- engines ----


@pytest.mark.parametrize("mean", [ReduceMean, None])
@pytest.mark.parametrize("inner", [Swish, HardSwish, Clip, None])
def test_engines_run_it(mean, inner):
    b, *_, y = block(inner=inner, mean=mean, padding=(1, 1, 1, 1))
    graph = single(b.graph(y))
    x = np.random.default_rng(3).uniform(-1, 1, (2, 3, 11, 9)).astype(np.float32)
    with Engine(graph, device="cpu", variant="if") as engine:
        (wanted,) = engine.run({"x": x}).values()
    found = []
    for threads in (1, 2):
        with Engine(graph, device="cpu", threads=threads) as engine:
            found += engine.run({"x": x}).values()
            kernels = [step.kernel for step in plan_of(engine, 2).steps]
            assert "expand_depthwise" in kernels
            assert "reduce" not in kernels
    np.testing.assert_array_equal(*found)
    np.testing.assert_allclose(found[0], wanted, rtol=1e-4, atol=1e-4)


def test_convolutions_by_themselves_where_bfloat16_is_asked_for_and_pays(monkeypatch):
    b, *_, y = block(mean=None)
    graph = single(b.graph(y))

    def kernels_of(dtype):
        with Engine(graph, device="cpu", dtype=dtype) as engine:
            return [node.op.kind for node in engine._plans._program.laid(2, False).nodes]

    if not _cpu.bfloat16_why_not():
        monkeypatch.setattr(_cpu, "bfloat16_pays", lambda: True)
        monkeypatch.setattr(cpu, "_target", functools.cache(cpu._target.__wrapped__))
        assert "expand_depthwise" not in kernels_of("bfloat16")
    assert "expand_depthwise" in kernels_of("float32")
