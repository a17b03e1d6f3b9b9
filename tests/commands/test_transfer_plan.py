"""``transfer --plan``: the formula against a simulated schedule, and the command without a GPU."""

from __future__ import annotations

import heapq
import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from transfers import error_line, run, write_raw

from cnn_engine.run import main as run_network
from cnn_engine.transfer import overlap
from cnn_engine.transfer.subjects import Mode


def simulated(stages: list[int], count: int, buffers: int) -> int:
    """The end of the last batch, by events: a stage serves one batch at a time, in order."""
    now, free, begun = 0, buffers, 0
    waiting: list[list[int]] = [[] for _ in stages]
    busy = [False] * len(stages)
    events: list[tuple[int, int, int]] = []  # time, stage, batch
    while True:
        while free and begun < count:
            waiting[0].append(begun)
            free, begun = free - 1, begun + 1
        for stage, queue in enumerate(waiting):
            if queue and not busy[stage]:
                busy[stage] = True
                heapq.heappush(events, (now + stages[stage], stage, queue.pop(0)))
        if not events:
            return now
        now, stage, batch = heapq.heappop(events)
        busy[stage] = False
        if stage + 1 < len(stages):
            waiting[stage + 1].append(batch)
        else:
            free += 1


@given(st.lists(st.integers(0, 9), min_size=1, max_size=5), st.integers(1, 40), st.integers(1, 9))
def test_makespan_is_that_of_the_simulated_schedule(stages, count, buffers):
    assert overlap.makespan(stages, count, buffers) == simulated(stages, count, buffers)


def test_period_is_what_one_more_batch_takes():
    stages, buffers = [3.0, 5.0, 2.0], 2
    more = overlap.makespan(stages, 202, buffers) - overlap.makespan(stages, 200, buffers)
    assert overlap.period(stages, buffers) == more / 2 == 5
    assert overlap.period(stages, 1) == 10


def plan(tmp_path, *arguments) -> dict:
    path = tmp_path / "plan.json"
    assert run("--plan", "1000", "--output", tmp_path / "out", "--json", path, *arguments) == 0
    return json.loads(path.read_text())


def test_plan_from_regressions_and_results_of_run(tmp_path, capsys):
    """Copies as the regression of each direction says, in its own bytes; kernels as `run` timed them."""
    sizes = np.array([1, 2, 4, 8, 16, 32])
    for direction, slope in (("h2d", 4e-6), ("d2h", 8e-6)):
        mode = Mode(direction, "pinned")
        write_raw(tmp_path / "raw", lambda b, s=slope: 1e-5 + s * b, sizes, mode=mode)
    organize = (
        "--organize",
        tmp_path / "raw",
        "--output",
        tmp_path / "out",
        "--no-plot",
        "--quiet",
    )
    assert run(*organize) == 0
    results = []
    for batch in (8, 16):
        results.append(tmp_path / f"{batch}.json")
        arguments = ["--network=cifar10", "--device=cpu", f"--batch={batch}", f"--images={batch}",
                     "--data=synthetic", "--weights=random", "--iterations=2", "--quiet",
                     "--no-check", f"--json={results[-1]}"]  # fmt: skip
        assert run_network(arguments) == 0
    capsys.readouterr()
    found = plan(
        tmp_path, "--network", "cifar10", "--batch", "4,8,12", "--buffers", "1,2",
        "--compute-from", *results, "--output-bytes", "1536",
    )  # fmt: skip
    passes = {}
    for path in results:
        document = json.loads(path.read_text())
        passes[document["batch"]] = sum(x["host_s"] / x["calls"] for x in document["layers"])
    compute = {4: passes[8] / 2, 8: passes[8], 12: (passes[8] + passes[16]) / 2}
    for row in found["rows"]:
        times = row["stages"]
        assert times["copy in"] == pytest.approx(1e-5 + 4e-6 * row["batch"], rel=1e-3)
        assert times["copy out"] == pytest.approx(1e-5 + 8e-6 * row["batch"] / 2, rel=1e-3)
        assert times["compute"] == pytest.approx(compute[row["batch"]])
        count = -(-1000 // row["batch"])
        assert row["serial_s"] == pytest.approx(count * sum(times.values()))
        if row["buffers"] == 1:
            assert (row["seconds"], row["hidden"]) == pytest.approx((row["serial_s"], 0))
        else:
            assert row["images_per_s"] > 1000 / row["serial_s"]
    assert found["bytes_in_per_image"] == 3072
    assert "copies hidden" in capsys.readouterr().out


def test_plan_from_given_bandwidths_says_what_binds(tmp_path):
    given = (
        "--shape",
        "1,1,1000",
        "--output-bytes",
        "500",
        "--batch",
        "10",
        "--bandwidth",
        "1,0.5",
    )
    found = plan(tmp_path, *given, "--copy-latency", "1e-5", "--compute", "1e-6")
    one, two, three, _ = found["rows"]
    assert list(one["stages"].values()) == pytest.approx([2e-5, 1e-5, 2e-5])
    assert (one["bound_by"], two["bound_by"], three["bound_by"]) == (
        "buffers",
        "buffers",
        "copy in",
    )
    assert three["seconds"] == pytest.approx(5e-5 + 99 * 2e-5)
    assert two["seconds"] == pytest.approx(50 * 5e-5 + 2e-5)
    assert found["best"] == three
    assert three["hidden"] == pytest.approx((5e-3 - three["seconds"]) / 4e-3)
    assert plan(tmp_path, *given, "--compute", "1")["rows"][1]["bound_by"] == "compute"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--plan=9"], "--plan: expected one --network, --model or --shape"),
        (["--plan=9", "--shape=1,2,3", "--compute=1"], "--output-bytes: expected the bytes"),
        (["--plan=9", "--network=cifar10", "--bandwidth=1"], "--compute or --compute-from"),
        (["--plan=9", "--network=cifar10", "--compute=1"], "regression_h2d_pinned.json, found none"),
        (["--plan=9", "--network=cifar10", "--compute=1", "--bandwidth=1,x"], "--bandwidth: expected"),
        (["--plan=9", "--network=cifar10", "--compute=1", "--copy-latency=1"], "--bandwidth with it"),
        (["--plan=0", "--network=cifar10"], "expected a number of images"),
        (["--bandwidth=1"], "--bandwidth: expected --plan with it"),
        (["--check-infer=none.json"], "none.json: cannot be read"),
    ],
)  # fmt: skip
def test_bad_plans_get_a_line(tmp_path, capsys, arguments, message):
    assert run("--output", tmp_path / "out", *arguments) == 2
    assert message in error_line(capsys)


def test_results_that_do_not_fit_are_refused(tmp_path, capsys):
    path = tmp_path / "r.json"
    command = ("--plan=9", "--network=cifar10", "--bandwidth=1", "--compute-from", path)
    layer = {"calls": 1, "host_s": 1.0, "device_s": None}
    for document, message in (
        ([], "expected a result of run --json"),
        ({"batch": 1, "layers": [layer], "network": "ece408"}, "network: expected cifar10"),
        ({"batch": 1, "layers": [{**layer, "calls": 0}], "network": "cifar10"}, "layers: expected"),
        ({"batch": 0, "layers": [layer], "network": "cifar10"}, "expected a result of run --json"),
    ):
        path.write_text(json.dumps(document))
        assert run(*command) == 2
        assert message in error_line(capsys)


def report(**changes) -> dict:
    ceilings = {
        "read": 5e3,
        "decode": 500.0,
        "compute": 250.0,
        "all at once": 100.0,
        "cores": 160.0,
    }
    rows = {name: {"images_per_s": rate} for name, rate in ceilings.items()}
    return {"kind": "inference", "ceilings": rows, "images_per_s": 150.0, **changes}


def test_rate_of_infer_from_its_stages(tmp_path, capsys):
    path = tmp_path / "report.json"
    path.write_text(json.dumps(report()))
    assert run("--check-infer", path, "--json", tmp_path / "found.json") == 0
    found = json.loads((tmp_path / "found.json").read_text())
    assert (found["bound_by"], found["images_per_s"]) == ("cores", pytest.approx(160))
    assert found["serial_images_per_s"] == pytest.approx(1 / (1 / 5e3 + 1 / 500 + 1 / 250))
    assert found["off"] == pytest.approx(160 / 150 - 1)
    assert "6.67 % above" in capsys.readouterr().out
    for changes in ({"kind": "plan"}, {"ceilings": None}, {"images_per_s": None}, {"ceilings": {}},
                    {"ceilings": {"read": {"images_per_s": 0}}}):  # fmt: skip
        path.write_text(json.dumps(report(**changes)))
        assert run("--check-infer", path) == 2
        assert "report.json: expected" in error_line(capsys)
