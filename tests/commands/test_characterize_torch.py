"""PyTorch models beside ours."""

from __future__ import annotations

import json
import sys

import pytest
from characterize_points import rows, run

from cnn_engine import characterize
from cnn_engine.characterize import measure, subjects
from cnn_engine.errors import InputError

MODELS = """
import torch

class Named(torch.nn.Module):
    def __init__(self, width=4):
        super().__init__()
        self.conv = torch.nn.Conv2d(3, width, 3)
        self.relu = torch.nn.ReLU()

    def forward(self, images):
        assert not self.training
        assert not torch.is_grad_enabled()
        return self.relu(self.relu(self.conv(images)))

class namespace:
    Nested = Named

def no_module():
    return 3

def broken(**options):
    raise RuntimeError("as it must")

thing = 5
"""


@pytest.fixture
def models(tmp_path, monkeypatch):
    (tmp_path / "made_up_models.py").write_text(MODELS)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield "made_up_models"
    sys.modules.pop("made_up_models", None)


def test_torch_that_is_not_there_is_named(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    assert run(tmp_path, "--torch", "torchvision.models:resnet50") == 2
    err = capsys.readouterr().err
    assert "expected the package torch" in err
    assert "cnn-engine[torch]" in err


PLAIN = """
def Named(width=4):
    return width

def broken(**options):
    raise RuntimeError

thing = 5
"""


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("{m}", "expected module:callable"),
        ("{m}:", "expected module:callable"),
        ("no_such_module:x", "a module no_such_module that can be imported"),
        ("{m}:missing", "'missing' in {m}"),
        ("{m}:thing", "something to call, found an object of type int"),
        ("{m}:Named,height=3", "arguments that Named takes"),
        ("{m}:Named,3", "key=value after the callable, found '3'"),
        ("{m}:broken,weights=DEFAULT", "random weights"),
        ("{m}:broken,pretrained=True", "random weights"),
    ],
)
def test_torch_models_that_cannot_be_found(tmp_path, monkeypatch, spec, message):
    models = "made_up_callables"  # a module that does without PyTorch
    (tmp_path / f"{models}.py").write_text(PLAIN)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, models, raising=False)
    with pytest.raises(InputError) as caught:
        subjects._resolve(spec.format(m=models))
    assert message.format(m=models) in str(caught.value)


def test_arguments_of_a_torch_model(models):
    pytest.importorskip("torch")
    make, arguments, name = subjects._resolve(
        f"{models}:namespace.Nested,width=6,weights=None,mode=fast"[
            : -len(",weights=None,mode=fast")
        ]
    )
    assert make(**arguments).conv.out_channels == 6
    assert name == "namespace.Nested(width=6)"


def test_a_torch_model_on_the_cpu(tmp_path, models, capsys):
    pytest.importorskip("torch")
    code = run(
        tmp_path, "--torch", f"{models}:Named,width=3", "--torch", f"{models}:Named",
        "--shape", "3,8,8", "--batch", "1,4", "--network", "cifar10", "--threads", "1",
    )  # fmt: skip
    assert code == 0, capsys.readouterr().err
    summary = rows(tmp_path / "summary.csv")
    names = [(row["subject"], row["batch"]) for row in summary]
    assert names == [
        (name, batch)
        for name in ("cifar10 auto", "Named(width=3)", "Named")
        for batch in ("1", "4")
    ]
    torch_row = summary[-1]
    assert (torch_row["kind"], torch_row["boundary"], torch_row["variant"]) == (
        "torch",
        "device",
        "",
    )
    assert torch_row["threads"] == "1"
    kernels = [k for k in rows(tmp_path / "kernel.csv") if k["subject"] == "Named"]
    assert {(k["name"], k["source"]) for k in kernels} == {("conv", "host"), ("relu", "host")}
    for k in kernels:  # relu is called twice a pass
        assert int(k["calls"]) == int(k["passes"]) * (2 if k["name"] == "relu" else 1)
    document = json.loads((tmp_path / "characterize.json").read_text())
    assert document["options"]["shape"] == [3, 8, 8]
    assert document["options"]["torch"]["channels_last"] is False


def test_a_torch_model_that_does_not_take_the_shape(tmp_path, models, capsys):
    pytest.importorskip("torch")
    assert run(tmp_path, "--torch", f"{models}:Named", "--shape", "4,8,8", "--batch", "1,2") == 1
    err = capsys.readouterr().err
    assert "2 of 2 points failed" in err
    assert "Traceback" not in err
    assert "RuntimeError" in rows(tmp_path / "summary.csv")[0]["note"]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("no_module", "expected a torch.nn.Module, found an object of type int"),
        ("broken", "expected a model, found RuntimeError: as it must"),
    ],
)
def test_what_is_no_torch_model(tmp_path, models, capsys, name, message):
    pytest.importorskip("torch")
    assert run(tmp_path / "out", "--torch", f"{models}:{name}") == 2
    assert message in capsys.readouterr().err


def test_variants_beside_a_torch_model_are_of_the_default_network(tmp_path, models):
    pytest.importorskip("torch")
    assert run(tmp_path, "--torch", f"{models}:Named", "--variant", "fused", "--batch", "1") == 0
    found = {row["subject"] for row in rows(tmp_path / "summary.csv")}
    assert found == {"cifar10 fused", "Named"}


@pytest.mark.gpu
def test_a_torch_model_on_a_gpu(tmp_path, models):
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("a PyTorch without CUDA")
    code = characterize.main(
        ["--device", "cuda", "--settle", "1", "--duration", "0.5", "--batch", "1,8",
         "--torch", f"{models}:Named,width=32", "--shape", "3,64,64", "--torch-dtype", "float16",
         "--output", str(tmp_path)]
    )  # fmt: skip
    assert code == 0
    one, eight = rows(tmp_path / "summary.csv")
    assert one["subject"] == "Named(width=32) float16"
    assert int(eight["allocated_peak_bytes"]) > int(one["allocated_peak_bytes"]) > 0
    if measure.activity.unavailable() is None:
        assert float(one["kernels_per_pass"]) >= 2
        assert 0 < float(one["gpu_utilization"]) <= 1
        assert {k["source"] for k in rows(tmp_path / "kernel.csv")} == {"activity"}
