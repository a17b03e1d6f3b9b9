"""What infer says of its speed: of good images, with an interval that holds; and what a plan refuses."""

from __future__ import annotations

import copy
import json

import infer_inputs
import numpy as np
import pytest

from cnn_engine import infer
from cnn_engine.infer import progress, summary
from cnn_engine.infer.output import Record
from cnn_engine.infer.shards import Shard
from cnn_engine.infer.supervise import Supervisor


@pytest.fixture(autouse=True)
def inline(monkeypatch):
    """Saves the time that processes take to start."""
    monkeypatch.setattr("cnn_engine.infer.local_pool.LocalPool", infer_inputs.InlinePool)


@pytest.fixture
def report(tmp_path):
    """The report of a run over 60 images, four of them broken, by fives."""
    folder = tmp_path / "in"
    infer_inputs.make("image", folder, infer_inputs.pixels(60), parts=6)
    files = sorted(folder.glob("*/*.jpg"))
    for path in files[5::15]:
        path.write_bytes(b"no image")
    size = max(
        sum(map(len, (f.read_bytes() for f in files[at : at + 5]))) for at in range(0, 60, 5)
    )
    words = [str(folder), "--output", str(tmp_path / "out"), "--json", str(tmp_path / "r.json"), "--quiet",
             "--shard-size", str(size), *infer_inputs.COMMON]  # fmt: skip
    assert infer.main(words) == 0
    return json.loads((tmp_path / "r.json").read_text())


def plan(document: object, tmp_path, *more: str) -> int:
    path = tmp_path / "rate.json"
    path.write_text(document if isinstance(document, str) else json.dumps(document))
    return infer.main(["--plan", "1e6", "--rate-from", str(path), *more])


def test_throughput_is_of_good_images(report):
    assert (report["images"], report["errors"]) == (60, 4)
    assert report["images_per_s"] == pytest.approx(56 / report["working_s"])
    low, high = report["images_per_s_interval"]
    assert low < report["images_per_s"] < high


def test_a_plan_is_by_good_images_and_tells_the_interval(report, tmp_path, capsys):
    report = {**report, "images": 6000, "errors": 60, "working_s": 10.0, "images_per_s": 600.0,
              "images_per_s_interval": [550.0, 650.0]}  # of a report that counted all  # fmt: skip
    assert plan(report, tmp_path, "--nodes", "2", "--json", "-") == 0
    found = json.loads(capsys.readouterr().out)
    (row,) = found["rows"]
    assert row["images_per_s"] == pytest.approx(2 * 594)
    assert row["seconds_interval"] == [pytest.approx(1e6 / 1300), pytest.approx(1e6 / 1100)]
    assert plan(report, tmp_path) == 0
    assert "594.0 images/s (95 %: 550.0 to 650.0)" in capsys.readouterr().out


def test_a_rate_with_more_than_a_hundredth_of_bad_images_is_refused(report, tmp_path, capsys):
    assert plan(report, tmp_path) == 2
    assert (
        "expected at most 1% of bad images in a rate to plan by, found 6.67 %"
        in capsys.readouterr().err
    )


def test_progress_is_of_all_images_and_its_rate_of_good_ones(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(progress, "monotonic", lambda: now[0])
    tracker = progress.Tracker(1, 0, [Shard(0, "image", 100, 100, 0, 100)])
    supervisor = Supervisor(None, 1)
    supervisor.counts.images, supervisor.counts.errors = 50, 40
    now[0] += 5
    state = tracker.state(supervisor)
    assert (state.rate, state.eta_s, state.fraction) == (2.0, 5.0, 0.5)


def test_a_shard_without_an_image_tells_no_end(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(progress, "monotonic", lambda: now[0])
    tracker = progress.Tracker(3, 0, [Shard(at, "tar", -1, 100, at, 1) for at in range(3)])
    supervisor = Supervisor(None, 1)
    supervisor.counts.images = 10
    supervisor.done[0] = Record(0, 0, 1)
    now[0] += 5
    assert tracker.state(supervisor).eta_s is None
    supervisor.done[1] = Record(20, 0, 1)
    assert tracker.state(supervisor).eta_s == (300 * 20 / 200 - 10) / 2


@pytest.fixture
def good(report):
    return {**report, "errors": 0, "images_per_s": 60 / report["working_s"]}


@pytest.mark.parametrize(
    "value", [None, "x", -1, 0, [], {}, True, float("nan"), float("inf"), 1e300]
)
def test_a_damaged_report_is_refused_in_one_line(value, good, tmp_path, capsys):
    assert plan(good, tmp_path) == 0
    capsys.readouterr()
    names = ("images", "errors", "workers", "hosts", "images_per_s", "working_s", "input_bytes",
             "output_bytes", "command", "environment", "ceilings", "device_name", "started")  # fmt: skip
    for name in names:
        if (name, value) in (
            ("errors", 0),
            ("input_bytes", 0),
            ("output_bytes", 0),
        ) and value is not True:
            continue
        if (name, value) in (
            ("command", "x"),
            ("device_name", "x"),
            ("started", "x"),
            ("ceilings", {}),
        ):
            continue
        if name == "environment" and value == {}:
            continue  # what is not known is not said
        damaged = copy.deepcopy(good)
        damaged[name] = value
        assert plan(damaged, tmp_path) == 2, (name, value)
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith(f"error: {tmp_path}/rate.json: expected "), (name, value)
        del damaged[name]
        assert plan(damaged, tmp_path) == 2, name
        assert len(capsys.readouterr().err.splitlines()) == 1


@pytest.mark.parametrize(
    "text", ["", "[", "[" * 100_000, "null", "3", '{"kind": "inference"}', "\ud800"]
)
def test_what_is_no_report_is_refused_in_one_line(text, tmp_path, capsys):
    path = tmp_path / "rate.json"
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    assert infer.main(["--plan", "1e6", "--rate-from", str(path)]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_a_rate_that_its_own_figures_do_not_give_is_refused(good, tmp_path, capsys):
    assert plan({**good, "images_per_s": 10 * good["images_per_s"]}, tmp_path) == 2
    assert "whose figures fit each other, found" in capsys.readouterr().err


def test_the_interval_of_a_rate_holds_it_as_often_as_it_says():
    """Of shards whose times are of a gamma distribution, on two workers, whose mean is known."""
    rng = np.random.default_rng(0)
    held, runs, widths = 0, 400, []
    for _ in range(runs):
        paces = [(seconds, 10) for seconds in rng.gamma(9, 1 / 9, 120)]
        rate = 2 * 1200 / sum(seconds for seconds, _ in paces)
        low, high = summary.rate_interval(rate, paces)
        assert low < rate < high
        held += low <= 20 <= high
        widths.append((high - low) / 20)
    assert 0.9 * runs <= held
    assert np.median(widths) < 0.2


def test_few_shards_have_no_interval_and_say_so():
    paces = [(at + 1.0, 5) for at in range(summary.FEWEST_SHARDS)]
    assert summary.rate_interval(5.0, paces) is not None
    assert "10 shards are too few to estimate their correlation" in summary.rate_warning(5.0, paces)
    assert summary.rate_interval(5.0, paces[:-1]) is None
    assert summary.rate_warning(5.0, paces[:-1]) == (
        "the rate has no interval: at least 10 shards are needed, found 9 shards"
    )
    assert summary.rate_warning(None, paces) is None
    assert summary.rate_warning(5.0, []) is None
    assert summary.rate_interval(5.0, [(seconds, 0) for seconds, _ in paces]) is None
    assert summary.rate_interval(5.0, []) is None
    assert summary.rate_interval(None, paces) is None


def test_the_lowest_ceiling_is_not_chosen_by_what_measures_it():
    """Three stages of one speed: the lowest of three noisy samples is too low, its next sample is not."""
    rng = np.random.default_rng(0)

    def sample() -> dict:
        return {
            stage: [
                {"images": 100, "seconds": 1 / rng.normal(1, 0.1), "bytes": 0, "cpu_seconds": 0.0}
            ]
            for stage in ("read", "compute", "write")
        }

    chosen, others = [], []
    for _ in range(400):
        trial, second = (summary.ceilings_of(sample(), 1) for _ in range(2))
        others.append(second[summary.lowest(second)]["images_per_s"])
        chosen.append(second[summary.lowest(trial)]["images_per_s"])
    assert np.mean(others) < 93
    assert abs(np.mean(chosen) - 100) < 2
