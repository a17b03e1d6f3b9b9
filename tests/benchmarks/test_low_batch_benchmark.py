"""``python -m benchmarks.low_batch``: its floor, its tables, and on a GPU a run."""

from __future__ import annotations

import io
import json
import signal
import time
from argparse import ArgumentTypeError

import graphs
import numpy as np
import pytest

from benchmarks import low_batch, result_file
from benchmarks import low_batch_configuration as cell
from benchmarks import low_batch_pages as pages
from benchmarks import low_batch_processes as jobs
from cnn_engine.errors import InputError


def row(**given):
    found = {
        "network": "resnet18", "size": [224, 224], "dtype": "float16", "batch": 1,
        "name": "cnn_engine", "ours": True, "device_ms": 0.1, "lowest_ms": 0.09, "highest_ms": 0.2,
        "flushed_ms": 0.12, "wall_ms": 0.2, "error": 1e-3, "wrong": None,
    }  # fmt: skip
    return found | given


def document():
    ours = row(
        floor_ms=0.02, ratio=3.6, flushed_ratio=3.0, wall_ratio=2.0, error_ratio=0.9, same_bits=True,
        bits=1000, beside_another=True,
    )  # fmt: skip
    checked = {
        "network": "resnet18", "size": [33, 47], "dtype": "float16", "batch": 7, "name": "cnn_engine",
        "ours": True, "error": 1e-3, "wrong": None, "error_ratio": 1.6,
    }  # fmt: skip
    slow = row(
        dtype="tf32",
        ratio=0.5,
        floor_ms=0.05,
        same_bits=False,
        bits=1000,
        error=None,
        wrong="not finite",
    )
    peers = [
        row(name="PyTorch graph", ours=False, device_ms=0.36, error=2e-3),
        row(name="PyTorch graph, channels last", ours=False, device_ms=0.4),
        row(name="PyTorch graph", ours=False, device_ms=0.05, dtype="tf32"),
    ]
    about = {"gpu": "a GPU", "driver": "CUDA 13", "commit": "abc"}
    return {
        "schema": "cnn_engine.low_batch/1", "environment": about, "bits": 1000, "steps": [],
        "commands": [{"command": "python -m benchmarks.low_batch", "started": "2026-01-01"}],
        "rows": [ours, slow, *peers, checked], "left_out": {"torch.compile of resnet18": "no compiler"},
    }  # fmt: skip


def test_tables_name_the_best_peer_and_what_is_behind():
    text = pages.markdown(document())
    assert "Ahead in 1 of 2 cells; in 2 of them torch.compile took no part." in text
    assert "| resnet18 | float16 | 1 | 0.100 | 0.360 PyTorch graph | 3.60 | yes |" in text
    assert "| resnet18 | tf32 | 1 | 0.100 | 0.050 PyTorch graph | 0.50 | **no** |" in text
    assert "| 20% | 1.0e-03, 0.90 |" in text
    assert "Wrong: resnet18 tf32 batch 1, 224x224: not finite" in text
    assert "The error is at most 1.5 times PyTorch's own in 1 of 2 cells" in text
    assert "1000 passes gave the same bits in 1 of 2 cells." in text
    assert "another stream passes gave theirs in 1 of 1." in text
    assert "images of 33x47: the error is at most 1.5 times PyTorch's own in 0 of 1 cells" in text
    assert "Left out: torch.compile of resnet18, no compiler" in text
    assert "Goals reached: 0 of 1." in text
    assert "| resnet18 | float16 | 1 | 0.080 ms | 0.100 | no |" in text


def test_the_summary_counts_what_was_compiled():
    found = document()
    for dtype in ("float16", "tf32"):
        one = row(name="torch.compile default, channels last", ours=False, dtype=dtype)
        found["rows"].append(one)
    assert pages.summary(found) == "Ahead in 1 of 2 cells."
    assert pages.summary(found | {"rows": []}) == "Ahead in 0 of 0 cells."


def test_goals_are_of_time_or_of_a_peer():
    assert pages.goal(row(device_ms=0.08), []) == ("0.080 ms", True)
    graph = row(name="PyTorch graph, channels last", ours=False, device_ms=0.41)
    assert pages.goal(row(dtype="float32"), [graph]) == ("4 times PyTorch graph (0.410)", True)
    assert pages.goal(row(dtype="float32", device_ms=0.11), [graph])[1] is False
    assert pages.goal(row(batch=20), [graph]) is None  # not compiled, so there is nothing to say
    assert pages.goal(row(dtype="tf32"), [graph]) is None


def test_parts_have_every_cell_once_and_about_the_same_work():
    cells = [
        jobs.Cell(network, dtype, batch)
        for batch in low_batch.BATCHES
        for dtype in low_batch.DTYPES
        for network in low_batch.NETWORKS
    ]
    parts = [jobs.part(cells, which, 4) for which in (1, 2, 3, 4)]
    assert sorted(str(one) for part in parts for one in part) == sorted(map(str, cells))
    work = [sum(cell.seconds for cell in part) for part in parts]
    assert max(work) < 1.1 * min(work)
    assert all(part == [cell for cell in cells if cell in part] for part in parts)
    for task in jobs.tasks_of(cells):
        assert len({(cell.network, cell.dtype) for cell in task}) == 1
    assert jobs.tasks_of(cells, apart=True) == [[one] for one in cells]
    assert jobs.part(cells, 1, 1) == cells
    few = cells[:2]
    assert [jobs.part(few, which, 3) for which in (1, 2, 3)].count([]) == 1


def test_what_takes_too_long_ends():
    with pytest.raises(TimeoutError), cell.at_most(0.05):
        time.sleep(5)
    with pytest.raises(TimeoutError), cell.at_most(-1.0):
        pytest.fail("it was begun")
    with cell.at_most(float("inf")):
        pass
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


def written(folder, name, **given):
    path = folder / name
    path.write_text(json.dumps(document() | given))
    return str(path)


def test_parts_become_one_record(tmp_path):
    third = row(network="vgg16", size=[224, 224])
    commands = [{"command": "later", "started": "2026-01-02"}]
    first = written(tmp_path, "1.json", left_out={"vgg16 float16 batch 1": "not begun"})
    second = written(
        tmp_path, "2.json", rows=[third, row(device_ms=9.0)], left_out={}, commands=commands
    )
    words = ["--json", f"{tmp_path}/all.json", "--markdown", f"{tmp_path}/all.md"]
    assert low_batch.main(["--merge", first, second, *words]) == 0
    found = json.loads((tmp_path / "all.json").read_text())
    assert len(found["rows"]) == len(document()["rows"]) + 1
    assert [one["device_ms"] for one in found["rows"] if one["ours"] and "device_ms" in one] == [
        0.1, 0.1, 0.1,
    ]  # fmt: skip
    assert [one["command"] for one in found["commands"]][-1] == "later"
    assert "command" not in found
    assert found["left_out"] == {}
    assert "vgg16" in (tmp_path / "all.md").read_text()


@pytest.mark.parametrize(
    ("given", "wrong"),
    [
        ({"schema": "cnn_engine.models/1"}, "expected cnn_engine.low_batch/1"),
        ({"environment": {"gpu": "a GPU", "commit": "def"}}, "expected commit abc on a GPU"),
        (None, "expected what --json writes"),
    ],
)
def test_other_records_are_not_merged(tmp_path, capsys, given, wrong):
    first, second = written(tmp_path, "1.json"), written(tmp_path, "2.json", **(given or {}))
    if given is None:
        (tmp_path / "2.json").write_text("{")
    assert low_batch.main(["--merge", first, second]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"error: --merge: {second}: {wrong}")
    assert said.count("\n") == 1


def test_shards_are_named_from_one():
    assert result_file.shard("2/4") == (2, 4)
    for text in ("0/4", "5/4", "1", "a/b", "1/0"):
        with pytest.raises((ArgumentTypeError, InputError)):
            result_file.shard(text)


def test_sizes_are_rows_and_columns():
    options = low_batch.parser().parse_args(["--size", "192x160"])
    assert options.size == [(192, 160)]
    assert low_batch.parser().parse_args(["--size", "33", "8x9"]).size == [(33, 33), (8, 9)]


def test_a_chart_has_a_panel_a_type():
    pytest.importorskip("matplotlib")
    file = io.BytesIO()
    pages.draw(document(), file)
    assert file.getvalue()[:4] == b"\x89PNG"


def test_the_floor_is_what_must_be_read_and_waited_for():
    """ResNet-50 of small images reads its weights at batch 1; at batch 100 it multiplies."""
    graph = graphs.resnet((3, 4, 6, 3), (1, 3, 112, 112), weights=False)
    layers = 1 + 3 * 16 + 1  # the convolutions beside a block's own do not wait
    weights = sum(array.size for array in graph.constants.values())
    wanted = weights * 2 / cell.BYTES_PER_S + layers * cell.WAIT_S
    assert cell.floor_s(graph, "float16") == pytest.approx(wanted)
    many = graph.with_batch(100)
    flops = sum(many.cost_of(n).flops for n in many.nodes if n.op.kind in cell.SUMS)
    products = flops / cell.FLOPS_PER_S["tf32"] + layers * cell.WAIT_S
    assert cell.floor_s(many, "tf32") == pytest.approx(products)


def tiny_network():
    torch = pytest.importorskip("torch")
    return torch.nn.Sequential(
        torch.nn.Conv2d(3, 8, 3, 2, 1), torch.nn.BatchNorm2d(8), torch.nn.ReLU(),
        torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(), torch.nn.Linear(8, 10),
    )  # fmt: skip


TINY = "--network test_low_batch_benchmark:tiny_network --device cpu --dtype float32 --batch 1 3"


@pytest.mark.parametrize("jobs", ["", "--jobs 2 --prepare 120"])
def test_runs_on_the_cpu_in_this_process_or_in_others(tmp_path, jobs, torchvision):
    words = (
        f"{TINY} --peers torch --rounds 2 --milliseconds 1 --bits 3 --json {tmp_path}/l.json {jobs}"
    )
    assert low_batch.main(words.split()) == 0
    found = json.loads((tmp_path / "l.json").read_text())
    assert found["left_out"] == {}
    ours = [one for one in found["rows"] if one["ours"]]
    assert [one["batch"] for one in ours] == [1, 3]
    for one in ours:
        assert one["error"] < 1e-6
        assert one["same_bits"]
        assert one["ratio"] > 0
        assert one["ahead"] == (one["ratio"] > 1)
    assert {one["name"] for one in found["rows"]} == {
        "cnn_engine", "PyTorch", "PyTorch, channels last",
    }  # fmt: skip
    assert low_batch.main([*words.replace("3 --peers", "3 2 --peers").split(), "--keep"]) == 0
    kept = json.loads((tmp_path / "l.json").read_text())
    assert kept["rows"][: len(found["rows"])] == found["rows"]
    assert [one["batch"] for one in kept["rows"] if one["ours"]] == [1, 3, 2]
    assert len(kept["commands"]) == 2


def test_a_process_that_fails_leaves_its_cells_out(tmp_path, torchvision):
    words = TINY.replace("tiny_network", "no_such") + f" --jobs 1 --json {tmp_path}/l.json"
    assert low_batch.main(words.split()) == 0
    found = json.loads((tmp_path / "l.json").read_text())
    assert found["rows"] == []
    assert all("no_such" in why for why in found["left_out"].values())
    assert len(found["left_out"]) == 2


def test_logits_alone_on_the_cpu(tmp_path, torchvision):
    words = f"{TINY} --check --size 33x47 8 --json {tmp_path}/l.json"
    assert low_batch.main(words.split()) == 0
    ours = [one for one in json.loads((tmp_path / "l.json").read_text())["rows"] if one["ours"]]
    assert [(one["size"], one["batch"]) for one in ours] == [
        ([33, 47], 1), ([33, 47], 3), ([8, 8], 1), ([8, 8], 3),
    ]  # fmt: skip
    assert all(one["error"] < 1e-6 and one["error_ratio"] > 0 for one in ours)


def test_networks_that_answer_for_each_pixel(tmp_path, torchvision):
    dense_networks = pytest.importorskip("benchmarks.dense_networks")
    wanted = ["benchmarks.dense_networks:espcn", *dense_networks.NAMES]
    assert [*low_batch._named([wanted[0], "dense"])] == wanted
    assert len(dense_networks.NAMES) == 12
    file = tmp_path / "dense.json"
    given = f"--network {wanted[0]} --device cpu --dtype float32 --batch 2 --check --json {file}"
    assert low_batch.main(given.split()) == 0
    ours, *peers = json.loads(file.read_text())["rows"]
    assert ours["size"] == [256, 256]
    assert ours["wrong"] is None
    assert ours["error"] < 1e-5
    assert peers


@pytest.mark.gpu
def test_writes_what_it_measured(tmp_path, torchvision):
    arguments = (
        "--network mobilenet_v3_small --size 64 --batch 1 3 --dtype float16 --peers torch --rounds 2 "
        f"--milliseconds 2 --bits 20 --steps --json {tmp_path}/l.json --markdown {tmp_path}/l.md"
    )
    assert low_batch.main(arguments.split()) == 0
    found = json.loads((tmp_path / "l.json").read_text())
    ours = [row for row in found["rows"] if row["ours"]]
    assert [row["batch"] for row in ours] == [1, 3]
    assert all(row["same_bits"] and row["error"] < 0.05 for row in ours)
    assert {row["name"] for row in found["rows"]} >= {
        "PyTorch graph",
        "PyTorch graph, channels last",
    }
    kernels = {step["kernel"] for step in found["steps"][0]["steps"]}
    assert "depthwise" in kernels
    assert kernels & {"implicit_gemm", "wgmma"}
    assert "mobilenet_v3_small" in (tmp_path / "l.md").read_text()
    again = arguments.replace("--batch 1 3", "--batch 1 3 2 --keep")
    assert low_batch.main(again.split()) == 0
    kept = json.loads((tmp_path / "l.json").read_text())
    assert kept["rows"][: len(found["rows"])] == found["rows"]
    assert [row["batch"] for row in kept["rows"] if row["ours"]] == [1, 3, 2]
    beside = [row["beside_another"] for row in kept["rows"] if "beside_another" in row]
    assert beside == [True]  # with the smallest batch


@pytest.mark.gpu
def test_checks_odd_sizes(tmp_path, torchvision):
    arguments = (
        "--network mobilenet_v3_small --size 33x47 --batch 1 7 --dtype float16 float32 --peers torch "
        f"--check --json {tmp_path}/l.json"
    )
    assert low_batch.main(arguments.split()) == 0
    ours = [row for row in json.loads((tmp_path / "l.json").read_text())["rows"] if row["ours"]]
    assert len(ours) == 4
    assert all(row["error"] < 0.05 and row["size"] == [33, 47] for row in ours)


def test_exact_logits_know_a_sixth():
    """PyTorch's functions are its own again afterwards."""
    torch = pytest.importorskip("torch")
    from benchmarks import low_batch_contestants as who

    functional = torch.nn.functional
    before = functional.hardswish, functional.hardsigmoid
    x = torch.linspace(-4, 4, 1001, dtype=torch.float64)
    with who._sixths_in_any_type(torch):
        found = torch.nn.Hardswish()(x).numpy(), torch.nn.Hardsigmoid()(x).numpy()
    gate = np.clip(x.numpy() / 6 + 0.5, 0, 1)
    np.testing.assert_allclose(found, (x.numpy() * gate, gate), rtol=0, atol=1e-15)
    assert (functional.hardswish, functional.hardsigmoid) == before
