"""``serve --engine ray``: a replica or a machine that is lost costs no answer, and is replaced."""

from __future__ import annotations

import os
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import psutil
import pytest

import cnn_engine
from cnn_engine.errors import InputError

client = pytest.importorskip("tritonclient.http")
pytest.importorskip("starlette")

from benchmarks.serve_process import Server, write_network  # noqa: E402
from cnn_engine.serve import ray_replicas  # noqa: E402
from cnn_engine.serve.errors import Refused  # noqa: E402
from cnn_engine.serve.replicas import Settings  # noqa: E402

#: Seconds in which something must have happened on a busy machine.
LIMIT_S = 150


def wait_for(what: Callable[[], bool]) -> None:
    end = time.monotonic() + LIMIT_S
    while not what():
        assert time.monotonic() < end
        time.sleep(0.05)


def replicas(processes: psutil.Process) -> list[psutil.Process]:
    found = []
    for child in processes.children(recursive=True):
        with suppress(psutil.Error):
            if "ray::Replica" in " ".join(child.cmdline()):
                found.append(child)
    return found


@contextmanager
def in_the_midst(server: Server, found: list[psutil.Process]) -> Iterator[None]:
    """Suspends replicas, and goes on once each has a pass."""
    for process in found:
        process.suspend()
    wait_for(lambda: running(server) == len(found))
    yield
    for process in found:
        with suppress(psutil.NoSuchProcess):
            process.resume()


def read_until(server: Server, text: str) -> None:
    """Reads what the server says up to a line that has ``text``."""
    for line in server.process.stdout:
        server.said.append(line)
        if text in line:
            return
    raise AssertionError(server.said)


def running(server: Server) -> int:
    with urllib.request.urlopen(f"http://127.0.0.1:{server.http_port}/metrics") as answer:
        lines = answer.read().decode().splitlines()
    (line,) = [line for line in lines if line.startswith("cnn_engine_running{")]
    return int(float(line.rpartition(" ")[2]))


class Clients:
    """Clients that ask all the time, and note what is not one of the ``wanted`` answers."""

    def __init__(self, port: int, images: np.ndarray, wanted: list[np.ndarray]) -> None:
        self._port, self._images, self._wanted = port, images, wanted
        self._stop = threading.Event()
        self.wrong: list[object] = []
        self.answers = 0
        self._threads = [threading.Thread(target=self._ask) for _ in range(3)]
        for thread in self._threads:
            thread.start()

    def ask(self, server: object = None) -> np.ndarray:
        server = server or client.InferenceServerClient(
            f"127.0.0.1:{self._port}", network_timeout=LIMIT_S
        )
        tensor = client.InferInput("x", self._images.shape, "FP32")
        tensor.set_data_from_numpy(self._images)
        return server.infer("m", [tensor]).as_numpy("y")

    def _ask(self) -> None:
        server = client.InferenceServerClient(f"127.0.0.1:{self._port}", network_timeout=LIMIT_S)
        while not self._stop.is_set():
            try:
                found = self.ask(server)
            except Exception as error:
                self.wrong.append(error)
                return
            self.answers += 1
            if not any(np.array_equal(found, rows) for rows in self._wanted):
                self.wrong.append(found)

    def more(self) -> None:
        """Waits for some answers."""
        goal = self.answers + 20
        wait_for(lambda: self.answers >= goal or bool(self.wrong))
        assert not self.wrong

    def stop(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()


@pytest.mark.timeout(600)
def test_a_replica_and_a_machine_are_lost_and_replaced(tmp_path, monkeypatch):
    cluster_utils = pytest.importorskip("ray.cluster_utils")
    images = np.random.default_rng(0).standard_normal((2, 3, 12, 12), np.float32)
    wanted = []
    for seed in (1, 0):
        write_network(tmp_path / "m.onnx", seed)
        with cnn_engine.Engine(tmp_path / "m.onnx", device="cpu", threads=1) as engine:
            wanted.append(engine.predict(images))
    root = str(Path(cnn_engine.__file__).parents[1])
    monkeypatch.setenv(
        "PYTHONPATH", os.pathsep.join([root, os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    )
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    ours = psutil.Process()
    cluster = cluster_utils.Cluster(
        initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False}
    )
    try:
        nodes = [cluster.add_node(num_cpus=1) for _ in range(2)]
        server = Server(
            str(tmp_path), "--engine=ray", f"--address={cluster.address}", "--threads=1",
            "--max-batch=1",
        )  # fmt: skip
        wait_for(lambda: len(replicas(ours)) == 2)  # one per CPU
        clients = Clients(server.http_port, images, wanted)
        try:
            clients.more()
            before = replicas(ours)
            with in_the_midst(server, before):
                before[0].kill()
            read_until(server, ": lost: ")
            clients.more()
            wait_for(lambda: len(set(replicas(ours)) - {before[0]}) == 2)
            read_until(server, ": back")
            before = replicas(ours)
            with in_the_midst(server, before):
                for node in nodes:
                    if node.all_processes["raylet"][0].process.pid == before[0].ppid():
                        cluster.remove_node(node, allow_graceful=False)
                before[0].kill()  # it has lost its machine, and would go on
            read_until(server, ": lost: ")
            clients.more()
            wait_for(lambda: len(set(replicas(ours)) - {before[0]}) == 2)  # both on one machine
            write_network(tmp_path / "m.onnx", 1)
            with client.InferenceServerClient(
                f"127.0.0.1:{server.http_port}", network_timeout=LIMIT_S
            ) as asking:
                asking.load_model("m")
            np.testing.assert_array_equal(clients.ask(), wanted[0])
        finally:
            clients.stop()
        assert not clients.wrong
        code, said = server.end()
        assert code == -15, said  # ended by the signal
        assert "Traceback" not in "".join(server.said) + said
    finally:
        cluster.shutdown()


class TaskError(Exception):
    """What a task raised."""

    def __init__(self, cause: Exception) -> None:
        super().__init__(str(cause))
        self.cause = cause


class FakeRay:
    """Stands in for Ray: an actor answers, or raises, what ``script`` has next for its number."""

    def __init__(self, script: dict[int, list[object]]) -> None:
        base = type("RayError", (Exception,), {})
        self.exceptions = SimpleNamespace(
            RayError=base,
            ActorDiedError=type("ActorDiedError", (base,), {}),
            RayTaskError=type("RayTaskError", (TaskError, base), {}),
        )
        self.script, self.asked = script, []
        self.there = threading.Event()  # what is lost has been started again
        self._made = 0

    def remote(self, _: type) -> FakeRay:
        return self

    def options(self, **_: object) -> SimpleNamespace:
        return SimpleNamespace(remote=self._actor)

    def _actor(self, *_: object) -> SimpleNamespace:
        number, self._made = self._made, self._made + 1
        about = SimpleNamespace(form=None)
        return SimpleNamespace(
            about=SimpleNamespace(remote=lambda: about),
            run=SimpleNamespace(remote=lambda inputs: ("run", number, inputs)),
        )

    def wait(
        self, calls: list[object], num_returns: int, timeout: float
    ) -> tuple[list[object], list[object]]:
        return calls[:num_returns], calls[num_returns:]

    @property
    def waits(self) -> bool:
        """Whether a replica is lost and not there again."""
        return bool(self.asked) and not self.there.is_set()

    def get(self, call: object) -> object:
        if not isinstance(call, tuple):
            if self.waits:
                raise self.exceptions.RayError("still starting")
            return call
        self.asked.append(call[1])
        found = self.script[call[1]].pop(0)
        if isinstance(found, Exception) and not isinstance(found, cnn_engine.CnnEngineError):
            raise found
        return found

    def kill(self, _: object) -> None:
        pass


def made(monkeypatch: pytest.MonkeyPatch, script: dict[int, list[object]]) -> tuple:
    ray = FakeRay(script)
    monkeypatch.setattr(ray_replicas, "connect", lambda address: ray)
    found = ray_replicas.RayReplicas("cifar10", Settings(instances=len(script), threads=1))
    return ray, found


def test_a_pass_whose_replica_is_lost_runs_on_another(monkeypatch):
    ray, found = made(monkeypatch, {0: [], 1: [{"y": 1}, {"y": 2}]})
    ray.script[0] += [ray.exceptions.RayError("the machine is gone"), {"y": 3}]
    assert found.runs[0]({}) == {"y": 1}
    assert ray.asked == [0, 1]
    ray.there.set()
    wait_for(lambda: not found._lost)  # it is there again
    assert found.runs[0]({}) == {"y": 3}
    found.close()


def test_a_pass_that_ends_replicas_is_refused_after_three(monkeypatch):
    ray, found = made(monkeypatch, {n: [] for n in range(5)})
    for script in ray.script.values():
        script.append(ray.exceptions.RayError("the actor died"))
    with pytest.raises(Refused, match="the actor died") as refused:
        found.runs[1]({})
    assert refused.value.status == 503
    assert ray.asked == [1, 2, 3]
    found.close()


def test_errors_of_the_engine_are_raised_and_not_tried_again(monkeypatch):
    ray, found = made(monkeypatch, {0: [InputError("x: wrong")], 1: []})
    with pytest.raises(InputError, match="x: wrong"):
        found.runs[0]({})
    ray.script[1].append(ray.exceptions.RayTaskError(ValueError("a fault")))
    with pytest.raises(ValueError, match="a fault"):
        found.runs[1]({})
    assert ray.asked == [0, 1]
    found.close()


def test_options_that_do_not_go_together_are_one_line(tmp_path, capsys):
    from cnn_engine.serve.command import main

    for words in (["--address=x:1"], ["--engine=ray", "--device=cuda:1"], ["--engine=mpi"]):
        try:
            code = main(["cifar10", "--http-port=0", "--grpc-port=-1", *words])
        except SystemExit as ended:
            code = ended.code
        assert code == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith("error: --")
