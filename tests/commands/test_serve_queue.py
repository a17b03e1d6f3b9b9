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
from cnn_engine.serve.replicas import Settings
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
    """Submits a request to run here where it may, and waits for its answer."""
    ended = threading.Event()
    made, _ = job(1.0, **options)
    made.done = lambda _: ended.set()
    batcher.submit(made, here=True)
    assert ended.wait(60)
    while batcher.running:
        time.sleep(0.001)


@pytest.mark.parametrize(
    ("delay_s", "short_s", "wanted"),
    [(0.0, 60.0, True), (0.01, 60.0, False), (0.0, -1.0, False)],
    ids=["usual", "told to wait for others", "a long pass"],
)
def test_a_request_alone_runs_on_the_thread_that_brings_it(monkeypatch, delay_s, short_s, wanted):
    monkeypatch.setattr(batching, "SHORT_S", short_s)
    run = Noted()
    batcher = Batcher([run, run], 4, delay_s, 6, Statistics())
    for rows in (1, 1, 2, 2):
        ask(batcher, rows=rows)
    batcher.close()
    # The first of its shapes is queued: nobody knows how long it takes.
    found = [thread == threading.get_ident() for thread in run.threads]
    assert found == [False, wanted, False, wanted]


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


@pytest.mark.parametrize("clients", [1, 2])
def test_the_event_loop_is_kept_by_a_client_alone_and_by_no_two(monkeypatch, clients):
    """A pass of two clients ends only once the event loop goes on meanwhile."""
    monkeypatch.setattr(batching, "SHORT_S", 60.0)
    monkeypatch.setattr(http, "ALONE", 3)
    here, loop, passes = threading.get_ident(), asyncio.new_event_loop(), []

    def run(inputs):
        on_loop = threading.get_ident() == here
        passes.append(on_loop)
        if not on_loop:
            went_on = threading.Event()
            loop.call_soon_threadsafe(went_on.set)
            assert went_on.wait(60)
        return inputs

    class Model:
        labels = {}  # noqa: RUF012
        batcher = Batcher([run], 4, 0.0, 6, Statistics())

        def submit(self, _, done, here):
            made, _ = job(1.0)
            made.done = done
            self.batcher.submit(made, here)

    async def serve():
        served, model = http.Served(None, None), Model()
        for number in range(12):
            served.arrived(number % clients)
            await http.infer(served, model, protocol.Request({}))
            while model.batcher.running:
                await asyncio.sleep(0)

    loop.run_until_complete(serve())
    loop.close()
    Model.batcher.close()
    assert passes == [False] * 3 + [clients == 1] * 9


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
