"""The queue of a served model: who goes first, who shares a pass, and what runs at once."""

from __future__ import annotations

import asyncio
import threading
import time

import numpy as np
import pytest

import cnn_engine

pytest.importorskip("starlette")
pytest.importorskip("orjson")

from cnn_engine.serve import batching, http, protocol
from cnn_engine.serve.batching import Batcher, Job
from cnn_engine.serve.errors import Refused
from cnn_engine.serve.model import Settings
from cnn_engine.serve.repository import Repository
from cnn_engine.serve.statistics import Statistics


class Slow:
    """A network that waits until it is told to go on, and notes what it ran."""

    def __init__(self):
        self.go, self.passes = threading.Event(), []

    def __call__(self, inputs):
        self.go.wait(60)
        self.passes.append([float(v) for v in inputs["x"][:, 0]])
        if -1 in inputs["x"]:
            raise cnn_engine.InputError("x: expected at least 0, found -1")
        return {"y": inputs["x"] * 2}


def job(value, rows=1, key="k", **options):
    answer = []
    settings = {"priority": 0, "timeout_s": 0.0, **options}
    made = Job(
        {"x": np.full((rows, 1), value, np.float32)}, rows, key, done=answer.append, **settings
    )
    return made, answer


@pytest.fixture
def queue():
    slow, statistics = Slow(), Statistics()
    batcher = Batcher([slow], 4, 0.0, 6, statistics)
    yield slow, batcher, statistics
    slow.go.set()
    batcher.close()


def _all(batcher, slow, jobs):
    """Queues jobs behind one that holds the only thread; returns what each was answered."""
    first, _ = job(100.0, key=None)
    batcher.submit(first)
    while batcher.waiting:
        time.sleep(0.001)
    for one, _ in jobs:
        batcher.submit(one)
    slow.go.set()
    batcher.close()
    return [answer for _, answer in jobs]


def test_the_most_urgent_goes_first_and_passes_are_filled(queue):
    slow, batcher, _ = queue
    jobs = [
        job(0.0),
        job(1.0, priority=2),
        job(2.0, key="other"),
        job(3.0, rows=2),
        job(4.0, priority=1),
    ]
    found = _all(batcher, slow, jobs)
    assert slow.passes == [[100.0], [4.0, 1.0, 0.0], [2.0], [3.0, 3.0]]
    for (one, _), (answer,) in zip(jobs, found, strict=True):
        np.testing.assert_array_equal(answer["y"], one.inputs["x"] * 2)


def test_a_wrong_request_does_not_spoil_those_beside_it(queue):
    slow, batcher, statistics = queue
    found = _all(batcher, slow, [job(0.0), job(-1.0), job(2.0)])
    assert [float(found[0][0]["y"][0, 0]), float(found[2][0]["y"][0, 0])] == [0.0, 4.0]
    assert isinstance(found[1][0], cnn_engine.InputError)
    assert (statistics.success.count, statistics.fail.count) == (3, 1)


def test_sizes_that_clients_choose_take_no_memory_without_end():
    statistics = Statistics()
    for rows in range(1, 20_000):
        statistics.ran([], rows, 0.0, 0.0, 0.0, 0.0)
    found = statistics.described("m", "1")["batch_stats"]
    assert len(found) == 4096
    assert sum(row["compute_infer"]["count"] for row in found) == statistics.executions == 19_999


def test_late_requests_and_those_past_the_queue_are_refused(queue):
    slow, batcher, statistics = queue
    first, _ = job(100.0, key=None)
    batcher.submit(first)
    while batcher.waiting:
        time.sleep(0.001)
    late, answer = job(1.0, timeout_s=1e-9)
    batcher.submit(late)
    for _ in range(5):
        batcher.submit(job(2.0)[0])
    with pytest.raises(Refused, match="6 requests wait") as refused:
        batcher.submit(job(3.0)[0])
    assert refused.value.status == 503
    slow.go.set()
    batcher.close()
    assert answer[0].status == 504
    assert statistics.rejected == 1
    with pytest.raises(Refused, match="unloaded"):
        batcher.submit(job(3.0)[0])


# ---- on the thread that brings a request ----


class Noted:
    """A network that notes the threads that ran it."""

    def __init__(self):
        self.threads = []

    def __call__(self, inputs):
        self.threads.append(threading.get_ident())
        return {"y": inputs["x"]}


def ask(batcher, **options):
    """Submits a request and waits for it; returns whether it ran on this thread."""
    ended = threading.Event()
    made, _ = job(1.0, **options)
    made.done = lambda _: ended.set()
    here = batcher.submit(made)
    assert ended.is_set() or not here
    assert ended.wait(60)
    while batcher.running:
        time.sleep(0.001)
    return here


@pytest.mark.parametrize(
    ("delay_s", "short_s", "wanted"),
    [(0.0, 60.0, True), (0.01, 60.0, False), (0.0, -1.0, False)],
    ids=["usual", "told to wait for others", "a long pass"],
)
def test_a_request_alone_runs_on_the_thread_that_brings_it(monkeypatch, delay_s, short_s, wanted):
    monkeypatch.setattr(batching, "SHORT_S", short_s)
    run = Noted()
    batcher = Batcher([run, run], 4, delay_s, 6, Statistics())
    found = [ask(batcher), ask(batcher), ask(batcher, rows=2), ask(batcher, rows=2)]
    batcher.close()
    # The first of its shapes is handed over: nobody knows how long it takes.
    assert found == [False, wanted, False, wanted]
    assert [thread == threading.get_ident() for thread in run.threads] == found


def test_requests_are_handed_over_after_one_had_to_wait(monkeypatch):
    monkeypatch.setattr(batching, "SHORT_S", 60.0)
    batcher = Batcher([Noted()], 4, 0.0, 6, Statistics())
    assert [ask(batcher), ask(batcher)] == [False, True]
    batcher.delayed()
    assert [ask(batcher) for _ in range(batching.HANDED_OVER + 1)] == [
        *[False] * batching.HANDED_OVER, True,
    ]  # fmt: skip
    batcher.close()


def test_a_queue_is_closed_once_a_pass_on_another_thread_has_ended(monkeypatch):
    monkeypatch.setattr(batching, "SHORT_S", 60.0)
    slow, log, begun = Slow(), [], threading.Event()

    def run(inputs):
        begun.set()
        found = slow(inputs)
        log.append("pass")
        return found

    batcher = Batcher([run], 4, 0.0, 6, Statistics())
    slow.go.set()
    ask(batcher)
    slow.go.clear()
    begun.clear()
    log.clear()
    bringing = threading.Thread(target=ask, args=(batcher,))
    bringing.start()
    assert begun.wait(60)
    closing = threading.Thread(target=lambda: (batcher.close(), log.append("closed")))
    closing.start()
    closing.join(0.2)  # long enough for one that does not wait
    slow.go.set()
    for thread in (bringing, closing):
        thread.join(60)
    assert log == ["pass", "closed"]


@pytest.mark.parametrize(
    ("others", "wanted"), [([], 0), (["a"], 0), (["b"], 1), (["b", "a"], 1), ([None], 1)]
)
def test_another_connections_request_that_waited_is_noticed(others, wanted):
    """``others`` are the connections whose requests come in the next turn of the event loop."""
    delays = []

    class Model:
        def __init__(self):
            self.labels = {}

        def submit(self, _, done):
            done({})
            return True

        def delayed(self):
            delays.append(1)

    async def serve():
        served = http.Served(None, None)
        served.arrived("a")
        _, answers = await http.infer(served, Model(), protocol.Request({}))
        assert answers == []
        for other in others:
            asyncio.get_running_loop().call_soon(served.arrived, other)
        for _ in range(4):
            await asyncio.sleep(0)

    asyncio.run(serve())
    assert len(delays) == wanted


def test_a_request_for_a_model_that_is_replaced_meanwhile_is_answered():
    models = Repository(["cifar10"], Settings(threads=1))
    models.load("cifar10")
    before = models.get("cifar10", "")
    models.load("cifar10")
    images = np.random.default_rng(0).standard_normal((2, 3, 32, 32), np.float32)
    served, request = http.Served(models, None), protocol.Request({"images": images})
    model, (found,) = asyncio.run(http.infer(served, before, request))
    assert model is models.get("cifar10", "")
    with cnn_engine.Engine("cifar10", device="cpu", threads=1) as engine:
        np.testing.assert_array_equal(found.array, engine.predict(images))
    models.unload("cifar10")
    with pytest.raises(Refused, match="unloaded"):
        asyncio.run(http.infer(served, before, request))
