"""predict: calls alike, ``out=``, and arrays that are on a device already, of CuPy and of PyTorch."""

from __future__ import annotations

import math
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import graphs
import numpy as np
import onnx
import onnx_models
import pytest
import tolerances
from test_engine import CELLS, NETWORK, ODD_NETWORKS, VARIANTS, engine, pixels

from cnn_engine import (
    Conv2d,
    Engine,
    InputError,
    Linear,
    MaxPool2d,
    Network,
    Relu,
    Softmax,
    Tanh,
    UnsupportedError,
)
from cnn_engine.devices.cpu import CpuDevice
from cnn_engine.engine import plan_cache
from cnn_engine.engine.predictor import Predictor
from cnn_engine.graph import reference
from cnn_engine.plan import stream


def test_a_call_like_the_last_one_is_checked_all_the_same(rng):
    images = pixels(rng, 3)
    with engine() as e:
        first = e.predict(images)
        again = e.predict(images)
        np.testing.assert_array_equal(first, again)
        assert first is not again
        with pytest.raises(InputError, match="C-contiguous"):
            e.predict(np.asfortranarray(images))
        with pytest.raises(InputError, match="expected whole numbers from 0 to 255, found -"):
            e.predict(np.full_like(images, 200).astype(np.int8))
        other = pixels(rng, 3)
        wanted = reference.forward(NETWORK, e.weights, other)
        tolerances.assert_close(e.predict(other), wanted, tolerances.PROBABILITY)
    with pytest.raises(InputError, match="closed"):
        e.predict(images)


@pytest.mark.parametrize("batch", [2, "n"])
def test_a_call_like_one_before_goes_straight_to_its_plan(monkeypatch, rng, batch):
    """Also of a network for one batch alone, and by ``run``; nothing else goes there."""
    weight = rng.standard_normal((5, 3)).astype(np.float32)
    proto = onnx_models.model(
        [onnx.helper.make_node("MatMul", ["x", "w"], ["y"])],
        [onnx_models.tensor("x", [batch, 5])], [onnx_models.tensor("y", [batch, 3])], {"w": weight},
    )  # fmt: skip
    x = rng.standard_normal((2, 5)).astype(np.float32)
    ways = {
        "predict": lambda some: network.predict(some),
        "run": lambda some: network.run({"x": some})["y"],
    }
    for name in ways:
        with Engine(proto, device="cpu") as network, monkeypatch.context() as patched:
            ways[name](x)
            patched.setattr(
                Predictor, f"_{name}", None
            )  # what a call like none before goes through
            again = x[::-1].copy()
            np.testing.assert_allclose(ways[name](again), again @ weight, rtol=1e-5, atol=1e-6)
            assert ways[name](again) is not ways[name](again)
            patched.undo()
            for other in (x.astype(np.float64), x.tolist()):
                np.testing.assert_allclose(ways[name](other), x @ weight, rtol=1e-5, atol=1e-6)
            for wrong in (x[:, :4].copy(), np.asfortranarray(x)):
                with pytest.raises(InputError):
                    ways[name](wrong)
        with pytest.raises(InputError, match="closed"):
            ways[name](x)


def test_out_is_filled_and_returned(rng):
    images = pixels(rng, 5)
    with engine() as e:
        wanted = e.predict(images)
        out = np.full((5, 10), -1, np.float32)
        assert e.predict(images, out=out) is out
        np.testing.assert_array_equal(out, wanted)
        out[...] = -1
        assert e.predict(images, 2, out=out) is out
        np.testing.assert_array_equal(out, wanted)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: np.empty((4, 10), np.float32), r"out: expected shape \[5, 10\], found \[4, 10\]"),
        (lambda: np.empty((5, 10), np.float64), "out: expected float32, found float64"),
        (lambda: np.empty((5, 20), np.float32)[:, ::2], "out: expected a C-contiguous array"),
        (lambda: np.frombuffer(bytes(200), np.float32).reshape(5, 10), "out: expected a writable array"),
        (lambda: [0.0], "out: expected a NumPy array"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("calls", [0, 1], ids=["at first", "after a call alike"])
def test_an_out_that_does_not_fit_is_refused(rng, make, message, calls):
    images = pixels(rng, 5)
    with engine() as e:
        for _ in range(calls):
            e.predict(images)
        with pytest.raises(InputError, match=message):
            e.predict(images, out=make())


def test_an_out_inside_the_images_is_refused(rng):
    images = rng.standard_normal((5, 3, 32, 32)).astype(np.float32)
    with engine() as e, pytest.raises(InputError, match="found an overlap"):
        e.predict(images, out=images.reshape(-1)[:50].reshape(5, 10))


@pytest.mark.gpu
@pytest.mark.parametrize("library", ["cupy", "torch"])
@pytest.mark.parametrize("variant", ["fused", "tiled", "if"])
class TestArraysOnADevice:
    def test_of_one_kind_after_the_other(self, rng, library, variant):
        module = pytest.importorskip(library)
        put = module.asarray if library == "cupy" else lambda a: module.from_numpy(a).cuda()
        with engine(device="cuda", variant=variant) as e:
            for count in (1, 3, 1, 20):
                images = pixels(rng, count)
                wanted = reference.forward(NETWORK, e.weights, images)
                for where in (None, put(np.full((count, 10), -1, np.float32))):
                    for _ in range(3):
                        found = e.predict(put(images), out=where)
                        assert where is None or found is where
                        assert type(found) is type(put(images))
                        host = found.get() if library == "cupy" else found.cpu().numpy()
                        tolerances.assert_close(host, wanted, tolerances.PROBABILITY)

    def test_on_two_streams_of_the_caller_at_once(self, rng, library, variant):
        module = pytest.importorskip(library)
        if library == "cupy":
            streams = [module.cuda.Stream(non_blocking=True) for _ in range(2)]
            enter, put = (lambda stream: stream), module.asarray
        else:
            streams = [module.cuda.Stream() for _ in range(2)]
            enter, put = module.cuda.stream, lambda a: module.from_numpy(a).cuda()
        many = [pixels(rng, 33) for _ in range(2)]
        with engine(device="cuda", variant=variant) as e:
            inputs = [put(images) for images in many]
            module.cuda.Device().synchronize() if library == "cupy" else module.cuda.synchronize()
            found = [[], []]
            for _ in range(20):
                for index, stream in enumerate(streams):
                    with enter(stream):
                        found[index].append(e.predict(inputs[index]))
            for stream in streams:
                stream.synchronize()
            for images, outputs in zip(many, found, strict=True):
                wanted = reference.forward(NETWORK, e.weights, images)
                for output in outputs:
                    host = output.get() if library == "cupy" else output.cpu().numpy()
                    tolerances.assert_close(host, wanted, tolerances.PROBABILITY)

    def test_bad_outs_are_refused(self, rng, library, variant):
        module = pytest.importorskip(library)
        put = module.asarray if library == "cupy" else lambda a: module.from_numpy(a).cuda()
        images = put(pixels(rng, 2))
        with engine(device="cuda", variant=variant) as e:
            e.predict(images, out=put(np.zeros((2, 10), np.float32)))
            for bad, message in (
                (np.zeros((2, 10), np.float32), "out: expected memory of cuda:0"),
                (put(np.zeros((3, 10), np.float32)), "out: expected shape"),
                (put(np.zeros((2, 10), np.int32)), "out: expected float32"),
                (put(np.zeros((2, 20), np.float32))[:, ::2], "out: expected a C-contiguous"),
            ):
                with pytest.raises(InputError, match=message):
                    e.predict(images, out=bad)


@pytest.mark.gpu
@pytest.mark.parametrize("variant", ["fused", "if"])
def test_a_call_on_the_device_can_be_captured(rng, variant):
    """Nothing is allocated and nothing waited for: either would end the capture with an error."""
    import cupy

    images = cupy.asarray(pixels(rng, 1))
    out = cupy.full((1, 10), -1, np.float32)
    stream = cupy.cuda.Stream(non_blocking=True)
    with engine(device="cuda", variant=variant) as e:
        cupy.cuda.Device().synchronize()
        with stream:
            e.predict(images, out=out)
            stream.synchronize()
            out[...] = -1
            stream.begin_capture()
            e.predict(images, out=out)
            graph = stream.end_capture()
            graph.launch(stream)
            stream.synchronize()
        wanted = reference.forward(NETWORK, e.weights, images.get())
        tolerances.assert_close(out.get(), wanted, tolerances.PROBABILITY)


@pytest.mark.alone
@pytest.mark.gpu
def test_a_call_on_the_device_does_not_wait(rng):
    import cupy

    images = cupy.asarray(pixels(rng, 1))
    out = cupy.full((1, 10), -1, np.float32)
    with engine(device="cuda") as e:
        e.predict(images, out=out)
        stream = cupy.cuda.get_current_stream()
        stream.synchronize()
        e.device.kernels.delay(100_000_000, stream.ptr)
        start = time.perf_counter()
        e.predict(images, out=out)
        assert time.perf_counter() - start < 0.05
        assert not stream.done
        stream.synchronize()


@pytest.mark.gpu
class TestArraysOnTheDevice:
    def test_stay_there(self, rng):
        import cupy

        images = pixels(rng, 9)
        with engine(device="cuda") as e:
            found = e.predict(cupy.asarray(images), batch=4)
            assert isinstance(found, cupy.ndarray)
            wanted = reference.forward(NETWORK, e.weights, images)
            tolerances.assert_close(cupy.asnumpy(found), wanted, tolerances.PROBABILITY)
            assert e.predict(cupy.empty((0, 3, 32, 32), cupy.uint8)).shape == (0, 10)

    def test_wait_for_the_callers_stream_and_make_it_wait(self, rng):
        import cupy

        from cnn_engine import _cuda

        images = pixels(rng, 3)
        stream = cupy.cuda.Stream(non_blocking=True)
        with engine(device="cuda") as e, stream:
            late = cupy.zeros(images.shape, cupy.uint8)
            source = cupy.asarray(images)
            for _ in range(2):  # the second time with a plan that is ready
                late[...] = 0
                _cuda.delay(20_000_000, stream.ptr)
                late[...] = source  # ends long after predict has returned
                found = e.predict(late)
                copy = found.copy()
            wanted = reference.forward(NETWORK, e.weights, images)
            tolerances.assert_close(cupy.asnumpy(copy), wanted, tolerances.PROBABILITY)

    def test_are_refused_by_other_modes_and_devices(self, rng):
        import cupy

        images = cupy.asarray(pixels(rng, 1))
        with (
            engine(device="cpu") as e,
            pytest.raises(UnsupportedError, match="found an array on cuda:0"),
        ):
            e.predict(images)
        with engine(device="cuda", data_mode="transfer") as e, pytest.raises(UnsupportedError):
            e.predict(images)


#: A network of every kind of layer that is small enough for thousands of passes.
SMALL = Network(
    "small", (2, 9, 9), (Conv2d("conv1", 4, 3, padding=1), Relu("relu1"), MaxPool2d("pool1", 3, stride=2),
                         Tanh("tanh1"), Linear("fc", 5), Softmax("softmax")),
)  # fmt: skip


def call_in_threads(call, threads: int = 8) -> None:
    """Runs ``call(index)`` in so many threads at once; raises what any of them raised."""
    barrier = threading.Barrier(threads)

    def begin(index):
        barrier.wait()
        call(index)

    with ThreadPoolExecutor(threads) as executor:
        for future in [executor.submit(begin, index) for index in range(threads)]:
            future.result()


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(("device", "data_mode", "variant", "reduction"), CELLS)
@pytest.mark.parametrize(
    ("network", "calls"), [(SMALL, 200), (NETWORK, 2)], ids=["small", "cifar10"]
)
def test_threads_share_an_engine(
    rng, network, calls, device, data_mode, variant, reduction, threads
):
    """Every thread's batches are its own, of odd sizes, and what comes out is what one thread gets."""
    if network is SMALL and variant == "fused" and device == "cuda":
        pytest.skip("fused on CUDA takes the networks that are compiled in")
    if device == "cuda" and data_mode != "transfer" and threads > 1:
        pytest.skip("no layer on the CPU: threads have nothing to do")
    options = {"device": device, "data_mode": data_mode, "reduction": reduction, "threads": threads}
    images = pixels(rng, 63, network.input_shape)
    parts = [slice(7 * index, 7 * index + (7, 1, 5, 13)[index % 4]) for index in range(8)]
    with engine(network, variant=variant, **options) as e:
        whole = e.predict(images, 7)
        wanted = [(e.predict(images[part]), e.predict(images[part], 3)) for part in parts]
        for part, rows in zip(parts, wanted, strict=True):
            # On CUDA, blocked splits a sum between blocks where a batch has too few outputs.
            if (device, variant) != ("cuda", "blocked"):
                np.testing.assert_array_equal(rows[0], whole[part])
                np.testing.assert_array_equal(rows[1], whole[part])

        def call(index):
            mine = images[parts[index]]
            out = np.empty((len(mine), network.classes), np.float32)
            for turn in range(calls):
                small = turn % 10 == 9
                found = e.predict(mine, 3 if small else None, out if turn % 2 else None)
                np.testing.assert_array_equal(found, wanted[index][small])

        call_in_threads(call)


def test_an_engine_closed_by_another_thread_is_refused_and_nothing_breaks(rng):
    images = pixels(rng, 7, SMALL.input_shape)
    for variant, reduction in VARIANTS:
        for _ in range(10):
            e = engine(SMALL, variant=variant, reduction=reduction)
            wanted = e.predict(images)
            refused = []

            def call(index, e=e, wanted=wanted, refused=refused):
                if index == 0:
                    time.sleep(0.005)
                    e.close()

                def forever():
                    while True:
                        np.testing.assert_array_equal(e.predict(images), wanted)

                with pytest.raises(InputError, match="expected an open engine, found a closed one"):
                    forever()
                refused.append(index)

            call_in_threads(call, 4)
            assert len(refused) == 4


#: Much memory between layers and little arithmetic.
WIDE = Network(
    "wide", (8, 64, 64), (Relu("relu"), MaxPool2d("pool", 2), Linear("fc", 2), Softmax("softmax"))
)  # fmt: skip


def test_memory_kept_for_many_sizes_of_batch_is_bounded(monkeypatch, rng):
    images = pixels(rng, 60, WIDE.input_shape)
    with engine(WIDE, variant="pad") as e:
        e.predict(images)
        one = e._plans.pool.nbytes
        assert one > 60 * 4 * 8 * 64 * 64  # what is measured below is real
        monkeypatch.setattr(e._plans.pool, "kept_bytes", 3 * one)
        for _ in range(2):
            for count in (*range(1, 61), *range(60, 0, -1)):
                e.predict(images[:count])
                assert e._plans.pool.nbytes <= 3 * one
        wanted = reference.forward(WIDE, e.weights, images)
        tolerances.assert_close(e.predict(images), wanted, tolerances.PROBABILITY)


def resident() -> int:
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_resident_memory_stays_bounded_over_many_sizes_of_batch(rng):
    """What the process holds, not what is counted: all sizes together would hold about 1.5 GB."""
    images = pixels(rng, 120, WIDE.input_shape)
    with engine(WIDE, variant="pad") as e:
        e.predict(images)
        before = resident()
        for count in range(1, 121):
            e.predict(images[:count])
        assert resident() - before < plan_cache.KEPT_BYTES + (64 << 20)
        assert e._plans.pool.nbytes > plan_cache.KEPT_BYTES // 2


def test_resident_memory_stays_bounded_over_sizes_in_any_order(rng):
    """The memory of a plan that is dropped goes back, whatever was taken before and after it."""
    graph = graphs.resnet((1,), (1, 3, 64, 64), width=16, bottleneck=False)
    images, kept = np.zeros((80, 3, 64, 64), np.float32), 32 << 20
    with Engine(graph, device="cpu", threads=1) as e:
        e.run({"images": images[:1]})
        e._plans.pool.kept_bytes = kept
        before, most = resident(), 0
        for count in rng.integers(1, 81, 150):
            e.run({"images": images[:count]})
            last = list(e._plans.pool._shelves.values())[-1].nbytes
            assert e._plans.pool.nbytes <= max(kept, last)
            most = max(most, resident() - before)
        assert most < kept + (24 << 20)


def test_a_larger_batch_takes_the_memory_that_idle_plans_hold(monkeypatch, rng):
    images = pixels(rng, 40)
    with engine(variant="pad") as e:
        e.predict(images[:20])
        one = e._plans.pool.nbytes
        monkeypatch.setattr(
            CpuDevice, "free_memory", lambda self: 2 * one + one // 2 - e._plans.pool.nbytes
        )
        e.predict(images)
        assert e._plans.pool.nbytes == 2 * one


@pytest.mark.parametrize(("variant", "reduction"), VARIANTS)
@pytest.mark.parametrize("network", [NETWORK, *ODD_NETWORKS], ids=lambda n: n.name)
def test_nothing_is_written_but_the_rows_of_out(rng, network, variant, reduction):
    """Not the images, which a first ReLU could be run over, and nothing beside the rows."""
    images = rng.standard_normal((5, *network.input_shape)).astype(np.float32)
    before = images.copy()
    try:
        e = engine(network, variant=variant, reduction=reduction)
    except UnsupportedError:
        assert variant == "fused"
        return
    with e:
        around = np.full((15, network.classes), -7, np.float32)
        out = around[5:10]
        for batch in (None, None, 2):
            out[...] = -7
            assert e.predict(images, batch, out) is out
            np.testing.assert_array_equal(images, before)
            np.testing.assert_array_equal(around[:5], -7)
            np.testing.assert_array_equal(around[10:], -7)
            np.testing.assert_array_equal(out, e.predict(before))


def test_an_out_inside_the_images_is_refused_by_a_call_like_the_last_one(rng):
    images = rng.standard_normal((5, 3, 32, 32)).astype(np.float32)
    with engine() as e:
        out = np.empty((5, 10), np.float32)
        for _ in range(2):
            e.predict(images, out=out)
        with pytest.raises(InputError, match="found an overlap"):
            e.predict(images, out=images.reshape(-1)[:50].reshape(5, 10))


@pytest.mark.parametrize("variant", ["if", "pad"])
def test_a_batch_is_refused_from_the_first_byte_that_is_not_free(monkeypatch, rng, variant):
    images = pixels(rng, 6)
    with engine(variant=variant) as e:
        e.predict(images)
        needed = e._plans.pool.nbytes
    assert needed >= 6 * 4 * max(math.prod(info.output_shape) for info in NETWORK.infos)
    monkeypatch.setattr(CpuDevice, "free_memory", lambda self: needed)
    with engine(variant=variant) as e:
        e.predict(images)
    monkeypatch.setattr(CpuDevice, "free_memory", lambda self: needed - 1)
    with engine(variant=variant) as e, pytest.raises(InputError, match="batch: 6 images need"):
        e.predict(images)


@pytest.mark.parametrize("short", ["host", "device"])
def test_chunks_are_refused_before_anything_is_taken(monkeypatch, short):
    """Page-locked staging counts as memory of the host."""

    class Taken(Exception):
        pass

    class Device:
        kind, name, free = "cuda", "cuda:0", 1 << 60

        def lane(self):
            raise Taken

        def free_memory(self):
            return self.free

    device = Device()
    needed = 3 * 8 * (3 * 32 * 32 + 4 * 10)  # three chunks of pixels and of rows
    host = needed
    monkeypatch.setattr(CpuDevice, "free_memory", lambda self: host)
    with engine() as e:
        program = e._plans.open().on(device)
        with pytest.raises(Taken):
            stream.build_stream(program, 100, True, 8, (False, False))
        if short == "host":
            host -= 1
        else:
            device.free = needed - 1
        where = "cpu" if short == "host" else "cuda:0"
        with pytest.raises(InputError, match=f"batch: 3 chunks of 8 images need .* GiB on {where}"):
            stream.build_stream(program, 100, True, 8, (False, False))
        if short == "host":
            with pytest.raises(Taken):
                stream.build_stream(program, 100, True, 8, (True, True))


@pytest.mark.gpu
def test_a_second_device_serves_host_arrays_whichever_is_current(rng):
    import cupy

    if cupy.cuda.runtime.getDeviceCount() < 2:
        pytest.skip("needs two GPUs")
    images = pixels(rng, 300)
    for variant in ("fused", "tiled"):
        for mode in ("resident", "stream"):
            with (
                cupy.cuda.Device(0),
                engine(device="cuda:1", variant=variant, data_mode=mode) as e,
            ):
                wanted = reference.forward(NETWORK, e.weights, images)
                for _ in range(2):
                    found = e.predict(images)
                    tolerances.assert_close(found, wanted, tolerances.PROBABILITY)
                assert e.profile(images, iterations=1).check.passed
                assert cupy.cuda.runtime.getDevice() == 0


@pytest.mark.gpu
def test_a_captured_call_outlives_many_other_sizes_of_batch(rng):
    import cupy

    images = cupy.asarray(pixels(rng, 7))
    out = cupy.full((7, 10), -1, np.float32)
    stream_ = cupy.cuda.Stream(non_blocking=True)
    with engine(device="cuda", variant="tiled") as e, stream_:
        e._plans.pool.kept_bytes = 1 << 20
        e.predict(images, out=out)
        stream_.synchronize()
        stream_.begin_capture()
        e.predict(images, out=out)
        graph = stream_.end_capture()
        for count in range(8, 80):
            e.predict(cupy.asarray(pixels(rng, count)))
        out[...] = -1
        graph.launch(stream_)
        stream_.synchronize()
        wanted = reference.forward(NETWORK, e.weights, images.get())
        tolerances.assert_close(out.get(), wanted, tolerances.PROBABILITY)
