"""stem_pair: the rewrite that makes it, its record, and its kernel on CUDA against those that it joins."""

from __future__ import annotations

import fake_cuda
import halves
import numpy as np
import pytest
from conftest import Device
from engines import built, on_gpu, running, single
from halves import HALVES
from lowered import fuse, lay_channels_last
from native import NONE, RELU, call, packed
from test_expand_depthwise import ids
from test_passes import Builder, kinds, same

from cnn_engine import _cpu
from cnn_engine.devices import cuda_module
from cnn_engine.errors import InputError
from cnn_engine.graph import passes
from cnn_engine.graph.graph import Value
from cnn_engine.operators.binary import Add
from cnn_engine.operators.channels_last import Conv2dNhwc, MaxPool2dNhwc
from cnn_engine.operators.conv2d import Conv2d
from cnn_engine.operators.conv2d_pool import Conv2dPool
from cnn_engine.operators.max_pool2d import MaxPool2d
from cnn_engine.operators.stem_pair import StemPair
from cnn_engine.operators.unary import Clip, Relu, Swish

Function = _cpu.UnaryFunction
CLIP = Function.clip, -0.5, 1.5
AROUND = (1, 1, 1, 1)
HALF = MaxPool2d((2, 2), (2, 2))

# n, c, h, w, filters of the first convolution, of the second
CASES = [
    (1, 3, 224, 224, 64, 64),
    (2, 3, 61, 37, 64, 64),
    (3, 1, 29, 9, 40, 32),
    (1, 2, 56, 8, 7, 8),
    (2, 3, 3, 5, 64, 24),
    (1, 3, 2, 40, 64, 64),
    (24, 3, 64, 64, 64, 64),  # blocks stay
    (90, 3, 28, 32, 16, 48),
    (0, 3, 8, 8, 8, 8),
]  # fmt: skip


def shapes_of(case):
    """Both convolutions' shapes."""
    n, c, h, w, k, filters = case
    window = 3, 3, 1, 1, *AROUND
    return _cpu.Conv2dShape(n, c, h, w, k, *window), _cpu.Conv2dShape(n, k, h, w, filters, *window)


def pair(batch=2, channels=3, functions=(Relu, Relu), size=(21, 18), window=3, pads=AROUND):
    """Two first convolutions and their functions, and what is pooled."""
    b, y = Builder(batch, channels, *size), "x"
    between = []
    for place, (inputs, function) in enumerate(zip((channels, 16), functions, strict=True)):
        kernel = 3 if place else window
        weight = b.constant(16, inputs, kernel, kernel)
        y = b.add(Conv2d(padding=AROUND if place else pads), y, weight, b.constant(16))
        y = y if function is None else b.add(function(), y)
        between.append(y)
    return b, b.add(HALF, y), between


def fused(graph, takes=lambda *_: True):
    laid = lay_channels_last(fuse(graph), "cuda", run=8)
    return passes.fuse_stem_pairs(passes.fuse_pools(laid, lambda *_: True), takes)


def found_in(graph):
    return [node for node in graph.nodes if node.op.kind == "stem_pair"]


def ended(b, y, channels=16):
    """What follows branches, as no chain that one kernel runs does."""
    other = b.add(Swish(), b.add(Conv2d(), y, b.constant(channels, channels, 1, 1)))
    return b.graph(b.add(Conv2d(), b.add(Add(), y, other), b.constant(8, channels, 1, 1)))


# ---- the rewrite ----


@pytest.mark.parametrize("functions", [(Relu, Relu), (None, Clip), (Swish, None)])
def test_two_convolutions_and_their_pool_become_one_node(functions):
    b, y, _ = pair(functions=functions)
    after = same(ended(b, y), fused)
    (node,) = found_in(after)
    assert tuple(map(type, (node.op.inner, node.op.activation))) == tuple(
        function or type(None) for function in functions
    )
    assert "together they are stem_pair" in {note.why for note in after.notes}
    assert "conv2d_pool" not in kinds(after)
    assert len(node.covers) == 3 + sum(function is not None for function in functions)


def test_a_bias_may_be_missing():
    b = Builder(2, 3, 21, 18)
    y = b.add(Conv2d(padding=AROUND), "x", b.constant(16, 3, 3, 3))
    y = b.add(Conv2d(padding=AROUND), b.add(Relu(), y), b.constant(16, 16, 3, 3), b.constant(16))
    after = same(ended(b, b.add(HALF, b.add(Relu(), y))), fused)
    assert found_in(after)[0].inputs[3] is None


def test_a_device_is_asked():
    b, y, _ = pair()
    asked = []

    def takes(graph, *nodes):
        asked.append([node.op.kind for node in nodes])
        return False

    assert not found_in(same(ended(b, y), lambda graph: fused(graph, takes)))
    assert asked == [["conv2d_nhwc", "conv2d_pool"]]


def test_what_does_not_fit_stays_as_it_is():
    """What others read between, and convolutions that are not first."""
    b, y, (between, _) = pair()
    other = b.add(HALF, b.add(Swish(), b.conv(between, 16, 16)))
    graph = b.graph(b.add(Conv2d(), y, b.constant(8, 16, 1, 1)), other)
    assert not found_in(same(graph, fused))
    b, y, _ = pair()
    for _ in range(2):
        y = b.add(Relu(), b.conv(y, 16, 16))
    assert len(found_in(same(ended(b, b.add(HALF, y)), fused))) == 1


def test_record():
    x, first, second = (
        Value("x", (2, 3, 21, 18)), Value("w", (16, 3, 3, 3)), Value("v", (8, 16, 3, 3)),
    )  # fmt: skip
    biases = Value("b", (16,)), Value("c", (8,))
    convolution = Conv2dNhwc(padding=AROUND, activation=Relu(), planar=True)
    pooled = Conv2dPool(Conv2dNhwc(padding=AROUND), MaxPool2dNhwc((2, 2), (2, 2)), Clip(0, 6))
    op = StemPair(convolution, pooled)
    assert (op.inner, op.activation) == (Relu(), Clip(0, 6))
    outputs = op.infer([x, first, second, *biases])
    assert outputs == (((2, 10, 9, 8), "float32"),) == op.infer([x, first, second, None, biases[1]])
    values = [Value("", *output) for output in outputs]
    places = 2 * 21 * 18
    assert op.flops([x, first, second], values) == 2 * places * (16 * 27 + 8 * 144)
    assert op.terms([x, first, second]) == 144
    for wrong in (
        [x, first], [x, first, first], [x, second, second], [x, first, second, biases[1]],
        [x, first, second, None, biases[0]],
    ):  # fmt: skip
        with pytest.raises(InputError, match="expected"):
            op.infer(wrong)


# ---- engines ----


@pytest.mark.parametrize("dtype", [*HALVES, "tf32", "float32"])
@pytest.mark.parametrize(
    ("functions", "fits"),
    [((Relu, Relu), True), ((None, Clip), True), ((Swish, Relu), False), ((Relu, Swish), False)],
)
def test_engines_join_in_16_bits_behind_clamps(hopper_engines, dtype, functions, fits):
    b, y, _ = pair(functions=functions)
    graph, steps = built(single(ended(b, y)), dtype)
    found = found_in(graph)
    assert len(found) == (fits and dtype in HALVES) == bool(running(steps, "stem_pair"))
    for node in found:
        assert node.op.compute_dtype == dtype
        assert graph.values[node.inputs[0]].storage_dtype == ""
        assert graph.values[node.outputs[0]].storage_dtype == dtype


@pytest.mark.parametrize(
    "change", [{"window": 5, "pads": (2,) * 4}, {"window": 1, "pads": (0,) * 4}]
)
def test_engines_leave_windows_of_two_kinds(hopper_engines, change):
    b, y, _ = pair(**change)
    graph, steps = built(single(ended(b, y)), "float16")
    assert not found_in(graph)
    assert running(steps, "wgmma_pool")


def test_engines_leave_what_no_kernel_takes(hopper_engines, monkeypatch):
    asked = []

    def takes(*how):
        asked.append(how)
        return 0

    monkeypatch.setattr(fake_cuda.FakeTensorCores, "stem_pair_takes", staticmethod(takes))
    b, y, _ = pair()
    assert not found_in(built(single(ended(b, y)), "float16")[0])
    (shape, filters, compute_dtype, _), *_ = asked
    assert (shape.weight_size, shape.out_h, shape.out_w, filters) == (16 * 27, 21, 18, 16)
    assert compute_dtype == _cpu.Conv2dOperands.float16


# ---- the kernel ----


def arrays(rng, case):
    n, c, h, w, k, filters = case
    made = (n, c, h, w), (k, c, 3, 3), (filters, k, 3, 3), (k,), (filters,)
    return [rng.standard_normal(one).astype(np.float32) for one in made]


def run(case, given, compute_dtype, functions=(RELU, RELU), more=0, told=halves.NO_ONE):
    device, (x, first, second, *biases) = Device("cuda"), given
    (shape, _), filters, kind = (
        shapes_of(case),
        case[5],
        getattr(_cpu.Conv2dOperands, compute_dtype),
    )
    sizes = len(x), case[2] // 2, case[3] // 2, filters + more
    out = halves.Output(device, sizes, compute_dtype)
    untouched = out.array[..., filters:].copy()
    call(
        device, "stem_pair", device.put(x),
        packed(device, "stem_pair", [first, second], shape, filters, kind), *map(device.put, biases),
        out.array, shape, filters, filters + more, told, kind, *functions[0], *functions[1],
    )  # fmt: skip
    assert bool((out.array[..., filters:] == untouched).all())
    return out.get()[..., :filters]


def run_both(case, given, compute_dtype, functions=(RELU, RELU)):
    """The first convolution's kernel and the second's with its pool, one behind the other."""
    device, (x, first, second, *biases) = Device("cuda"), given
    (shape, behind), kind = shapes_of(case), getattr(_cpu.Conv2dOperands, compute_dtype)
    n, _, h, w, k, filters = case
    between = halves.put(device, np.zeros((n, h, w, k)), compute_dtype)
    out = halves.put(device, np.zeros((n, h // 2, w // 2, filters)), compute_dtype)
    call(
        device, "conv2d_nhwc_wgmma_planar", device.put(x),
        packed(device, "conv2d_nhwc_wgmma_planar", [first], shape, kind), device.put(biases[0]),
        between, shape, k, halves.kind(compute_dtype), halves.NO_ONE, kind, *functions[0],
    )  # fmt: skip
    call(
        device, "conv2d_nhwc_wgmma_pool", between,
        packed(device, "conv2d_nhwc_wgmma", [second], behind, kind), device.put(biases[1]), out,
        behind, _cpu.Conv2dPitches(k, filters), halves.NO_ONE, kind, *functions[1], 0,
    )  # fmt: skip
    return halves.get(device, out, compute_dtype)


def reference(given, functions):
    x, first, second, *biases = given
    convolution = Conv2dNhwc(padding=AROUND, activation=functions[0], planar=True)
    pool = MaxPool2dNhwc((2, 2), (2, 2))
    pooled = Conv2dPool(Conv2dNhwc(padding=AROUND), pool, functions[1])
    return StemPair(convolution, pooled).reference(x, first, second, *biases)


@pytest.fixture
def hopper():
    if not cuda_module.load().stem_pair_takes(
        shapes_of(CASES[0])[0], 64, _cpu.Conv2dOperands.float16, 0
    ):
        pytest.skip("needs a GPU of compute capability 9.0")


@pytest.mark.gpu
@pytest.mark.parametrize("compute_dtype", HALVES)
@pytest.mark.parametrize("case", CASES, ids=ids)
def test_whole_numbers_are_exact(rng, hopper, case, compute_dtype):
    given = [rng.integers(-1, 2, one.shape).astype(np.float32) for one in arrays(rng, case)]
    given[0] *= rng.random(given[0].shape) < 0.5
    given[1] *= rng.random(given[1].shape) < 0.3  # so that bfloat16 holds every sum
    given[2] *= rng.random(given[2].shape) < 0.1
    for functions, ops in (((RELU, RELU), (Relu(), Relu())), ((NONE, RELU), (None, Relu()))):
        for biases in (given[3:], [None, given[4]], [given[3], None]):
            wanted = reference([*given[:3], *biases], ops)
            assert np.abs(wanted).max(initial=0) <= 256
            found = run(case, [*given[:3], *biases], compute_dtype, functions)
            assert np.array_equal(found, wanted)


@pytest.mark.gpu
@pytest.mark.parametrize("compute_dtype", HALVES)
@pytest.mark.parametrize(
    "functions", [(RELU, RELU), (NONE, RELU), (CLIP, CLIP), (RELU, CLIP)], ids=str
)
@pytest.mark.parametrize("case", [case for case in CASES if case[4] % 8 == 0], ids=ids)
def test_the_bits_of_two_kernels(rng, hopper, case, functions, compute_dtype):
    given = arrays(rng, case)
    wanted = run_both(case, given, compute_dtype, functions)
    for more in (0, 8):
        found = run(case, given, compute_dtype, functions, more)
        assert np.array_equal(found, wanted)
        assert np.array_equal(np.signbit(found), np.signbit(wanted))


@pytest.mark.gpu
@pytest.mark.parametrize("case", [CASES[0], CASES[1], CASES[6]], ids=ids)
def test_the_same_bits_again(rng, hopper, case):
    given = arrays(rng, case)
    found = run(case, given, "float16")
    for _ in range(3):
        assert np.array_equal(run(case, given, "float16"), found)


@pytest.mark.gpu
@pytest.mark.parametrize("compute_dtype", HALVES)
def test_what_is_not_finite_goes_on_likewise(rng, hopper, compute_dtype):
    case = CASES[1]
    given = arrays(rng, case)
    for at, value in (((0, 1, 9, 12), np.nan), ((1, 0, 0, 0), np.inf), ((1, 2, 60, 36), -np.inf)):
        given[0][at] = value
    for functions in ((RELU, RELU), (NONE, CLIP)):
        found, wanted = (of(case, given, compute_dtype, functions) for of in (run, run_both))
        halves.assert_same_beside_what_is_not_finite(found, wanted, compute_dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("where", ["image", "between", "result", "outside", "nowhere"])
def test_what_is_past_float16_is_told(rng, hopper, where):
    """A value of the image, of either convolution; not what a window has outside the image."""
    case = (2, 3, 33, 45, 40, 40)
    x, first, second, *biases = (0 * one for one in arrays(rng, case))
    if where == "image":
        x[1, 2, 20, 30] = 70000.0
    if where == "outside":  # the row above the image would be 90,000, those inside are 0
        x[:, 0] = 30000.0
        first[0, 0, :, 1] = 0.0, -3.0, 3.0
    biases[0][39] = 70000.0 if where == "between" else 60000.0
    biases[1][39] = 70000.0 if where == "result" else 60000.0
    told = halves.Told()
    run(case, [x, first, second, *biases], "float16", told=told.overflow)
    assert told.said() == (where not in ("outside", "nowhere"))
    run(case, [x, first, second, *biases], "bfloat16", told=told.overflow)
    assert not told.said()


@pytest.mark.gpu
def test_what_does_not_fit_is_refused(hopper):
    module, fine = cuda_module.load(), shapes_of(CASES[0])[0]
    float16 = _cpu.Conv2dOperands.float16
    window = 3, 3, 1, 1, *AROUND

    def run_on(shape, filters=64, pitch=64, packed=512, kind=float16, functions=(RELU, RELU)):
        given = 256, packed, 0, 0, 1024
        return module.stem_pair(
            *given, shape, filters, pitch, halves.NO_ONE, kind, *functions[0], *functions[1], 0
        )

    assert module.stem_pair_takes(fine, 64, float16, 0)
    for few in ((1, 3, 112, 112), (40, 3, 32, 32)):  # tiles, or places of them
        assert not module.stem_pair_takes(_cpu.Conv2dShape(*few, 64, *window), 64, float16, 0)
    for shape, filters, expected in (
        (_cpu.Conv2dShape(1, 4, 64, 64, 64, *window), 64, "at most 3 channels"),
        (_cpu.Conv2dShape(1, 3, 64, 64, 64, 3, 3, 2, 1, *AROUND), 64, "kernels of 3x3"),
        (_cpu.Conv2dShape(1, 3, 64, 64, 64, 3, 3, 1, 1, 1, 1, 1, 0), 64, "kernels of 3x3"),
        (_cpu.Conv2dShape(1, 3, 64, 64, 64, 5, 3, 1, 1, *AROUND), 64, "kernels of 3x3"),
        (_cpu.Conv2dShape(1, 3, 64, 64, 72, *window), 64, "at most 64 filters"),
        (fine, 72, "at most 64 filters"),
        (fine, 60, "in eights"),
    ):
        assert not module.stem_pair_takes(shape, filters, float16, 0)
        with pytest.raises(ValueError, match=expected):
            run_on(shape, filters)
        with pytest.raises(ValueError, match=expected):
            module.stem_pair_packed(shape, filters, float16, 0)
    for change, expected in (
        ({"kind": _cpu.Conv2dOperands.tf32}, "float16 or bfloat16"),
        ({"packed": 8}, "packed weights"),
        ({"pitch": 68}, "y's pitch"),
        ({"functions": ((Function.swish, 1, 0), RELU)}, "relu, clip or no functions"),
        ({"functions": (RELU, (Function.swish, 1, 0))}, "relu, clip or no functions"),
    ):
        with pytest.raises(ValueError, match=expected):
            run_on(fine, **change)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("batch", [1, 5, 20])
def test_engine(hopper, dtype, batch):
    b = Builder(batch, 3, 64, 96)
    y = b.add(Conv2d(padding=AROUND), "x", b.constant(64, 3, 3, 3), b.constant(64))
    y = b.add(Conv2d(padding=AROUND), b.add(Relu(), y), b.constant(64, 64, 3, 3), b.constant(64))
    y = b.add(HALF, b.add(Relu(), y))
    _, kernels = on_gpu(single(ended(b, y, 64)), dtype)
    shape = _cpu.Conv2dShape(batch, 3, 64, 96, 64, 3, 3, 1, 1, *AROUND)
    kind = getattr(_cpu.Conv2dOperands, dtype)
    taken = cuda_module.load().stem_pair_takes(shape, 64, kind, 0)
    assert ("stem_pair" in kernels) == taken
