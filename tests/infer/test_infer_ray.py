"""``infer --engine ray``: the same files as the local engine's, also when an actor or a machine is lost."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import infer_inputs
import pytest

from cnn_engine import infer
from cnn_engine.errors import InputError
from cnn_engine.infer import ray_pool
from cnn_engine.infer.supervise import Supervisor

pytest.importorskip("ray")

#: Slow enough to be disturbed.
WORDS = ["--variant", "if", "--batch", "10", "--shard-size", "31kB", "--no-ceilings", "--quiet",
         "--device", "cpu"]  # fmt: skip
COUNT = 1200

#: A cluster of a head without CPUs and two machines with one each, of which the busier one is lost.
LOSING = """
import sys, threading, time
from contextlib import suppress
from pathlib import Path
import psutil
from ray.cluster_utils import Cluster
from cnn_engine import infer

if __name__ == "__main__":
    inputs, out, report, *words = sys.argv[1:]
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    nodes = [cluster.add_node(num_cpus=1) for _ in range(2)]
    cluster.wait_for_nodes()

    def actors():
        for process in psutil.Process().children(recursive=True):
            with suppress(psutil.Error):
                if "ray::Actor" in " ".join(process.cmdline()):
                    yield process

    def lose():
        while len(found := list(actors())) < 2:
            time.sleep(0.01)
        while len(list(Path(out).glob("*.parquet"))) < 2:
            time.sleep(0.01)
        for actor in found:  # so that neither is done before its machine is lost
            actor.suspend()
        busiest = max(found, key=lambda p: p.cpu_times().user)
        for node in nodes:
            if node.all_processes["raylet"][0].process.pid == busiest.ppid():
                cluster.remove_node(node, allow_graceful=False)
        busiest.kill()
        for actor in found:
            if actor != busiest:
                actor.resume()

    threading.Thread(target=lose, daemon=True).start()
    ours = ["--engine", "ray", "--address", cluster.address, "--workers", "2", "--json", report]
    code = infer.main([inputs, "--output", out, *ours, *words])
    cluster.shutdown()
    sys.exit(code)
"""


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ray") / "in"
    infer_inputs.make("npy", folder, infer_inputs.pixels(COUNT))
    return folder


@pytest.fixture(scope="module")
def wanted(inputs, tmp_path_factory):
    out = tmp_path_factory.mktemp("local") / "out"
    assert infer.main([str(inputs), "--output", str(out), "--workers", "2", *WORDS]) == 0
    return infer_inputs.contents(out)


def environment() -> dict[str, str]:
    paths = [str(Path(infer.__file__).resolve().parents[2]), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)),
            "RAY_USAGE_STATS_ENABLED": "0"}  # fmt: skip


#: The command, of whose two actors one is killed once two shards are done.
KILLING = """
import sys, time
from contextlib import suppress
import psutil
from cnn_engine import infer
from cnn_engine.infer.supervise import Supervisor

done = Supervisor._on_done

def actors():
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            if "ray::Actor" in " ".join(process.cmdline()):
                yield process

def killing(self, worker, event):
    done(self, worker, event)
    if len(self.done) == 2:
        while len(found := list(actors())) < 2:  # the other one may still start
            time.sleep(0.05)
        print("niceness", *(process.nice() for process in (psutil.Process(), *found)), flush=True)
        found[0].kill()

Supervisor._on_done = killing
sys.exit(infer.main())
"""


@pytest.mark.timeout(240)
def test_an_actor_is_killed_and_the_files_are_the_local_engines(inputs, wanted, tmp_path):
    out, report = tmp_path / "out", tmp_path / "report.json"
    # Ray's sockets are below it, and their paths are short.
    instances = tempfile.TemporaryDirectory(prefix="ray", ignore_cleanup_errors=True)
    with instances:
        process = subprocess.run(
            [sys.executable, "-c", KILLING, str(inputs), "--output", str(out), *WORDS,
             "--engine", "ray", "--workers", "2", "--json", str(report)],
            env={**environment(), "RAY_TMPDIR": instances.name}, capture_output=True, text=True,
        )  # fmt: skip
        started = list(Path(instances.name).glob("ray/session_2*"))
    assert process.returncode == 0, process.stderr
    assert len(started) == 1, started
    (said,) = (line for line in process.stdout.splitlines() if line.startswith("niceness "))
    own, *actors = said.split()[1:]
    assert actors == [own] * 2  # as urgent as the command
    assert infer_inputs.contents(out) == wanted
    document = json.loads(report.read_text())
    assert document["engine"] == "ray"
    assert document["restarts"] == 1


@pytest.mark.timeout(240)
def test_a_machine_is_lost_and_the_others_do_its_shards(inputs, wanted, tmp_path):
    script = tmp_path / "losing.py"
    script.write_text(LOSING)
    out, report = tmp_path / "out", tmp_path / "report.json"
    done = subprocess.run(
        [sys.executable, str(script), str(inputs), str(out), str(report), *WORDS],
        env={**environment(), "RAY_worker_niceness": "0"}, capture_output=True, text=True, timeout=200,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert infer_inputs.contents(out) == wanted
    document = json.loads(report.read_text())
    assert document["folder"]["complete"]
    assert document["retries"] >= 1


def test_actors_that_cannot_be_made_are_one_line(monkeypatch):
    """Ray raises what it will where its own processes are gone."""

    class Gone:
        def cluster_resources(self):
            return {"CPU": 2.0}

        def remote(self, _):
            return self

        def options(self, **_):
            return SimpleNamespace(remote=self.refuse)

        def refuse(self, _):
            raise ConnectionError("the raylet is gone")

        def shutdown(self):
            pass

    monkeypatch.setattr(ray_pool, "connect", lambda address, workers: Gone())
    pool = ray_pool.RayPool({"threads": None}, 2, False, None)
    with pytest.raises(InputError, match="3 in a row ended: the raylet is gone"):
        Supervisor(pool, 2).first_hello()
    pool.close()


def test_a_pool_is_closed_once_its_calls_have_ended(monkeypatch):
    """A call on Ray that comes later would start another instance of it."""
    called, ended, log = threading.Event(), threading.Event(), []

    class Fake:
        def __getattr__(self, _):  # of Ray, of an actor and of its methods
            return self

        def cluster_resources(self):
            return {"CPU": 2.0}

        def remote(self, *_):
            return self

        def options(self, **_):
            return self

        def get(self, _):
            called.set()
            ended.wait(10)
            time.sleep(0.1)
            log.append("a call has ended")
            raise RuntimeError("the actor died")

        def kill(self, _):
            log.append("killed")
            ended.set()

        def shutdown(self):
            log.append("shut down")

    monkeypatch.setattr(ray_pool, "connect", lambda address, workers: Fake())
    pool = ray_pool.RayPool({"threads": None}, 1, False, None)
    pool.start(0)
    assert called.wait(10)
    pool.close()
    pool.close()
    assert log == ["killed", "a call has ended", "shut down"]


def test_a_cluster_that_is_not_there_is_one_line(inputs, tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "cnn_engine.infer", str(inputs), "--output", str(tmp_path / "out"),
         "--engine", "ray", "--address", "nonsense"],
        env=environment(), capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith(
        "error: --address: expected a Ray cluster, found: "
    )
