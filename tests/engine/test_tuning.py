"""``--tune``: what is measured, chosen, kept and read again, and files that do not fit."""

from __future__ import annotations

import json

import fake_cuda
import graphs
import numpy as np
import onnx_models
import pytest
from onnx import helper

from cnn_engine import Engine, characterize, compare, run
from cnn_engine.engine import autotune
from cnn_engine.io import cache

ROWS, COLUMNS = 3, 28


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("CNN_ENGINE_KERNEL_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def graph():
    return graphs.resnet((2, 1, 1, 1), (ROWS, 3, COLUMNS, COLUMNS))


@pytest.fixture
def images():
    return np.random.default_rng(0).normal(size=(ROWS, 3, COLUMNS, COLUMNS)).astype(np.float32)


class Times:
    """Stands for the clock: what a node takes is said by its kernel and form."""

    def __init__(self, monkeypatch, says, whole=lambda chosen: -len(chosen)) -> None:
        self.asked = 0

        def step_times(program, batch, pixels, chosen):
            self.asked += 1
            names = (node.name for node in program.laid(batch, pixels).nodes)
            return {name: says(chosen[name]) if name in chosen else 9.0 for name in names}

        def pass_time(program, batch, pixels, chosen):
            return whole([kernel for kernel in chosen.values() if kernel.form == "direct"])

        monkeypatch.setattr(autotune, "step_times", step_times)
        monkeypatch.setattr(autotune, "pass_time", pass_time)


def direct_is_fastest(kernel):
    return 1e-3 if kernel.form == "direct" else 2e-3


def kernels_of(engine):
    plan = engine.plan(ROWS, np.dtype(np.float32))
    return {step.name: step.kernel for step in plan.steps}


def test_what_is_fastest_runs_and_is_kept(graph, images, monkeypatch, folder):
    times = Times(monkeypatch, direct_is_fastest)
    plain = Engine(graph, device="cpu", threads=1)
    with Engine(graph, device="cpu", threads=1, tune=True) as engine:
        (found, words), logits = engine.tuned(ROWS, np.float32), engine.predict(images)
        assert np.abs(logits - plain.predict(images)).max() < 1e-4
        assert np.array_equal(logits, engine.predict(images))
    assert found
    assert {(one["kernel"], one["form"]) for one in found} == {("winograd", "direct")}
    assert all((one["seconds"], one["seconds_instead"]) == (1e-3, 2e-3) for one in found)
    assert words[-1].startswith(f"tuning: {len(found)} nodes gain {len(found)}000.0 us per pass: ")
    (file,) = folder.iterdir()
    document = json.loads(file.read_text())
    assert document["schema"] == autotune.SCHEMA
    assert {entry["form"] for entry in document["nodes"].values()} >= {"direct"}

    asked = times.asked
    with Engine(graph, device="cpu", threads=1, tune=True) as again:
        assert again.tuned(ROWS, np.float32) == (found, words[-1:])
        assert np.array_equal(again.predict(images), logits)
    assert times.asked == asked
    with Engine(graph, device="cpu", threads=1, tune=True) as other:
        other.tuned(ROWS + 1, np.float32)  # a batch of its own
    assert times.asked > asked
    assert len(json.loads(file.read_text())["nodes"]) > len(document["nodes"])


def test_a_pass_that_is_no_faster_changes_nothing(graph, monkeypatch):
    Times(monkeypatch, direct_is_fastest, whole=lambda chosen: 1.0)
    with Engine(graph, device="cpu", threads=1, tune=True) as engine:
        found, words = engine.tuned(ROWS, np.float32)
    assert found == []
    assert words[-1] == "tuning: every node runs the kernel that it runs without"


def test_less_than_noise_changes_nothing(graph, monkeypatch):
    Times(monkeypatch, lambda kernel: 0.99 if kernel.form else 1.0)
    with Engine(graph, device="cpu", threads=1, tune=True) as engine:
        assert engine.tuned(ROWS, np.float32)[0] == []


def test_passes_are_really_timed(graph, images):
    with Engine(graph, device="cpu", threads=1, tune=True) as engine:
        logits = engine.predict(images)
        _, words = engine.tuned(ROWS, np.float32)
        kinds = engine._tuner._known
    assert words[0].startswith("tuning: ")
    assert all(0 < found.seconds <= found.first_s < 1 for found in kinds.values())
    with Engine(graph, device="cpu", threads=1) as plain:
        assert np.abs(logits - plain.predict(images)).max() < 1e-4


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_passes_are_really_timed_on_a_gpu(graph, images, dtype, monkeypatch):
    """Whatever is chosen; here that is never for lack of a gain."""
    pass_time, measured = autotune.pass_time, []

    def faster(*arguments):
        measured.append(pass_time(*arguments))
        return -float(len(measured) == 1)

    monkeypatch.setattr(autotune, "pass_time", faster)
    with Engine(graph, device="cuda", dtype=dtype) as plain:
        wanted = plain.predict(images)
    found = []
    for _ in range(2):
        with Engine(graph, device="cuda", dtype=dtype, tune=True) as engine:
            found.append((engine.predict(images), engine.tuned(ROWS, np.float32)[0]))
            assert np.array_equal(engine.predict(images), found[-1][0])
    assert all(0 < seconds < 1 for seconds in measured)
    assert np.array_equal(found[0][0], found[1][0])
    assert found[0][1] == found[1][1]
    assert np.abs(found[0][0] - wanted).max() <= 0.02 * np.abs(wanted).max()


def deep(text):
    return text.replace('"nodes": {', '"nodes": {"a": ' + "[" * 100_000 + "]" * 100_000 + ", ", 1)


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda text: text[: len(text) // 2], "does not fit: "),
        (lambda text: "", "does not fit: "),
        (lambda text: "[]", "expected an object, found list"),
        (lambda text: text.replace('"engine": "', '"engine": "0.1 '), "engine: expected "),
        (lambda text: text.replace('"driver": "', '"driver": "0'), "driver: expected "),
        (lambda text: text.replace("tuned/1", "tuned/9"), "schema: expected "),
        (lambda text: text.replace('"seconds": 0.', '"seconds": -0.'), "expected names and seconds"),
        (lambda text: text.replace('"seconds": 0.001', '"seconds": NaN'), "expected names and seconds"),
        (lambda text: text.replace('"seconds": 0.001', '"seconds": true'), "expected names and seconds"),
        (lambda text: text.replace('"form": "direct"', '"form": {}'), "expected names and seconds"),
        (lambda text: text.replace('"form": "direct",', ""), "expected kernel, form"),
        (deep, "does not fit: "),
        (lambda text: text.replace('"seconds": 0.001', '"seconds": 0.009', 1), "digest: expected that"),
        (lambda text: text.replace('"digest"', '"dogest"'), "digest: expected that"),
    ],
)  # fmt: skip
def test_a_file_that_does_not_fit_is_left_aside_with_a_line(
    graph, images, monkeypatch, folder, damage, said
):
    times = Times(monkeypatch, direct_is_fastest)
    with Engine(graph, device="cpu", threads=1, tune=True) as engine:
        found, logits = engine.tuned(ROWS, np.float32)[0], engine.predict(images)
    (file,) = folder.iterdir()
    damaged = damage(file.read_text())
    assert damaged != file.read_text()
    file.write_text(damaged)
    asked = times.asked
    with Engine(graph, device="cpu", threads=1, tune=True) as engine:
        again, words = engine.tuned(ROWS, np.float32)
        assert np.array_equal(engine.predict(images), logits)
    assert again == found
    assert times.asked > asked
    assert [said in word for word in words].count(True) == 1
    assert all("\n" not in word for word in words)
    assert json.loads(file.read_text())["nodes"]  # made anew


def test_a_kernel_that_there_is_not_is_measured_again(graph, monkeypatch, folder):
    times = Times(monkeypatch, direct_is_fastest)
    with Engine(graph, device="cpu", threads=1, tune=True) as engine:
        found = engine.tuned(ROWS, np.float32)[0]
    (file,) = folder.iterdir()
    file.write_text(file.read_text().replace('"form": "direct"', '"form": "../../etc/passwd"'))
    asked = times.asked
    with Engine(graph, device="cpu", threads=1, tune=True) as engine:
        assert engine.tuned(ROWS, np.float32)[0] == found
    assert times.asked > asked


def test_a_folder_that_cannot_be_written_is_no_error(graph, images, monkeypatch, tmp_path):
    Times(monkeypatch, direct_is_fastest)
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setenv("CNN_ENGINE_KERNEL_CACHE", str(blocked / "below"))
    made: list = []
    monkeypatch.setattr(cache, "_made", made)
    with Engine(graph, device="cpu", threads=1, tune=True) as engine:
        found, words = engine.tuned(ROWS, np.float32)
        engine.predict(images)
    assert found
    assert [word for word in words if word.startswith("tuning: nothing is kept")]
    made[0].cleanup()


def test_rows_and_tiles_take_turns_on_a_gpu(monkeypatch, folder):
    """On the fake one, whose kernels are the CPU's."""
    fake_cuda.install(monkeypatch, tensor_cores=True)
    monkeypatch.setattr(fake_cuda.FakeKernels, "driver_version", lambda self: 13000, raising=False)
    seen = set()

    def says(kernel):
        seen.add((kernel.op, kernel.name))
        return 1.0 if kernel.name == "implicit_gemm" else 2.0

    Times(monkeypatch, says, whole=lambda chosen: 0.0)
    whole = iter([1.0, 2.0])
    monkeypatch.setattr(autotune, "pass_time", lambda *arguments: next(whole))
    graph = graphs.resnet((1, 1, 1, 1), (ROWS, 3, 32, 32))
    images = np.random.default_rng(0).normal(size=(ROWS, 3, 32, 32)).astype(np.float32)
    with Engine(graph, device="cuda", dtype="tf32", tune=True) as engine:
        found = engine.tuned(ROWS, np.float32)[0]
        assert kernels_of(engine)[found[0]["node"]] == "implicit_gemm"
        logits = engine.predict(images)
    assert ("linear", "rows") in seen
    assert {(one["instead_of"], one["kernel"]) for one in found} == {("rows", "implicit_gemm")}
    with Engine(graph, device="cpu", threads=1) as plain:
        assert np.abs(logits - plain.predict(images)).max() < 1e-3
    (file,) = folder.iterdir()
    assert json.loads(file.read_text())["driver"] == "13000"


@pytest.mark.parametrize(
    ("dtype", "function"), [("tf32", "conv2d_nhwc"), ("float16", "conv2d_nhwc_wgmma")]
)
def test_tiles_and_splits_of_products_are_forms(graph, monkeypatch, dtype, function):
    """The fake GPU runs no float16; what would be run is looked at."""
    fake_cuda.install(monkeypatch, tensor_cores=True, stores=True)
    monkeypatch.setattr(fake_cuda.FakeKernels, "driver_version", lambda self: 13000, raising=False)
    cores = fake_cuda.FakeTensorCores
    for name, own in {
        "takes": lambda *shape: function == "conv2d_nhwc_wgmma",
        "packed": lambda *shape: 64,
        "pack": lambda *shape: None,
    }.items():
        monkeypatch.setattr(cores, f"conv2d_nhwc_wgmma_{name}", staticmethod(own), raising=False)
    monkeypatch.setattr(cores, function, function, raising=False)
    forms: set[str] = set()

    def says(kernel):
        forms.add(kernel.form)
        return 1.0 if kernel.form == "rank 2" else 2.0

    Times(monkeypatch, says)
    whole = iter([1.0, 2.0])
    monkeypatch.setattr(autotune, "pass_time", lambda *arguments: next(whole))
    with Engine(graph, device="cuda", dtype=dtype, tune=True) as engine:
        found = engine.tuned(ROWS, np.float32)[0]
        steps = engine.plan(ROWS, np.dtype(np.float32)).steps
    assert forms == {"", "rank 1", "rank 2", "rank 3"}
    assert {one["form"] for one in found} == {"rank 2"}
    tuned = {one["node"] for one in found}
    products = [step for step in steps if step.function == function]
    assert len(products) > 5
    assert {step.args[-2] for step in products} == {2}
    assert tuned >= {step.name for step in products}


def test_a_fused_network_has_nothing_to_choose(folder):
    with Engine("cifar10", weights="random", device="cpu", tune=True) as engine:
        assert engine.tuned(1) == ([], ["tuning: nothing to choose in fused, resident"])
    assert not folder.exists()


def test_reports_say_what_was_tuned(tmp_path, capsys, monkeypatch):
    onnx_file = tmp_path / "m.onnx"
    onnx_file.write_bytes(model_bytes())
    Times(monkeypatch, direct_is_fastest)
    words = [
        "--model",
        str(onnx_file),
        "--device",
        "cpu",
        "--threads",
        "1",
        "--images",
        "2",
        "--batch",
        "2",
    ]
    words += ["--iterations", "1", "--data", "synthetic"]
    path = tmp_path / "r.json"
    assert run.main([*words, "--tune", "--json", str(path)]) == 0
    assert "tuning: 1 nodes gain 1000.0 us per pass: " in capsys.readouterr().out
    document = json.loads(path.read_text())
    assert [one["form"] for one in document["tuned"]] == ["direct"]


def test_characterize_says_it_at_each_point(tmp_path, monkeypatch):
    onnx_file, folder = tmp_path / "m.onnx", tmp_path / "out"
    onnx_file.write_bytes(model_bytes())
    Times(monkeypatch, direct_is_fastest)
    words = f"--model {onnx_file} --device cpu --threads 1 --batch 1,2 --images 2 --tune --quiet --no-plot"
    words += f" --settle 0.01 --duration 0.01 --data synthetic --output {folder}"
    assert characterize.main(words.split()) == 0
    found = json.loads((folder / "characterize.json").read_text())
    for point in found["points"]:
        assert "tuning: 1 nodes gain 1000.0 us per pass: conv winograd direct" in point["note"]


def test_compare_runs_the_command_again_with_it(tmp_path, capsys):
    onnx_file, path = tmp_path / "m.onnx", tmp_path / "a.json"
    onnx_file.write_bytes(model_bytes())
    words = f"--model {onnx_file} --device cpu --threads 1 --images 2 --batch 2 --iterations 3"
    command = f"python -m cnn_engine.run {words} --data synthetic --json {path}"
    monkey = pytest.MonkeyPatch()
    monkey.setattr("sys.orig_argv", command.split())
    try:
        assert run.main(command.split()[3:]) == 0
    finally:
        monkey.undo()
    capsys.readouterr()
    assert compare.main([str(path), "--tune", "--json", str(tmp_path / "c.json")]) == 0
    assert "--tune" in (tmp_path / "c.json").read_text()


def model_bytes():
    """A convolution that Winograd's kernels can run, and a linear layer."""
    rng = np.random.default_rng(0)
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["y"], "conv", pads=[1, 1, 1, 1]),
        helper.make_node("Relu", ["y"], ["r"], "relu"),
        helper.make_node("GlobalAveragePool", ["r"], ["p"], "pool"),
        helper.make_node("Flatten", ["p"], ["f"], "flatten"),
        helper.make_node("Gemm", ["f", "v"], ["z"], "gemm"),
    ]
    constants = {
        "w": rng.normal(size=(32, 32, 3, 3)).astype(np.float32),
        "v": rng.normal(size=(32, 10)).astype(np.float32),
    }
    inputs = [onnx_models.tensor("x", ["n", 32, 20, 20])]
    found = onnx_models.model(nodes, inputs, [onnx_models.tensor("z", ["n", 10])], constants)
    return found.SerializeToString()
