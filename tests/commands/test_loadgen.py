"""``cnn-engine loadgen``: LoadGen's queries are answered rightly, and its logs are read as they are."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from types import SimpleNamespace

import numpy as np
import pytest

import cnn_engine
from cnn_engine.loadgen import command, contestants, harness, logs, rules

loadgen = pytest.importorskip("mlperf_loadgen")

#: Prints the settings that LoadGen's own copy of the rules gives, which it reads once in a process.
OWN_RULES = """
import json, sys, mlperf_loadgen as loadgen
found = loadgen.TestSettings()
found.FromConfig("/dev/null", "resnet50", sys.argv[1], 1)
print(json.dumps({key: getattr(found, key) for key in json.loads(sys.argv[2])}))
"""


@pytest.mark.parametrize("scenario", rules.SCENARIOS)
def test_rules_are_those_of_loadgen(scenario):
    made = rules.settings(loadgen, scenario, False, rules.OFFICIAL_S, 1.0, 1.0, 0.015)
    keys = ["qsl_rng_seed", "sample_index_rng_seed", "schedule_rng_seed", "min_duration_ms"]
    keys += {
        "SingleStream": ["single_stream_target_latency_percentile"],
        "MultiStream": [
            "multi_stream_target_latency_percentile", "multi_stream_samples_per_query", "min_query_count",
        ],
        "Server": ["server_target_latency_percentile", "server_target_latency_ns"],
        "Offline": ["min_query_count"],
    }[scenario]  # fmt: skip
    words = [sys.executable, "-c", OWN_RULES, scenario, json.dumps(keys)]
    own = json.loads(subprocess.run(words, capture_output=True, check=True, text=True).stdout)
    assert {key: getattr(made, key) for key in keys} == own


def test_every_scenario_is_run_and_reported(tmp_path, capsys):
    words = [f"--scenario={one}" for one in rules.SCENARIOS]
    result = tmp_path / "result.json"
    code = command.main(
        [*words, "--duration=0.3", "--images=16", "--threads=1", "--latency=10000", "--target-qps=50",
         f"--output={tmp_path / 'logs'}", f"--json={result}"]
    )  # fmt: skip
    found = json.loads(result.read_text())
    assert [row["scenario"] for row in found["runs"]] == list(rules.SCENARIOS)
    valid = [row["validity"] for row in found["runs"]]
    assert code == (0 if valid == ["VALID"] * 4 else 1), found
    for row in found["runs"]:
        assert not row["errors"]
        assert 0 < row["min_s"] <= row["p50_s"] <= row["p99_s"] <= row["max_s"]
        assert (
            tmp_path / "logs" / row["scenario"] / "cnn_engine" / "mlperf_log_summary.txt"
        ).is_file()
    said = capsys.readouterr().out.splitlines()
    assert "not official: 0.3 s, not 600" in said[0]
    assert sum("cnn_engine" in line for line in said) == 4


def test_a_bound_that_is_missed_is_invalid_and_exits_with_1(tmp_path, capsys):
    words = [
        "--scenario=Server",
        "--latency=0.000001",
        "--target-qps=50",
        "--duration=0.2",
        "--images=4",
    ]
    assert command.main([*words, "--threads=1", f"--output={tmp_path}"]) == 1
    assert "INVALID" in capsys.readouterr().out


def test_answers_of_accuracy_mode_are_those_of_predict(tmp_path):
    words = ["--mode=accuracy", "--duration=0.2", "--images=20", "--threads=1", "--data=synthetic"]
    for scenario in ("SingleStream", "Server", "Offline"):
        result = tmp_path / "result.json"
        code = command.main(
            [*words, f"--scenario={scenario}", "--batch=3", "--target-qps=500",
             f"--output={tmp_path}", f"--json={result}", "--quiet"]
        )  # fmt: skip
        assert code == 0
        indices, rows = logs.answers(
            tmp_path / scenario / "cnn_engine" / "mlperf_log_accuracy.json", 10
        )
        assert sorted(indices) == list(range(20))
        images = cnn_engine.workload.get("cifar10").load_data("synthetic", 20)
        with cnn_engine.Engine("cifar10", device="cpu", threads=1) as engine:
            np.testing.assert_array_equal(rows, engine.predict(images.images)[indices])
        (row,) = json.loads(result.read_text())["runs"]
        if images.labels is None:
            assert row["accuracy"] is None
        else:
            assert row["accuracy"]["correct"] == (rows.argmax(1) == images.labels[indices]).sum()


def test_an_error_of_a_contestant_is_raised(tmp_path):
    images = np.zeros((4, 1), np.float32)
    calls = []

    def run(batch):
        calls.append(len(batch))
        if len(calls) > 5:
            raise ValueError("too many")
        return batch

    settings = rules.settings(loadgen, "SingleStream", False, 0.1, 100.0, 1.0, 1.0)
    with pytest.raises(ValueError, match="too many"):
        harness.test(loadgen, run, images, settings, 1, 0, tmp_path, np.empty)
    assert len(calls) == 6


def test_other_libraries_answer_alike(tmp_path, small_model):
    pytest.importorskip("onnxruntime")
    images = np.random.default_rng(0).standard_normal((3, 3, 8, 8), np.float32)
    options = command.parser().parse_args(["--model", small_model, "--threads", "1"])
    rows = [
        contestants.MAKERS[name](small_model, options).run(images)
        for name in ("cnn_engine", "onnxruntime")
    ]
    np.testing.assert_allclose(rows[0], rows[1], rtol=1e-5, atol=1e-5)


@pytest.fixture
def small_model(tmp_path):
    onnx = pytest.importorskip("onnx")
    helper, tensor = onnx.helper, onnx.TensorProto.FLOAT
    graph = helper.make_graph(
        [helper.make_node("GlobalAveragePool", ["x"], ["m"]), helper.make_node("Flatten", ["m"], ["y"])],
        "mean",
        [helper.make_tensor_value_info("x", tensor, ["n", 3, 8, 8])],
        [helper.make_tensor_value_info("y", tensor, ["n", 3])],
    )  # fmt: skip
    path = tmp_path / "mean.onnx"
    onnx.save(
        helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9), path
    )
    return str(path)


def test_wrong_options_are_one_line(tmp_path, capsys):
    for words in (
        ["--contestant=onnxruntime"],
        ["--contestant=torch"],
        ["--contestant=server"],
        ["--clients=0"],
        ["--contestant=server", "--address=127.0.0.1:1/none"],
        ["--scenario=None"],
        ["--model=none.onnx"],
        ["--duration=0"],
    ):
        capsys.readouterr()
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(tmp_path)
            try:
                code = command.main(words)
            except SystemExit as ended:
                code = ended.code
        assert code == 2, words
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith("error: "), line


#: The command, interrupted by the first query of its second test.
INTERRUPTED = """
import signal, sys, threading
from cnn_engine.loadgen import command, harness

systems, make, issue = [], harness.System.__init__, harness.System.issue

def made(system, *arguments):
    systems.append(system)
    make(system, *arguments)

def issued(system, samples):
    if len(systems) == 2:
        systems.append(None)
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
    issue(system, samples)

harness.System.__init__, harness.System.issue = made, issued
sys.exit(command.main())
"""


def test_ctrl_c_ends_it_and_keeps_what_was_measured(tmp_path):
    result = tmp_path / "result.json"
    process = subprocess.run(
        [sys.executable, "-c", INTERRUPTED, "--scenario=SingleStream", "--scenario=Offline",
         "--duration=0.3", "--images=4", "--threads=1", f"--output={tmp_path}", f"--json={result}",
         "--contestant=cnn_engine"],
        capture_output=True, text=True,
    )  # fmt: skip
    assert process.returncode == 130, process.stderr
    assert "Traceback" not in process.stderr
    assert [row["scenario"] for row in json.loads(result.read_text())["runs"]] == ["SingleStream"]


def test_clients_of_a_server_have_requests_under_way_at_once():
    """Each waits until all have asked, which one alone would do for ever."""
    together, done = threading.Barrier(3), []

    def run(images):
        together.wait(timeout=60)
        return images.reshape(len(images), -1)

    stand_in = SimpleNamespace(
        QuerySampleResponse=lambda *one: one, QuerySamplesComplete=done.append
    )
    images = np.zeros((3, 1, 1, 1), np.float32)
    system = harness.System(stand_in, run, images, batch=1, keeps=False, workers=3)
    for index in range(3):
        system.issue([SimpleNamespace(id=index, index=index)])
    system.close()
    assert system.error is None
    assert sorted(response[0][0] for response in done) == [0, 1, 2]


def test_images_are_read_where_they_are_or_copied_into_one_memory():
    made, seen = [], []

    def empty(shape, dtype):
        made.append(np.empty(shape, dtype))
        return made[-1]

    def run(images):
        seen.append((images.copy(), [np.shares_memory(images, one) for one in (held, *made)]))
        return images.reshape(len(images), -1)

    held = np.arange(6, dtype=np.float32).reshape(6, 1, 1, 1)
    stand_in = SimpleNamespace(
        QuerySampleResponse=lambda *one: one, QuerySamplesComplete=lambda responses: None
    )
    system = harness.System(stand_in, run, held, 3, keeps=False, workers=0, empty=empty)
    for indices in ([1, 2, 3], [5, 0, 2], [4, 4]):
        system.issue([SimpleNamespace(id=0, index=index) for index in indices])
        assert system.error is None
        assert seen[-1][0].ravel().tolist() == indices
    assert [shared for _, shared in seen] == [[True], [False, True], [False, True]]
    assert len(made) == 1


def test_each_thread_has_a_connection_to_the_server(monkeypatch):
    opened = []

    class Client:
        def __init__(self, where):
            self.used, self.closed = set(), False
            opened.append(self)

        def get_model_metadata(self, name):
            tensor = SimpleNamespace(name="x", datatype="FP32")
            return SimpleNamespace(inputs=[tensor], outputs=[tensor])

        def infer(self, name, inputs):
            self.used.add(threading.get_ident())
            return SimpleNamespace(as_numpy=lambda output: np.zeros((1, 2), np.float32))

        def close(self):
            self.closed = True

    library = SimpleNamespace(
        InferenceServerClient=Client, InferenceServerException=RuntimeError,
        InferInput=lambda *_: SimpleNamespace(set_data_from_numpy=lambda images: None),
    )  # fmt: skip
    monkeypatch.setattr(contestants, "_library", lambda *_: library)
    found = contestants.server(None, SimpleNamespace(address="here:1/model"))
    images = np.zeros((1, 1, 1, 1), np.float32)
    asking = [threading.Thread(target=found.run, args=(images,)) for _ in range(2)]
    for thread in asking:
        thread.start()
    for thread in asking:
        thread.join()
    found.run(images)
    found.close()
    assert all(len(one.used) <= 1 for one in opened)
    assert len(opened) == 4  # of the model's description, and of three threads
    assert all(one.closed for one in opened)


@pytest.mark.parametrize(("scenario", "samples"), [("SingleStream", 1), ("MultiStream", 8)])
def test_streams_have_queries_for_a_contestant_that_was_estimated_too_slow(scenario, samples):
    """LoadGen makes them before the run, and calls one invalid that runs out of them."""
    made = rules.settings(loadgen, scenario, False, 60, 100.0, 1.0, 0.015)
    key = {1: "single_stream_expected_latency_ns", 8: "multi_stream_expected_latency_ns"}[samples]
    assert getattr(made, key) <= samples / 800 * 1e9
