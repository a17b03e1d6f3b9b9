"""An image's bits in every batch, ``batch_invariant=True``: what decides the order of sums is the same."""

from __future__ import annotations

import fake_cuda
import numpy as np
import pytest
from graphs import Builder as PlainBuilder
from graphs import resnet
from test_low_batch import network
from test_requirements import needs_kernels

from cnn_engine import Engine, UnsupportedError, kernels
from cnn_engine.devices.described import DescribedDevice
from cnn_engine.graph.graph import Graph
from cnn_engine.kernels.kernel import ANY_BATCH
from cnn_engine.kernels.select import Choice
from cnn_engine.lower.lowering import Program
from cnn_engine.lower.placement import Placement
from cnn_engine.operators.reduce import ReduceMean
from cnn_engine.operators.shaping import Transpose
from cnn_engine.plan.arenas import plan_memory
from cnn_engine.target import Target

RESNET = resnet((1, 1), (1, 3, 64, 64), width=32)
MOBILE = network(33, 16)

BATCHES = [*range(1, 10), 13, 15, 16, 17, 20, 32, 33, 63, 64]


def program(graph: Graph, dtype: str, target: str, batch_invariant: bool) -> Program:
    device = DescribedDevice(Target.named(target))
    choice = Choice("blocked", False, "auto")
    return Program(
        lambda size, _pixels: graph.with_sizes(size) if not isinstance(size, int) else graph.with_batch(size),
        Placement(device, "resident", 1), choice, dtype, first=(1, False), fuses=True,
        batch_invariant=batch_invariant,
    )  # fmt: skip


def decisions(made: Program, batch: int) -> list[tuple]:
    """Returns the nodes that a pass runs, with what decides the order of their sums."""
    placed = made.placed(batch, False)
    device, graph = made.placement.device, placed.graph
    return [
        (node.name, node.op.kind, kernel.name, kernel.shown_as(node, graph, device))
        for node in graph.nodes
        if (kernel := placed.kernels.get(node.name)) is not None
    ]


@needs_kernels
@pytest.mark.parametrize("target", ["h200", "a100", "t4"])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("graph", [MOBILE, RESNET], ids=["mobile", "resnet"])
def test_every_batch_has_the_decisions_of_one(graph: Graph, dtype: str, target: str) -> None:
    made = program(graph, dtype, target, True)
    wanted = decisions(made, 16)
    for batch in BATCHES:
        assert decisions(made, batch) == wanted, batch
        shapes = made.laid(batch, False).values
        assert shapes[graph.outputs[0]].shape[0] == batch


@needs_kernels
def test_decisions_depend_on_the_batch_otherwise() -> None:
    made = program(MOBILE, "float16", "h200", False)
    assert len({tuple(decisions(made, batch)) for batch in BATCHES}) > 1


@needs_kernels
def test_no_region_is_made_whose_sums_depend_on_the_batch() -> None:
    made = program(RESNET, "float16", "h200", True)
    placed = made.placed(1, False)
    for node in placed.graph.nodes:
        kernel = placed.kernels.get(node.name)
        if kernel is not None and hasattr(node.op, "nodes"):
            assert kernels.is_batch_invariant(kernel, node, placed.graph), node.name


@pytest.fixture
def recorded(monkeypatch):
    """A GPU that is not there, and the calls of its functions of which the batch may decide the order."""
    fake_cuda.install(monkeypatch, tensor_cores=True)
    found: list[tuple[str, tuple]] = []
    for name in ("conv2d_nhwc", "reduce"):
        own = getattr(fake_cuda.FakeTensorCores(), name)

        def launch(*arguments, name=name, own=own):
            found.append((name, arguments))
            return own(*arguments)

        monkeypatch.setattr(fake_cuda.FakeTensorCores, name, staticmethod(launch), raising=False)
    return found


def test_products_take_a_choice_for_every_batch_and_others_an_image_each(recorded) -> None:
    graph = network()
    images = np.random.default_rng(1).normal(size=(21, 3, 17, 17)).astype(np.float32)
    with (
        Engine(graph, device="cuda", batch_invariant=True) as engine,
        Engine(graph, device="cpu") as other,
    ):
        for batch in (1, 2, 16, 21):
            recorded.clear()
            found = engine.predict(images[:batch])
            np.testing.assert_allclose(found, other.predict(images[:batch]), rtol=1e-4, atol=1e-4)
            ranks = [arguments[-2] for name, arguments in recorded if name == "conv2d_nhwc"]
            assert set(ranks) == {ANY_BATCH}
            shapes = [arguments[2].outer for name, arguments in recorded if name == "reduce"]
            assert shapes == batch * [1]


@needs_kernels
def test_scratch_memory_has_room_for_the_splits_of_one_image() -> None:
    """Of few images a sum is split more often than of many."""
    made = program(resnet((1,), (1, 3, 32, 32), bottleneck=False), "float32", "t4", True)
    device, more = made.placement.device, 0
    for batch in (1, 2, 64):
        placed = made.placed(batch, False)
        planned = plan_memory(placed, lambda where: device, 1, batch_invariant=True)
        sizes = {life.name: life.nbytes for life in planned.lifetimes["cuda"]}
        for node in placed.graph.nodes:
            kernel = placed.kernels.get(node.name)
            if kernel is not None and kernel.name == "blocked":
                one = made.placed(1, False).graph
                wanted = kernel.workspace(node, one, device, 1)
                assert sizes.get((node.name,), 0) >= wanted, (node.name, batch)
                more += wanted > kernel.workspace(node, placed.graph, device, 1)
    assert more  # else nothing is tested


def test_engines_of_a_cpu_are_batch_invariant_anyhow() -> None:
    images = np.random.default_rng(1).normal(size=(9, 3, 17, 17)).astype(np.float32)
    with Engine(network(), device="cpu", batch_invariant=True) as engine:
        whole = engine.predict(images)
        for first in (0, 3, 8):
            assert engine.predict(images[first:]).tobytes() == whole[first:].tobytes()


def test_a_network_without_a_batch_is_one_image(monkeypatch) -> None:
    fake_cuda.install(monkeypatch, tensor_cores=True)
    shape = (1, 3, 5, 5)
    builder = PlainBuilder(shape, batched=False)
    graph = builder.graph(builder.add(ReduceMean((2, 3)), "images"))
    images = np.random.default_rng(1).normal(size=shape).astype(np.float32)
    with Engine(graph, device="cuda", batch_invariant=True) as engine:
        (found,) = engine.run({"images": images}).values()
    np.testing.assert_allclose(found, images.mean((2, 3), keepdims=True), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tune": True}, "batch_invariant: expected no tune, which may sum in another order"),
        ({"variant": "fused"}, "variant: fused: batch_invariant needs kernels of single nodes"),
    ],
)
def test_what_sums_in_another_order_is_refused(monkeypatch, options, message) -> None:
    fake_cuda.install(monkeypatch, tensor_cores=True)
    with pytest.raises(UnsupportedError, match=f"^{message}$"):
        Engine("cifar10", device="cuda", batch_invariant=True, **options)


def test_images_that_are_not_in_front_are_refused(monkeypatch) -> None:
    from test_passes import Builder

    fake_cuda.install(monkeypatch, tensor_cores=True)
    b = Builder(1, 3, 5, 5)
    x = b.add(Transpose((1, 0, 2, 3)), "x")
    graph = b.network(b.add(Transpose((1, 0)), b.add(ReduceMean((2, 3), keepdims=False), x)))
    with pytest.raises(UnsupportedError, match="batch_invariant: .*expected images in front of"):
        Engine(graph, device="cuda", batch_invariant=True)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("graph", [MOBILE, RESNET], ids=["mobile", "resnet"])
def test_rows_have_the_same_bits_in_every_batch_and_place(graph: Graph, dtype: str) -> None:
    rng = np.random.default_rng(2)
    shape = graph.inputs[0].shape[1:]
    images = rng.normal(size=(64, *shape)).astype(np.float32)
    with Engine(graph, device="cuda", dtype=dtype, batch_invariant=True) as engine:
        wanted = engine.predict(images)
        assert np.isfinite(wanted).all()
        for batch in BATCHES:
            order = rng.permutation(64)[:batch]
            found = engine.predict(np.ascontiguousarray(images[order]))
            assert found.tobytes() == wanted[order].tobytes(), batch
