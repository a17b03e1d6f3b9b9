"""The table's rows for operators of one node: planned and run on each device, against their references.

A GPU that is not there (``fake``) plans as a real one does, with the CPU's kernels.
"""

from __future__ import annotations

import fake_cuda
import numpy as np
import pytest
import tolerances

from cnn_engine import Engine
from cnn_engine.devices.cpu import CpuDevice
from cnn_engine.errors import UnsupportedError
from cnn_engine.graph.graph import Graph, Node, Value
from cnn_engine.kernels.select import Choice
from cnn_engine.lower.lowering import Program
from cnn_engine.lower.placement import Placement
from cnn_engine.lower.placement import place as placed
from cnn_engine.operators import KINDS
from cnn_engine.operators.binary import Binary
from cnn_engine.operators.conv2d import Conv2d
from cnn_engine.operators.reduce import Reduce
from cnn_engine.operators.resize import COORDINATES
from cnn_engine.operators.unary import Unary
from cnn_engine.plan.builder import build


@pytest.fixture(params=["cpu", "fake", pytest.param("cuda", marks=pytest.mark.gpu)])
def place(request):
    if request.param == "cpu":
        return CpuDevice()
    if request.param == "fake":
        return fake_cuda.FakeCuda()
    from cnn_engine.devices.cuda import CudaDevice

    return CudaDevice(0)


@pytest.mark.parametrize(
    ("kernel", "stride", "fits"),
    [((5, 5), (1, 1), True), ((11, 11), (4, 4), True), ((99, 99), (1, 1), False), ((5, 5), (80, 80), False)],
)  # fmt: skip
def test_tiled_says_what_does_not_fit_before_anything_runs(kernel, stride, fits):
    """On a GPU that is not there: the plan is refused, and what chooses by itself takes another."""
    values = {"x": (1, 3, 400, 400), "w": (4, 3, *kernel)}
    op = Conv2d(stride)
    node = Node("conv", op, ("x", "w"), ("y",))
    images = Value("x", values["x"], "float32")
    graph = Graph("test", (images,), ("y",), (node,), {"w": np.zeros(values["w"], np.float32)})
    placement = Placement(fake_cuda.FakeCuda(), "resident", 1)
    if fits:
        assert placed(graph, placement, "tiled", False).kernels["conv"].name == "tiled"
        return
    words = "variant: tiled: node conv .*: expected a kernel whose tile fits into 49,152 bytes of shared"
    with pytest.raises(UnsupportedError, match=words):
        placed(graph, placement, "tiled", False)
    assert placed(graph, placement, None, False).kernels["conv"].name == "blocked"


def run(place, op, *arrays, known=(), host=False):
    """Runs ``op`` on arrays, of which those at ``known`` are constants; returns outputs and steps.

    Every node must have a kernel, and one on the device unless ``host`` says otherwise.
    """
    names = [None if a is None else f"x{i}" for i, a in enumerate(arrays)]
    values = [
        None if a is None else Value(n, a.shape, a.dtype.name)
        for n, a in zip(names, arrays, strict=True)
    ]
    count = len(op.infer(values))
    fed = [i for i, a in enumerate(arrays) if a is not None and i not in known]
    outputs = tuple(f"y{i}" for i in range(count))
    graph = Graph(
        "test",
        tuple(values[i] for i in fed),
        outputs,
        (Node("node", op, tuple(names), outputs),),
        {names[i]: np.asarray(arrays[i], order="C") for i in known if arrays[i] is not None},
    )
    choice = Choice("pad", True, "chosen by a test")
    program = Program(lambda batch, pixels: graph, Placement(place, "resident", 2), choice)
    plan = build(program, 1, False)
    assert not plan.fallbacks or host, plan.fallbacks
    assert "numpy" not in {step.kernel for step in plan.steps}
    sources = [np.asarray(arrays[i], order="C") for i in fed]
    found = [np.zeros(graph.values[name].shape, graph.values[name].dtype) for name in outputs]
    by_name = dict(zip([*(names[i] for i in fed), *outputs], [*sources, *found], strict=True))
    if place.kind == "cuda" and hasattr(place.context, "use"):
        place.context.use()
    plan.bind(*(by_name[slot].ctypes.data for slot in plan.slots))
    plan.run()
    return found, [step.kernel for step in plan.steps]


def check(place, op, *arrays, known=(), host=False, bound=None):
    found, steps = run(place, op, *arrays, known=known, host=host)
    wanted = op.reference(*arrays)
    wanted = wanted if isinstance(wanted, tuple) else (wanted,)
    for one, other in zip(found, wanted, strict=True):
        allowed = 0 if bound is None else bound(other)
        tolerances.assert_close(one, np.asarray(other), allowed, op=op)
    return steps


def floats(rng, *shape):
    return rng.standard_normal(shape).astype(np.float32)


UNARY = [
    kind
    for kind, record in KINDS.items()
    if issubclass(record, Unary)
    and record.types in ("floats", "numbers")
    and kind not in ("is_nan", "is_inf")
]


@pytest.mark.parametrize("kind", UNARY)
def test_unary(place, rng, kind):
    op = KINDS[kind]()
    x = floats(rng, 2, 3, 5)

    def bound(wanted):
        return tolerances.unary(op.function, x, wanted, op.alpha, op.beta)

    check(place, op, x, bound=bound)


@pytest.mark.parametrize("shapes", [((2, 3, 4, 5), (3, 1, 1)), ((4,), (2, 4)), ((), (3,))], ids=str)
@pytest.mark.parametrize("kind", ["add", "sub", "mul", "div", "pow", "min", "max", "mod", "prelu"])
def test_binary(place, rng, kind, shapes):
    if kind == "prelu" and len(shapes[0]) < len(shapes[1]):
        shapes = shapes[::-1]
    a, b = (floats(rng, *shape) for shape in shapes)
    check(place, KINDS[kind](), np.abs(a) if kind == "pow" else a, b, bound=tolerances.functions)


def test_binary_in_ten_dimensions(place, rng):
    a, b = floats(rng, *[2, 1] * 5), floats(rng, *[1, 2] * 5)
    with pytest.raises(AssertionError):
        check(place, KINDS["add"](), a, b)
    joined = floats(rng, *[2] * 10), floats(rng, 2, 2, 2)
    check(place, KINDS["add"](), *joined, bound=tolerances.functions)


def test_where(place, rng):
    condition = rng.random((3, 1, 4)) < 0.5
    check(place, KINDS["where"](), condition, floats(rng, 2, 4), floats(rng, 3, 2, 1))


MOVES = [
    (KINDS["transpose"]((0, 2, 3, 1)), [(2, 3, 4, 5)]),
    (KINDS["transpose"]((2, 1, 0)), [(17, 3, 19)]),
    (KINDS["transpose"](()), [()]),
    (KINDS["expand"]((3, 2, 4, 5)), [(2, 1, 5)]),
    (KINDS["expand"]((2, 3)), [()]),
    (KINDS["tile"]((2, 1, 3)), [(2, 3, 4)]),
    (KINDS["tile"]((0, 2)), [(2, 3)]),
    (KINDS["slice"]((1, -1), (5, -6), (1, 2), (2, -2)), [(2, 6, 7)]),
    (KINDS["slice"]((3,), (1,), (0,), (1,)), [(6, 7)]),
    (KINDS["split"](1, (2, 0, 3)), [(2, 5, 4)]),
    (KINDS["split"](-1, (1, 6)), [(3, 7)]),
    (KINDS["concat"](1), [(2, 3, 4), (2, 1, 4), (2, 0, 4)]),
    (KINDS["concat"](0), [(2, 3), (5, 3)]),
    (KINDS["depth_to_space"](2), [(2, 12, 3, 5)]),
    (KINDS["depth_to_space"](2, "CRD"), [(2, 12, 3, 5)]),
    (KINDS["space_to_depth"](3), [(2, 2, 6, 9)]),
    (KINDS["pad"]((0, 0, 1, 2, 0, 0, 3, 4), "constant", 1.5), [(2, 3, 4, 5)]),
    (KINDS["pad"]((0, 0, 1, 2, 0, 0, 3, 4), "reflect"), [(2, 3, 4, 5)]),
    (KINDS["pad"]((2, 0, 1, 3, 1, 0), "edge"), [(2, 3, 4)]),
    (KINDS["pad"]((2, 0, 3, 3), "wrap"), [(2, 4)]),
    (KINDS["pad"]((-1, 2, -1, -3), "constant", 7.0), [(4, 6)]),
    (KINDS["pad"]((0, 1, 0, 1), "constant", 7.0), [(0, 6)]),
    (KINDS["pad"]((1, 1, 1, 1), "constant", 7.0), [(0, 6)]),
    (KINDS["pad"]((0, 0), "constant", 7.0), [(6,)]),
]


@pytest.mark.parametrize("dtype", ["float32", "int64", "uint8", "bool", "float16"])
@pytest.mark.parametrize(("op", "shapes"), MOVES, ids=str)
def test_movement(place, rng, op, shapes, dtype):
    arrays = [rng.integers(0, 100, shape).astype(dtype) for shape in shapes]
    host = dtype != "float32"  # others stay on the host
    found, _ = run(place, op, *arrays, host=host)
    wanted = op.reference(*arrays)
    wanted = wanted if isinstance(wanted, tuple) else (wanted,)
    for one, other in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("axis", [0, 1, -1])
@pytest.mark.parametrize("indices", [[[0, -1], [2, 1]], 1, []], ids=str)
def test_gather(place, rng, axis, indices):
    x = floats(rng, 3, 4, 5)
    check(place, KINDS["gather"](axis), x, np.array(indices, np.int64), known=(1,))


REDUCTIONS = [kind for kind, record in KINDS.items() if issubclass(record, Reduce)]


@pytest.mark.parametrize("keepdims", [True, False])
@pytest.mark.parametrize("axes", [(2, 3), (1,), (0,), (0, 2), (1, -1), (0, 1, 2, 3), (), (1, 3, 0)])
@pytest.mark.parametrize("kind", REDUCTIONS)
def test_reduce(place, rng, kind, axes, keepdims):
    x = rng.uniform(0.5, 1.5, (2, 3, 4, 5)).astype(np.float32)
    op = KINDS[kind](axes, keepdims)
    magnitude = np.sum(x.astype(np.float64))

    def bound(wanted):
        return tolerances.reduction(op.function, wanted, magnitude)

    check(place, op, x, bound=bound)


def test_reduce_leaves_out_dimensions_of_one(place, rng):
    steps = check(
        place, KINDS["reduce_max"]((0, 2)), floats(rng, 1, 3, 40), bound=tolerances.functions
    )
    assert steps.count("copy_nd") == 0


@pytest.mark.parametrize("kind", ["arg_max", "arg_min"])
@pytest.mark.parametrize("last", [True, False])
@pytest.mark.parametrize("axis", [0, 1, -1])
def test_arg_extreme(place, rng, kind, axis, last):
    x = rng.integers(0, 4, (3, 9, 5)).astype(np.float32)
    check(place, KINDS[kind](axis, keepdims=last, last=last), x)


@pytest.mark.parametrize("kind", ["cum_sum", "cum_prod"])
@pytest.mark.parametrize("axis", [0, 1, -2, -1])
@pytest.mark.parametrize(("exclusive", "reverse"), [(False, False), (True, False), (False, True)])
def test_cumulative(rng, kind, axis, exclusive, reverse):
    """float32 has a kernel on the CPU; other types are computed by NumPy, exactly."""
    op = KINDS[kind](axis, exclusive, reverse)
    x = rng.integers(-4, 5, (3, 5, 7))
    assert check(CpuDevice(), op, x.astype(np.float32)) == ["cumulative"]
    for dtype in ("int32", "int64", "uint8", "float64", "float16"):
        graph = Graph(
            "test", (Value("x", x.shape, dtype),), ("y",), (Node("node", op, ("x",), ("y",)),), {}
        )
        with Engine(graph, device="cpu") as engine, np.errstate(all="ignore"):
            found = engine.run({"x": x.astype(dtype)})["y"]
            wanted = op.reference(x.astype(dtype)).astype(dtype)
        np.testing.assert_array_equal(found, wanted, strict=True)


def run_node(op, *arrays):
    """Returns what an engine of one node on the CPU makes of arrays, and the kernel that ran it."""
    names = [f"x{place}" for place in range(len(arrays))]
    inputs = tuple(Value(n, a.shape, a.dtype.name) for n, a in zip(names, arrays, strict=True))
    graph = Graph("test", inputs, ("y",), (Node("node", op, tuple(names), ("y",)),), {})
    with Engine(graph, device="cpu") as engine:
        found = engine.run(dict(zip(names, arrays, strict=True)))["y"]
        (shelf,) = engine._plans.pool._shelves.values()
        return found, shelf.idle[0].steps[0].kernel


@pytest.mark.parametrize(
    ("kind", "function"),
    [
        ("equal", np.equal), ("less", np.less), ("less_or_equal", np.less_equal),
        ("greater", np.greater), ("greater_or_equal", np.greater_equal),
    ],
)  # fmt: skip
@pytest.mark.parametrize("dtype", ["float32", "int32", "int64", "uint8", "float64"])
@pytest.mark.parametrize(
    "shapes", [((3, 70), (3, 70)), ((5, 1), (1, 37)), ((), (2, 3)), ((4, 3, 5), (3, 1))], ids=str
)
def test_compare(instruction_set, rng, kind, function, dtype, shapes):
    """NaN is unequal to all, and -0 equal to 0; other types are compared by NumPy."""
    x, y = (rng.integers(0, 4, shape).astype(dtype) for shape in shapes)
    if x.dtype.kind == "f":
        x[x == 2], y[y == 3], y[y == 0] = np.nan, np.nan, -0.0
    elif dtype == "int64":
        x += 1 << 40
        y += 1 << 40
    found, kernel = run_node(KINDS[kind](), x, y)
    np.testing.assert_array_equal(found, function(x, y), strict=True)
    assert kernel == ("numpy" if dtype in ("uint8", "float64") else "compare")


@pytest.mark.parametrize("dtype", ["bool", "uint8", "int8", "int32", "int64"])
@pytest.mark.parametrize("size", [0, 1, 37, 1000])
def test_to_float32(instruction_set, rng, dtype, size):
    """Whole numbers are rounded half to even, as NumPy rounds them; any byte but 0 is true."""
    kind = np.dtype("uint8" if dtype == "bool" else dtype)
    limits = np.iinfo(kind)
    x = rng.integers(limits.min, limits.max, size, kind, endpoint=True)
    x[:2] = np.array([limits.min, limits.max], kind)[:size]
    x = x.view(dtype)
    found, kernel = run_node(KINDS["cast"]("float32"), x)
    np.testing.assert_array_equal(found, x.astype(np.float32), strict=True)
    assert kernel == "to_float32"
    if dtype != "bool":
        assert run_node(KINDS["cast"]("float64"), x)[1] == "numpy"


@pytest.mark.parametrize("kind", ["softmax", "log_softmax"])
@pytest.mark.parametrize("axis", [0, 1, -1])
@pytest.mark.parametrize("shape", [(3, 9), (3, 9, 5)], ids=str)
def test_softmax(place, rng, kind, axis, shape):
    x = floats(rng, *shape)
    check(place, KINDS[kind](axis), x, bound=lambda wanted: tolerances.softmax(x, axis))


def test_batch_norm(place, rng):
    x = floats(rng, 2, 3, 4, 5) * 3 + 50
    scale, bias, mean = floats(rng, 3, 3)
    variance = rng.uniform(0.5, 2, 3).astype(np.float32)
    mean += 50
    parameters = scale, bias, mean, variance

    def bound(wanted):
        return tolerances.functions(np.abs(wanted) + np.abs(bias)[:, None, None])

    steps = check(place, KINDS["batch_norm"](1e-3), x, *parameters, known=(1, 2, 3, 4), bound=bound)
    assert "affine_channel" in steps
    flat = x[:, :, 0, 0]
    check(
        place, KINDS["batch_norm"](1e-3), flat, *parameters, known=(1, 2, 3, 4),
        bound=lambda wanted: tolerances.functions(np.abs(wanted) + np.abs(bias)),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("op", "shape"),
    [
        (KINDS["instance_norm"](), (2, 6, 4, 5)),
        (KINDS["instance_norm"](), (2, 6, 7)),
        (KINDS["group_norm"](3), (2, 6, 4, 5)),
        (KINDS["group_norm"](1), (2, 6)),
    ],
    ids=str,
)
def test_norms_of_channels(place, rng, op, shape):
    x = floats(rng, *shape) + 2
    scale, bias = floats(rng, 2, 6)

    def bound(wanted):
        groups = getattr(op, "groups", 6)
        rows = x.reshape(2 * groups, 6 // groups, -1)
        rows_wanted = wanted.reshape(rows.shape)
        return tolerances.normalized(rows, rows_wanted, scale, bias, True).reshape(wanted.shape)

    check(place, op, x, scale, bias, bound=bound)


@pytest.mark.parametrize("axis", [-1, 1])
@pytest.mark.parametrize("statistics", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_layer_norm(place, rng, axis, statistics, bias):
    x = floats(rng, 3, 4, 5)
    scale = floats(rng, *x.shape[axis:])
    shift = floats(rng, *x.shape[axis:]) if bias else None
    op = KINDS["layer_norm"](axis, 1e-5, statistics)
    check(place, op, x, scale, shift, bound=lambda wanted: _layer_bound(x, wanted, scale, shift))


def _layer_bound(x, wanted, scale, shift):
    if wanted.shape != x.shape:
        return tolerances.functions(wanted)
    row = int(np.prod(scale.shape))
    rows = x.reshape(-1, row, 1)
    return tolerances.normalized(rows, wanted.reshape(rows.shape), scale, shift, True).reshape(
        x.shape
    )


def test_rms_norm(place, rng):
    x, scale = floats(rng, 3, 4, 5), floats(rng, 5)
    check(place, KINDS["rms_norm"](), x, scale, bound=tolerances.functions)


@pytest.mark.parametrize("coordinates", [c for c in COORDINATES if c != "tf_crop_and_resize"])
@pytest.mark.parametrize("mode", ["nearest", "linear", "cubic"])
@pytest.mark.parametrize(
    ("sizes", "scales"),
    [
        ((2, 3, 8, 10), (1.0, 1.0, 2.0, 2.0)),
        ((2, 3, 3, 2), (1.0, 1.0, 0.75, 0.4)),
        ((2, 3, 4, 7), (1.0, 1.0, 1.0, 1.4)),
        ((2, 3, 4, 5), (1.0, 1.0, 1.0, 1.0)),
        ((4, 2, 9, 5), (2.0, 0.7, 2.25, 1.0)),
    ],
)
def test_resize(place, rng, sizes, scales, mode, coordinates):
    x = floats(rng, 2, 3, 4, 5)
    op = KINDS["resize"](sizes, scales, mode, coordinates)
    largest = 0.0 if mode == "nearest" else 4 * np.abs(x).max()
    steps = check(
        place, op, x,
        bound=lambda wanted: tolerances.sum_of_products(op.terms([Value("x", x.shape)]), largest),
    )  # fmt: skip
    assert steps.count("interpolate_axis") <= 4


@pytest.mark.parametrize("scale", [(0.5,), (0.5, 2.0, 0.25)], ids=str)
def test_normalize(place, rng, scale):
    pixels = rng.integers(0, 256, (2, 3, 4, 5), np.uint8)
    op = KINDS["normalize"](scale, (-1.0,))
    check(place, op, pixels, bound=lambda wanted: tolerances.functions(np.abs(wanted) + 1))


def test_records_of_pairs_and_single_numbers_have_kernels():
    """Every function of floats that a record stands for has a kernel on both devices."""
    from cnn_engine import kernels

    for kind, record in KINDS.items():
        if issubclass(record, (Unary, Binary)) and record.types in ("floats", "numbers"):
            inputs = [Value("x", (2,))] * (1 if issubclass(record, Unary) else 2)
            if record().infer(inputs)[0][1] == "float32":
                assert kernels.of(kind, "cpu"), kind
                assert kernels.of(kind, "cuda"), kind
