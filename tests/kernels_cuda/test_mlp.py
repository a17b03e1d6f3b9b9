"""mlp: two products over channels with gelu between them as one node, and its kernel against float64."""

from __future__ import annotations

import math

import fake_cuda
import halves
import numpy as np
import pytest
import targets
import tolerances
from conftest import Device
from engines import plan_of
from native import call, check_guards, epilogue, guarded, images
from regions import bottleneck
from test_bottleneck import HALVES, NONE, RELU, found_in, laid
from test_expand_depthwise import ids, single
from test_passes import Builder, same

from cnn_engine import Engine, _cpu
from cnn_engine.devices import cuda_module
from cnn_engine.engine.check import ROUNDING
from cnn_engine.kernels.cuda.requirements import WGMMA
from cnn_engine.operators.binary import Add
from cnn_engine.operators.channels_last import Conv2dNhwc
from cnn_engine.operators.conv2d import Conv2d
from cnn_engine.operators.unary import Gelu, Relu

#: Images, channels, rows, columns, hidden channels, outputs: of ConvNeXt; of more tiles than multiprocessors;
#: of channels and outputs that fill no unit; of places that fill no tile.
CASES = [
    (1, 96, 56, 56, 384, 96),
    (2, 192, 28, 28, 768, 192),
    (20, 96, 56, 56, 128, 96),
    (20, 192, 31, 29, 128, 192),
    (2, 72, 5, 7, 128, 96),
    (1, 96, 1, 1, 1024, 72),
    (3, 136, 9, 15, 256, 184),
    (0, 96, 4, 4, 128, 96),
]  # fmt: skip
#: Of clusters: ConvNeXt's, at low batch; several times 96 hidden channels a block; more clusters than there
#: is room for; places that fill no tile, one place and none.
CLUSTERED = [
    (1, 96, 56, 56, 384, 96),
    (1, 192, 28, 28, 768, 192),
    (1, 384, 14, 14, 1536, 384),
    (2, 96, 5, 7, 192, 96),
    (3, 96, 31, 29, 768, 96),
    (2, 192, 33, 47, 768, 192),
    (9, 192, 28, 28, 768, 192),
    (13, 384, 9, 11, 1536, 384),
    (1, 384, 1, 1, 1536, 384),
    (0, 192, 4, 4, 768, 192),
]  # fmt: skip
WIDE = ("float32", "tf32")
EVERY = [
    *((case, compute_dtype) for compute_dtype in HALVES for case in CASES),
    *((case, compute_dtype) for compute_dtype in WIDE for case in CLUSTERED),
]


def names(case):
    sizes, compute_dtype = case
    return f"{ids(sizes)}-{compute_dtype}"


def kept(compute_dtype):
    """Returns what images of this compute_dtype are stored as."""
    return compute_dtype if compute_dtype in HALVES else "float32"


def mlp(batch=2, channels=96, inner=Gelu, outer=None, residual=True, size=(5, 7)):
    """Two products, and what is between, beside and behind them."""
    b = Builder(batch, 3, *size)
    x = b.conv("x", 3, channels, padding=(1, 1, 1, 1))
    y = first = b.add(
        Conv2d(), x, b.constant(4 * channels, channels, 1, 1), b.constant(4 * channels)
    )
    y = b.add(inner(), y)
    y = b.add(Conv2d(), y, b.constant(channels, 4 * channels, 1, 1), b.constant(channels))
    y = b.add(Add(), y, x) if residual else y
    return b, first, b.conv(b.add(outer(), y) if outer else y, channels, 8)


# ---- the rewrite ----


@pytest.mark.parametrize("outer", [None, Relu])
@pytest.mark.parametrize("residual", [True, False])
def test_two_products_become_one_node(residual, outer):
    b, _, y = mlp(residual=residual, outer=outer)
    asked = []

    def takes(graph, node):
        asked.append(node.op["third"])
        return True

    (node,) = found_in(same(b.graph(y), lambda graph: laid(graph, takes)))
    assert node.op.activation("first") == Gelu()
    assert node.op.activation("second") == (outer and outer())
    assert (node.inputs[5] is not None) == residual
    assert asked == [None]  # nothing is asked of a third, though 1x1 follows


def test_products_that_others_read_stay():
    b, first, y = mlp()
    assert not found_in(same(b.graph(y, first), laid))


@pytest.mark.parametrize("inner", [Gelu, Relu])
@pytest.mark.parametrize("dtype", [*HALVES, "tf32", "float32"])
def test_engines_join_where_images_lie_as_they_are_multiplied(monkeypatch, dtype, inner):
    fake_cuda.install(monkeypatch, tensor_cores=True, stores=True)
    monkeypatch.setattr(fake_cuda.FakeTensorCores, "mlp_takes", staticmethod(lambda *_: True))
    b, _, y = mlp(inner=inner)
    with Engine(single(b.graph(y)), device="cuda", dtype=dtype) as engine:
        laid_out = engine._plans.open().placed(2, False).graph
        steps = [step.kernel for step in plan_of(engine, 2).steps]
    joined = inner is Gelu
    assert len(found_in(laid_out)) == joined == ("mlp" in steps)
    for node in found_in(laid_out):
        around = (node.inputs[0], node.inputs[5], *node.outputs)
        storage_dtype = {laid_out.values[name].storage_dtype for name in around}
        assert node.op.compute_dtype == dtype
        assert storage_dtype == {dtype if dtype in HALVES else ""}


# ---- the kernel ----


def shape_of(case, batch):
    _, c, h, w, k, _ = case
    return _cpu.Conv2dShape(batch, c, h, w, k, 1, 1, 1, 1, 0, 0)


def arrays(rng, case):
    n, c, h, w, k, outputs = case
    shapes = (n, h, w, c), (k, c, 1, 1), (outputs, k, 1, 1), (k,), (outputs,), (n, h, w, outputs)
    return [rng.uniform(-1, 1, shape).astype(np.float32) for shape in shapes]


def run(case, x, first, second, given, compute_dtype, *, outer=NONE, overflow=halves.NO_FLAG):
    """Returns what both products make."""
    device, shape, outputs = Device("cuda"), shape_of(case, len(x)), len(second)
    kind = getattr(_cpu.ElementType, compute_dtype)
    size = cuda_module.load().mlp_packed(shape, outputs, kind, 0)
    packed = device.library.full(size, 0xFF, np.uint8)
    call(device, "mlp_pack", device.put(first), device.put(second), packed, shape, outputs, kind)
    storage_dtype = kept(compute_dtype)
    dtype = halves.laid(x, storage_dtype).dtype
    out, memory = guarded(device, (*x.shape[:3], outputs), dtype)
    *biases, residual = given
    added = None if residual is None else halves.put(device, residual, storage_dtype)
    call(
        device, "mlp", halves.put(device, x, storage_dtype), packed, out, shape, outputs, kind,
        *epilogue(device.put(biases[0]), (_cpu.UnaryFunction.gelu, 0, 0)),
        *epilogue(device.put(biases[1]), outer, overflow, images(added, storage_dtype=storage_dtype)),
    )  # fmt: skip
    check_guards(device, memory, dtype)
    return halves.get(device, out, storage_dtype)


def takes(case, batch, compute_dtype="float16"):
    """Whether a GPU makes both products sooner as one."""
    kind = getattr(_cpu.ElementType, compute_dtype)
    return bool(
        cuda_module.load().mlp_takes(shape_of(case, batch), case[-1], kind, targets.native())
    )


def record(inner=None, outer=None):
    return bottleneck(Conv2dNhwc(activation=inner), outer)


@pytest.fixture
def hopper():
    targets.need(WGMMA)


@pytest.mark.gpu
@pytest.mark.parametrize("case", EVERY, ids=names)
def test_whole_numbers_are_exact(rng, hopper, case):
    """Hidden sums are multiples of 16, of which gelu makes themselves or zero."""
    case, compute_dtype = case
    x, first, second, *given = (rng.integers(-1, 2, a.shape) for a in arrays(rng, case))
    x = x * (rng.random(x.shape) < 0.1)  # so that bfloat16 holds every sum
    first, given[0] = 16 * first * (rng.random(first.shape) < 0.3), 16 * given[0]
    second = second * (rng.random(second.shape) < 0.03)
    x, first, second, *given = (a.astype(np.float32) for a in (x, first, second, *given))
    for of, outer in ((given, (Relu(), RELU)), ((None,) * 3, (None, NONE))):
        # relu is gelu here.
        wanted = record(Relu(), outer[0]).reference(x, first, second, *of)
        found = run(case, x, first, second, of, compute_dtype, outer=outer[1])
        assert np.array_equal(found, halves.rounded(wanted, kept(compute_dtype)))


@pytest.mark.gpu
@pytest.mark.parametrize("case", EVERY, ids=names)
def test_against_reference(rng, hopper, case):
    case, compute_dtype = case
    x, first, second, *given = arrays(rng, case)
    x, given[2] = (
        halves.rounded(x, kept(compute_dtype)),
        halves.rounded(given[2], kept(compute_dtype)),
    )
    first *= 3 / math.sqrt(first.shape[1])  # on both sides of zero
    wanted = record(Gelu()).reference(x, first, second, *given)
    found = run(case, x, first, second, given, compute_dtype)
    size = record().reference(*map(np.abs, (x, first, second, *given)))
    terms = first.shape[1] + second.shape[1] + 2
    # Weights, what is between and the result are rounded; gelu's own errors are far below.
    rounding = ROUNDING[compute_dtype] if compute_dtype in HALVES else 2.0**-22
    limit = tolerances.sum_of_products(terms, size) + 4 * rounding * size
    tolerances.assert_close(found, wanted, limit)
    rest = np.sqrt(np.mean((found - wanted) ** 2) / np.mean(wanted**2)) if x.size else 0.0
    assert rest < rounding  # errors of either side cancel


@pytest.mark.gpu
@pytest.mark.parametrize("case", CLUSTERED[:3], ids=ids)
def test_what_sums_of_float32_lose_is_given_back(rng, hopper, case):
    """On average: tensor cores cut 2^-24 of a sum off towards zero; of that 36 draws kept at most 0.45."""
    x, first, second, *_ = arrays(rng, case)
    first, second = np.abs(first), second + 0.5  # so that sums have a side
    wanted = record(Gelu()).reference(x, first, second, None, None, None)
    found = run(case, x, first, second, (None,) * 3, "float32")
    lost = np.sum((found - wanted) * wanted) / np.sum(wanted**2)
    assert abs(lost) < 0.6 * 2.0**-24


@pytest.mark.gpu
@pytest.mark.parametrize(
    "case",
    [*((case, "float16") for case in (CASES[0], CASES[1], CASES[4])),
     *((case, "float32") for case in CLUSTERED[:3])],
    ids=names,
)  # fmt: skip
def test_each_image_has_the_same_bits_among_others_and_again(rng, hopper, case):
    case, compute_dtype = (5, *case[0][1:]), case[1]
    x, first, second, *given = arrays(rng, case)
    together = run(case, x, first, second, given, compute_dtype)
    for _ in range(10):
        assert np.array_equal(run(case, x, first, second, given, compute_dtype), together)
    for n in (0, 4):
        alone = *given[:2], given[2][n : n + 1]
        one = run(case, x[n : n + 1], first, second, alone, compute_dtype)
        assert np.array_equal(one[0], together[n])


@pytest.mark.gpu
@pytest.mark.parametrize("compute_dtype", [*HALVES, "float32"])
def test_nan_and_infinities_reach_their_place_alone(rng, hopper, compute_dtype):
    case = (1, 96, 9, 17, 128 if compute_dtype in HALVES else 192, 96)
    x, first, second, *given = arrays(rng, case)
    whole = run(case, x, first, second, given, compute_dtype)
    x[0, 3, 5, 2], x[0, 7, 1, 0] = np.nan, np.inf
    found = run(case, x, first, second, given, compute_dtype)
    assert np.isnan(found[0, 3, 5]).all()
    assert not np.isfinite(found[0, 7, 1]).any()
    found[0, 3, 5], found[0, 7, 1] = whole[0, 3, 5], whole[0, 7, 1]
    assert np.array_equal(found, whole)


@pytest.mark.gpu
@pytest.mark.parametrize("where", ["between", "after", "infinite", "nowhere"])
def test_results_past_float16_are_told(rng, hopper, where):
    case = (1, 96, 3, 7, 128, 96)
    x, first, second, *given = (0 * array for array in arrays(rng, case))
    given[0][5] = 70000.0 if where == "between" else 40000.0
    second[5, 5] = 2.0 if where == "after" else 1.0
    if where == "infinite":  # as it was before, which is no news
        x[0, 1, 2, 7], first[9, 7] = np.inf, 1.0
    word = Device("cuda").put(np.zeros(1, np.int32), np.int32)
    overflow = _cpu.Overflow(word.data.ptr, 7)
    run(case, x, first, second, given, "float16", overflow=overflow)
    assert int(word[0]) == (7 if where in ("between", "after") else 0)


@pytest.mark.gpu
def test_what_does_not_fit_is_refused(hopper):
    module = cuda_module.load()
    half, wide = _cpu.ElementType.float16, _cpu.ElementType.float32
    one, none = (1, 1), (0, 0, 0, 0)
    for numbers, outputs, expected, *kind in (
        ((1, 100, 9, 9, 128, 1, 1, *one, *none), 96, "channels and outputs in eights"),
        ((1, 96, 9, 9, 128, 1, 1, *one, *none), 92, "channels and outputs in eights"),
        ((1, 96, 9, 9, 192, 1, 1, *one, *none), 96, "hidden channels in 128s"),
        ((1, 96, 9, 9, 1152, 1, 1, *one, *none), 96, "at most 1,024"),
        ((1, 96, 9, 9, 128, 3, 3, *one, 1, 1, 1, 1), 96, "a kernel of 1x1"),
        ((1, 96, 9, 9, 128, 1, 1, 2, 1, *none), 96, "a kernel of 1x1"),
        ((1, 96, 9, 9, 128, 1, 1, *one, *none, 1, 1, 8), 96, "one group"),
        ((1, 96, 9, 9, 128, 1, 1, *one, *none), 192, "65 to 96"),
        ((1, 64, 9, 9, 128, 1, 1, *one, *none), 64, "65 to 96"),
        ((1, 384, 9, 9, 128, 1, 1, *one, *none), 384, "129 to 192"),
        ((1, 96, 9, 9, 192, 3, 3, *one, 1, 1, 1, 1), 96, "a kernel of 1x1", wide),
        ((1, 96, 9, 9, 192, 1, 1, *one, *none), 88, "as many outputs as channels", wide),
        ((1, 128, 9, 9, 512, 1, 1, *one, *none), 128, "96, 192 or 384 channels", wide),
        ((1, 96, 9, 9, 128, 1, 1, *one, *none), 96, "share in 96s", wide),
        ((1, 96, 9, 9, 960, 1, 1, *one, *none), 96, "share in 96s", wide),
        ((1, 384, 9, 9, 3072, 1, 1, *one, *none), 384, "share in 96s", wide),
    ):
        shape, (compute_dtype,) = _cpu.Conv2dShape(*numbers), kind or [half]
        assert not module.mlp_takes(shape, outputs, compute_dtype, targets.native())
        with pytest.raises(ValueError, match=expected):
            module.mlp_packed(shape, outputs, compute_dtype, 0)
    shape = shape_of(CASES[0], 1)
    for compute_dtype in (half, wide):
        for x, function, expected in (
            (8, RELU, "of 16"), (256, (_cpu.UnaryFunction.swish, 1, 0), "relu or clip"),
        ):  # fmt: skip
            both = *epilogue(), *epilogue(0, function)
            with pytest.raises(ValueError, match=expected):
                module.mlp(x, 256, 512, shape, 96, compute_dtype, *both, 0)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [*HALVES, *WIDE])
@pytest.mark.parametrize("channels", [96, 192])
def test_engine(hopper, dtype, channels):
    batch, size = (20, 28) if dtype in HALVES else (1, 5376 // channels)
    b, _, y = mlp(batch, channels, size=(size, size))
    graph = single(b.graph(y))
    x = np.random.default_rng(3).uniform(-1, 1, (batch, 3, size, size)).astype(np.float32)
    with Engine(graph, device="cpu") as engine:
        (wanted,) = engine.run({"x": x}).values()
    with Engine(graph, device="cuda", dtype=dtype) as engine:
        (found,) = engine.run({"x": x}).values()
        steps = [step.kernel for step in plan_of(engine, batch).steps]
    sizes = batch, channels, size, size, 4 * channels, channels
    assert ("mlp" in steps) == takes(sizes, batch, dtype)
    assert "mlp" in steps or dtype == "tf32"
    limit = {"float16": 4e-3, "bfloat16": 3e-2, "tf32": 4e-3, "float32": 4e-6}[dtype]
    np.testing.assert_allclose(found, wanted, rtol=0, atol=limit * np.abs(wanted).max())
