"""Two GPUs at once: engines on both, in threads and graphs; arrays of the other GPU are refused by name."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from graphs import chain_images as images
from graphs import convolution_chain as network

from cnn_engine import Engine
from cnn_engine.errors import InputError, UnsupportedError

pytestmark = pytest.mark.gpu
GPUS = (0, 1)


@pytest.fixture
def cupy():
    """CuPy, where there are two GPUs; the first one is current before a test and after it."""
    library = pytest.importorskip("cupy")
    if library.cuda.runtime.getDeviceCount() < 2:
        pytest.skip("needs two GPUs")
    library.cuda.Device(0).use()
    yield library
    assert library.cuda.runtime.getDevice() == 0


def on(cupy, gpu: int, array: np.ndarray):
    with cupy.cuda.Device(gpu):
        there = cupy.asarray(array)
        cupy.cuda.Device(gpu).synchronize()
        return there


def host(array) -> np.ndarray:
    with array.device:
        return array.get()


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_the_second_gpu_gives_the_bits_of_the_first(cupy, dtype):
    """By predict and run, of arrays of the host and of the GPU, and of whichever is current."""
    graph, x = network(), images(5)
    found = []
    for gpu in GPUS:
        with Engine(graph, device=f"cuda:{gpu}", dtype=dtype) as engine:
            (name,) = (value.name for value in engine.outputs)
            wanted = engine.predict(x)
            np.testing.assert_array_equal(engine.run({"images": x})[name], wanted)
            there, rows = on(cupy, gpu, x), []
            for current in GPUS:
                with cupy.cuda.Device(current):
                    made = engine.predict(there), engine.run({"images": there})[name]
                assert [array.device.id for array in made] == [gpu, gpu]
                rows += map(host, made)
            for other in rows[1:]:
                np.testing.assert_array_equal(other, rows[0])
            np.testing.assert_allclose(rows[0], wanted, rtol=1e-4, atol=1e-5)
            found.append((wanted, rows[0]))
    for first, second in zip(*found, strict=True):
        np.testing.assert_array_equal(first, second)


@pytest.mark.parametrize("gpu", GPUS)
def test_arrays_of_the_other_gpu_are_refused_by_name(cupy, gpu):
    other = 1 - gpu
    with Engine(network(), device=f"cuda:{gpu}") as engine:
        (name,) = (value.name for value in engine.outputs)
        here, there = (on(cupy, n, images(2)) for n in (gpu, other))
        rows = on(cupy, other, np.full((2, 10), -1, np.float32))
        wanted = host(engine.predict(here))
        for current in GPUS:
            with cupy.cuda.Device(current):
                for call in (engine.predict, lambda x: engine.run({"images": x})):
                    with pytest.raises(
                        UnsupportedError,
                        match=f"images: .*device cuda:{gpu} .*found an array on cuda:{other}",
                    ):
                        call(there)
                for call in (
                    lambda: engine.predict(here, out=rows),
                    lambda: engine.run({"images": here}, out={name: rows}),
                ):
                    with pytest.raises(
                        InputError,
                        match=f"out: expected memory of cuda:{gpu}.* found .*cuda:{other}",
                    ):
                        call()
                np.testing.assert_array_equal(host(engine.predict(here)), wanted)
        assert (host(rows) == -1).all()


@pytest.mark.parametrize("batch", [1, 33])
def test_calls_are_captured_on_both_gpus_and_replayed_in_turns(cupy, batch):
    graph, inputs, outs, wanted, streams, captured = network(), [], [], [], [], []
    engines = [Engine(graph, device=f"cuda:{gpu}", dtype="float16") for gpu in GPUS]
    for gpu, engine in zip(GPUS, engines, strict=True):
        wanted.append([engine.predict(images(batch, seed)) for seed in (1, 2)])
        inputs.append(on(cupy, gpu, images(batch, 1)))
        outs.append(on(cupy, gpu, np.full((batch, 10), -1, np.float32)))
        with cupy.cuda.Device(gpu):
            stream = cupy.cuda.Stream(non_blocking=True)
            with stream:
                stream.begin_capture()
                engine.predict(inputs[gpu], out=outs[gpu])
                captured.append(stream.end_capture())
            streams.append(stream)
        assert (host(outs[gpu]) == -1).all()
    for seed in (1, 2, 1, 2):
        for gpu in GPUS:
            with cupy.cuda.Device(gpu):
                inputs[gpu].set(images(batch, seed))
                cupy.cuda.Device(gpu).synchronize()
                captured[gpu].launch(streams[gpu])
        for gpu in GPUS:
            with cupy.cuda.Device(gpu):
                streams[gpu].synchronize()
            np.testing.assert_array_equal(host(outs[gpu]), wanted[gpu][seed - 1])
    for engine in engines:
        engine.close()


def test_engines_of_both_gpus_are_called_from_threads_at_once(cupy):
    """Two threads per GPU, one with arrays of the host, one with arrays of the GPU; other sizes each time."""
    graph, sizes = network(), (1, 7, 33, 64)
    engines = [Engine(graph, device=f"cuda:{gpu}") for gpu in GPUS]
    wanted = {
        (count, False): host(engines[0].predict(on(cupy, 0, images(count, count))))
        for count in sizes
    }
    for count in sizes:
        wanted[count, True] = engines[0].predict(images(count, count))

    def work(gpu: int, of_host: bool) -> int:
        cupy.cuda.Device(gpu).use()
        for number in range(60):
            count = sizes[(number + gpu) % len(sizes)]
            x = images(count, count)
            rows = engines[gpu].predict(x if of_host else cupy.asarray(x))
            found = rows if of_host else host(rows)
            assert of_host or rows.device.id == gpu
            np.testing.assert_array_equal(found, wanted[count, of_host])
        return number + 1

    with ThreadPoolExecutor(4) as pool:
        jobs = [pool.submit(work, gpu, of_host) for gpu in GPUS for of_host in (True, False)]
        assert [job.result(timeout=120) for job in jobs] == [60] * 4
    for engine in engines:
        engine.close()
