"""Puts ``serve`` under load and faults for a while, and compares every answer with ``predict``.

    python -m benchmarks.serve_faults --seconds 600 --json faults.json --markdown faults.md

Clients ask over HTTP (JSON, binary tensors, shared memory) and gRPC at a steady rate, while the model is
replaced and unloaded, and others send what is wrong, too large, too slow or not to its end, go away, or cut
their shared memory. With ``--engine ray`` a replica is killed, too. In the end SIGTERM comes while requests
are in progress. Exits with 1 where an answer was wrong or lost, a fault was not answered as it should be,
memory grew, or the queue was not empty.
"""

from __future__ import annotations

import gzip
import http.client
import json
import os
import random
import socket
import sys
import tempfile
import threading
import time
import urllib.request
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from cnn_engine import cli
from cnn_engine.devices.cpu import CpuDevice
from cnn_engine.measure import environment

from . import result_file
from .serve_load import IMAGES, ROWS, SIZE, ByHttp, Load, Truth
from .serve_process import Server

#: Seconds in which a request must have come: --upload-timeout of the server.
UPLOAD_S = 2.0
#: Growth of memory from which on it is said to grow, in MiB an hour, where its interval is above 0.
GROWTH = 20.0
#: Seconds of a run from which on its memory is judged: in a short one, caches still fill.
JUDGED_S = 120.0
#: Requests that are in progress when the server is told to end.
LAST = 8


class Faults:
    """What is done to a server; a method raises AssertionError where it is answered otherwise."""

    def __init__(self, truth: Truth, server: Server, folder: Path, seed: int) -> None:
        self._truth, self._server, self._folder = truth, server, folder
        self._chance = random.Random(seed)
        self._file = 0

    # ---- the model ----

    def replace(self) -> None:
        self._file = 1 - self._file
        part = self._folder / "m.part"
        part.write_bytes(self._truth.files[self._file])
        part.replace(self._folder / "m.onnx")
        assert self._post("/v2/repository/models/m/load", b"{}")[0] == 200
        numbers = self._numbers(2)
        assert np.array_equal(self._answer(numbers), self._truth.rows[self._file][numbers])

    def replace_by_a_wrong_file(self) -> None:
        before = (self._folder / "m.onnx").read_bytes()
        (self._folder / "m.onnx").write_bytes(before[: self._chance.randrange(len(before))])
        try:
            assert self._post("/v2/repository/models/m/load", b"{}")[0] == 400
        finally:
            (self._folder / "m.onnx").write_bytes(before)

    def unload_and_load(self) -> None:
        assert self._post("/v2/repository/models/m/unload", b"{}")[0] == 200
        time.sleep(self._chance.uniform(0, 0.3))
        assert self._post("/v2/repository/models/m/load", b"{}")[0] == 200

    def kill_a_replica(self) -> None:
        children = psutil.Process(self._server.process.pid).children(recursive=True)
        replicas = [child for child in children if "ray::Replica" in " ".join(child.cmdline())]
        assert replicas
        self._chance.choice(replicas).kill()

    # ---- requests ----

    def wrong_shapes(self) -> None:
        for shape in (
            [1, 3, SIZE],
            [1, 3, SIZE, SIZE + 1],
            [1, 3, SIZE, -1],
            [2**31, 3, 1, 1],
            "x",
            [],
        ):
            body = json.dumps({"inputs": [{**self._tensor(), "shape": shape}]}).encode()
            status, answer = self._post("/v2/models/m/infer", body)
            assert status in (400, 413)
            assert answer["error"]

    def wrong_bodies(self) -> None:
        good = json.dumps({"inputs": [self._tensor()]}).encode()
        cut = good[: self._chance.randrange(len(good))]
        noise, packed = self._chance.randbytes(1000), {"Content-Encoding": "gzip"}
        for body, headers in (
            (cut, {}), (noise, {}), (b"", {}), (good, {"Inference-Header-Content-Length": "9999999"}),
            (noise, packed), (gzip.compress(bytes(1 << 24)), packed),
        ):  # fmt: skip
            status, _ = self._post("/v2/models/m/infer", body, headers)
            assert status in (400, 413)

    def huge_headers(self) -> None:
        with self._connection() as connection:
            connection.sendall(b"GET /v2 HTTP/1.1\r\nHost: x\r\n")
            with suppress(OSError):  # closed, as it should be
                for number in range(64):
                    connection.sendall(b"X-%d: " % number + b"y" * 65536 + b"\r\n")
                connection.sendall(b"\r\n")
                answer = connection.recv(12)
                assert not answer or answer[9:10] in (b"2", b"4")

    def not_a_number(self) -> None:
        numbers = np.array([7, 3, 9])
        found = self._answer(numbers)
        assert self._truth.is_right(numbers, found)
        assert np.isnan(found[0]).any()

    # ---- clients ----

    def trickle(self) -> None:
        numbers = self._numbers(1)
        with self._connection() as connection:
            request = self._request(numbers)
            step = len(request) // 20 + 1
            for first in range(0, len(request), step):
                connection.sendall(request[first : first + step])
                time.sleep(UPLOAD_S / 100)
            answer = http.client.HTTPResponse(connection)
            answer.begin()
            status, found = answer.status, json.loads(answer.read())
        assert status in (200, 503), found  # 503: the model is being replaced
        if status == 200:
            assert self._truth.is_right(numbers, _rows(found))

    def too_slow(self) -> None:
        with self._connection() as connection:
            connection.sendall(self._request(self._numbers(1))[:-1])
            assert connection.recv(12)[9:12] in (b"408", b"503")  # 503: the model is unloaded

    def vanish(self) -> None:
        request = self._request(self._numbers(ROWS))
        for part in (request, request[: len(request) // 2], request[:40], b""):
            with self._connection() as connection:
                connection.sendall(part)

    def cut_shared_memory(self) -> None:
        name = f"serve-faults-{os.getpid()}-cut"
        path, size = f"/dev/shm/{name}", 3 * SIZE * SIZE * 4
        self._truth.images[:1].tofile(path)
        shared = {"shared_memory_region": name, "shared_memory_byte_size": size}
        tensor = {**self._tensor(), "parameters": shared}
        del tensor["data"]
        body = json.dumps({"inputs": [tensor]}).encode()
        about = json.dumps({"key": f"/{name}", "byte_size": size}).encode()
        try:
            register = f"/v2/systemsharedmemory/region/{name}/register"
            assert self._post(register, about)[0] == 200
            ended = threading.Event()

            def cut() -> None:
                while not ended.is_set():
                    os.truncate(path, 0)
                    self._truth.images[:1].tofile(path)

            cutting = threading.Thread(target=cut, daemon=True)
            cutting.start()
            for _ in range(20):  # answered or refused; of what, nobody can say
                assert self._post("/v2/models/m/infer", body)[0] in (200, 400, 503)
            ended.set()
            cutting.join()
            os.unlink(path)
            status, found = self._post("/v2/models/m/infer", body)  # the server has it open
            assert status in (200, 503)
            if status == 200:
                assert self._truth.is_right(np.array([0]), _rows(found))
        finally:
            self._post(f"/v2/systemsharedmemory/region/{name}/unregister", b"")
            with suppress(FileNotFoundError):
                os.unlink(path)

    # ---- parts of these ----

    def _numbers(self, rows: int) -> np.ndarray:
        finite = [n for n in range(IMAGES) if np.isfinite(self._truth.images[n]).all()]
        return np.array(self._chance.choices(finite, k=rows))

    def _tensor(self, numbers: np.ndarray | None = None) -> dict[str, Any]:
        images = self._truth.images[[0] if numbers is None else numbers]
        return {
            "name": "x", "datatype": "FP32", "shape": list(images.shape), "data": images.reshape(-1).tolist(),
        }  # fmt: skip

    def _request(self, numbers: np.ndarray) -> bytes:
        body = json.dumps({"inputs": [self._tensor(numbers)]}).encode()
        return (
            b"POST /v2/models/m/infer HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body)
            + body
        )

    def _connection(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self._server.http_port), timeout=60)

    def _post(self, path: str, body: bytes, headers: Any = ()) -> tuple[int, dict[str, Any]]:
        connection = http.client.HTTPConnection("127.0.0.1", self._server.http_port, timeout=60)
        try:
            connection.request("POST", path, body, dict(headers))
            answer = connection.getresponse()
            return answer.status, json.loads(answer.read() or b"{}")
        finally:
            connection.close()

    def _answer(self, numbers: np.ndarray) -> np.ndarray:
        with ByHttp(self._server, 0) as ask:
            return ask(self._truth.images[numbers])


FAULTS = (
    "replace", "replace_by_a_wrong_file", "unload_and_load", "wrong_shapes", "wrong_bodies", "huge_headers",
    "not_a_number", "trickle", "too_slow", "vanish", "cut_shared_memory",
)  # fmt: skip


def _rows(found: dict[str, Any]) -> np.ndarray:
    output = found["outputs"][0]
    return np.array(output["data"], np.float32).reshape(output["shape"])


def slope(seconds: list[float], sizes: list[float], blocks: int = 12) -> tuple[float, float, float]:
    """Returns the slope of a series by least squares over means of blocks, and its 95% interval, per hour.

    The first fifth is left out: caches fill. Means of blocks are nearly independent, where samples are not.
    """
    from scipy.stats import linregress, t

    first = len(seconds) // 5
    parts = np.array_split(np.arange(first, len(seconds)), min(blocks, len(seconds) - first))
    when = [np.mean([seconds[n] for n in part]) / 3600 for part in parts]
    size = [np.mean([sizes[n] for n in part]) for part in parts]
    if len(parts) < 3:
        return float("nan"), float("-inf"), float("inf")
    found = linregress(when, size)
    half = t.ppf(0.975, len(parts) - 2) * found.stderr
    return found.slope, found.slope - half, found.slope + half


def end_under_load(server: Server, faults: Faults, truth: Truth) -> tuple[int, int, str]:
    """Ends a server by SIGTERM while requests are in progress.

    Returns:
        how many of :data:`LAST` were answered rightly, the exit code, and what the server printed.
    """
    numbers = [faults._numbers(ROWS) for _ in range(LAST)]
    connections = [faults._connection() for _ in range(LAST)]
    requests = [faults._request(some) for some in numbers]
    for connection, request in zip(connections, requests, strict=True):
        connection.sendall(request[:-1])  # so that each is known to the server, and not complete
    time.sleep(0.2 * UPLOAD_S)
    ended: list[tuple[int, str]] = []
    ending = threading.Thread(target=lambda: ended.append(server.end()))
    ending.start()
    time.sleep(0.1 * UPLOAD_S)
    right = 0
    for connection, request, some in zip(connections, requests, numbers, strict=True):
        with connection, suppress(OSError, ValueError, http.client.HTTPException):
            connection.sendall(request[-1:])
            answer = http.client.HTTPResponse(connection)
            answer.begin()
            right += answer.status == 200 and truth.is_right(some, _rows(json.loads(answer.read())))
    ending.join()
    return right, *ended[0]


def parser() -> cli.ArgumentParser:
    """Returns the command's parser."""
    p = result_file.parser("serve_faults", __doc__, "json", "markdown")
    p.add_argument("--seconds", type=cli.number(0.5, 86400), default=60.0, help="default: 60")
    p.add_argument("--clients", type=cli.whole_number(1, 256), default=8, help="default: 8")
    p.add_argument(
        "--rate",
        type=cli.number(0.01, 10000),
        default=5.0,
        help="requests per second of each; default: 5",
    )
    p.add_argument(
        "--every", type=cli.number(0, 3600), default=1.0, metavar="SECONDS",
        help="pause between faults; default: 1",
    )  # fmt: skip
    p.add_argument("--fault", action="append", choices=FAULTS, help="some alone; default: all")
    p.add_argument("--engine", choices=("local", "ray"), default="local", help="default: local")
    p.add_argument("--instances", type=cli.whole_number(1, 64), default=2, help="default: 2")
    p.add_argument("--seed", type=cli.whole_number(0, 2**31), default=0, help="default: 0")
    return p


@cli.command
def main(arguments: list[str] | None = None) -> int:
    """Runs the command line; returns its exit code."""
    options = parser().parse_args(arguments)
    found = result_file.ResultFile(
        "serve_faults", options, arguments, environment=environment.describe(CpuDevice()),
        engine=options.engine,
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as top:
        folder = Path(top) / "models"
        folder.mkdir()
        truth = Truth(Path(top), 1)
        (folder / "m.onnx").write_bytes(truth.files[0])
        words = ["--threads=1", f"--instances={options.instances}", "--max-delay=500", "--queue=256",
                 f"--upload-timeout={UPLOAD_S}", "--max-request=1"]  # fmt: skip
        if options.engine != "local":
            words.append(f"--engine={options.engine}")
        server = Server(str(folder), *words)
        try:
            found.document |= _run(options, truth, server, folder)
        finally:
            server.process.kill()
    found.write(markdown)
    cli.show("\n".join(table(found.document)))
    return cli.DONE if found.document["passed"] else cli.CHECK_FAILED


def _run(options: Any, truth: Truth, server: Server, folder: Path) -> dict[str, Any]:
    """Returns what was found of a server, which has ended then."""
    faults = Faults(truth, server, folder, options.seed)
    load = Load(truth, server, options.rate)
    process, seconds, sizes = psutil.Process(server.process.pid), [], []
    load.start(options.clients)
    kinds = list(options.fault or FAULTS)
    if options.engine == "ray" and not options.fault:
        kinds.append("kill_a_replica")
    tried: dict[str, Counter[str]] = {kind: Counter() for kind in kinds}
    reasons: list[str] = []
    chance, begin = random.Random(options.seed), time.monotonic()
    order: list[str] = []
    sampled = begin
    while time.monotonic() - begin < options.seconds:
        order = order or chance.sample(kinds, len(kinds))
        kind = order.pop()
        try:
            getattr(faults, kind)()
            tried[kind]["answered"] += 1
        except Exception as error:
            tried[kind]["not"] += 1
            reasons.append(f"{kind}: {type(error).__name__}: {error}"[:300])
        until = time.monotonic() + options.every
        while True:
            now = time.monotonic()
            if now >= sampled:
                seconds.append(now - begin)
                sizes.append(process.memory_info().rss / 2**20)
                sampled = now + min(1.0, options.seconds / 60)
            if now >= until:
                break
            time.sleep(min(0.2, until - now))
    load.stop()
    with urllib.request.urlopen(f"http://127.0.0.1:{server.http_port}/metrics") as answer:
        text = answer.read().decode()
    waiting = sum(
        float(line.rpartition(" ")[2])
        for line in text.splitlines()
        if line.startswith("cnn_engine_waiting{")
    )
    files = process.num_fds()
    right, code, said = end_under_load(server, faults, truth)
    growth = slope(seconds, sizes)
    outcomes = {way: dict(counts) for way, counts in load.outcomes.items()}
    grows = options.seconds >= JUDGED_S and growth[1] > 0 and growth[0] > GROWTH
    bad = sum(counts["wrong"] + counts["lost"] for counts in load.outcomes.values())
    passed = (
        not bad and not reasons and not waiting and right == LAST and code == 143
        and "Traceback" not in said and not grows
    )  # fmt: skip
    return {
        "seconds": options.seconds, "clients": options.clients, "outcomes": outcomes,
        "faults": {kind: dict(counts) for kind, counts in tried.items()}, "reasons": reasons[:20],
        "faulty": load.faulty, "rss_mib": [round(size, 2) for size in sizes],
        "rss_at_s": [round(second, 1) for second in seconds],
        "rss_mib_per_hour": growth, "waiting_at_the_end": waiting, "open_files": files,
        "answered_after_sigterm": right, "asked_before_sigterm": LAST, "exit_code": code,
        "said": said.splitlines()[-20:], "passed": passed,
    }  # fmt: skip


def table(document: dict[str, Any]) -> list[str]:
    """Returns the lines of what was found."""
    lines = ["| client | right | refused | wrong | lost |", "|---|---|---|---|---|"]
    for way, counts in document["outcomes"].items():
        cells = [str(counts.get(key, 0)) for key in ("right", "refused", "wrong", "lost")]
        lines.append(f"| {way} | {' | '.join(cells)} |")
    lines += ["", "| fault | times | answered as it should be |", "|---|---|---|"]
    for kind, counts in document["faults"].items():
        times = sum(counts.values())
        lines.append(f"| {kind.replace('_', ' ')} | {times} | {counts.get('answered', 0)} |")
    growth, low, high = document["rss_mib_per_hour"]
    sizes = document["rss_mib"]
    lines += [
        "",
        f"- Memory of the server: {sizes[0]:.1f} MiB at first, {sizes[-1]:.1f} MiB at last; "
        f"{growth:+.1f} MiB an hour (95%: {low:+.1f} to {high:+.1f}) after the first fifth, "
        f"judged from {JUDGED_S:g} s on.",
        f"- Waiting at the end: {document['waiting_at_the_end']:g}. Open files: {document['open_files']}.",
        f"- SIGTERM: {document['answered_after_sigterm']} of {document['asked_before_sigterm']} requests in "
        f"progress were answered rightly; exit code {document['exit_code']}.",
        *(f"- {one}" for one in [*document["faulty"], *document["reasons"]]),
    ]  # fmt: skip
    return lines


def markdown(document: dict[str, Any]) -> str:
    """Returns the page of a document."""
    about = document["environment"]
    lines = [
        "# serve under load and faults",
        "",
        f"- Machine: {about['cpu']}, engine {document['engine']}",
    ]
    lines += [*result_file.run_lines(document), "", *table(document), ""]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
