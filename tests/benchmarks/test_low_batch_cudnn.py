"""``cudnn``, a peer of ``benchmarks.low_batch``: which nodes are one graph, and what it computes.

A stand-in for the package computes cuDNN's operators with PyTorch, since there is no cuDNN without a GPU:
these tests do not show that cuDNN has plans for the graphs.
"""

from __future__ import annotations

import json
import math
import sys
from types import SimpleNamespace
from typing import ClassVar

import pytest

from benchmarks import low_batch
from benchmarks import low_batch_configuration as cell
from benchmarks.low_batch_cudnn import CudnnGraphs
from cnn_engine.errors import UnsupportedError

torch = pytest.importorskip("torch")


class Tensor:
    """A tensor of a graph: ``make`` returns its numbers of those that are given."""

    def __init__(self, make, computed, **about):
        self.make, self.computed, self.about = make, computed, about

    def set_output(self, value):
        return self

    def set_data_type(self, dtype):
        self.about["data_type"] = dtype
        return self

    def set_dim(self, dim):
        self.about["dim"] = dim
        return self

    def set_stride(self, stride):
        self.about["stride"] = stride
        return self


class Graph:
    """A graph of cuDNN's operators, which are noted in ``operators``."""

    made: ClassVar[list[Graph]] = []
    plans = 3
    refuse: str | None = None

    def __init__(self, **about):
        self.about, self.operators, self.built, self.ran = about, [], [], []
        Graph.made.append(self)

    def tensor(self, **about):
        made = Tensor(lambda given: given[made].float(), False, **about)
        return made

    def _add(self, kind, compute, *inputs):
        self.operators.append(kind)
        return Tensor(lambda given: compute(*(one.make(given) for one in inputs)), True)

    def conv_fprop(
        self, image, weight, pre_padding, post_padding, stride, dilation, compute_data_type
    ):
        (top, left), (bottom, right) = pre_padding, post_padding
        groups = image.about["dim"][1] // weight.about["dim"][1]

        def compute(x, w):
            x = torch.nn.functional.pad(x, (left, right, top, bottom))
            return torch.nn.functional.conv2d(x, w, None, stride, 0, dilation, groups)

        return self._add("conv", compute, image, weight)

    def add(self, a, b):
        return self._add("add", lambda x, y: x + y, a, b)

    def mul(self, a, b):
        return self._add("mul", lambda x, y: x * y, a, b)

    def relu(self, x, lower_clip=0.0, upper_clip=math.inf):
        return self._add("relu", lambda x: x.clamp(lower_clip, upper_clip), x)

    def sigmoid(self, x):
        return self._add("sigmoid", torch.sigmoid, x)

    def swish(self, x, swish_beta):
        return self._add("swish", lambda x: x * torch.sigmoid(swish_beta * x), x)

    def validate(self):
        if self.refuse in self.operators:
            raise RuntimeError(f"no plan for {self.refuse}")

    build_operation_graph = check_support = validate

    def create_execution_plans(self, modes):
        assert modes == ["A", "FALLBACK"]

    def get_execution_plan_count(self):
        return self.plans

    def build_plan_at_index(self, index):
        if index == 0:
            raise RuntimeError("the first plan cannot be built")
        self.built.append(index)

    def get_workspace_size_plan_at_index(self, index):
        return 16 * index

    def execute_plan_at_index(self, tensors, workspace, index, handle):
        assert index in self.built
        assert workspace.numel() >= 16 * index
        for tensor, array in tensors.items():
            sizes = zip(tensor.about["dim"], tensor.about["stride"], array.stride(), strict=True)
            assert list(array.shape) == tensor.about["dim"]
            assert all(wanted == found for size, wanted, found in sizes if size > 1)
        (out,) = (tensor for tensor in tensors if tensor.computed)
        made = out.make(tensors)
        if out.about["data_type"] == "int8":
            made = made.round().clamp(-128, 127)
        tensors[out].copy_(made)
        self.ran.append(index)


@pytest.fixture
def cudnn(monkeypatch):
    """Stands in for the package."""
    made = SimpleNamespace(
        backend_version_string=lambda: "9.0.0", create_handle=object, pygraph=Graph,
        data_type=SimpleNamespace(
            HALF="half", BFLOAT16="bfloat16", FLOAT="float", INT8="int8", INT32="int32"
        ),
        heur_mode=SimpleNamespace(A="A", FALLBACK="FALLBACK"),
    )  # fmt: skip
    monkeypatch.setitem(sys.modules, "cudnn", made)
    monkeypatch.setattr(Graph, "made", [])
    return made


class Block(torch.nn.Module):
    """Two convolutions and a shortcut, as in a ResNet."""

    def __init__(self, activation):
        super().__init__()
        self.first = torch.nn.Conv2d(3, 8, 3, 2, 1)
        self.second = torch.nn.Conv2d(8, 8, 3, 1, 1, groups=4)
        self.shortcut = torch.nn.Conv2d(3, 8, 1, 2, bias=False)
        self.activation = activation
        self.last = torch.nn.Linear(8, 10)

    def forward(self, x):
        y = self.second(self.activation(self.first(x))) + self.shortcut(x)
        return self.last(self.activation(y).mean((2, 3)))


class Dense(torch.nn.Module):
    """Batch norm before convolutions, concatenation and both kinds of pooling, as in a DenseNet."""

    def __init__(self):
        super().__init__()
        self.stem = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.MaxPool2d(3, 2, 1))
        self.norm = torch.nn.BatchNorm2d(8)
        self.conv = torch.nn.Conv2d(8, 4, 3, padding=1)
        self.last = torch.nn.Linear(12, 10)

    def forward(self, x):
        x = self.stem(x)
        x = torch.cat([x, self.conv(self.norm(x).relu())], 1)
        return self.last(torch.nn.functional.avg_pool2d(x, 2).mean((2, 3)))


def relu_block():
    return Block(torch.nn.ReLU())


def swish_block():
    return Block(torch.nn.SiLU())


def hard_swish_block():
    return Block(torch.nn.Hardswish())


def dense():
    return Dense()


class Wide(torch.nn.Module):
    """Convolutions of int8 one after another, with a shortcut, after one of three channels."""

    def __init__(self):
        super().__init__()
        self.stem = torch.nn.Conv2d(3, 8, 3, 2, 1)
        self.first = torch.nn.Conv2d(8, 16, 3, 1, 1)
        self.second = torch.nn.Conv2d(16, 16, 1, bias=False)
        self.third = torch.nn.Conv2d(16, 16, 3, 1, 1)
        self.last = torch.nn.Linear(16, 10)

    def forward(self, x):
        x = self.first(self.stem(x).relu()).relu()
        y = (self.second(x).relu() + x).relu()
        y = (self.third(y) + y).relu()
        return self.last(y.mean((2, 3)))


def wide():
    return Wide()


def run(tmp_path, name, dtype="bfloat16"):
    words = (
        f"--network test_low_batch_cudnn:{name} --size 24x20 --device cpu --dtype {dtype} --batch 2 --peers "
        f"torch cudnn --rounds 1 --milliseconds 1 --bits 0 --json {tmp_path}/l.json"
    )
    assert low_batch.main(words.split()) == 0
    found = json.loads((tmp_path / "l.json").read_text())
    return found, {row["name"]: row for row in found["rows"]}


HARD = ["mul", "add", "relu", "mul"]


@pytest.mark.parametrize(
    ("name", "activation"),
    [("relu_block", ["relu"]), ("swish_block", ["swish"]), ("hard_swish_block", HARD)],
)
def test_a_convolution_takes_what_follows_it(tmp_path, torchvision, cudnn, name, activation):
    found, rows = run(tmp_path, name)
    assert found["left_out"] == {}
    own = rows["cuDNN graphs"]
    assert own["error"] < 2 * rows["PyTorch"]["error"] + 1e-4
    assert own["note"] == "cuDNN 9.0.0: 3 of 3 convolutions as graphs"
    operators = [graph.operators for graph in Graph.made if graph.ran]
    # The sum is of the last of the two convolutions that it adds.
    assert sorted(operators, key=len)[-1][-len(activation) - 1 :] == ["add", *activation]
    assert ["conv", "add", *activation] in operators


def test_a_batch_norm_and_its_activation_are_a_graph(tmp_path, torchvision, cudnn):
    found, rows = run(tmp_path, "dense")
    assert found["left_out"] == {}
    assert rows["cuDNN graphs"]["error"] < 2 * rows["PyTorch"]["error"] + 1e-4
    assert ["mul", "add", "relu"] in [graph.operators for graph in Graph.made if graph.ran]


def test_pytorch_computes_what_cudnn_has_no_plan_for(tmp_path, torchvision, cudnn, monkeypatch):
    monkeypatch.setattr(Graph, "refuse", "swish")
    _, rows = run(tmp_path, "swish_block")
    assert rows["cuDNN graphs"]["note"].endswith("3 of 3 convolutions as graphs")
    monkeypatch.setattr(Graph, "refuse", "conv")
    _, rows = run(tmp_path, "swish_block")
    assert rows["cuDNN graphs"]["note"].endswith("0 of 3 convolutions as graphs")
    assert rows["cuDNN graphs"]["error"] < 2 * rows["PyTorch"]["error"] + 1e-4


def test_int8_convolutions_hand_int8_to_each_other(tmp_path, torchvision, cudnn):
    found, rows = run(tmp_path, "wide", "int8")
    assert rows["cuDNN graphs"]["note"] == "cuDNN 9.0.0: 4 of 4 convolutions as graphs"
    assert 1e-4 < rows["cuDNN graphs"]["error"] < 0.05
    assert rows["cnn_engine"]["error"] < 0.05
    assert all("it has no int8 here" in why for why in found["left_out"].values())
    stem, first, second, third = [graph.operators for graph in Graph.made if graph.ran]
    assert stem == ["conv", "add", "relu", "mul"]  # what it makes is read in int8
    assert first == ["conv", "mul", "add", "relu"]  # a sum that is no graph's reads it, too
    assert second == ["conv", "mul", "relu"]
    assert third == ["conv", "mul", "add", "add", "relu"]


def test_int8_falls_back_to_what_pytorch_computes(tmp_path, torchvision, cudnn, monkeypatch):
    refused = Graph.conv_fprop

    def conv_fprop(self, image, weight, **about):
        if image.about["dim"][1] == 16:
            raise RuntimeError("no plan")
        return refused(self, image, weight, **about)

    monkeypatch.setattr(Graph, "conv_fprop", conv_fprop)
    _, rows = run(tmp_path, "wide", "int8")
    assert rows["cuDNN graphs"]["note"].endswith("2 of 4 convolutions as graphs")
    assert rows["cuDNN graphs"]["error"] < 0.05


def test_what_is_not_there_is_left_out_by_name(tmp_path, torchvision, monkeypatch):
    monkeypatch.setitem(sys.modules, "cudnn", None)
    found, rows = run(tmp_path, "relu_block")
    (why,) = found["left_out"].values()
    assert "cuDNN graphs of " in next(iter(found["left_out"]))
    assert "expected the package nvidia-cudnn-frontend and cuDNN, not found" in why
    assert "cuDNN graphs" not in rows


def test_other_data_types_are_refused(cudnn):
    with pytest.raises(UnsupportedError, match="expected float16, bfloat16, int8, found tf32"):
        CudnnGraphs(SimpleNamespace(dtype="tf32"), None)


def test_its_error_is_not_pytorchs():
    rows = [{"name": "cnn_engine", "error": 1.0}, {"name": "cuDNN graphs", "error": 0.1}]
    cell._compare(rows)
    assert "error_ratio" not in rows[0]
