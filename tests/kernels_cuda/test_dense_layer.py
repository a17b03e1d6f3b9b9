"""dense_layer: the rewrite that makes it, its record, and its kernel on CUDA against float64."""

from __future__ import annotations

import math
from dataclasses import replace

import fake_cuda
import halves
import numpy as np
import pytest
import targets
import tolerances
from conftest import Device
from engines import built, on_gpu, running, single
from halves import HALVES
from lowered import fuse, lay_channels_last
from native import NONE, RELU, call, epilogue, images, launch, packed, prologue
from regions import dense_layer, fused
from test_expand_depthwise import ids
from test_passes import Builder, same

from cnn_engine import _cpu
from cnn_engine.devices import cuda_module
from cnn_engine.engine.check import ROUNDING
from cnn_engine.graph import passes
from cnn_engine.graph.passes.fuse.patterns import DENSE_LAYER
from cnn_engine.kernels.cuda.requirements import CLUSTERS
from cnn_engine.operators.channels_last import Conv2dNhwc
from cnn_engine.operators.conv2d import Conv2d
from cnn_engine.operators.shaping import Concat
from cnn_engine.operators.unary import Clip, Relu, Swish

#: What the kernel takes: channels of e and filters of the product; filters of the window.
CHANNELS, GROWTH = 128, 32

#: Images, rows, columns, channels so far, how many of them are known: of DenseNets; all and none known;
#: one row, one column, tiles with rows beyond the image, and as many channels as there is room for.
CASES = [
    (1, 14, 14, 256, 224),
    (1, 14, 14, 1760, 1728),
    (1, 7, 7, 896, 864),
    (1, 7, 7, 1888, 1888),
    (1, 28, 28, 480, 448),
    (2, 7, 7, 32, 0),
    (1, 14, 14, 336, 96),
    (3, 5, 3, 48, 16),
    (1, 1, 32, 64, 32),
    (1, 61, 1, 80, 48),
    (1, 29, 32, 544, 512),
    (1, 7, 19, 2080, 2048),
    (2, 13, 11, 160, 0),
    (0, 7, 7, 64, 32),
]


# ---- the rewrite ----


def product(b, x, channels, filters):
    """A convolution of 1x1."""
    return b.add(Conv2d(), x, b.constant(filters, channels, 1, 1), b.constant(filters))


def block(batch=1, layers=3, inner=None, norm=True, size=(6, 5), width=CHANNELS, growth=GROWTH):
    """A dense block: its layers' 1x1 convolutions read all before, behind a batch norm and a relu."""
    b = Builder(batch, 3, *size)
    features = [b.conv("x", 3, 64)]
    for _ in range(layers):
        joined = b.add(Concat(1), *features) if len(features) > 1 else features[0]
        channels = 64 + growth * (len(features) - 1)
        y = b.add(Relu(), b.norm(joined, channels) if norm else joined)
        y = b.add(Relu(), b.norm(product(b, y, channels, width), width))
        y = b.conv(y, width, growth, padding=(1, 1, 1, 1))
        features.append(b.add(inner, y) if inner else y)
    channels = 64 + growth * layers
    y = b.add(Relu(), b.norm(b.add(Concat(1), *features), channels))
    return b, b.graph(b.conv(y, channels, 8))


def laid(graph, takes=lambda *_: True):
    graph = lay_channels_last(fuse(passes.simplify(graph)), "cuda", run=8)
    return fused(graph, DENSE_LAYER, takes=takes)


def found_in(graph):
    return [node for node in graph.nodes if node.op.kind == "dense_layer"]


@pytest.mark.parametrize("inner", [None, Relu()])
@pytest.mark.parametrize("batch", [1, 3])
def test_a_window_and_the_next_layers_product_become_one_node(batch, inner):
    after = same(block(batch, inner=inner, width=16, growth=8)[1], laid)
    nodes = found_in(after)
    assert len(nodes) == 2
    for node in nodes:
        assert node.op["second"].floor == 0.0
        assert node.op.activation("first") == inner
        assert node.op.activation("second") == Relu()
        assert len(node.outputs) == 2
    assert "together they are dense_layer" in {note.why for note in after.notes}
    assert sum(node.op.kind == "concat" for node in after.nodes) == 3


def test_what_does_not_fit_stays_as_it_is():
    """No batch norm before the product, a last layer, a product that others are added to, another order."""
    graphs = [block(norm=False, width=16, growth=8)[1], block(layers=1, width=16, growth=8)[1]]
    b = Builder(1, 3, 6, 5)
    x, y = b.conv("x", 3, 16), b.conv(b.conv("x", 3, 16), 16, 8, padding=(1, 1, 1, 1))
    joined = b.add(Concat(1), y, x)  # in front
    z = product(b, b.add(Relu(), b.norm(joined, 24)), 24, 16)
    graphs.append(b.graph(z, joined))
    for graph in graphs:
        assert not found_in(same(graph, laid))
    asked = []
    assert not found_in(laid(block(width=16, growth=8)[1], lambda *nodes: asked.append(nodes)))
    assert len(asked) == 2


@pytest.mark.parametrize("inner", [None, Relu(), Clip(-1.0, 2.0), Swish()])
@pytest.mark.parametrize("dtype", [*HALVES, "tf32", "float32"])
def test_engines_join_where_a_device_says_so(monkeypatch, dtype, inner):
    """And images lie in 16 bits; functions that are no clamps stay."""
    fake_cuda.install(monkeypatch, tensor_cores=True, stores=True)
    asked = []
    takes = staticmethod(lambda *how: asked.append(how) or True)
    monkeypatch.setattr(fake_cuda.FakeTensorCores, "dense_layer_takes", takes)
    graph, steps = built(single(block(2, inner=inner)[1]), dtype)
    nodes = found_in(graph)
    assert len(nodes) == 2 * (dtype in HALVES and type(inner) is not Swish)
    assert [node.name for node in nodes] == running(steps, "dense_layer")
    assert {how[1:-1] for how in asked} == ({(64, 128), (96, 128)} if nodes else set())


# ---- the kernel ----


def shape_of(n, h, w):
    return _cpu.Conv2dShape(n, CHANNELS, h, w, GROWTH, 3, 3, 1, 1, 1, 1, 1, 1)


def arrays(rng, case, whole=False):
    """x, last, window, e, scale, shift and the biases, which kernels read as they are."""
    n, h, w, before, _ = case
    all_ = before + GROWTH
    shapes = (
        (n, h, w, before), (CHANNELS, all_, 1, 1), (GROWTH, CHANNELS, 3, 3), (n, h, w, CHANNELS),
        (all_,), (all_,), (GROWTH,), (CHANNELS,),
    )  # fmt: skip
    if not whole:
        return [rng.uniform(-1, 1, shape).astype(np.float32) for shape in shapes]
    found = [rng.integers(-1, 2, shape).astype(np.float32) for shape in shapes]
    for place, part in ((1, 0.05), (2, 0.05), (3, 0.2)):  # so that all sums are small
        found[place] *= rng.random(shapes[place]) < part
    return found


def run(
    case, given, compute_dtype="float16", *, floor=0.0, inner=NONE, outer=RELU, overflow=halves.NO_FLAG,
    holds=True, more=16,
):  # fmt: skip
    """Returns y and z; x and y are columns of one array, with ``more`` behind them."""
    n, h, w, before, ready = case
    x, last, window, e, scale, shift, first_bias, bias = given
    device, kind, shape = (
        Device("cuda"),
        getattr(_cpu.ElementType, compute_dtype),
        shape_of(n, h, w),
    )
    pitch = before + GROWTH + more
    wide = np.full((n, h, w, pitch), np.nan, np.float32)
    wide[..., :before] = x
    block = halves.put(device, wide, compute_dtype)
    out = halves.Output(device, (n, h, w, CHANNELS), compute_dtype)
    how = shape, before, CHANNELS
    call(
        device, "dense_layer", *images(block, storage_dtype=compute_dtype),
        halves.put(device, e, compute_dtype),
        *images(block[..., before:], pitch, compute_dtype), *images(out.array, storage_dtype=compute_dtype),
        packed(device, "dense_layer", [window, last], *how, kind), *how, kind,
        *prologue(device.put(scale), device.put(shift), floor=floor),
        *epilogue(device.put(first_bias), inner), *epilogue(device.put(bias), outer, overflow),
        *launch(ready=ready, holds=holds),
    )  # fmt: skip
    found = halves.get(device, block, compute_dtype)
    assert np.array_equal(found[..., :before], halves.rounded(x, compute_dtype))
    assert np.isnan(found[..., before + GROWTH :]).all()
    return found[..., before : before + GROWTH], out.get()


def record(inner, outer, floor):
    first = Conv2dNhwc(padding=(1, 1, 1, 1), activation=inner)
    return dense_layer(first, Conv2dNhwc(activation=outer, floor=floor))


@pytest.fixture
def hopper():
    targets.need(CLUSTERS)


@pytest.mark.gpu
@pytest.mark.parametrize("compute_dtype", HALVES)
@pytest.mark.parametrize("case", CASES, ids=ids)
def test_whole_numbers_are_exact(rng, hopper, case, compute_dtype):
    given = arrays(rng, case, whole=True)
    for of, inner, outer in (
        (given, (Relu(), RELU), (Relu(), RELU)),
        ((*given[:6], None, None), (None, NONE), (None, NONE)),
    ):
        floor = 0.0 if outer[0] else None
        op = record(inner[0], outer[0], floor)
        wanted = op.reference(*of)
        assert max(np.abs(one).max(initial=0) for one in wanted) < 256  # bfloat16 has them
        found = run(
            case, of, compute_dtype, inner=inner[1], outer=outer[1],
            floor=-math.inf if floor is None else floor, holds=bool(outer[0]),
        )  # fmt: skip
        assert np.array_equal(found[0], wanted[0])
        assert np.array_equal(found[1], wanted[1])


@pytest.mark.gpu
@pytest.mark.parametrize("compute_dtype", HALVES)
@pytest.mark.parametrize("case", CASES, ids=ids)
def test_against_reference(rng, hopper, case, compute_dtype):
    given = arrays(rng, case)
    x, last, window, e, scale, shift, first_bias, bias = given
    x, e = halves.rounded(x, compute_dtype), halves.rounded(e, compute_dtype)
    window, last = window / math.sqrt(window[0].size), last / math.sqrt(last[0].size)
    given = x, last, window, e, scale, shift, first_bias, bias
    y, z = run(case, given, compute_dtype)
    op = record(None, Relu(), 0.0)
    size = op["first"].reference(*map(np.abs, (e, window, first_bias)))
    limit = (
        tolerances.sum_of_products(window[0].size + 1, size) + 2 * ROUNDING[compute_dtype] * size
    )
    tolerances.assert_close(y, op["first"].reference(e, window, first_bias), limit)
    # Of what is made of y as it is stored; what the product reads is rounded, too.
    both = np.concatenate((x, y), -1)
    wanted = op["second"].reference(both, last, bias, None, scale, shift)
    read = np.abs(both) * np.abs(scale) + np.abs(shift)
    size = Conv2dNhwc().reference(read, np.abs(last), np.abs(bias))
    limit = tolerances.sum_of_products(last[0].size + 1, size) + 3 * ROUNDING[compute_dtype] * size
    tolerances.assert_close(z, wanted, limit)


@pytest.mark.gpu
@pytest.mark.parametrize("case", [CASES[0], CASES[2], CASES[4]], ids=ids)
def test_the_same_bits_again_and_whatever_is_known(rng, hopper, case):
    given = arrays(rng, case)
    first = run(case, given)
    for known, holds in ((case[4], True), (case[4], False), (0, True), (0, False), (10**6, True)):
        again = run((*case[:4], known), given, holds=holds, more=8)
        assert all(map(np.array_equal, again, first))


@pytest.mark.gpu
def test_each_image_has_the_same_bits_among_others(rng, hopper):
    case = (4, 7, 7, 192, 160)
    given = arrays(rng, case)
    together = run(case, given)
    for n in range(4):
        alone = list(given)
        alone[0], alone[3] = given[0][n : n + 1], given[3][n : n + 1]
        for one, all_of_them in zip(run((1, *case[1:]), alone), together, strict=True):
            assert np.array_equal(one[0], all_of_them[n])


@pytest.mark.gpu
def test_nan_reaches_its_window_alone(rng, hopper):
    case = (1, 14, 14, 256, 224)
    given = arrays(rng, case)
    given[3][0, 5, 13, 2] = np.nan
    y, z = run(case, given)
    for found in (y, z):
        reached = np.isnan(found).any(-1)
        assert np.isnan(found[0, 4:7, 12:14]).all()
        assert reached.sum() == 6


@pytest.mark.gpu
@pytest.mark.parametrize("where", ["first", "next", "nowhere", "beyond"])
def test_results_past_float16_are_told(rng, hopper, where):
    """Not of rows beyond the image, which tiles have."""
    case = (1, 13, 14, 64, 32)
    given = [0 * array for array in arrays(rng, case)]
    _, last, window, e, scale, _, first_bias, _ = given
    scale[:] = 1.0
    first_bias[3] = {"first": 70000.0, "next": 40000.0}.get(where, 10.0)
    last[9, 64 + 3] = 2.0 if where == "next" else 1.0
    if where == "beyond":  # what the last row's places would give the row past it
        e[0, 12], window[3, 0, 0] = 4.0, 30000.0
    flag = halves.OverflowFlag()
    run(case, given, overflow=flag.overflow)
    assert flag.is_set() == (where in ("first", "next"))


@pytest.mark.gpu
def test_what_the_kernel_does_not_take(rng, hopper):
    kernels = cuda_module.load()
    shape = shape_of(1, 14, 14)
    assert not kernels.dense_layer_takes(shape, 40, CHANNELS, targets.native())
    assert not kernels.dense_layer_takes(shape, 4096, CHANNELS, targets.native())
    assert not kernels.dense_layer_takes(shape, 256, 64, targets.native())
    assert not kernels.dense_layer_takes(shape_of(1, 40, 40), 256, CHANNELS, targets.native())
    assert not kernels.dense_layer_takes(shape_of(64, 14, 14), 256, CHANNELS, targets.native())
    with pytest.raises(ValueError, match="dense_layer: expected channels before in sixteens"):
        kernels.dense_layer_packed(shape, 40, CHANNELS, _cpu.ElementType.float16, 0)
    with pytest.raises(ValueError, match="dense_layer: expected float16 or bfloat16"):
        call(Device("cuda"), "dense_layer_pack", None, None, None, shape, 64, CHANNELS,
             _cpu.ElementType.tf32)  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", HALVES)
def test_engines_join_dense_layers(hopper, dtype):
    graph = single(block(layers=4, size=(16, 16))[1])
    # So that float16 has room for all results.
    constants = {name: array * np.float32(0.1) for name, array in graph.constants.items()}
    _, kernels = on_gpu(replace(graph, constants=constants), dtype)
    assert kernels.count("dense_layer") == 3
