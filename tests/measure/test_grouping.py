"""Many layers in few rows: what blocks are, and that nothing is lost or counted twice."""

from __future__ import annotations

import json

import onnx_models
import pytest
from onnx import helper
from samples import make, make_cuda, make_deep

from cnn_engine import load, run
from cnn_engine.measure.result import LayerPart, LayerTime
from cnn_engine.report import html, text
from cnn_engine.report.grouping import WAYS, blocks, grouped


def test_blocks_are_modules_with_a_number():
    names = {
        "/conv1/Conv": "conv1",
        "/maxpool/MaxPool": "maxpool",
        "/layer1/layer1.0/conv1/Conv": "layer1.0",
        "/layer1/layer1.0/downsample/downsample.0/Conv": "layer1.0",
        "/layer1/layer1.0/Add": "layer1.0",
        "/layer1/layer1.1/conv1/Conv": "layer1.1",
        "layer2.0.bn1/node_Conv_294": "layer2.0",  # PyTorch's newer exporter
        "/features/features.3/squeeze/Conv": "features.3",
        "/features/features.1/features.1.0/block/block.0/block.0.0/Conv": "features.1.0",
        "/features/features.2/conv/conv.0/conv.0.0/Conv": "features.2",
        "/features/denseblock1/denselayer1/conv1/Conv": "features.denseblock1",
        "/trunk_output/block1/block1-0/f/a/a.0/Conv": "trunk_output.block1.0",
        "/Mixed_5b/branch1x1/conv/Conv": "Mixed_5b",
        "/Flatten": "Flatten",
        "conv2": "conv2",
        "": "",
    }
    assert blocks(list(names)) == list(names.values())


def test_what_all_names_begin_with_tells_nothing():
    assert blocks(["net1/a/Conv", "net1/b2/x/Conv"]) == ["a", "b2"]
    assert blocks(["only1/Conv"]) == ["only1"]
    assert blocks([]) == []


@pytest.mark.parametrize("result", [make(), make_cuda(), make_deep()], ids=["cpu", "cuda", "deep"])
@pytest.mark.parametrize("way", [None, *WAYS])
@pytest.mark.parametrize("top", [None, 1, 3, 1000])
def test_sums_stay_the_same(result, way, top):
    rows = grouped(result.layers, way, top)
    for value in ("seconds", "flops", "bytes", "calls", "host_s"):
        wanted = sum(getattr(layer, value) for layer in result.layers)
        assert sum(getattr(row, value) for row in rows) == pytest.approx(wanted), value
    if top is not None:
        assert len(rows) <= top + 1
        shown = rows[:top]
        assert [row.seconds for row in shown] == sorted((r.seconds for r in shown), reverse=True)
    assert grouped(result.layers) == result.layers


def test_parts_of_a_fused_network_stand_for_it():
    parts = [
        LayerPart("a+b", "conv+relu", ["a", "b"], 0.75, 0.75, 10),
        LayerPart("c", "fc", ["c"], 0.25, 0.25, 2),
    ]
    layers = [LayerTime("network", "fused", "cuda", 7, 0.1, 1.0, 12, 99, inside=parts)]
    rows = grouped(layers, "operator")
    assert [(row.name, row.seconds, row.flops) for row in rows] == [
        ("conv+relu", 0.75, 10),
        ("fc", 0.25, 2),
    ]
    assert grouped(layers, top=1) == layers


def test_a_deep_network_stays_readable():
    result = make_deep()
    assert len(text.render(result).splitlines()) > 180
    lines = text.render(result, "block").splitlines()
    assert any(line.startswith("Time for layer1.0 ") for line in lines)
    assert len(lines) < 110
    lines = text.render(result, None, 10).splitlines()
    assert len(lines) < 60
    first = next(i for i, line in enumerate(lines) if line.startswith("Layers "))
    assert lines[first + 1].startswith("Time for /maxpool/MaxPool ")
    assert lines[first + 11].startswith("Time for 140 others ")
    assert "Layers by operator" in text.render(result, "operator", 2)


def test_the_page_sums_up_many_layers_and_lets_one_script_run():
    document = html.render([make_deep()])
    assert "Layers by operator" in document
    assert "Layers by block" in document
    assert document.count("<script") == 1
    assert "script-src 'sha256-" in document
    assert "<script" not in html.render([make()])


def test_modules_of_the_newer_exporter_are_in_the_names():
    node = helper.make_node("Relu", ["x"], ["y"], name="node_relu_7")
    for scopes in (
        "['', 'layer1', 'layer1.0', 'layer1.0.relu', 'relu_7']",
        "['', 'top']",
        "nonsense",
        "['a/b']",
    ):
        del node.metadata_props[:]
        node.metadata_props.add(key="pkg.torch.onnx.name_scopes", value=scopes)
        model = onnx_models.model(
            [node], [onnx_models.tensor("x", [1, 3])], [onnx_models.tensor("y", [1, 3])]
        )
        wanted = "layer1.0.relu/node_relu_7" if "layer1" in scopes else "node_relu_7"
        assert [node.name for node in load(model).nodes] == [wanted]


def test_run_groups_its_text_and_not_its_document(tmp_path, capsys):
    path = tmp_path / "r.json"
    options = ["--images", "8", "--variant", "pad", "--device", "cpu", "--iterations", "1"]
    assert run.main([*options, "--json", str(path), "--group-by", "operator", "--top", "2"]) == 0
    out = capsys.readouterr().out
    assert "Layers by operator" in out
    assert "Time for conv " in out
    assert "others" in out
    names = [layer["name"] for layer in json.loads(path.read_text())["layers"]]
    assert {"pad1", "conv1", "softmax"} <= set(names)
