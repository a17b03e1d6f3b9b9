"""What ``inspect`` says of a model: text, JSON, a page, and everything that is not supported."""

from __future__ import annotations

import json
import re
from pathlib import Path

import fake_cuda
import graphs
import numpy as np
import onnx
import pytest
from onnx import helper
from onnx_models import model, tensor
from random_networks import network

from cnn_engine import Engine, inspect, kernels
from cnn_engine.engine import inspection
from cnn_engine.graph.onnx import load
from cnn_engine.operators.linear import Linear
from cnn_engine.operators.shaping import Reshape
from cnn_engine.operators.softmax import LogSoftmax
from cnn_engine.plan.builder import build
from cnn_engine.report import graph_page
from cnn_engine.report import inspection as report

node = helper.make_node


def block(batch="N") -> onnx.ModelProto:
    """A residual block of two convolutions, with a reshape and a classifier behind it."""
    rng = np.random.default_rng(0)
    nodes = [
        node("Conv", ["x", "w0"], ["a"], pads=[1, 1, 1, 1], name="first"),
        node("BatchNormalization", ["a", "s", "s", "s", "s"], ["b"], name="norm"),
        node("Relu", ["b"], ["c"], name="relu"),
        node("Conv", ["c", "w1"], ["d"], pads=[1, 1, 1, 1], name="second"),
        node("Add", ["d", "x"], ["e"], name="residual"),
        node("GlobalAveragePool", ["e"], ["f"], name="mean"),
        node("Flatten", ["f"], ["g"], name="flat"),
        node("Gemm", ["g", "v"], ["y"], transB=1, name="classifier"),
    ]
    constants = {
        "w0": rng.normal(size=(4, 4, 3, 3)).astype(np.float32),
        "w1": rng.normal(size=(4, 4, 3, 3)).astype(np.float32),
        "s": np.ones(4, np.float32),
        "v": rng.normal(size=(10, 4)).astype(np.float32),
    }
    return model(nodes, [tensor("x", [batch, 4, 8, 8])], [tensor("y", None)], constants, opset=15)


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "block.onnx"
    onnx.save(block(), path)
    return path


def test_facts():
    found = inspection.inspect(load(block(), batch=2))
    facts = {n.name: n for n in found.nodes}
    assert list(facts) == ["first", "second", "mean", "flat", "classifier"]
    assert facts["first"].covers == ("first", "norm", "relu")
    assert facts["first"].parameters == 4 * 4 * 9 + 4
    assert facts["first"].flops == 2 * 2 * 4 * 64 * 36
    assert facts["second"].covers == ("second", "residual")
    assert [v.name for v in facts["second"].inputs] == ["c", "x"]
    assert facts["flat"].kernels == {"cpu": "none", "cuda": "none"}
    assert "padding=(1, 1, 1, 1)" in facts["first"].attributes
    assert "activation=relu" in facts["first"].attributes
    assert "stride" not in facts["first"].attributes
    assert found.flops == sum(n.flops for n in found.nodes)
    assert found.parameters == 2 * 144 + 4 + 40
    assert found.peak_bytes >= found.alive_bytes >= 2 * 2 * 4 * 64 * 4
    assert all(n.kernels[d] for n in found.nodes for d in inspection.DEVICES)


def test_long_names_stay_apart_from_their_shapes():
    name = "softmax_11.tmp_0"
    proto = model([node("Relu", ["x"], [name])], [tensor("x", [1, 3])], [tensor(name, None)])
    assert f"  output {name}: 1 x 3\n" in report.text(inspection.inspect(load(proto)))


def test_what_the_cpu_runs_as_one_kernel_is_fused():
    """As the engine has it: a chain's first layers in one call, the others by kernels of their own."""
    b = graphs.Builder((1, 3, 8, 8))
    rows = b.add(Reshape((1, -1)), b.relu(b.conv("images", 4)))
    x = b.add(Linear(), rows, b.constant((5, 256)))
    b.add(LogSoftmax(1), x)
    found = inspection.inspect(b.graph())
    kernels = {node.kind: node.kernels["cpu"] for node in found.nodes}
    assert kernels.pop("log_softmax") == "softmax_axis"
    assert set(kernels.values()) == {"fused"}
    with Engine(b.graph(), device="cpu") as engine:
        steps = [step.kernel for step in engine.plan(1, np.dtype(np.float32)).steps]
    assert steps == ["fused", "softmax_axis"]


def same_layers(graph, device: str) -> int:
    """Compares what ``inspect`` says of a device with the plan that an engine runs; returns the layers."""
    found = inspection.inspect(graph).on[device].running
    with Engine(graph, device=device) as engine:
        program = engine._plans.open()
        plan = build(program, *program.first)
    layers = [step for step in plan.steps if step.kind not in ("copy", "sync")]
    assert [(n.name, n.kernel) for n in found] == [(s.name, _shown(s, device)) for s in layers]
    return len(layers)


def _shown(step, device: str) -> str:
    if step.place != device:
        return "CPU"
    return "NumPy" if step.kernel == kernels.NUMPY.name else step.kernel


@pytest.mark.parametrize("seed", range(9))
def test_a_cpu_runs_the_layers_that_are_shown(seed):
    assert same_layers(network(seed, "float32")[0], "cpu")


def test_a_cpu_runs_the_fused_network_that_is_shown():
    b = graphs.Builder((1, 3, 8, 8))
    rows = b.add(Reshape((1, -1)), b.relu(b.conv("images", 4)))
    b.add(LogSoftmax(1), b.add(Linear(), rows, b.constant((5, 256))))
    assert same_layers(b.graph(), "cpu") == 2


@pytest.mark.parametrize("seed", range(5))
def test_a_stand_in_for_a_gpu_runs_the_layers_that_are_shown(seed, monkeypatch):
    fake_cuda.install(monkeypatch, tensor_cores=True, stores=True)
    assert same_layers(network(seed, "float32")[0], "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(5))
def test_a_gpu_runs_the_layers_that_are_shown(seed):
    assert same_layers(network(seed, "float32")[0], "cuda")


def test_every_pass_is_shown_with_the_nodes_that_it_leaves(path, capsys):
    found = inspection.inspect(load(path))
    for facts in found.on.values():
        counts = [len(found.given.nodes), *(ran.after for ran in facts.passes)]
        assert [ran.before for ran in facts.passes] == counts[:-1]
        assert {"fold_affine_after", "fuse_residuals", "channels_last"} <= {
            ran.name for ran in facts.passes
        }
    assert inspect.main([str(path)]) == 0
    text = capsys.readouterr().out
    assert re.search(r"^  fold_affine_after +8 +7 ", text, re.M)
    assert f"layers on cpu:          {len(found.on['cpu'].running)}" in text


def test_text_names_every_node_and_why_it_went(path, capsys):
    assert inspect.main([str(path)]) == 0
    text = capsys.readouterr().out
    for name in ("first", "second", "mean", "flat", "classifier"):
        assert re.search(rf"^  {name} ", text, re.M)
    assert "5: rewrites removed 3 of 8" in text
    assert "input x:" in text
    assert "1 x 4 x 8 x 8 (any batch)" in text
    assert (
        "norm -> first: batch_norm with constants scales and shifts the channels of conv2d" in text
    )
    assert "residual -> second: it is added in the epilogue" in text


def test_json_says_the_same(path, tmp_path, capsys):
    output = tmp_path / "x.json"
    assert inspect.main([str(path), "--json", str(output), "--batch", "3", "--quiet"]) == 0
    assert capsys.readouterr().out == ""
    found = json.loads(output.read_text())
    assert found["inputs"] == {"x": {"shape": [3, 4, 8, 8], "dtype": "float32"}}
    assert found["outputs"]["y"]["shape"] == [3, 10]
    assert [n["name"] for n in found["nodes"]] == ["first", "second", "mean", "flat", "classifier"]
    assert found["flops"] == sum(n["flops"] for n in found["nodes"])
    cpu = found["devices"]["cpu"]
    covered = [name for layer in cpu["layers"] for name in layer["covers"]]
    assert {"first", "norm", "relu", "second", "residual", "mean", "classifier"} <= set(covered)
    assert all(layer["kernel"] for layer in cpu["layers"])
    assert cpu["passes"][0]["nodes_before"] == found["nodes_in_file"]
    assert {r["what"] for r in found["rewrites"]} >= {"norm", "relu", "residual"}
    assert inspect.main([str(path), "--json", "-"]) == 0
    assert json.loads(capsys.readouterr().out)["command"] == "inspect"


def test_all_unsupported_nodes_are_listed(tmp_path, capsys):
    operator = "TfIdfVectorizer"
    nodes = [node(operator, [f"x{i}"], [f"x{i + 1}"], name=f"words{i}") for i in range(20)]
    proto = model(nodes, [tensor("x0", [1, 2, 2])], [tensor("x20", None)])
    path, output = tmp_path / "x.onnx", tmp_path / "x.json"
    onnx.save(proto, path)
    assert inspect.main([str(path), "--json", str(output)]) == 2
    out, err = capsys.readouterr()
    assert all(re.search(rf"^  words{i} +{operator} ", out, re.M) for i in range(20))
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    listed = json.loads(output.read_text())["unsupported"]
    assert [n["name"] for n in listed] == [f"words{i}" for i in range(20)]
    assert listed[0]["reason"] == "the operator is not supported"


def test_open_dimensions_by_option(tmp_path, capsys):
    path = tmp_path / "x.onnx"
    proto = model(
        [node("Relu", ["x"], ["y"])], [tensor("x", ["N", 3, "H", "W"])], [tensor("y", None)]
    )
    onnx.save(proto, path)
    assert inspect.main([str(path)]) == 0
    assert "1 x 3 x 224 x 224" in capsys.readouterr().out
    assert inspect.main([str(path), "--input-shape", "x=1,3,5,6"]) == 0
    assert "1 x 3 x 5 x 6" in capsys.readouterr().out
    assert inspect.main([str(path), "--input-shape", "x:1,3"]) == 2
    assert "expected NAME=1,3,224,224, found 'x:1,3'" in capsys.readouterr().err


def test_the_page_draws_every_node(path, tmp_path):
    output = tmp_path / "x.html"
    assert inspect.main([str(path), "--html", str(output), "--quiet"]) == 0
    page = output.read_text()
    for name in ("first", "second", "mean", "flat", "classifier"):
        assert f"<title>{name}: " in page
    assert page.count("<path ") == 6  # x -> first -> second <- x, then a chain
    assert "script" not in page.replace("description", "")
    assert "http" not in page.replace("http-equiv", "")


def test_boxes_do_not_overlap():
    """Eight branches beside each other, of two lengths, joined."""
    nodes, ends = [], []
    for i in range(8):
        nodes.append(node("Relu", ["x"], [f"a{i}"]))
        if i % 2:
            nodes.append(node("Tanh", [f"a{i}"], [f"b{i}"]))
        ends.append(f"b{i}" if i % 2 else f"a{i}")
    nodes.append(node("Concat", ends, ["y"], axis=0))
    found = inspection.inspect(load(model(nodes, [tensor("x", [1, 3])], [tensor("y", None)])))
    drawn = graph_page.picture(found)
    boxes = [(b.x, b.y) for b in drawn.boxes]
    for i, (x, y) in enumerate(boxes):
        assert 0 <= x <= drawn.width - graph_page.BOX_WIDTH
        assert 0 <= y <= drawn.height - graph_page.BOX_HEIGHT
        for u, v in boxes[:i]:
            assert abs(x - u) >= graph_page.BOX_WIDTH or abs(y - v) >= graph_page.BOX_HEIGHT
    assert len(drawn.paths) == 8 + 4 + 8


def test_names_from_files_are_escaped(tmp_path):
    proto = model(
        [node("Relu", ["x"], ["y"], name="<script>\x1b[31m")],
        [tensor("x", [1])],
        [tensor("y", None)],
    )
    found = inspection.inspect(load(proto))
    assert "<script>" not in graph_page.render(found)
    assert "\x1b" not in report.text(found)


def test_each_family_of_the_picture_has_a_colour():
    page = (Path(graph_page.__file__).parent / "graph.html").read_text()
    for family in (*graph_page.FAMILIES, graph_page.OTHER, graph_page.family("reduce_sum")):
        assert f".f-{family.split(' ')[0]} {{" in page


def test_what_no_kernel_runs_as_one_has_its_reasons():
    """On a GPU, and be it one that is only described: of each row of the kernel table that could have."""
    found = inspection.inspect(graphs.resnet((1, 1), (1, 3, 64, 64), width=16))
    assert not found.on["cpu"].refused
    refused = found.on["cuda"].refused
    assert {note.into for note in refused} >= {"bottleneck", "conv2d_sum"}
    for note in refused:
        rows = [row.name for row in kernels.of(note.into, "cuda")]
        assert [reason.split(": ")[0] for reason in note.why.split("; ")] == rows
    listed = report.to_dict(found)["devices"]["cuda"]["refused"]
    assert [(one["name"], one["region"], one["why"]) for one in listed] == [
        (note.what, note.into, note.why) for note in refused
    ]
    text = report.text(found)
    assert "nodes that no kernel runs as one" in text
    assert all(f" x {note.into}: {note.why}" in text for note in refused)
