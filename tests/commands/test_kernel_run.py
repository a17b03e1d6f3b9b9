"""Kernels of a user's own in networks: bound to nodes, told in reports, refused where they cannot run."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import cnn_engine
from cnn_engine import Engine, InputError, Kernel, UnsupportedError, run
from cnn_engine.compare import command as compare
from cnn_engine.devices import cuda_module
from cnn_engine.engine.check import LIMITS
from cnn_engine.kernel import command, templates
from cnn_engine.kernels.user import nvrtc

STEPS = Path(__file__).resolve().parents[2] / "examples" / "kernels"
OPTIONS = ["--network", "ece408", "--weights", "random", "--device", "cpu", "--images", "12", "--batch", "4",
           "--data", "synthetic", "--iterations", "8"]  # fmt: skip


@pytest.fixture
def conv(tmp_path):
    path = tmp_path / "my_conv.cpp"
    path.write_text(templates.text("conv2d", "cpu", path.name))
    return path


@pytest.fixture(scope="module")
def images():
    return np.random.default_rng(0).integers(0, 256, (5, 3, 32, 32), np.uint8)


def test_for_all_nodes_and_for_one(conv, images):
    plain = Engine("cifar10", device="cpu").predict(images)
    for kernels in ([str(conv)], [f"conv2:{conv}"], {"conv2d": Kernel.from_file(conv)}):
        engine = Engine("cifar10", device="cpu", kernels=kernels)
        found = engine.predict(images)
        assert np.abs(found - plain).max() <= LIMITS["cpu"]["float32"]
        steps = {step.name: step.kernel for step in engine.plan(5, images.dtype).steps}
        ours = {name for name, kernel in steps.items() if kernel == "my_conv.cpp"}
        assert ours == ({"conv2"} if kernels == [f"conv2:{conv}"] else {"conv1", "conv2", "conv3"})
        assert engine.check(images).passed


def test_workspace_and_threads(images):
    plain = Engine("cifar10", device="cpu").predict(images)
    for name in ("conv2d_3_blocked.cpp", "conv2d_4_threads.cpp"):
        engine = Engine("cifar10", device="cpu", kernels=[str(STEPS / name)], threads=2)
        assert np.abs(engine.predict(images) - plain).max() <= LIMITS["cpu"]["float32"]


def test_several_operators(tmp_path, images):
    files = []
    for op in ("conv2d", "relu", "max_pool2d", "linear", "softmax"):
        path = tmp_path / f"{op}.cpp"
        path.write_text(templates.text(op, "cpu", path.name))
        files.append(str(path))
    engine = Engine("cifar10", device="cpu", kernels=files)
    plain = Engine("cifar10", device="cpu").predict(images)
    assert np.abs(engine.predict(images) - plain).max() <= LIMITS["cpu"]["float32"]
    kernels = {step.kernel for step in engine.plan(5, images.dtype).steps if step.kind != "sync"}
    assert {"conv2d.cpp", "relu.cpp", "max_pool2d.cpp", "linear.cpp", "softmax.cpp"} <= kernels


def test_epilogues_are_taken_apart(conv):
    """In an imported network a convolution's activation and residual are part of it: not of a user's."""
    torch = pytest.importorskip("torch")
    pytest.importorskip("torchvision")
    pytest.importorskip("onnxscript")
    from cnn_engine import export

    del torch, export
    from cnn_engine.graph.graph import Graph, Node, Value
    from cnn_engine.operators.binary import Add
    from cnn_engine.operators.conv2d import Conv2d
    from cnn_engine.operators.unary import Relu

    generator = np.random.default_rng(0)
    weight = generator.standard_normal((4, 4, 3, 3), np.float32)
    same = Conv2d(padding=(1, 1, 1, 1))
    graph = Graph(
        "block", (Value("x", (2, 4, 8, 8)),), ("y",),
        (
            Node("conv1", same, ("x", "w"), ("a",)),
            Node("relu1", Relu(), ("a",), ("b",)),
            Node("conv2", same, ("b", "w"), ("c",)),
            Node("add", Add(), ("c", "x"), ("d",)),
            Node("relu2", Relu(), ("d",), ("y",)),
        ),
        {"w": weight},
    )  # fmt: skip
    x = generator.standard_normal((2, 4, 8, 8), np.float32)
    wanted = Engine(graph, device="cpu").run({"x": x})["y"]
    engine = Engine(graph, device="cpu", kernels=[str(conv)])
    found = engine.run({"x": x})["y"]
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-4)


def test_refusals(conv, tmp_path, images):
    with pytest.raises(
        UnsupportedError, match="my_conv.cpp: expected conv9 that it can run, found none"
    ):
        Engine("cifar10", device="cpu", kernels=[f"conv9:{conv}"])
    with pytest.raises(InputError, match="expected a kernel of linear, found one of conv2d"):
        Engine("cifar10", device="cpu", kernels={"linear": str(conv)})
    with pytest.raises(InputError, match="expected one kernel"):
        Engine("cifar10", device="cpu", kernels=[str(conv), str(conv)])
    cuda = tmp_path / "a.cu"
    cuda.write_text(templates.text("conv2d", "cuda", "a.cu"))
    with pytest.raises(UnsupportedError, match="it is for cuda, and the node runs on cpu"):
        Engine("cifar10", device="cpu", kernels=[str(cuda)])
    with pytest.raises(UnsupportedError, match="kernels of your own"):
        Engine("cifar10", device="cpu", variant="fused", kernels=[str(conv)])
    text = conv.read_text().replace("// call:", "// requires: c == 16\n// call:")
    conv.write_text(text)
    engine = Engine("cifar10", device="cpu", kernels=[str(conv)])
    kernels, words = engine.own_kernels(1)
    assert 0 < len(kernels[0]["nodes"]) < 3
    assert any("requires c == 16" in word for word in words)
    with pytest.raises(UnsupportedError, match="requires c == 16"):
        Engine("cifar10", device="cpu", kernels=[f"conv1:{conv}"])


def test_python_callable(images):
    calls = []

    def numpy_relu(x, y, shape):
        calls.append(shape.count)
        np.maximum(x, 0, out=y)

    kernel = Kernel.from_callable(numpy_relu, "relu", "cpu")
    engine = Engine("cifar10", device="cpu", kernels=[kernel])
    plain = Engine("cifar10", device="cpu").predict(images)
    assert np.abs(engine.predict(images) - plain).max() <= LIMITS["cpu"]["float32"]
    assert len(calls) == 3
    assert "numpy_relu" in {step.kernel for step in engine.plan(5, images.dtype).steps}
    with pytest.raises(InputError, match="expected one of conv2d"):
        Kernel.from_callable(numpy_relu, "conv9d", "cpu")
    with pytest.raises(InputError, match="expected numpy"):
        Kernel.from_callable(numpy_relu, "relu", "cpu", arrays="torch")


def test_report_and_json(conv, tmp_path, capsys):
    path = tmp_path / "a.json"
    assert run.main([*OPTIONS, "--kernel", f"conv2:{conv}", "--json", str(path)]) == 0
    text = capsys.readouterr().out
    assert "my_conv.cpp runs conv2: named by --kernel" in " ".join(text.split())
    found = json.loads(path.read_text())
    assert found["kernels"][0]["nodes"] == ["conv2"]
    assert {layer["name"]: layer["kernel"] for layer in found["layers"]}["conv2"] == "my_conv.cpp"


def test_a_wrong_kernel_is_not_timed(conv, capsys):
    conv.write_text(conv.read_text().replace("sum +=", "sum -="))
    assert run.main([*OPTIONS, "--kernel", str(conv)]) == 1
    captured = capsys.readouterr()
    assert "wrong: conv1: y[0, 0, 0, 0]" in captured.err
    assert "Latency" not in captured.out


def test_a_crashing_kernel_does_not_crash_the_run(conv, capsys):
    conv.write_text(conv.read_text().replace("float sum =", "*(volatile int*)8 = 1; float sum ="))
    assert run.main([*OPTIONS, "--kernel", str(conv)]) == 1
    assert "crash: SIGSEGV" in capsys.readouterr().err


def test_compare_runs_the_command_again(conv, tmp_path, capsys):
    path = tmp_path / "a.json"
    assert run.main([*OPTIONS, "--json", str(path), "--quiet"]) == 0
    assert compare.main([str(path), "--kernel", f"conv2:{conv}"]) == 0
    text = capsys.readouterr().out
    assert f"conv2:{conv}" in " ".join(text.split()).replace(" ", "") or "my_conv.cpp" in text
    assert compare.main([str(path)]) == 2
    assert compare.main([str(path), "--kernel", "conv9:absent.cu"]) == 2


@pytest.mark.gpu
def test_cupy_and_triton_callables(images):
    import cupy

    relu = cupy.RawKernel(
        'extern "C" __global__ void relu(const float* x, float* y, int n) {'
        "int i = blockIdx.x * blockDim.x + threadIdx.x; if (i < n) y[i] = fmaxf(x[i], 0); }", "relu",
    )  # fmt: skip

    def raw(x, y, shape):
        relu((-(-shape.count // 256),), (256,), (x, y, np.int32(shape.count)))

    plain = Engine("cifar10", device="cuda").predict(images)
    kernels = [Kernel.from_callable(raw, "relu")]
    engine = Engine("cifar10", device="cuda", kernels=kernels)
    assert np.abs(engine.predict(images) - plain).max() <= LIMITS["cuda"]["float32"]
    torch = pytest.importorskip("torch")

    def in_torch(x, y, shape):
        torch.clamp(x, min=0, out=y)

    engine = Engine(
        "cifar10", device="cuda", kernels=[Kernel.from_callable(in_torch, "relu", arrays="torch")]
    )
    assert np.abs(engine.predict(images) - plain).max() <= LIMITS["cuda"]["float32"]


@pytest.mark.gpu
def test_triton_callable(images):
    pytest.importorskip("triton")
    import triton_relu

    plain = Engine("cifar10", device="cuda").predict(images)
    kernel = Kernel.from_callable(triton_relu.relu, "relu", arrays="torch")
    engine = Engine("cifar10", device="cuda", kernels=[kernel])
    assert np.abs(engine.predict(images) - plain).max() <= LIMITS["cuda"]["float32"]


#: Numba with a NumPy newer than it warns of what is its own.
numbas_warnings = pytest.mark.filterwarnings("ignore")


@pytest.fixture
def numba_kernels():
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            import numba_kernels
    except Exception as error:  # an old Numba with a new NumPy ends in an AttributeError
        pytest.skip(f"needs Numba: {error}")
    return numba_kernels


@numbas_warnings
def test_what_numba_compiled_is_a_callable(images, numba_kernels):
    plain = Engine("cifar10", device="cpu").predict(images)
    kernel = Kernel.from_callable(numba_kernels.conv2d, "conv2d", "cpu")
    engine = Engine("cifar10", device="cpu", kernels=[kernel])
    assert np.abs(engine.predict(images) - plain).max() <= LIMITS["cpu"]["float32"]
    steps = [step.kernel for step in engine.plan(5, images.dtype).steps]
    assert steps.count("conv2d") == 3
    assert engine.check(images).passed


@numbas_warnings
def test_numba_for_cuda_in_its_simulator(numba_kernels):
    """The same kernel as on a GPU, in Numba's own stand-in for one, over the CPU's arrays."""
    done = subprocess.run(
        [sys.executable, "-c", SIMULATED],
        capture_output=True, text=True, check=False, cwd=Path(__file__).resolve().parents[1] / "helpers",
        env={**os.environ, "NUMBA_ENABLE_CUDASIM": "1", "PYTHONPATH": os.pathsep.join(sys.path)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["relu", "right"]


SIMULATED = """
import numba_kernels, numpy as np
from cnn_engine import Engine, Kernel
from cnn_engine.graph.graph import Graph, Node, Value
from cnn_engine.operators.unary import Relu
graph = Graph("one", (Value("x", (2, 3, 5, 7)),), ("y",), (Node("relu", Relu(), ("x",), ("y",)),))
x = np.random.default_rng(0).standard_normal((2, 3, 5, 7), np.float32)
engine = Engine(graph, device="cpu", kernels=[Kernel.from_callable(numba_kernels.relu, "relu", "cpu")])
assert np.array_equal(engine.run({"x": x})["y"], np.maximum(x, 0))
print(next(iter(engine.own_kernels(2, np.float32)[0]))["kernel"], "right")
"""


@pytest.mark.gpu
@numbas_warnings
def test_numba_for_cuda(images, numba_kernels):
    import cupy

    x, y = cupy.asarray([-1.0, 2.0], cupy.float32), cupy.zeros(2, cupy.float32)
    try:
        numba_kernels.relu(x, y, SimpleNamespace(count=2))
    except Exception as error:  # Numba by itself, with this NumPy or without a toolkit of its own
        pytest.skip(f"needs Numba that compiles for CUDA: {type(error).__name__}: {error}")
    assert y.tolist() == [0.0, 2.0]
    plain = Engine("cifar10", device="cuda").predict(images)
    kernels = [Kernel.from_callable(numba_kernels.relu, "relu")]
    engine = Engine("cifar10", device="cuda", kernels=kernels)
    assert np.abs(engine.predict(images) - plain).max() <= LIMITS["cuda"]["float32"]


@pytest.mark.gpu
@pytest.mark.parametrize("data_mode", ["resident", "stream", "transfer", "managed"])
def test_cuda_file_in_every_data_mode(tmp_path, images, data_mode):
    path = tmp_path / "my_conv.cu"
    path.write_text(templates.text("conv2d", "cuda", path.name))
    plain = Engine("cifar10", device="cuda").predict(images)
    engine = Engine("cifar10", device="cuda", kernels=[str(path)], data_mode=data_mode)
    assert np.abs(engine.predict(images) - plain).max() <= LIMITS["cuda"]["float32"]


def test_the_name_is_public():
    assert cnn_engine.Kernel is Kernel


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
def test_without_a_gpu_a_cuda_file_is_compiled_and_no_more(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(cuda_module, "unavailable", lambda: "device cuda: none is here")
    path = tmp_path / "my.cu"
    path.write_text(templates.text("conv2d", "cuda", path.name))
    assert command.main(["check", str(path), "--json", str(tmp_path / "found.json")]) == 0
    out = capsys.readouterr().out
    assert re.search(
        r"compiled by (nvcc|NVRTC) for sm_90a; not run: device cuda: none is here", out
    )
    assert "no case was tried" in out
    document = json.loads((tmp_path / "found.json").read_text())
    assert document["passed"] is None
    assert document["cases"] == []
    path.write_text(path.read_text().replace("__global__", "__globl__"))
    assert command.main(["check", str(path)]) == 2
    assert re.match(rf"error: {path}:\d+: ", capsys.readouterr().err)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(nvrtc, "why_not", lambda: "none")
    assert command.main(["check", str(path)]) == 2
    assert "compiling alone takes nvcc on PATH" in capsys.readouterr().err
