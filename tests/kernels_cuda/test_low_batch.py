"""Models on a GPU with tensor cores: channels last, operands rounded, and passes that are one CUDA graph.

The GPU is not there (its kernels are played by the CPU's), or the one that there is.
"""

from __future__ import annotations

import threading
from dataclasses import replace
from types import SimpleNamespace

import fake_cuda
import numpy as np
import pytest
import tolerances
from test_passes import Builder

from cnn_engine import Engine, UnsupportedError, _cpu
from cnn_engine.engine.check import ROUNDING
from cnn_engine.graph import reference
from cnn_engine.graph.graph import Graph
from cnn_engine.operators.average_pool2d import AveragePool2d
from cnn_engine.operators.binary import Add, Mul
from cnn_engine.operators.conv2d import Conv2d
from cnn_engine.operators.linear import Linear
from cnn_engine.operators.max_pool2d import MaxPool2d
from cnn_engine.operators.reduce import ReduceMean
from cnn_engine.operators.shaping import Concat
from cnn_engine.operators.unary import HardSwish, Relu, Sigmoid
from cnn_engine.plan import builder, cuda_graph

DTYPES = ["float32", "tf32", "float16", "bfloat16"]


@pytest.fixture(params=["fake", pytest.param("cuda", marks=pytest.mark.gpu)])
def gpu(request, monkeypatch):
    if request.param == "fake":
        fake_cuda.install(monkeypatch, tensor_cores=True)
    return request.param


def network(size: int = 17, width: int = 8) -> Graph:
    """What mobile networks and DenseNets are made of, in a few layers, for any batch."""
    b = Builder(1, 3, size, size)
    x = b.conv("x", 3, width, stride=(2, 2), padding=(1, 1, 1, 1))
    x = b.add(HardSwish(), x)
    y = b.add(Relu(), b.conv(x, width, width, padding=(1, 1, 1, 1), groups=width))
    gate = b.add(Relu(), point(b, b.add(ReduceMean((2, 3)), y), width, 4))
    gate = b.add(Sigmoid(), point(b, gate, 4, width))
    x = b.add(Add(), point(b, b.add(Mul(), y, gate), width, width), x)
    x = b.add(MaxPool2d((3, 3), (2, 2), (1, 1, 1, 1)), x)
    for joined in (width, width + 4):
        z = point(b, b.add(Relu(), b.norm(x, joined)), joined, width)
        z = b.conv(b.add(Relu(), z), width, 4, padding=(1, 1, 1, 1))
        x = b.add(Concat(1), x, z)
    x = b.add(AveragePool2d((2, 2), (2, 2)), b.add(Relu(), b.norm(x, width + 8)))
    x = b.add(ReduceMean((2, 3), keepdims=False), x)
    x = b.add(Relu(), b.add(Linear(), x, b.constant(12, width + 8), b.constant(12)))
    x = b.add(Linear(), x, b.constant(10, 12), b.constant(10))
    return b.network(x)


def point(b: Builder, x: str, channels: int, filters: int) -> str:
    return b.add(Conv2d(), x, b.constant(filters, channels, 1, 1), b.constant(filters))


def images(batch: int, size: int = 17) -> np.ndarray:
    return np.random.default_rng(batch).standard_normal((batch, 3, size, size)).astype(np.float32)


def kernels(engine: Engine, batch: int = 1) -> dict[str, str]:
    plan = engine.plan(batch, np.dtype(np.float32))
    return {step.name: step.kernel for step in plan.steps if step.kernel}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [17, 32])
def test_outputs_are_the_references(gpu, dtype, size):
    with Engine(network(size=size), device="cuda", dtype=dtype) as engine:
        for batch in (1, 3, 9):
            check = engine.check(images(batch, size))
            assert check.passed, (batch, check)
        found = kernels(engine)
    assert {"depthwise", "rows", "channels_last"} <= set(found.values())
    assert {"implicit_gemm", "wgmma"} & set(found.values())
    assert not {"conv2d", "blocked", "transpose"} & set(found.values())


def test_many_rows_are_a_product(gpu):
    with Engine(network(), device="cuda") as engine:
        rows = [name for name, kernel in kernels(engine, 9).items() if kernel == "rows"]
    assert rows == []


def test_what_stands_before_a_convolution_is_read_in_fours(gpu):
    """A concatenation of widths that are no fours leaves batch norms as nodes."""
    with Engine(network(width=6), device="cuda") as engine:
        assert engine.check(images(2)).passed
        assert "affine_channel" in kernels(engine, 2).values()
    with Engine(network(width=8), device="cuda") as engine:
        found = list(kernels(engine, 2).values())
    assert found.count("affine_channel") == 1  # before the pool


def test_a_plan_becomes_one_call_behind_its_first_pass(gpu):
    x = images(2)
    with Engine(network(), device="cuda") as engine:
        wanted = engine.predict(x)
        for _ in range(3):
            np.testing.assert_array_equal(engine.predict(x), wanted)
        plan = engine.plan(2, x.dtype)
        assert plan.replays.why_not is None
        out = np.empty_like(wanted)
        plan.bind(x.ctypes.data, out.ctypes.data)
        plan.run()
        plan.run()
        calls = plan.replays.calls(plan)
        # The images to page-locked memory, the graph, the wait, and the rows out of such memory.
        assert len(calls) == 4 < len(plan.steps)
        copies = [step.direction for step in plan.steps if step.kind == "copy"]
        assert copies == ["h2h", "h2d", "h2h"]
        np.testing.assert_array_equal(out, wanted)
        other = images(2)[::-1].copy()
        plan.bind(other.ctypes.data, out.ctypes.data)
        plan.run()
        np.testing.assert_array_equal(out, wanted[::-1])


def test_runs_of_any_graph_are_replayed(gpu):
    x = images(1)
    with Engine(network(), device="cuda") as engine:
        found = [engine.run({"images": x}) for _ in range(3)]
        (wanted,) = reference.reference(engine.network.graph(1), {"images": x}).values()
    for outputs in found:
        (array,) = outputs.values()
        np.testing.assert_array_equal(array, *found[0].values())
        limit = tolerances.PROBABILITY * np.abs(wanted).max()
        tolerances.assert_close(array, wanted, limit)


def test_a_capture_that_fails_leaves_the_steps(gpu, monkeypatch):
    x = images(1)
    with Engine(network(), device="cuda") as engine:

        def capture(run):
            raise RuntimeError("no graphs today")

        monkeypatch.setattr(engine.device, "capture", capture)
        wanted = engine.predict(x)
        for _ in range(2):
            np.testing.assert_array_equal(engine.predict(x), wanted)
        plan = engine.plan(1, x.dtype)
        assert plan.replays.why_not == "capture failed: no graphs today"


def test_threads_do_not_disturb_each_other(gpu):
    inputs = [images(batch) for batch in (1, 2, 3, 1)]
    with Engine(network(), device="cuda") as engine:
        wanted = [engine.predict(x) for x in inputs]
        found: dict[int, list] = {k: [] for k in range(len(inputs))}

        def work(k: int) -> None:
            found[k] += [engine.predict(inputs[k]) for _ in range(20)]

        threads = [threading.Thread(target=work, args=(k,)) for k in found]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    for k, rows in found.items():
        for array in rows:
            np.testing.assert_array_equal(array, wanted[k])


def test_few_addresses_are_kept():
    """A plan for a caller's arrays on the device has a graph for each of a few pairs of them."""

    class Device(fake_cuda.FakeCuda):
        capturing = False

        def is_capturing(self, stream):
            return self.capturing

    device = Device(True)
    replays = cuda_graph.Replays(device, True)

    plan = SimpleNamespace(calls=[("step by step", ())], steps=(), bound=())
    for pair in range(3 * cuda_graph.KEPT_ADDRESSES):
        plan.bound = (pair, pair)
        assert replays.calls(plan) is plan.calls
    for _ in range(2):
        plan.bound = (7, 7)
        first = replays.calls(plan)
    assert replays.calls(plan) is first is not plan.calls
    device.capturing = True
    assert replays.calls(plan) is plan.calls
    device.capturing = False
    for pair in range(3 * cuda_graph.KEPT_GRAPHS):
        plan.bound = (pair, 0)
        replays.calls(plan)
        replays.calls(plan)
    assert len(replays._calls) == cuda_graph.KEPT_GRAPHS


@pytest.mark.parametrize("dtype", DTYPES[1:])
def test_dtypes_are_refused_where_nothing_rounds(monkeypatch, dtype):
    fake_cuda.install(monkeypatch)  # whose tensor cores multiply float16 alone, in linear layers
    if dtype != "float16":
        with pytest.raises(UnsupportedError, match=f"dtype: {dtype} needs the variant fused"):
            Engine(network(), device="cuda", dtype=dtype)
    fake_cuda.install(monkeypatch, tensor_cores=True)
    for options in ({"data_mode": "transfer"}, {"variant": "tiled"}, {"reduction": True}):
        with pytest.raises(UnsupportedError, match=dtype):
            Engine(network(), device="cuda", dtype=dtype, **options)


@pytest.mark.parametrize("scale", [1e6, 1e-7])
def test_weights_out_of_float16_are_multiplied_in_float32(gpu, scale):
    graph = network()
    first = next(name for name, array in graph.constants.items() if array.ndim == 4)
    constants = {**graph.constants, first: graph.constants[first] * np.float32(scale)}
    graph = replace(graph, constants=constants)
    for dtype, kept in (("float16", "float32"), ("bfloat16", "bfloat16")):
        with Engine(graph, device="cuda", dtype=dtype) as engine:
            program = engine._plans.open()
            nodes = {node.name: node for node in program.placed(1, False).graph.nodes}
            assert nodes["conv2d0"].op.compute_dtype == kept
            assert set(program.in_float32) == ({"conv2d0"} if dtype == "float16" else set())


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_arrays_on_the_device(dtype):
    import cupy

    x = images(2)
    with Engine(network(), device="cuda", dtype=dtype) as engine:
        wanted = engine.predict(x)
        for stream in (cupy.cuda.Stream.null, cupy.cuda.Stream(non_blocking=True)):
            with stream:
                there, out = cupy.asarray(x), cupy.zeros(wanted.shape, np.float32)
                for _ in range(4):
                    out[:] = -1
                    engine.predict(there, out=out)
                    np.testing.assert_array_equal(cupy.asnumpy(out), wanted)
        with cupy.cuda.Stream(non_blocking=True) as stream:
            engine.predict(there, out=out)
            stream.synchronize()
            stream.begin_capture()
            engine.predict(there, out=out)
            graph = stream.end_capture()
            out[:] = -1
            graph.launch(stream)
            np.testing.assert_array_equal(cupy.asnumpy(out), wanted)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_same_bits_every_run(dtype):
    x = images(3, 40)
    with Engine(network(size=40, width=32), device="cuda", dtype=dtype) as engine:
        wanted = engine.predict(x)
        for _ in range(100):
            np.testing.assert_array_equal(engine.predict(x), wanted)


def test_rounding_is_what_the_check_allows():
    assert set(DTYPES) == {*ROUNDING} - {"float64"}


def test_a_chunk_is_queued_by_its_own_plan(monkeypatch):
    """Passes of many images from host memory: after its first chunks a lane's kernels are one call."""
    fake_cuda.install(monkeypatch, tensor_cores=True)
    x = images(23)
    with Engine(network(), device="cuda", data_mode="stream", chunk=3) as engine:
        wanted = np.concatenate([engine.predict(part) for part in np.array_split(x, 8)])
        for _ in range(3):
            np.testing.assert_array_equal(engine.predict(x), wanted)
        plan = engine.plan(23, x.dtype)
        assert len(plan.replays.calls(plan)) < len(plan.calls) / 2
        inner = [own for lane in plan.buffers[0] for own in lane.plans.values()]
        assert sorted(own.batch for own in inner) == [2, 3, 3, 3]
        assert [len(own.replays._calls) for own in inner] == [1] * 4
        timed = np.empty_like(wanted)
        plan.bind(x.ctypes.data, timed.ctypes.data)
        plan.run_steps()
        np.testing.assert_array_equal(timed, wanted)


def test_images_cross_in_parts(monkeypatch):
    """One part is on its way while the next is copied; the last one belongs to the graph."""
    fake_cuda.install(monkeypatch, tensor_cores=True)
    x = images(8)
    with Engine(network(), device="cuda") as engine:
        wanted = engine.predict(x)
    monkeypatch.setattr(builder, "STAGED_A_PART", 8192)
    with Engine(network(), device="cuda") as engine:
        for _ in range(3):
            np.testing.assert_array_equal(engine.predict(x), wanted)
        plan = engine.plan(8, x.dtype)
        copies = [step for step in plan.steps if step.kind == "copy"]
        count = x.nbytes // 8192
        assert count > 1
        assert [step.direction for step in copies] == ["h2h", "h2d"] * count + ["h2h"]
        assert sum(step.bytes for step in copies if step.direction == "h2d") == x.nbytes
        # Two calls a part, of which the last one's second is the graph; the wait, and the rows.
        assert len(plan.replays.calls(plan)) == 2 * count + 2


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("start", [0, 16, 24, 63])
@pytest.mark.parametrize("nbytes", [0, 1, 63, 64, 200, 100_003])
def test_staging_is_a_copy(rng, nbytes, start, threads):
    source = rng.integers(0, 256, nbytes + 5, np.uint8)
    to = np.full(nbytes + 200, 7, np.uint8)
    skip = -to.ctypes.data % 64 + start
    _cpu.stage(source.ctypes.data + 5, to.ctypes.data + skip, nbytes, threads)
    np.testing.assert_array_equal(to[skip : skip + nbytes], source[5:])
    assert (to[:skip] == 7).all()
    assert (to[skip + nbytes :] == 7).all()


def test_large_outputs_are_copied(monkeypatch):
    """Small ones the last kernel writes to page-locked memory itself."""
    fake_cuda.install(monkeypatch, tensor_cores=True)
    x = images(2)
    found = []
    for most in (0, 1 << 20):
        monkeypatch.setattr(builder, "MOST_WRITTEN_AWAY", most)
        with Engine(network(), device="cuda") as engine:
            found += [engine.predict(x) for _ in range(3)]
            directions = [step.direction for step in engine.plan(2, x.dtype).steps]
            assert ("d2h" in directions) == (most == 0)
    for rows in found:
        np.testing.assert_array_equal(rows, found[0])


def test_page_locked_images_cross_at_once(monkeypatch):
    """From where they are, whichever array they are in; those of any other array are staged."""
    fake_cuda.install(monkeypatch, tensor_cores=True)
    x = images(3)
    locked = [x.copy(), x[::-1].copy()]
    monkeypatch.setattr(
        fake_cuda.FakeCuda, "is_pinned", lambda _, at: at in {a.ctypes.data for a in locked}
    )
    with Engine(network(), device="cuda") as engine:
        wanted = engine.predict(x)
        for turn in range(6):
            found = engine.predict(locked[turn % 2])
            np.testing.assert_array_equal(found, wanted[:: -1 if turn % 2 else 1])
            np.testing.assert_array_equal(engine.predict(x), wanted)
        plans = {key[-1]: shelf.idle for key, shelf in engine._plans.ready.items()}
        assert {pinned: len(idle) for pinned, idle in plans.items()} == {False: 1, True: 1}
        for pinned, (plan,) in plans.items():
            copies = [step.direction for step in plan.steps if step.kind == "copy"]
            assert copies == ["h2h"] * (not pinned) + ["h2d", "h2h"]
            # The copy in, or what stages it; the graph, the wait, the rows.
            assert len(plan.replays.calls(plan)) == 4
