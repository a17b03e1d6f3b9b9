"""conv2d_pool: the rewrite that makes it, its record, and its kernel on CUDA beside what it stands for."""

from __future__ import annotations

import fake_cuda
import halves
import numpy as np
import pytest
import targets
from conftest import Device
from engines import built
from graphs import Builder
from halves import HALVES
from lowered import fuse, lay_channels_last
from native import RELU, call, channels_last, epilogue, images, launch, packed
from regions import fused
from test_conv2d_nhwc import record
from test_conv2d_nhwc_cuda import whole_numbers
from test_conv2d_nhwc_wgmma import product, shape_of
from test_conv2d_pair import close

from cnn_engine import _cpu
from cnn_engine.graph.graph import Graph
from cnn_engine.graph.passes.fuse.patterns import CONV2D_POOL
from cnn_engine.kernels.cuda.requirements import WGMMA
from cnn_engine.operators.max_pool2d import MaxPool2d
from cnn_engine.operators.unary import Clip, Relu, Swish
from cnn_engine.target import Target

HALF = MaxPool2d((2, 2), (2, 2))


def network(
    shape=(2, 64, 14, 14), pool=HALF, inner=Relu, others: bool = False, first=(3, 1)
) -> Graph:
    """Two convolutions, each with a pool behind it; of the second's sums ``others`` read too.

    Of at most four channels the ``first``, of a size and stride, reads images as they are, [N, C, H, W].
    """
    b = Builder(shape)
    x = "images"
    for filters, window in ((64, first), (72, (3, 1))):
        y = b.conv(x, filters, *window)
        x = b.add(pool, b.add(inner(), y) if inner else y)
    outputs = [b.head(b.relu(b.conv(x, 64, 1)), 10)]
    return b.graph(*outputs, *([y] if others else []))


def laid(graph: Graph, takes=lambda *_: True) -> Graph:
    return fused(lay_channels_last(fuse(graph), "cuda", run=8), CONV2D_POOL, takes=takes)


def pooled(graph: Graph) -> list:
    return [node for node in graph.nodes if node.op.kind == "conv2d_pool"]


def planar(graph: Graph) -> list[bool]:
    """Of convolutions with pools, whether they read [N, C, H, W]."""
    return [node.op["convolution"].planar for node in pooled(graph)]


# ---- the rewrite, and the record ----


@pytest.mark.parametrize("inner", [Relu, Swish, None])
@pytest.mark.parametrize("channels", [3, 64])
def test_a_convolution_and_its_pool_become_one_node(channels, inner):
    graph = network((2, channels, 14, 14), inner=inner)
    after = laid(graph)
    close(graph, after)
    assert planar(after) == [channels == 3, False]
    for node in pooled(after):
        assert node.op.activation("convolution") == (inner and inner())
        assert len(node.covers) == (2 if inner is None else 3)
    assert "together they are conv2d_pool" in {note.why for note in after.notes}
    assert not [one for one in after.nodes if one.op.kind == "max_pool2d_nhwc"]


@pytest.mark.parametrize("channels", [3, 64])
def test_what_does_not_fit_stays_as_it_is(channels):
    """Sums that others read, and what no kernel takes."""
    shape = 2, channels, 14, 14
    after = laid(network(shape, inner=None, others=True))
    assert planar(after) == [channels == 3]
    asked = []
    assert not pooled(laid(network(shape), lambda graph, node: asked.append(node.op)))
    assert [[part.op.kind for part in op.nodes] for op in asked] == [
        ["conv2d_nhwc", "max_pool2d_nhwc"]
    ] * 2


# ---- engines ----


@pytest.mark.parametrize("dtype", [*HALVES, "tf32", "float32"])
@pytest.mark.parametrize("channels", [3, 64])
@pytest.mark.parametrize("inner", [Relu, Clip, None])
def test_engines_join_where_images_lie_in_16_bits(hopper_engines, channels, inner, dtype):
    graph, steps = built(network((2, channels, 14, 14), inner=inner), dtype)
    joined = [True, False] if channels == 3 else [False]  # wide images come in float32
    assert planar(graph) == (joined if dtype in HALVES else [])
    for node, is_first in zip(pooled(graph), planar(graph), strict=True):
        assert steps[node.name].kernel == ("stem_pool" if is_first else "wgmma_pool")
        assert steps[node.name].flops == graph.cost_of(node).flops
        x, y = (graph.values[name] for name in (node.inputs[0], *node.outputs))
        assert (x.storage_dtype, y.storage_dtype) == ("" if is_first else dtype, dtype)
        assert node.op.compute_dtype == dtype


@pytest.mark.parametrize("channels", [3, 64])
@pytest.mark.parametrize(
    "change",
    [
        {"inner": Swish},
        {"pool": MaxPool2d((3, 3), (2, 2), (1, 1, 1, 1))},
        {"pool": MaxPool2d((2, 2), (1, 1))},
        {"pool": MaxPool2d((2, 2), (2, 2), (0, 0, 1, 1))},
        {"pool": MaxPool2d((2, 2), (2, 2), (0, 0, 0, 0), (2, 2))},
    ],
)
def test_engines_join_clamps_alone_and_pools_of_two_by_two_but_for_first_ones(
    hopper_engines, change, channels
):
    graph, _ = built(network((2, channels, 13, 13), **change), "float16")
    assert planar(graph) == ([True] if channels == 3 and "pool" in change else [])


def test_a_device_is_asked_for_what_it_would_run(hopper_engines, monkeypatch):
    asked = []

    def takes(*how):
        asked.append(how)
        return 0

    fakes = fake_cuda.FakeTensorCores
    for function in ("stem_pool_takes", "conv2d_nhwc_wgmma_pool_takes"):
        monkeypatch.setattr(fakes, function, staticmethod(takes))
    assert not pooled(built(network((2, 3, 14, 12)), "float16")[0])
    (first, pool, *how), (second, *others), *_ = asked
    assert [(shape.out_h, shape.out_w) for shape in (first, pool, second)] == [
        (14, 12), (7, 6), (7, 6),
    ]  # fmt: skip
    assert [shape.weight_size for shape in (first, second)] == [64 * 3 * 9, 72 * 64 * 9]
    assert how == others == [_cpu.ElementType.float16, Target.named("h200").native]


# ---- the kernel ----

#: Images, channels, rows, columns, filters, padding: of VGG-16, and of odd sizes that no tile fills.
CASES = [
    (1, 64, 28, 24, 64, (1, 1, 1, 1)),
    (2, 72, 30, 17, 136, (1, 1, 1, 1)),
    (3, 64, 15, 9, 72, (2, 0, 1, 3)),
    (1, 520, 14, 14, 72, (1, 1, 1, 1)),
    (2, 264, 29, 12, 128, (0, 0, 0, 0)),
    (1, 8, 4, 130, 8, (1, 1, 1, 1)),
    (20, 64, 56, 56, 72, (1, 1, 1, 1)),
    (0, 64, 28, 28, 64, (1, 1, 1, 1)),
]


def case_of(case):
    n, c, h, w, k, padding = case
    return n, c, h, w, k, (3, 3), (1, 1), padding, (1, 1), 1


def run(
    case,
    compute_dtype,
    x,
    weight,
    bias,
    rank=0,
    activation=RELU,
    more=(0, 0),
    overflow=halves.NO_FLAG,
):
    """Returns [N, K, OH / 2, OW / 2]; ``more``: of the pitches of x and y."""
    device, shape, kind = (
        Device("cuda"),
        shape_of(case),
        getattr(_cpu.ElementType, compute_dtype),
    )
    n, _, _, _, k = case[:5]
    out = halves.Output(device, (n, shape.out_h // 2, shape.out_w // 2, k + more[1]), compute_dtype)
    untouched = out.array[..., k:].copy()
    call(
        device, "conv2d_nhwc_wgmma_pool",
        *images(
            halves.put(device, channels_last(x, more[0]), compute_dtype), storage_dtype=compute_dtype
        ),
        packed(device, "conv2d_nhwc_wgmma", [weight], shape, kind),
        *images(out.array, storage_dtype=compute_dtype), shape, kind,
        *epilogue(device.put(bias), activation, overflow), *launch(rank=rank),
    )  # fmt: skip
    assert bool((out.array[..., k:] == untouched).all())
    return out.get()[..., :k].transpose(0, 3, 1, 2)


def pool_of(y):
    """Returns the greatest of each two rows' two positions, of [N, K, H, W]."""
    n, k, h, w = y.shape
    return y[:, :, : h // 2 * 2, : w // 2 * 2].reshape(n, k, h // 2, 2, w // 2, 2).max((3, 5))


@pytest.fixture
def hopper():
    targets.need(WGMMA)


@pytest.mark.gpu
@pytest.mark.parametrize("compute_dtype", HALVES)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_whole_numbers_are_exact_in_every_tile_and_split(rng, hopper, case, compute_dtype):
    case = case_of(case)
    x, weight, bias = whole_numbers(rng, case)
    sums = pool_of(record(case).reference(x, weight, bias))
    for rank in range(6):
        found = run(case, compute_dtype, x, weight, bias, rank, more=(8, 16))
        assert np.array_equal(found, halves.rounded(np.maximum(sums, 0), compute_dtype)), rank
    clip = _cpu.UnaryFunction.clip, -np.inf, 5
    found = run(case, compute_dtype, x, weight, None, activation=clip)
    wanted = np.minimum(pool_of(record(case).reference(x, weight)), 5)
    assert np.array_equal(found, halves.rounded(wanted, compute_dtype))


@pytest.mark.gpu
@pytest.mark.parametrize("compute_dtype", HALVES)
@pytest.mark.parametrize("case", [CASES[1], CASES[3]], ids=str)
def test_the_same_bits_as_one_behind_the_other_and_again(rng, hopper, case, compute_dtype):
    """Among the tiles of convolutions are those that pools have, and one sum's order has one set of bits."""
    case = case_of(case)
    n, c, h, w, k = case[:5]
    x = rng.standard_normal((n, c, h, w), np.float32)
    weight, bias = (
        rng.standard_normal(shape, np.float32) / c**0.5 for shape in ((k, c, 3, 3), (k,))
    )
    x[0, 5, 7, 7], x[0, 6, 12, 3] = np.nan, np.inf
    apart = [
        pool_of(product(case, compute_dtype, x, weight, bias, activation=RELU, rank=rank))
        for rank in range(45)
    ]
    for rank in range(6):
        found = run(case, compute_dtype, x, weight, bias, rank)
        assert any(np.array_equal(found, one, equal_nan=True) for one in apart), rank
        for _ in range(5):
            again = run(case, compute_dtype, x, weight, bias, rank)
            assert np.array_equal(found, again, equal_nan=True)


@pytest.mark.gpu
def test_results_past_float16_are_told_of_the_image_alone(hopper):
    """Of a place that is pooled with greater ones too, and of none beyond the image."""
    case = case_of((1, 8, 15, 9, 8, (1, 1, 1, 1)))
    x, weight = np.zeros((1, 8, 15, 9), np.float32), np.zeros((8, 8, 3, 3), np.float32)
    flag = halves.OverflowFlag()
    weight[3, 0, 0, 1] = 60000.0  # of the place above
    for row, wanted in ((13, True), (14, False)):
        x[:] = 0.0
        x[0, 0, row, 4] = 2.0
        run(case, "float16", x, weight, None, overflow=flag.overflow)
        assert flag.is_set() == wanted, row


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"compute_dtype": "tf32"}, "expected operands of 16 bits"),
        ({"kernel": (1, 1)}, "expected a kernel of 3x3"),
        ({"stride": (2, 1)}, "expected a kernel of 3x3"),
        ({"filters": 12}, "expected filters in eights"),
        ({"more": (0, 4)}, "expected y's pitch and address"),
        ({"activation": (_cpu.UnaryFunction.swish, 1, 0)}, "expected a clamp"),
    ],
)
def test_what_it_does_not_take_is_refused(rng, hopper, change, said):
    kernel, stride = change.pop("kernel", (3, 3)), change.pop("stride", (1, 1))
    case = (1, 64, 8, 8, change.pop("filters", 64), kernel, stride, (1,) * 4, (1, 1), 1)
    compute_dtype = change.pop("compute_dtype", "float16")
    x, weight, bias = whole_numbers(rng, case)
    with pytest.raises(ValueError, match=said):
        run(case, compute_dtype, x, weight, bias, **change)
