"""The JSON Schema that the package ships, against what the commands write: every key is described."""

from __future__ import annotations

import copy
import json
from importlib import resources
from pathlib import Path
from typing import Any

import infer_inputs
import jsonschema
import numpy as np
import onnx
import pytest
import samples
import transfers
from onnx import helper
from onnx_models import model, tensor

from cnn_engine import __main__ as command_line
from cnn_engine import run
from cnn_engine.report import json as json_report

ROOT = Path(__file__).resolve().parents[2]
SCHEMA = json.loads(
    resources.files("cnn_engine.report").joinpath("results.schema.json").read_text("utf-8")
)
CPU = ["--device", "cpu", "--threads", "1"]


def strict(node: Any) -> Any:
    """Returns a schema under which a key that it does not describe is an error."""
    if isinstance(node, list):
        return [strict(item) for item in node]
    if not isinstance(node, dict):
        return node
    found = {key: strict(value) for key, value in node.items()}
    if isinstance(found.get("properties"), dict) and "type" in found:
        found["additionalProperties"] = False
    return found


def faults(kind: str, document: Any, schema: Any = None) -> list[str]:
    """Returns what of a document is not as the schema has it."""
    schema = strict(SCHEMA) if schema is None else schema
    validator = jsonschema.Draft202012Validator(
        {"$ref": f"#/$defs/{kind}", "$defs": schema["$defs"]}
    )
    return [
        f"{error.json_path}: {error.message[:200]}" for error in validator.iter_errors(document)
    ]


def written(path: Path) -> Any:
    return json.loads(path.read_text("utf-8"))


def command(*words: object) -> None:
    assert command_line.main([str(word) for word in words]) == 0


@pytest.fixture(scope="module")
def result(tmp_path_factory) -> Path:
    """A result of ``run``, with samples, layers, a check and a profile."""
    path = tmp_path_factory.mktemp("run") / "run.json"
    words = [
        "--variant",
        "fused",
        "--images",
        "4",
        "--batch",
        "2",
        "--iterations",
        "2",
        "--profile",
    ]
    assert run.main([*words, *CPU, "--quiet", "--json", str(path)]) == 0
    return path


def test_the_schema_is_one():
    jsonschema.Draft202012Validator.check_schema(SCHEMA)


def test_run(result):
    document = written(result)
    assert document["layers"][0]["inside"]
    assert document["profile"]["cpu"]
    assert faults("run", document) == []


@pytest.mark.parametrize("make", [samples.make, samples.make_cuda, samples.make_taken_apart])
def test_results_of_other_devices(make):
    assert faults("run", json.loads(json_report.dumps(make()))) == []


def test_a_result_of_an_earlier_version():
    """Of commit 639ae7c on an H200: padded convolutions that copy in and out."""
    assert faults("run", written(Path(__file__).with_name("earlier_result.json"))) == []


def test_comparison(result, tmp_path):
    command("compare", result, result, "--json", tmp_path / "compare.json")
    assert faults("comparison", written(tmp_path / "compare.json")) == []


def test_characterize(tmp_path):
    words = [
        "--variant",
        "if",
        "--images",
        "4",
        "--batch",
        "2",
        "--duration",
        "0.01",
        "--settle",
        "0.01",
    ]
    command("characterize", *words, "--device", "cpu", "--no-plot", "--output", tmp_path, "--quiet")
    assert faults("characterize", written(tmp_path / "characterize.json")) == []


@pytest.mark.parametrize("held_out", [0, 2])
def test_transfer(tmp_path, held_out):
    transfers.write_raw(tmp_path / "raw", transfers.two_pieces, np.arange(1, 40, 3), noise=0.01)
    words = [
        "--organize",
        tmp_path / "raw",
        "--output",
        tmp_path,
        "--hold-out",
        held_out,
        "--quiet",
    ]
    command("transfer", *(words if held_out else [*words[:4], "--quiet"]))
    (path,) = tmp_path.rglob("regression.json")
    assert faults("transfer", written(path)) == []


def test_kernels(tmp_path):
    kernel = tmp_path / "mine.cpp"
    command("kernel", "new", "relu", "--device", "cpu", "--output", kernel)
    command("kernel", "check", kernel, "--json", tmp_path / "check.json", "--quiet")
    assert faults("kernel_check", written(tmp_path / "check.json")) == []
    words = ["--network", "cifar10", "--batch", "1", "--calls", "2", "--rounds", "1", "--quiet"]
    command("kernel", "rank", kernel, *words, "--json", tmp_path / "rank.json")
    assert faults("kernel_rank", written(tmp_path / "rank.json")) == []


def test_infer(tmp_path, monkeypatch):
    monkeypatch.setattr("cnn_engine.infer.local_pool.LocalPool", infer_inputs.InlinePool)
    np.save(tmp_path / "images.npy", infer_inputs.pixels(8))
    words = [
        tmp_path / "images.npy",
        "--device",
        "cpu",
        "--workers",
        "1",
        "--output",
        tmp_path / "rows",
    ]
    command("infer", *words, "--json", tmp_path / "infer.json", "--quiet")
    assert faults("inference", written(tmp_path / "infer.json")) == []
    plan = ["--plan", "1e9", "--rate-from", tmp_path / "infer.json", "--nodes", "10"]
    command("infer", *plan, "--json", tmp_path / "plan.json", "--quiet")
    assert faults("inference_plan", written(tmp_path / "plan.json")) == []


def test_inspections(tmp_path):
    weight, nodes = np.ones((8, 4, 3, 3), np.float32), [helper.make_node("Conv", ["x", "w"], ["a"])]
    nodes += [helper.make_node("Relu", ["a"], ["b"]), helper.make_node("Sinh", ["b"], ["y"])]
    ends = [tensor("x", [None, 4, 8, 8])], [tensor("y", None)]
    onnx.save(model(nodes, *ends, {"w": weight}), tmp_path / "a.onnx")
    words = [tmp_path / "a.onnx", "--quiet", "--json", tmp_path / "inspect.json"]
    for target in ("h200", "zen4"):
        command("inspect", *words, "--target", target)
        assert faults("inspection", written(tmp_path / "inspect.json")) == []
    nodes[-1] = helper.make_node("StringNormalizer", ["b"], ["y"])
    onnx.save(model(nodes, *ends, {"w": weight}), tmp_path / "a.onnx")
    assert command_line.main(["inspect", *map(str, words)]) == 2
    assert faults("inspection_unsupported", written(tmp_path / "inspect.json")) == []


def test_ensemble(tmp_path):
    words = [
        "--members",
        "2",
        "--data",
        "synthetic",
        "--images",
        "40",
        "--device",
        "cpu",
        "--ceilings",
        "0.1",
    ]
    command("ensemble", *words, "--json", tmp_path / "ensemble.json", "--quiet")
    assert faults("ensemble", written(tmp_path / "ensemble.json")) == []


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        (lambda found: found.pop("check"), "'check' is a required property"),
        (lambda found: found.update(batch="7"), "$.batch: '7' is not of type 'integer'"),
        (lambda found: found.update(schema=2), "$.schema: 1 was expected"),
        (lambda found: found["layers"][0].update(flops=None), "$.layers[0].flops"),
        (lambda found: found["environment"].update(mood="good"), "$.environment: Additional properties"),
    ],
)  # fmt: skip
def test_documents_at_fault(change, fault):
    document = json.loads(json_report.dumps(samples.make()))
    change(document)
    (found,) = faults("run", document)
    assert fault in found


def test_a_user_may_add_keys():
    document = json.loads(json_report.dumps(samples.make()))
    changed = copy.deepcopy(document)
    changed["mine"] = 1
    assert faults("run", changed, SCHEMA) == []
