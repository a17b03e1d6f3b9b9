"""``cnn-engine serve``, asked by tritonclient over HTTP and gRPC, and by clients that do wrong."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import cnn_engine

http = pytest.importorskip("tritonclient.http")
grpc = pytest.importorskip("tritonclient.grpc")
pytest.importorskip("uvicorn")
from prometheus_client.parser import text_string_to_metric_families  # noqa: E402
from tritonclient.utils import InferenceServerException  # noqa: E402

IMAGE = (3, 9, 7)


def model(path, seed=0):
    """Writes a network of one convolution and a mean, with names of classes."""
    weights = np.random.default_rng(seed).standard_normal((5, 3, 3, 3), np.float32)
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["c"], pads=[1, 1, 1, 1]),
        helper.make_node("GlobalAveragePool", ["c"], ["m"]),
        helper.make_node("Flatten", ["m"], ["y"]),
    ]
    graph = helper.make_graph(
        nodes,
        "small",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", *IMAGE])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", 5])],
        [numpy_helper.from_array(weights, "w")],
    )
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    helper.set_model_props(
        made,
        {
            "cnn_engine.classes": json.dumps(list("abcde")),
            "cnn_engine.preprocess": "mean=0.5/0.5/0.5,std=0.25/0.25/0.25",
        },
    )
    temporary = f"{path}.part"
    onnx.save(made, temporary)
    os.replace(temporary, path)


class Running:
    """A server in a process of its own."""

    def __init__(self, folder, *options):
        environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
        self.process = subprocess.Popen(
            [
                sys.executable, "-m", "cnn_engine.serve", str(folder), "cifar10", "--http-port=0",
                "--grpc-port=0", "--threads=1", *options,
            ],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment,
        )  # fmt: skip
        self.said = []
        for line in self.process.stdout:
            self.said.append(line)
            if line.startswith("ready:"):
                break
        ports = [line.rstrip().rpartition(":")[2] for line in self.said if "://" in line]
        assert len(ports) == 2, self.said
        self.port, self.rpc_port = map(int, ports)
        self.address = f"http://127.0.0.1:{self.port}"

    def http(self):
        return http.InferenceServerClient(f"127.0.0.1:{self.port}", concurrency=4)

    def grpc(self):
        return grpc.InferenceServerClient(f"127.0.0.1:{self.rpc_port}")

    def post(self, path, body, headers=()):
        """Returns status and JSON of a request."""
        request = urllib.request.Request(self.address + path, body, dict(headers), method="POST")
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return answer.status, json.loads(answer.read() or b"{}")
        except urllib.error.HTTPError as error:
            return error.code, json.loads(error.read())

    def end(self, number=signal.SIGTERM):
        self.process.send_signal(number)
        said, _ = self.process.communicate(timeout=60)
        return self.process.returncode, said


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    model(folder / "small.onnx")
    (folder / "versions" / "2").mkdir(parents=True)
    (folder / "versions" / "10").mkdir()
    model(folder / "versions" / "2" / "model.onnx", seed=1)
    model(folder / "versions" / "10" / "model.onnx", seed=2)
    return folder


@pytest.fixture(scope="module")
def server(folder):
    running = Running(folder, "--max-delay=20000", "--instances=2", "--max-request=1")
    yield running
    code, said = running.end()
    assert code == 143, said
    assert "Traceback" not in said


@pytest.fixture(scope="module")
def engine(folder):
    with cnn_engine.Engine(folder / "small.onnx", device="cpu", threads=1) as engine:
        yield engine


def images(seed=0, count=1):
    return np.random.default_rng(seed).standard_normal((count, *IMAGE), np.float32)


def asked(library, array, datatype="FP32", **options):
    tensor = library.InferInput("x", array.shape, datatype)
    tensor.set_data_from_numpy(array, **options)
    return [tensor]


def test_both_clients_describe_the_server_and_its_models(server):
    for client, options in ((server.http(), {}), (server.grpc(), {"as_json": True})):
        assert client.is_server_live()
        assert client.is_server_ready()
        assert client.get_server_metadata(**options)["name"] == "cnn_engine"
        assert client.is_model_ready("small")
        found = client.get_model_metadata("versions", **options)
        assert found["versions"] == ["10"]
        assert [int(d) for d in found["inputs"][0]["shape"]] == [-1, *IMAGE]
        config = client.get_model_config("small", **options)
        assert config.get("config", config)["max_batch_size"] == 32
        index = client.get_model_repository_index(**options)
        index = index["models"] if isinstance(index, dict) else index
        assert {row["name"]: row["state"] for row in index} == dict.fromkeys(
            ["small", "versions", "cifar10"], "READY"
        )
        assert not client.is_model_ready("none")
        assert not client.is_model_ready("versions", "2")


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("way", ["json", "binary", "gzip", "grpc"])
def test_answers_are_the_engines_bits(server, engine, way, count):
    given = images(count, count)
    wanted = engine.predict(given)
    if way == "grpc":
        found = server.grpc().infer("small", asked(grpc, given))
    else:
        binary = way != "json"
        packed = {"request_compression_algorithm": "gzip"} if way == "gzip" else {}
        outputs = [http.InferRequestedOutput("y", binary_data=binary)]
        client = server.http()
        found = client.infer(
            "small",
            asked(http, given, binary_data=binary),
            outputs=outputs,
            request_id="7",
            **packed,
        )
        assert found.get_response()["id"] == "7"
    np.testing.assert_array_equal(found.as_numpy("y"), wanted)


def test_pixels_are_normalised_as_the_models_file_says(server, engine):
    pixels = np.random.default_rng(3).integers(0, 256, (2, *IMAGE), np.uint8)
    found = server.http().infer("small", asked(http, pixels, "UINT8")).as_numpy("y")
    wanted = engine.predict(
        ((pixels.astype(np.float32) / np.float32(255)) - 0.5).astype(np.float32) / np.float32(0.25)
    )
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5)
    named = (
        server.http()
        .infer(
            "small",
            asked(http, pixels, "UINT8"),
            outputs=[http.InferRequestedOutput("y", class_count=2)],
        )
        .as_numpy("y")
    )
    best = np.argsort(-wanted, axis=1)[:, :2]
    assert [[text.decode().split(":")[1:] for text in row] for row in named] == [
        [[str(n), "abcde"[n]] for n in row] for row in best
    ]
    scores = server.grpc().infer("cifar10", [_cifar(grpc)]).as_numpy("probabilities")
    assert scores.shape == (1, 10)


def _cifar(library):
    tensor = library.InferInput("images", (1, 3, 32, 32), "UINT8")
    tensor.set_data_from_numpy(np.full((1, 3, 32, 32), 99, np.uint8))
    return tensor


def test_requests_that_wait_share_passes_and_each_has_its_own_answer(server, engine):
    client = server.grpc()
    before = client.get_inference_statistics("small", as_json=True)["model_stats"][0]
    given = [images(seed, 1 + seed % 3) for seed in range(60)]
    with ThreadPoolExecutor(12) as pool:
        found = list(pool.map(lambda x: client.infer("small", asked(grpc, x)).as_numpy("y"), given))
    for x, y in zip(given, found, strict=True):
        np.testing.assert_array_equal(y, engine.predict(x))
    after = client.get_inference_statistics("small", as_json=True)["model_stats"][0]
    ran = int(after["inference_count"]) - int(before.get("inference_count", 0))
    passes = int(after["execution_count"]) - int(before.get("execution_count", 0))
    assert ran == sum(map(len, given))
    assert passes < len(given)


def test_a_stream_of_requests_is_answered_in_order(server, engine):
    found = []
    arrived = threading.Semaphore(0)
    client = server.grpc()
    client.start_stream(lambda result, error: (found.append((result, error)), arrived.release()))
    for name, seed in (("small", 1), ("none", 2), ("small", 3)):
        client.async_stream_infer(name, asked(grpc, images(seed)), request_id=str(seed))
    assert all(arrived.acquire(timeout=60) for _ in range(3))
    client.stop_stream()
    np.testing.assert_array_equal(found[0][0].as_numpy("y"), engine.predict(images(1)))
    assert "none" in str(found[1][1])
    np.testing.assert_array_equal(found[2][0].as_numpy("y"), engine.predict(images(3)))


class Shared:
    """A shared memory object."""

    def __init__(self, name, size):
        self.key, self.path = f"/{name}", f"/dev/shm/{name}"
        with open(self.path, "wb") as file:
            file.truncate(size)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        os.unlink(self.path)


@pytest.mark.parametrize("library", [http, grpc], ids=["http", "grpc"])
def test_tensors_in_shared_memory(server, engine, library):
    client = server.http() if library is http else server.grpc()
    given = images(5, 2)
    with Shared(f"cnn-engine-test-{os.getpid()}-{library.__name__}", 8192) as shared:
        client.register_system_shared_memory("r", shared.key, 8192)
        with open(shared.path, "r+b") as file:
            file.seek(64)
            file.write(given.tobytes())
        tensor = library.InferInput("x", given.shape, "FP32")
        tensor.set_shared_memory("r", given.nbytes, 64)
        output = library.InferRequestedOutput("y")
        output.set_shared_memory("r", 40, 4096)
        client.infer("small", [tensor], outputs=[output])
        found = np.fromfile(shared.path, np.float32, 10, offset=4096).reshape(2, 5)
        np.testing.assert_array_equal(found, engine.predict(given))
        os.truncate(shared.path, 100)  # a client may cut its region at any time, and write it anew
        with pytest.raises(InferenceServerException, match="it was cut"):
            client.infer("small", [tensor], outputs=[output])
        with open(shared.path, "r+b") as file:
            file.truncate(8192)
            file.seek(64)
            file.write((given + 1).tobytes())
        client.infer("small", [tensor], outputs=[output])
        found = np.fromfile(shared.path, np.float32, 10, offset=4096).reshape(2, 5)
        np.testing.assert_array_equal(found, engine.predict(given + 1))
        os.truncate(shared.path, 100)
        for key, size in (("/../etc/passwd", 1), ("/none", 1), (shared.key, 101)):
            with pytest.raises(InferenceServerException, match="expected"):
                client.register_system_shared_memory("other", key, size)
        client.unregister_system_shared_memory("r")
        with pytest.raises(InferenceServerException, match="not registered"):
            client.infer("small", [tensor], outputs=[output])


TENSOR = {"name": "x", "datatype": "FP32", "shape": [1, *IMAGE], "data": [0.0] * 189}


@pytest.mark.parametrize(
    ("status", "body"),
    [
        (400, b""), (400, b"{"), (400, b"[]"), (400, b"{}"), (400, {"inputs": 3}), (400, {"inputs": [3]}),
        (400, {"inputs": [TENSOR, TENSOR]}), (400, {"inputs": [{**TENSOR, "name": "z"}]}),
        (400, {"inputs": [{**TENSOR, "shape": [1, -3, 9, 7]}]}),
        (400, {"inputs": [{**TENSOR, "shape": [2**31, 3, 9, 7]}]}),
        (400, {"inputs": [{**TENSOR, "shape": [1, 3, 9]}]}), (400, {"inputs": [{**TENSOR, "shape": "x"}]}),
        (400, {"inputs": [{**TENSOR, "datatype": "FP64"}]}), (400, {"inputs": [{**TENSOR, "datatype": {}}]}),
        (400, {"inputs": [{**TENSOR, "data": ["a"] * 189}]}), (400, {"inputs": [{**TENSOR, "data": None}]}),
        (400, {"inputs": [{**TENSOR, "data": [[1], [2, 3]]}]}),
        (400, {"inputs": [{**TENSOR, "parameters": {"binary_data_size": 756}}]}),
        (400, {"inputs": [{**TENSOR, "parameters": {"shared_memory_region": "none"}}]}),
        (400, {"inputs": [TENSOR], "outputs": [{"name": "none"}]}),
        (400, {"inputs": [TENSOR], "outputs": [{"name": "y"}, {"name": "y"}]}),
        (400, {"inputs": [TENSOR], "parameters": {"timeout": "soon"}}),
        (400, {"inputs": [TENSOR], "parameters": {"sequence_id": 4}}),
        (400, {"inputs": [TENSOR], "outputs": [{"name": "y", "parameters": {"classification": -1}}]}),
        (413, b" " * (1 << 20) + b"{}"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_refused_in_one_line(server, status, body):
    sent = body if isinstance(body, bytes) else json.dumps(body).encode()
    found, answer = server.post("/v2/models/small/infer", sent)
    assert found == status, answer
    assert answer["error"]
    assert "\n" not in answer["error"]
    assert (
        server.post("/v2/models/small/infer", json.dumps({"inputs": [TENSOR]}).encode())[0] == 200
    )


@pytest.mark.parametrize(
    ("path", "headers", "status"),
    [
        ("/v2/models/none/infer", {}, 404), ("/v2/none", {}, 404),
        ("/v2/models/small/infer", {"Content-Encoding": "br"}, 400), ("/v2/models/small/infer", {}, 413),
    ],
)  # fmt: skip
def test_no_answer_is_lost_where_the_body_was_not_wanted(server, path, headers, status):
    """A connection that is closed on bytes that were not read takes the answer with it, now and then."""
    body = b" " * ((1 << 20) + (2 if status == 413 else 0))
    with ThreadPoolExecutor(6) as pool:
        asked = [pool.submit(server.post, path, body, headers) for _ in range(120)]
    assert [answer.result()[0] for answer in asked] == [status] * 120


def test_a_body_that_is_announced_as_too_large_is_refused_before_it_comes(server):
    connection = HTTPConnection("127.0.0.1", server.port, timeout=60)
    connection.putrequest("POST", "/v2/models/small/infer")
    connection.putheader("Content-Length", str((1 << 20) + 2))
    connection.endheaders()
    answer = connection.getresponse()
    assert answer.status == 413
    assert "\n" not in json.loads(answer.read())["error"]
    connection.close()


def test_wrong_headers_paths_and_packed_bodies(server):
    path, good = "/v2/models/small/infer", json.dumps({"inputs": [TENSOR]}).encode()
    for status, headers in (
        (400, {"Inference-Header-Content-Length": "-1"}),
        (400, {"Inference-Header-Content-Length": "99999"}),
        (400, {"Content-Encoding": "gzip"}),
        (400, {"Content-Encoding": "br"}),
    ):
        assert server.post(path, good, headers)[0] == status
    bomb = __import__("gzip").compress(bytes(1 << 24))
    assert server.post(path, bomb, {"Content-Encoding": "gzip"})[0] == 413
    for wrong in (
        "/v2/models/none/infer",
        "/v2/models/versions/versions/2/infer",
        "/nothing",
        "/v2/models/../x",
    ):
        status, _ = server.post(wrong, good)
        assert status in (404, 405), (wrong, status)
    assert server.post("/v2/repository/models/..%2Fsmall/load", b"{}")[0] == 404
    upload = json.dumps({"parameters": {"file:1/model.onnx": "AAAA"}}).encode()
    assert server.post("/v2/repository/models/small/load", upload)[0] == 400


def test_a_client_that_sends_slowly_is_refused_and_others_are_not_kept(folder):
    running = Running(
        folder, "--upload-timeout=1"
    )  # too short where a request's body must come whole
    head = b"POST /v2/models/small/infer HTTP/1.1\r\nHost: x\r\nContent-Length: 500\r\n\r\n"
    for part in (b"", b"{"):
        with socket.create_connection(("127.0.0.1", running.port)) as slow:
            slow.sendall(head + part)
            assert running.http().is_server_live()
            slow.settimeout(60)
            assert b" 408 " in slow.recv(100)
    assert running.end()[0] == 143


def test_metrics_are_what_prometheus_reads(server):
    with urllib.request.urlopen(f"{server.address}/metrics") as answer:
        text = answer.read().decode()
    found = {family.name: family for family in text_string_to_metric_families(text)}
    stats = server.http().get_inference_statistics("small")["model_stats"][0]
    passes = {s.labels["model"]: s.value for s in found["cnn_engine_passes"].samples}
    assert passes["small"] == stats["execution_count"]
    counts = [
        s.value for s in found["cnn_engine_request_seconds"].samples if s.labels["model"] == "small"
    ]
    assert stats["inference_stats"]["success"]["count"] in counts


def test_models_are_replaced_and_unloaded_under_load(folder, tmp_path):
    model(tmp_path / "m.onnx", seed=0)
    running = Running(tmp_path)
    client, given = running.grpc(), images(1)
    wanted = []
    for seed in (0, 9):
        model(tmp_path / "other", seed=seed)
        with cnn_engine.Engine(
            (tmp_path / "other").read_bytes(), device="cpu", threads=1
        ) as engine:
            wanted.append(engine.predict(given))
    stop, wrong, answered = threading.Event(), [], [0]

    def ask():
        own = running.grpc()
        while not stop.is_set():
            found = own.infer("m", asked(grpc, given)).as_numpy("y")
            answered[0] += 1
            if not any(np.array_equal(found, y) for y in wanted):
                wrong.append(found)

    with ThreadPoolExecutor(3) as pool:
        jobs = [pool.submit(ask) for _ in range(3)]
        for seed in (9, 0, 9):
            model(tmp_path / "m.onnx", seed=seed)
            client.load_model("m")
        (tmp_path / "m.onnx").write_bytes(b"no model")
        with pytest.raises(InferenceServerException, match=r"m\.onnx"):
            client.load_model("m")
        stop.set()
        for job in jobs:
            job.result()  # nothing was refused, and nothing lost
    assert not wrong
    assert answered[0] > 3
    np.testing.assert_array_equal(client.infer("m", asked(grpc, given)).as_numpy("y"), wanted[1])
    client.unload_model("m")
    assert not client.is_model_ready("m")
    with pytest.raises(InferenceServerException, match="unloaded"):
        client.infer("m", asked(grpc, given))
    code, said = running.end(signal.SIGINT)
    assert code == 130, said
    assert "Traceback" not in said


def test_command_line_errors_are_one_line(tmp_path, capsys):
    from cnn_engine.serve.command import main

    (tmp_path / "no.onnx").write_bytes(b"x")
    (tmp_path / "a" / "1").mkdir(parents=True)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        for words in (
            ["none.onnx"],
            [str(tmp_path / "no.onnx")],
            ["cifar10", "--device", "cpu,cpu"],
            ["cifar10", "--tls-key", "none.pem"],
            ["cifar10", "--http-port", str(port)],
            ["cifar10", "--http-port", "0", "--grpc-port", str(port)],
        ):
            capsys.readouterr()
            assert main([*words[:1], "--http-port=0", "--grpc-port=0", *words[1:]]) == 2, words
            said = capsys.readouterr().err.splitlines()
            assert said[-1].startswith("error: "), said
