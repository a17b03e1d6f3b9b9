"""predict: calls alike, ``out=``, and arrays that are on a device already, of CuPy and of PyTorch."""

from __future__ import annotations

import time

import numpy as np
import pytest
import tolerances
from test_engine import NETWORK, engine, pixels

from cnn_engine import InputError, UnsupportedError
from cnn_engine.operators import reference


def test_a_call_like_the_last_one_is_checked_all_the_same(rng):
    images = pixels(rng, 3)
    with engine() as e:
        first = e.predict(images)
        again = e.predict(images)
        np.testing.assert_array_equal(first, again)
        assert first is not again
        with pytest.raises(InputError, match="C-contiguous"):
            e.predict(np.asfortranarray(images))
        with pytest.raises(InputError, match="expected float32, found int8"):
            e.predict(images.astype(np.int8))
        other = pixels(rng, 3)
        wanted = reference.forward(NETWORK, e.weights, other)
        tolerances.assert_close(e.predict(other), wanted, tolerances.PROBABILITY)
    with pytest.raises(InputError, match="closed"):
        e.predict(images)


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
def test_an_out_that_does_not_fit_is_refused(rng, make, message):
    with engine() as e, pytest.raises(InputError, match=message):
        e.predict(pixels(rng, 5), out=make())


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
