"""stem_pool: the rewrite that makes it, its record, and its kernel on CUDA against those that it joins."""

from __future__ import annotations

import math

import fake_cuda
import halves
import numpy as np
import pytest
from conftest import Device
from native import call, check_guards, guarded
from test_expand_depthwise import ids, single
from test_passes import Builder, kinds, same

from cnn_engine import Engine, _cpu
from cnn_engine.devices import cuda_module
from cnn_engine.errors import InputError
from cnn_engine.graph import passes
from cnn_engine.graph.graph import Value
from cnn_engine.operators.binary import Add
from cnn_engine.operators.conv2d import Conv2d
from cnn_engine.operators.max_pool2d import MaxPool2d
from cnn_engine.operators.stem_pool import StemPool
from cnn_engine.operators.unary import Clip, Relu, Swish

Function = _cpu.UnaryFunction
NONE = Function.clip, -math.inf, math.inf
RELU = Function.relu, 0, 0
HALVES = ("float16", "bfloat16")
AROUND = (1, 1, 1, 1)

# n, c, h, w, filters, (rows, columns) of them, strides, padding of the convolution, of the pool:
# above, left, below, right
CASES = [
    (1, 3, 224, 224, 64, (7, 7), (2, 2), (3,) * 4, AROUND),
    (1, 3, 224, 224, 64, (3, 3), (2, 2), (0,) * 4, (0,) * 4),
    (3, 3, 33, 47, 64, (7, 7), (2, 2), (3,) * 4, AROUND),
    (2, 3, 225, 225, 64, (7, 7), (2, 2), (3,) * 4, AROUND),
    (5, 3, 192, 160, 96, (7, 7), (2, 2), (3,) * 4, AROUND),
    (33, 1, 30, 31, 32, (3, 3), (2, 2), AROUND, (0, 0, 1, 1)),
    (2, 4, 40, 70, 70, (5, 8), (3, 2), (2, 4, 2, 4), (1, 0, 0, 1)),
    (1, 2, 19, 20, 130, (4, 2), (1, 2), (0, 1, 1, 0), (0, 1, 2, 2)),
    (1, 3, 7, 7, 64, (7, 7), (2, 2), (3,) * 4, AROUND),
    (1, 3, 5, 300, 8, (1, 1), (1, 2), (0,) * 4, AROUND),
    (20, 3, 64, 64, 64, (7, 7), (2, 2), (3,) * 4, AROUND),
    (90, 1, 64, 64, 8, (7, 7), (2, 2), (3,) * 4, AROUND),  # blocks stay
    (0, 3, 8, 8, 8, (3, 3), (2, 2), AROUND, AROUND),
]  # fmt: skip


def shapes_of(case, **changed):
    n, c, h, w, k, kernel, strides, pads, around = case
    shape = _cpu.Conv2dShape(n, c, h, w, k, *kernel, *strides, *pads)
    window = {"kernel": (3, 3), "stride": (2, 2), "around": around, **changed}
    sizes = n, k, shape.out_h, shape.out_w
    pool = _cpu.MaxPool2dShape(*sizes, *window["kernel"], *window["stride"], *window["around"])
    return shape, pool


def stem(batch=2, channels=3, function=Relu, size=(21, 18)):
    """A first convolution, its function and a max pool."""
    b = Builder(batch, channels, *size)
    weight = b.constant(16, channels, 7, 7)
    y = b.add(Conv2d((2, 2), (3,) * 4), "x", weight, b.constant(16))
    between = y if function is None else b.add(function(), y)
    return b, b.add(MaxPool2d((3, 3), (2, 2), AROUND), between), between


def ended(b, y):
    """What follows branches, as no chain that one kernel runs does."""
    other = b.add(Swish(), b.add(Conv2d(), y, b.constant(16, 16, 1, 1)))
    return b.graph(b.add(Conv2d(), b.add(Add(), y, other), b.constant(8, 16, 1, 1)))


def fused(graph, takes=lambda *_: True):
    laid = passes.lay_channels_last(passes.fuse(graph), "cuda", run=8)
    return passes.fuse_stem_pools(laid, takes)


def found_in(graph):
    return [node for node in graph.nodes if node.op.kind == "stem_pool"]


# ---- the rewrite ----


@pytest.mark.parametrize("function", [Relu, None])
def test_a_convolution_and_its_pool_become_one_node(function):
    b, y, _ = stem(function=function)
    after = same(ended(b, y), fused)
    (node,) = found_in(after)
    assert type(node.op.activation) is (function or type(None))
    assert (node.op.kernel, node.op.stride, node.op.padding) == ((3, 3), (2, 2), (3,) * 4)
    assert "together they are stem_pool" in {note.why for note in after.notes}
    assert kinds(after).count("conv2d_nhwc") == 2
    assert "max_pool2d_nhwc" not in kinds(after)


def test_a_device_is_asked():
    b, y, _ = stem()
    asked = []

    def takes(graph, *nodes):
        asked.append([node.op.kind for node in nodes])
        return False

    assert not found_in(same(ended(b, y), lambda graph: fused(graph, takes)))
    assert asked == [["conv2d_nhwc", "max_pool2d_nhwc"]]


def test_what_does_not_fit_stays_as_it_is():
    """What others read between, and convolutions that are not first."""
    b, y, between = stem()
    y = b.add(Add(), y, b.add(MaxPool2d((3, 3), (2, 2), AROUND), between))
    assert not found_in(same(ended(b, y), fused))
    b, y, _ = stem()
    y = b.add(Relu(), b.conv(y, 16, 16))
    y = b.add(MaxPool2d((3, 3), (2, 2), AROUND), y)
    assert len(found_in(same(ended(b, y), fused))) == 1


def test_record():
    x, weight = Value("x", (2, 3, 21, 18)), Value("w", (16, 3, 7, 7))
    op = StemPool((3, 3), (2, 2), AROUND, (2, 2), (3,) * 4, Relu())
    outputs = op.infer([x, weight, Value("b", (16,))])
    assert outputs == (((2, 6, 5, 16), "float32"),) == op.infer([x, weight])
    values = [Value("", *output) for output in outputs]
    assert op.flops([x, weight], values) == 2 * 2 * 11 * 9 * 16 * 147
    assert op.terms([x, weight]) == 147
    for wrong in ([x], [x, Value("w", (16, 4, 7, 7))], [x, weight, Value("b", (15,))]):
        with pytest.raises(InputError, match="expected"):
            op.infer(wrong)


@pytest.mark.parametrize("dtype", [*HALVES, "tf32", "float32"])
@pytest.mark.parametrize(
    ("function", "fits"), [(Relu, True), (Clip, True), (None, True), (Swish, False)]
)
def test_engines_join_in_16_bits_behind_clamps(monkeypatch, dtype, function, fits):
    fake_cuda.install(monkeypatch, tensor_cores=True, stores=True)
    b, y, _ = stem(function=function)
    with Engine(single(ended(b, y)), device="cuda", dtype=dtype) as engine:
        graph = engine._plans.open().placed(2, False).graph
        steps = [step.kernel for step in engine._plans._build_run(2, False).steps]
    found = found_in(graph)
    assert len(found) == (fits and dtype in HALVES) == ("stem_pool" in steps)
    for node in found:
        assert node.op.operands == dtype
        assert graph.values[node.inputs[0]].stored == ""
        assert graph.values[node.outputs[0]].stored == dtype


def test_engines_leave_what_no_kernel_takes(monkeypatch):
    fake_cuda.install(monkeypatch, tensor_cores=True, stores=True)
    asked = []

    def takes(*how):
        asked.append(how)
        return 0

    monkeypatch.setattr(fake_cuda.FakeTensorCores, "stem_pool_takes", staticmethod(takes))
    b, y, _ = stem()
    with Engine(single(ended(b, y)), device="cuda", dtype="float16") as engine:
        assert not found_in(engine._plans.open().placed(2, False).graph)
    (shape, pool, operands, _), *_ = asked
    assert (shape.out_h, shape.out_w, pool.out_h, pool.out_w) == (11, 9, 6, 5)
    assert operands == _cpu.Conv2dOperands.float16


# ---- the kernel ----


def arrays(rng, case):
    n, c, h, w, k, kernel, *_ = case
    made = (n, c, h, w), (k, c, *kernel), (k,)
    return [rng.standard_normal(one).astype(np.float32) for one in made]


def packed_for(device, case, weight, kind):
    shape, _ = shapes_of(case)
    nbytes = cuda_module.load().conv2d_nhwc_wgmma_planar_packed(shape, kind, 0)
    packed = device.put(np.full(nbytes, 255), np.uint8)
    call(device, "conv2d_nhwc_wgmma_planar_pack", device.put(weight), packed, shape, kind)
    return packed


def run(case, given, operands, function=RELU, more=0, told=halves.NO_ONE):
    device, (x, weight, bias) = Device("cuda"), given
    shape, pool = shapes_of(case)
    kind, k = getattr(_cpu.Conv2dOperands, operands), case[4]
    kept = halves.laid(x[:0], operands).dtype
    out, memory = guarded(device, (len(x), pool.out_h, pool.out_w, k + more), kept)
    untouched = out[..., k:].copy()
    call(
        device, "stem_pool", device.put(x), packed_for(device, case, weight, kind),
        None if bias is None else device.put(bias), out, shape, pool, k + more, told, kind, *function,
    )  # fmt: skip
    check_guards(device, memory, kept)
    assert bool((out[..., k:] == untouched).all())
    return halves.get(device, out, operands)[..., :k]


def run_both(case, given, operands, function=RELU):
    """The convolution's kernel and the pool's, one behind the other."""
    device, (x, weight, bias) = Device("cuda"), given
    shape, pool = shapes_of(case)
    k, kind, stored = case[4], getattr(_cpu.Conv2dOperands, operands), halves.kind(operands)
    between = halves.put(device, np.zeros((len(x), shape.out_h, shape.out_w, k)), operands)
    out = halves.put(device, np.zeros((len(x), pool.out_h, pool.out_w, k)), operands)
    call(
        device, "conv2d_nhwc_wgmma_planar", device.put(x), packed_for(device, case, weight, kind),
        None if bias is None else device.put(bias), between, shape, k, stored, halves.NO_ONE,
        kind, *function,
    )  # fmt: skip
    call(device, "max_pool2d_nhwc", between, out, pool, k, k, stored)
    return halves.get(device, out, operands)


@pytest.fixture
def hopper():
    how = *shapes_of(CASES[0]), _cpu.Conv2dOperands.float16
    if not cuda_module.load().stem_pool_takes(*how, 0):
        pytest.skip("needs a GPU of compute capability 9.0")


@pytest.mark.gpu
@pytest.mark.parametrize("operands", HALVES)
@pytest.mark.parametrize("case", CASES, ids=ids)
def test_whole_numbers_are_exact(rng, hopper, case, operands):
    x, weight, bias = (
        rng.integers(-1, 2, one.shape).astype(np.float32) for one in arrays(rng, case)
    )
    x *= rng.random(x.shape) < 0.5  # so that bfloat16 holds every sum
    *_, strides, pads, around = case
    for function, with_bias, op in ((RELU, bias, Relu()), (NONE, None, None)):
        record = StemPool((3, 3), (2, 2), around, strides, pads, op)
        wanted = record.reference(x, weight, *([] if with_bias is None else [with_bias]))
        assert np.abs(wanted).max(initial=0) <= 256
        assert np.array_equal(run(case, [x, weight, with_bias], operands, function), wanted)


@pytest.mark.gpu
@pytest.mark.parametrize("operands", HALVES)
@pytest.mark.parametrize("function", [RELU, NONE, (Function.clip, -0.5, 1.5)], ids=str)
@pytest.mark.parametrize("case", CASES, ids=ids)
def test_the_bits_of_a_convolution_and_then_a_pool(rng, hopper, case, function, operands):
    given = arrays(rng, case)
    wanted = run_both(case, given, operands, function)
    for more in (0, 8, 3):
        found = run(case, given, operands, function, more)
        assert np.array_equal(found, wanted)
        if function is RELU:
            assert np.array_equal(np.signbit(found), np.signbit(wanted))


@pytest.mark.gpu
@pytest.mark.parametrize("case", [CASES[0], CASES[1], CASES[4]], ids=ids)
def test_the_same_bits_again(rng, hopper, case):
    given = arrays(rng, case)
    found = run(case, given, "float16")
    for _ in range(3):
        assert np.array_equal(run(case, given, "float16"), found)


@pytest.mark.gpu
@pytest.mark.parametrize("operands", HALVES)
def test_what_is_not_finite_is_pooled_likewise(rng, hopper, operands):
    case = CASES[2]
    given = arrays(rng, case)
    for at, value in (((0, 1, 9, 12), np.nan), ((1, 0, 0, 0), np.inf), ((2, 2, 32, 46), -np.inf)):
        given[0][at] = value
    for function in (RELU, NONE):
        found, wanted = (of(case, given, operands, function) for of in (run, run_both))
        assert np.isnan(found).any()
        assert np.array_equal(found, wanted, equal_nan=True)


@pytest.mark.gpu
@pytest.mark.parametrize(("where", "wanted"), [("image", 7), ("result", 7), ("nowhere", 0)])
def test_what_is_past_float16_is_told(rng, hopper, where, wanted):
    case = (2, 3, 33, 47, 40, (7, 7), (2, 2), (3,) * 4, AROUND)
    x, weight, bias = (0 * one for one in arrays(rng, case))
    if where == "image":
        x[1, 2, 20, 30] = 70000.0
    bias[39] = 70000.0 if where == "result" else 60000.0
    word = Device("cuda").put(np.zeros(1, np.int32), np.int32)
    run(case, [x, weight, bias], "float16", told=_cpu.Overflow(word.data.ptr, 7))
    assert int(word[0]) == wanted
    word[0] = 0
    run(case, [x, weight, bias], "bfloat16", told=_cpu.Overflow(word.data.ptr, 7))
    assert int(word[0]) == 0


@pytest.mark.gpu
def test_what_does_not_fit_is_refused(hopper):
    module, fine = cuda_module.load(), CASES[0]
    float16 = _cpu.Conv2dOperands.float16

    def changed(place, value):
        return (*fine[:place], value, *fine[place + 1 :])

    assert module.stem_pool_takes(*shapes_of(fine), float16, 0)
    other = shapes_of(changed(2, 222))[1]
    for how, expected in (
        (shapes_of(changed(1, 5)), "at most 4 channels"),
        (shapes_of(changed(6, (2, 1))), "2 columns apart"),
        (shapes_of(changed(5, (7, 9))), "at most 8 columns"),
        (shapes_of(changed(5, (150, 7))), "rows that fit into shared memory"),
        (shapes_of(fine, kernel=(2, 2)), "a pool of 3x3"),
        (shapes_of(fine, stride=(2, 1)), "two places apart"),
        ((shapes_of(fine)[0], other), "a pool over what the convolution makes"),
    ):
        assert not module.stem_pool_takes(*how, float16, 0)
        with pytest.raises(ValueError, match=expected):
            module.stem_pool(256, 512, 0, 1024, *how, 64, halves.NO_ONE, float16, *RELU, 0)
    for operands, packed, function, expected in (
        ("tf32", 512, RELU, "float16 or bfloat16"),
        ("float16", 8, RELU, "a multiple of 16"),
        ("float16", 512, (Function.swish, 1, 0), "relu, clip or no function"),
    ):
        kind = getattr(_cpu.Conv2dOperands, operands)
        with pytest.raises(ValueError, match=expected):
            module.stem_pool(
                256, packed, 0, 1024, *shapes_of(fine), 64, halves.NO_ONE, kind, *function, 0
            )


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("batch", [1, 5, 20])
def test_engine(dtype, batch):
    b, y, _ = stem(batch, size=(65, 96))
    graph = single(ended(b, y))
    x = np.random.default_rng(3).uniform(-1, 1, (batch, 3, 65, 96)).astype(np.float32)
    with Engine(graph, device="cpu") as engine:
        (wanted,) = engine.run({"x": x}).values()
    with Engine(graph, device="cuda", dtype=dtype) as engine:
        (found,) = engine.run({"x": x}).values()
        steps = [step.kernel for step in engine._plans._build_run(batch, False).steps]
    case = (batch, 3, 65, 96, 16, (7, 7), (2, 2), (3,) * 4, AROUND)
    kind = getattr(_cpu.Conv2dOperands, dtype)
    assert ("stem_pool" in steps) == bool(
        cuda_module.load().stem_pool_takes(*shapes_of(case), kind, 0)
    )
    limit = {"float16": 4e-3, "bfloat16": 3e-2}[dtype]
    np.testing.assert_allclose(found, wanted, rtol=0, atol=limit * np.abs(wanted).max())
