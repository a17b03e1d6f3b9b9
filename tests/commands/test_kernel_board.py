"""``kernel board``: runs of rank and grade are kept, whole, whoever writes at the same time."""

from __future__ import annotations

import json
import sqlite3
import threading

import pytest

from cnn_engine.errors import InputError
from cnn_engine.kernel import command, history, rank, templates
from cnn_engine.kernel.grade import Grade


def board(times: dict[str, float | None], **changes) -> rank.Board:
    entries = [
        rank.Entry(name, name, processes=[{"n": [seconds]}])
        if seconds
        else rank.Entry(name, name, fault="wrong")
        for name, seconds in times.items()
    ]
    given = {
        "network": "ece408", "operator": "conv2d", "device": "cpu", "batch": 4, "threads": 2, "calls": 1,
        "rounds": 1, "flops": 10**9, "nodes": ["n"], "entries": entries, "environment": {"cpu": "a CPU"},
        **changes,
    }  # fmt: skip
    return rank.Board(**given)


def test_the_best_run_of_each_kernel_is_shown_within_its_problem(tmp_path, capsys):
    file, page, found = str(tmp_path / "b.sqlite"), tmp_path / "b.html", tmp_path / "b.json"
    history.append(file, board({"<b>.cpp": 2.0, "b.cpp": 3.0, "never.cpp": None}))
    history.append(file, board({"<b>.cpp": 4.0, "b.cpp": 1.0}))
    history.append(file, board({"<b>.cpp": None}))
    history.append(file, board({"b.cpp": 9.0}, batch=8))
    marks = [Grade("b.cpp", 70, 100, None)]
    history.append(file, board({"b.cpp": 5.0}), "course/convolution", marks)
    assert command.main(["board", file, "--html", str(page), "--json", str(found)]) == 0
    problems = json.loads(found.read_text())["problems"]
    assert [(p["task"], p["batch"]) for p in problems] == [
        ("ece408", 4),
        ("ece408", 8),
        ("course/convolution", 4),
    ]
    first = problems[0]["submissions"]
    assert [(s["name"], s["best"], s["runs"], s["fault"]) for s in first] == [
        ("b.cpp", 1.0, 2, None), ("<b>.cpp", 2.0, 3, "wrong"), ("never.cpp", None, 1, "wrong"),
    ]  # fmt: skip
    assert [seconds for _, seconds in first[1]["times"]] == [2.0, 4.0]
    assert problems[2]["submissions"][0]["points"] == 70
    text, html = capsys.readouterr().out, page.read_text()
    assert "conv2d of ece408, batch 8, on cpu (a CPU, 2 threads)" in text
    assert "&lt;b&gt;.cpp" in html
    assert "<b>.cpp" not in html
    assert "70 of 100" in html


def test_many_write_at_the_same_time(tmp_path):
    file = str(tmp_path / "b.sqlite")
    writers = [
        threading.Thread(
            target=lambda: [history.append(file, board({"a.cpp": 1.0, "b.cpp": 2.0})) for _ in range(5)]
        )
        for _ in range(8)
    ]  # fmt: skip
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    ((_, submissions),) = history.read(file).items()
    assert [(s.name, s.runs) for s in submissions] == [("a.cpp", 40), ("b.cpp", 40)]


def test_a_run_is_kept_whole_or_not_at_all(tmp_path):
    file = str(tmp_path / "b.sqlite")
    found = board({"a.cpp": 1.0})
    found.entries.append(rank.Entry("b.cpp", "b.cpp", fault={"no": "text"}))  # SQLite takes no dict
    history.prepare(file)
    with pytest.raises(InputError):
        history.append(file, found)
    assert history.read(file) == {}


def test_files_that_are_no_boards_are_refused(tmp_path, capsys):
    other, text, none = (tmp_path / name for name in ("other.sqlite", "text", "none"))
    with sqlite3.connect(other) as connection:
        connection.execute("CREATE TABLE theirs (n)")
    connection.close()
    text.write_text("no database" * 100)
    kernel = tmp_path / "relu.cpp"
    kernel.write_text(templates.text("conv2d", "cpu", "relu.cpp"))
    words = ["rank", str(kernel), "--network", "ece408", "--board"]
    for file in (other, text):
        before = file.read_bytes()
        assert command.main([*words, str(file)]) == 2  # before anything is timed
        assert command.main(["board", str(file)]) == 2
        assert file.read_bytes() == before
    assert command.main([*words, "-"]) == 2
    assert command.main(["board", str(none)]) == 2
    assert not none.exists()
    errors = capsys.readouterr().err.splitlines()
    assert len(errors) == 6
    assert all(line.startswith("error: ") for line in errors)


def test_rank_appends_its_board_and_measures_the_roofline(tmp_path):
    kernel, file = tmp_path / "linear.cpp", tmp_path / "b ?#.sqlite"
    kernel.write_text(templates.text("linear", "cpu", "linear.cpp"))
    words = [
        "rank",
        str(kernel),
        "--network",
        "ece408",
        "--batch",
        "1",
        "--calls",
        "2",
        "--rounds",
        "1",
    ]
    page = tmp_path / "rank.json"
    words += ["--threads", "1", "--roofline", "--json", str(page), "--quiet"]
    assert command.main([*words, "--board", str(file)]) == 0
    limits = json.loads(page.read_text())["roofline"]
    rates = {ceiling["name"]: ceiling["rate"] for ceiling in limits["ceilings"]}
    for point in limits["points"]:
        assert point["name"].startswith("linear.cpp, ")
        attained = point["flops_per_s" if point["bound"] == "float32" else "bytes_per_s"]
        assert point["share"] == pytest.approx(attained / rates[point["bound"]])
    assert len(limits["points"]) == len(json.loads(page.read_text())["nodes"]) == 2
    ((problem, (submission,)),) = history.read(str(file)).items()
    found = (problem.task, problem.operator, problem.batch, problem.threads)
    assert found == ("ece408", "linear", 1, 1)
    assert submission.best > 0
    assert submission.low is None  # one process
