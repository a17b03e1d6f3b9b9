"""What a pass's graph asks the second-level cache for, where a layer has more weights than that keeps."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace

import fake_cuda
import numpy as np
import pytest
from test_passes import Builder

from cnn_engine import Engine
from cnn_engine.devices.cuda import CudaDevice
from cnn_engine.errors import DeviceError
from cnn_engine.graph.graph import Graph
from cnn_engine.operators.binary import Add
from cnn_engine.operators.linear import Linear
from cnn_engine.operators.shaping import Reshape
from cnn_engine.operators.unary import Relu
from cnn_engine.plan import cuda_graph, l2_prefetch

WIDTH, CLASSES = 16, 40
FEATURES = WIDTH * 12 * 12


def network(convolutions: int = 8) -> Graph:
    """Convolutions that are no chain, and a linear layer with more weights than all of them."""
    b = Builder(1, 3, 12, 12)
    x = b.add(Relu(), b.conv("x", 3, WIDTH, padding=(1, 1, 1, 1)))
    for _ in range(convolutions - 1):
        x = b.add(Add(), b.conv(x, WIDTH, WIDTH, padding=(1, 1, 1, 1)), x)
    x = b.add(Reshape((-1, FEATURES)), x)
    x = b.add(Linear(), x, b.constant(CLASSES, FEATURES), b.constant(CLASSES))
    return b.network(x, scale=0.1)  # float16 has room for all results


def images(batch: int) -> np.ndarray:
    return np.random.default_rng(batch).standard_normal((batch, 3, 12, 12)).astype(np.float32)


@pytest.fixture(params=["fake", pytest.param("cuda", marks=pytest.mark.gpu)])
def gpu(request, monkeypatch):
    """A GPU on which the linear layer's weights, and no other's, sweep the cache."""
    if request.param == "fake":
        fake_cuda.install(monkeypatch, tensor_cores=True)
        monkeypatch.setattr(
            fake_cuda.FakeTensorCores, "prefetch", staticmethod(lambda *how: None), raising=False
        )
    monkeypatch.setattr(l2_prefetch, "SWEEPING", CLASSES * FEATURES * 2)
    return request.param


def plan_of(engine: Engine, batch: int = 1):
    return engine.plan(batch, np.dtype(np.float32))


def requests_of(engine: Engine) -> tuple[list[l2_prefetch.Request], l2_prefetch.Request]:
    """Returns what is asked for of convolutions, and of the layer that sweeps."""
    *convolutions, swept = plan_of(engine).replays.branch.requests
    return convolutions, swept


def test_convolutions_weights_and_pieces_of_what_sweeps(gpu):
    with Engine(network(), device="cuda") as engine:
        plan = plan_of(engine)
        kernels = [step for step in plan.steps if step.place == "cuda" and step.kernel]
        assert plan.replays.branch.step is kernels[l2_prefetch.BEFORE]
        convolutions, swept = requests_of(engine)
        multiprocessors = engine.device.properties["multiprocessors"]
    assert len(convolutions) == 8 - l2_prefetch.BEFORE - l2_prefetch.AFTER
    assert len({one.address for one in (*convolutions, swept)}) == len(convolutions) + 1
    for one in convolutions:
        assert one == l2_prefetch.Request(one.address, 1, one.row_bytes)
        assert one.row_bytes >= WIDTH * WIDTH * 9 * 4
    assert swept == l2_prefetch.Request(
        swept.address, CLASSES, FEATURES * 4, 8 * multiprocessors, 1
    )


def test_half_of_the_cache_for_convolutions_and_a_third_for_what_sweeps(gpu, monkeypatch):
    """However many bytes a kernel packs its weights into."""
    with Engine(network(), device="cuda") as engine:
        convolutions, _ = requests_of(engine)
    cache = 2 * sum(one.row_bytes for one in convolutions)
    with Engine(network(), device="cuda") as engine:
        monkeypatch.setitem(engine.device.properties, "cache_bytes", cache)
        again, swept = requests_of(engine)
    assert [one.row_bytes for one in again] == [one.row_bytes for one in convolutions]
    assert swept.every == -(-CLASSES * FEATURES * 4 // (cache // 3))
    with Engine(network(), device="cuda") as engine:
        monkeypatch.setitem(engine.device.properties, "cache_bytes", cache - 2)
        assert plan_of(engine).replays.branch is None


@pytest.mark.parametrize("what", ["several rows", "nothing sweeps", "too few kernels"])
def test_nothing_is_asked_for(gpu, monkeypatch, what):
    if what == "nothing sweeps":
        monkeypatch.setattr(l2_prefetch, "SWEEPING", 64 << 20)
    layers = l2_prefetch.BEFORE + l2_prefetch.AFTER if what == "too few kernels" else 8
    with Engine(network(layers), device="cuda") as engine:
        assert plan_of(engine, 2 if what == "several rows" else 1).replays.branch is None


def test_the_branch_begins_before_its_step_and_ends_behind_all():
    done = []

    class Device(fake_cuda.FakeCuda):
        def beside(self, stream, run):
            run(stream + 1)
            return lambda: done.append(("waits", stream))

    device = Device(True)
    device.kernels = SimpleNamespace(prefetch=lambda *how: done.append(how))
    steps = [SimpleNamespace(function=done.append, args=[name]) for name in "abc"]
    requests = l2_prefetch.Request(4096, 1, 64), l2_prefetch.Request(8192, 3, 32, 2, 5)
    branch = l2_prefetch.Branch(steps[1], requests)
    plan = SimpleNamespace(on_stream=lambda handle: done.append(("on", handle)))
    cuda_graph.Replays(device, True, branch)._run(plan, steps, 20)
    asked = [(4096, 1, 64, 1, 1, 21), (8192, 3, 32, 2, 5, 21)]
    assert done == [("on", 20), "a", *asked, "b", "c", ("waits", 20), ("on", 7)]


@pytest.mark.parametrize("dtype", ["float32", pytest.param("float16", marks=pytest.mark.gpu)])
def test_outputs_stay_as_they_are(gpu, monkeypatch, dtype):
    if gpu == "fake" and dtype == "float16":
        pytest.skip("plans of a GPU that is not there store no 16 bits")
    found = []
    for asks in (True, False):
        if not asks:
            monkeypatch.setattr(l2_prefetch, "plan", lambda *how: None)
        with Engine(network(), device="cuda", dtype=dtype) as engine:
            found += [engine.predict(images(1)) for _ in range(4)]
            replays = plan_of(engine).replays
            assert (replays.branch is not None, replays.why_not) == (asks, None)
    assert all((one == found[0]).all() for one in found)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("rows", "row_bytes"), [(0, 16), (1, 0), (1, 16), (1, 1 << 20), (5, 4112), (40, 8192)]
)
@pytest.mark.parametrize(("together", "every"), [(1, 1), (2, 3), (1056, 10)])
def test_any_memory_can_be_asked_for(rows, row_bytes, together, every):
    device = CudaDevice(0)
    wanted = np.arange(max(rows * row_bytes, 16), dtype=np.uint8)
    memory = device.upload(wanted)
    ask = partial(device.kernels.prefetch, memory.address, rows, row_bytes, together, every)
    ask(device.stream_handle)
    joins = device.beside(device.stream_handle, ask)
    joins()
    device.synchronize()
    found = np.zeros(memory.nbytes, np.uint8)
    device.copy_d2h(found.ctypes.data, memory.address, found.nbytes)
    device.synchronize()
    assert (found == wanted).all()


@pytest.mark.gpu
@pytest.mark.parametrize(
    "how", [(-1, 16, 1, 1), (1, -16, 1, 1), (1, 8, 1, 1), (1, 16, 0, 1), (1, 16, 1, 0)]
)
def test_what_cannot_be_asked_for_is_refused(how):
    device = CudaDevice(0)
    with pytest.raises(DeviceError, match="prefetch: expected rows of a multiple of 16 bytes"):
        device.kernels.prefetch(0, *how, device.stream_handle)
