"""Calls on arrays of a GPU: captured into CUDA graphs, on streams that come and go, of engines that close.

Without a GPU it is a stand-in whose captures are said to be ones.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import sys
import weakref
from types import SimpleNamespace

import fake_cuda
import numpy as np
import pytest
from graphs import Builder
from graphs import chain_images as images
from graphs import convolution_chain as network

from cnn_engine import Engine
from cnn_engine.devices import arrays
from cnn_engine.engine import plan_runner
from cnn_engine.operators.resize import Resize
from cnn_engine.plan.plan import _ABANDONED, Plan

# ---- without a GPU ----


class There:
    """An array of a fake GPU."""

    def __init__(self, array: np.ndarray, stream: int = 7) -> None:
        self.array = array
        self.__cuda_array_interface__ = {**array.__array_interface__, "stream": stream}


class Streams(fake_cuda.FakeCuda):
    """A device that knows which streams are captured, and who keeps and waits for what."""

    captured: dict[int, int]

    def on(self, stream: int, apart: bool = False) -> Streams:
        other = Streams(self.tensor_cores)
        other.__dict__.update(self.__dict__)
        other._left = np.empty(0, np.uint8)  # what it allocates is its own
        other.stream_handle, other.apart = stream, apart
        return other

    def is_capturing(self, stream: int) -> bool:
        return stream in self.captured

    def stream_id(self, stream: int) -> int:
        return -1 if stream in self.captured else self.ids.get(stream, stream)

    def capture_id(self, stream: int) -> int:
        return self.captured[stream]

    def while_captured(self) -> contextlib.AbstractContextManager:
        return contextlib.nullcontext()

    def keep_in_graph(self, stream: int, used: object) -> None:
        self.kept.setdefault(self.captured[stream], []).append(used)

    def wait_for(self, streams: dict[int, object]) -> bool:
        self.waited.append(dict(streams))
        return not streams.keys() & self.captured.keys()


@pytest.fixture
def device(monkeypatch):
    from cnn_engine import devices

    fake_cuda.install(monkeypatch)
    found = Streams()
    found.captured, found.kept, found.waited, found.ids = {}, {}, [], {}
    monkeypatch.setattr(devices, "select", lambda name: found)
    monkeypatch.setattr(arrays, "_cuda_device", lambda *_: 0)
    return found


def call(engine: Engine, x: np.ndarray, stream: int = 7) -> np.ndarray:
    out = np.full((len(x), 10), -1, np.float32)
    engine.predict(There(x, stream), out=There(out, stream))
    return out


def test_each_capture_has_plans_of_its_own_which_its_graph_keeps(device):
    x = images(3)
    with Engine(network(), device="cuda") as engine:
        wanted = call(engine, x)
        usual = {id(plan) for shelf in engine._plans.pool._shelves.values() for plan in shelf.idle}
        for capture, stream in ((1, 7), (2, 7), (3, 8)):
            device.captured = {stream: capture}
            np.testing.assert_array_equal(call(engine, x, stream), wanted)
            np.testing.assert_array_equal(call(engine, x, stream), wanted)
        device.captured = {}
        kept = device.kept
        assert {number: len(used) for number, used in kept.items()} == {1: 1, 2: 1, 3: 1}
        assert len({id(plan) for (plan,) in kept.values()} | usual) == 3 + len(usual)
        arenas = [
            range(buffer.address, buffer.address + buffer.nbytes)
            for (plan,) in kept.values()
            for buffer in plan.buffers[0].values()
            if buffer.nbytes
        ]
        starts = sorted(arenas, key=lambda arena: arena.start)
        assert all(one.stop <= other.start for one, other in itertools.pairwise(starts))
        call(engine, x)
        idle = {id(plan) for shelf in engine._plans.pool._shelves.values() for plan in shelf.idle}
        assert idle == usual
    plan = weakref.ref(kept[1][0])
    assert plan() is not None, "a graph's memory outlives its engine"
    kept.clear()
    gc.collect()
    assert plan() is None


def test_plans_belong_to_streams_not_to_their_handles(device):
    x = images(2)
    with Engine(network(), device="cuda") as engine:
        call(engine, x)
        (first,) = engine._plans.pool._shelves
        device.ids = {7: 70}  # another stream, with the handle of one that is gone
        call(engine, x)
        assert len(engine._plans.pool._shelves) == 2
        assert first in engine._plans.pool._shelves


@pytest.mark.parametrize("how", ["closed", "dropped"])
def test_what_was_queued_is_waited_for_before_memory_goes(device, how):
    engine = Engine(network(), device="cuda")
    call(engine, images(2))
    assert not device.waited
    weights = weakref.ref(engine._plans.open())
    alive = []
    device.wait_for = lambda streams: alive.append((set(streams), weights() is not None)) or True
    if how == "closed":
        engine.close()
    else:
        del engine
        gc.collect()
    assert alive == [({7}, True)]
    gc.collect()
    assert weights() is None


def test_what_cannot_be_waited_for_is_kept_until_it_can(device):
    engine = Engine(network(), device="cuda")
    call(engine, images(2))
    weights = weakref.ref(engine._plans.open())
    device.captured = {7: 1}
    del engine
    gc.collect()
    assert weights() is not None
    assert plan_runner._UNDONE
    device.captured = {}
    Engine(network(), device="cuda").close()
    gc.collect()
    assert weights() is None
    assert not plan_runner._UNDONE


def test_engines_are_freed_without_the_collector():
    engine = Engine(network(), device="cpu", threads=1)
    engine.predict(images(1))
    gone = weakref.ref(engine._plans)
    gc.disable()
    try:
        del engine
        assert gone() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("waits", [True, False])
def test_a_pass_that_fails_is_waited_for_before_its_memory_goes(device, monkeypatch, waits):
    """Page-locked memory and the words that kernels write to are given to the next who asks."""
    x = images(2)
    with Engine(network(), device="cuda") as engine:
        engine.predict(x)
        log = []

        def synchronize(self) -> None:
            log.append("waited")
            if not waits:
                raise KeyboardInterrupt

        def stop(self) -> None:
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(Plan, "queue", stop)
            patch.setattr(Streams, "synchronize", synchronize)
            with pytest.raises(KeyboardInterrupt):
                engine.predict(x)
        assert log == ["waited"]
        assert len(_ABANDONED) == (not waits)
        _ABANDONED.clear()
        assert engine.predict(x).shape == (2, 10)


# ---- on a GPU ----


def capture(cupy, engine, x, out, stream):
    with stream:
        stream.begin_capture()
        engine.predict(x, out=out)
        return stream.end_capture()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_graphs_of_one_stream_run_beside_each_other(dtype):
    import cupy

    xs = [cupy.asarray(images(64, seed)) for seed in range(2)]
    outs = [cupy.empty((64, 10), np.float32) for _ in xs]
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()
    with Engine(network(), device="cuda", dtype=dtype) as engine:
        with stream:
            for x, out in zip(xs, outs, strict=True):
                engine.predict(x, out=out)
            stream.synchronize()
        wanted = [out.get() for out in outs]
        graphs = [capture(cupy, engine, *each, stream) for each in zip(xs, outs, strict=True)]
        others = [cupy.cuda.Stream(non_blocking=True) for _ in graphs]
        for _ in range(30):
            for graph, other in zip(graphs, others, strict=True):
                graph.launch(other)
    for other in others:  # of an engine that is closed
        other.synchronize()
    for out, right in zip(outs, wanted, strict=True):
        np.testing.assert_array_equal(out.get(), right)


@pytest.mark.gpu
@pytest.mark.parametrize("before", ["on another stream", "never"])
@pytest.mark.parametrize("batch", [1, 33])
@pytest.mark.parametrize("mode", ["Global", "ThreadLocal"])
def test_a_call_may_be_captured_on_any_stream(before, batch, mode):
    import cupy

    x, out = cupy.asarray(images(batch)), cupy.full((batch, 10), -1, np.float32)
    stream = cupy.cuda.Stream(non_blocking=True)
    with Engine(network(), device="cuda", dtype="float16") as engine:
        wanted = engine.predict(images(batch))
        if before != "never":
            engine.predict(x, out=out)
        cupy.cuda.Device().synchronize()
        out[...] = -1
        cupy.cuda.Device().synchronize()
        with stream:
            stream.begin_capture(getattr(cupy.cuda.runtime, f"streamCaptureMode{mode}"))
            engine.predict(x, out=out)
            graph = stream.end_capture()
        assert (out.get() == -1).all()
        graph.launch(stream)
        stream.synchronize()
        np.testing.assert_array_equal(out.get(), wanted)


@pytest.mark.gpu
def test_a_call_is_captured_whose_kernels_read_tables():
    """Positions and weights of an interpolation are copied to the GPU as a plan is made."""
    import cupy

    b = Builder((2, 3, 9, 7))
    wide = Resize((2, 8, 18, 21), (1.0, 1.0, 2.0, 3.0), "linear")
    b.conv(b.add(wide, b.relu(b.conv("images", 8))), 4)
    x = np.random.default_rng(0).normal(size=(2, 3, 9, 7)).astype(np.float32)
    there, out = cupy.asarray(x), cupy.zeros((2, 4, 18, 21), np.float32)
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()
    with Engine(b.graph(), device="cuda") as engine, stream:
        (name,) = (value.name for value in engine.outputs)
        wanted = engine.run({"images": x})[name]
        stream.begin_capture()
        engine.run({"images": there}, out={name: out})
        graph = stream.end_capture()
        graph.launch(stream)
        stream.synchronize()
    np.testing.assert_array_equal(out.get(), wanted)


@pytest.mark.gpu
def test_a_graph_keeps_its_memory_until_it_is_gone():
    import cupy

    from cnn_engine.devices.cuda import _IN_GRAPHS

    x, out = cupy.asarray(images(8)), cupy.empty((8, 10), np.float32)
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()
    engine = Engine(network(), device="cuda")
    held = len(_IN_GRAPHS)
    wanted = engine.predict(images(8))
    graph = capture(cupy, engine, x, out, stream)
    engine.close()
    del engine
    gc.collect()
    cupy.cuda.alloc(64 << 20)
    assert len(_IN_GRAPHS) == held + 1
    graph.launch(stream)
    stream.synchronize()
    np.testing.assert_array_equal(out.get(), wanted)
    del graph
    cupy.cuda.Device().synchronize()
    for _ in range(100):  # a thread of the driver tells
        Engine(network(), device="cuda").close()
        if len(_IN_GRAPHS) == held:
            break
    assert len(_IN_GRAPHS) == held


@pytest.mark.gpu
def test_a_failed_call_is_told_once():
    from cnn_engine import _cuda

    with pytest.raises(_cuda.CudaError, match="invalid device ordinal"):
        _cuda.device_properties(99)
    _cuda.delay(0, 0)


@pytest.mark.parametrize("current", [0, 1])
def test_rows_lie_on_the_device_of_the_images(monkeypatch, current):
    """Also where another one is current: by what CuPy has, on devices that are not there."""

    class Cupy:
        device = current

        class ndarray:
            def __init__(self, shape, dtype=np.float32):
                self.shape = shape
                self.data = SimpleNamespace(device_id=Cupy.device, ptr=256)

        empty = ndarray

        class cuda:
            runtime = SimpleNamespace(getDevice=lambda: Cupy.device)

            @contextlib.contextmanager
            def Device(index):
                before, Cupy.device = Cupy.device, index
                yield
                Cupy.device = before

    with Cupy.cuda.Device(1):
        images = Cupy.ndarray((3, 3, 8, 8))
    monkeypatch.setitem(sys.modules, "cupy", Cupy)
    rows, address = arrays.empty_rows(images, (10,))
    assert (rows.shape, rows.data.device_id, address) == ((3, 10), 1, 256)
    assert Cupy.device == current


@pytest.mark.gpu
def test_calls_on_a_second_gpu_write_to_it_though_the_first_is_current():
    import cupy

    if cupy.cuda.runtime.getDeviceCount() < 2:
        pytest.skip("needs two GPUs")
    with Engine(network(), device="cuda:1") as engine:
        with cupy.cuda.Device(1):
            x = cupy.asarray(images(2))
        wanted = engine.predict(images(2))
        for _ in range(3):
            rows = engine.predict(x)
            assert rows.device.id == 1
            with rows.device:
                np.testing.assert_allclose(rows.get(), wanted, rtol=1e-4, atol=1e-5)
    assert cupy.cuda.runtime.getDevice() == 0


@pytest.mark.gpu
def test_an_engine_on_a_second_gpu_makes_no_context_on_the_first():
    import cupy

    if cupy.cuda.runtime.getDeviceCount() < 2:
        pytest.skip("needs two GPUs")
    code = (
        "import ctypes, numpy as np\n"
        "driver = ctypes.CDLL('libcuda.so.1'); driver.cuInit(0)\n"
        "def active(i):\n"
        "    flags, on = ctypes.c_uint(), ctypes.c_int()\n"
        "    driver.cuDevicePrimaryCtxGetState(i, ctypes.byref(flags), ctypes.byref(on))\n"
        "    return on.value\n"
        "from test_cuda_graphs import *\n"
        "with Engine(network(), device='cuda:1') as e:\n"
        "    for n in (1, 4, 4): e.predict(images(n))\n"
        "print(active(0), active(1))\n"
    )
    from test_threads import python

    result = python(code)
    assert (result.stdout, result.returncode) == ("0 1\n", 0), result.stderr
