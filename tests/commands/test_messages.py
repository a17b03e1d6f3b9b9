"""What errors name: the argument in Python, the option on the command line, and what was probably meant."""

from __future__ import annotations

import subprocess
import sys

import pytest

import cnn_engine
from cnn_engine import __main__ as command
from cnn_engine.devices import cuda_module
from cnn_engine.errors import InputError, UnsupportedError, did_you_mean


@pytest.mark.parametrize(
    ("name", "value", "hint"),
    [
        ("dtype", "fp16", "float16"), ("dtype", "BF16", "bfloat16"), ("dtype", "flot32", "float32"),
        ("device", "gpu", "cuda"), ("device", "gpu:1", "cuda:1"), ("device", "cdua", "cuda"),
        ("variant", "tild", "tiled"), ("data_mode", "managd", "managed"),
        ("network", "ece40", "ece408"), ("network", "cifar", "cifar10"),
    ],
)  # fmt: skip
def test_what_was_probably_meant(name, value, hint, capsys):
    with pytest.raises(InputError) as raised:
        cnn_engine.Engine(**{"network": "cifar10", "device": "cpu", name: value})
    assert str(raised.value).startswith(f"{name}: expected ")
    assert str(raised.value).endswith(f"found {value!r}; did you mean {hint}?")
    option = f"--{name.replace('_', '-')}"
    assert command.main(["run", "--device", "cpu", option, value]) == 2
    assert capsys.readouterr().err == f"error: --{str(raised.value).replace(name, option[2:], 1)}\n"


def test_nothing_is_suggested_that_is_not_near():
    assert did_you_mean("quantum", ["float32", "float16"]) == ""
    assert did_you_mean(7, ["float32"]) == ""
    with pytest.raises(InputError, match="found 'quantum'$"):
        cnn_engine.Engine("cifar10", dtype="quantum")


def test_options_and_commands_that_were_probably_meant(capsys):
    assert command.main(["run", "--varient", "if"]) == 2
    assert capsys.readouterr().err == (
        "error: unrecognized arguments: --varient if; did you mean --variant?\n"
    )
    assert command.main(["inspct", "x.onnx"]) == 2
    assert capsys.readouterr().err.endswith("found 'inspct'; did you mean inspect?\n")


@pytest.mark.parametrize(
    ("option", "value", "python"),
    [
        ("--weights", "/no/such/file", {"weights": "/no/such/file"}),
        ("--kernel", "/no/such.cu", {"kernels": ["/no/such.cu"]}),
        ("--threads", "100000", {"threads": 100000}),
    ],
)
def test_python_names_arguments_and_the_command_line_options(option, value, python, capsys):
    with pytest.raises(InputError) as raised:
        cnn_engine.Engine("cifar10", device="cpu", **python)
    assert "--" not in str(raised.value)
    assert command.main(["run", "--device", "cpu", option, value]) == 2
    assert capsys.readouterr().err.startswith("error: ")


class Kernels:
    """The CUDA module where there is no GPU, with a driver and a runtime of these versions."""

    architectures = "90a-real"

    def __init__(self, driver: int, reason: str) -> None:
        self.driver_version, self.runtime_version = (lambda: driver), (lambda: 13000)
        self.device_count = lambda: (0, reason)


@pytest.mark.parametrize(
    ("driver", "reason", "why"),
    [
        (0, "cudaErrorInsufficientDriver: insufficient", "no NVIDIA driver is installed"),
        (12040, "cudaErrorInsufficientDriver: insufficient",
         "the NVIDIA driver is for CUDA 12.4, the kernels need 13.0: update the driver"),
        (13010, "cudaErrorNoDevice: no CUDA-capable device is detected",
         "no CUDA-capable device is detected"),
    ],
)  # fmt: skip
def test_without_a_gpu_the_error_says_what_is_missing(driver, reason, why, monkeypatch, capsys):
    monkeypatch.setattr(cuda_module, "load", lambda: Kernels(driver, reason))
    with pytest.raises(UnsupportedError) as raised:
        cnn_engine.Engine("cifar10", device="cuda")
    message = f"device cuda: expected an NVIDIA GPU, found none ({why}); the device cpu needs none"
    assert str(raised.value) == message
    assert command.main(["run", "--device", "cuda"]) == 2
    assert capsys.readouterr().err == f"error: --{message}\n"


def test_choices_and_what_is_required_say_what_was_expected(capsys):
    assert command.main(["loadgen", "--model", "x.onnx", "--scenario", "server"]) == 2
    assert capsys.readouterr().err == (
        "error: --scenario: expected one of SingleStream, MultiStream, Server, Offline, found 'server'; "
        "did you mean Server?\n"
    )
    assert command.main(["quantize", "x.onnx"]) == 2
    assert capsys.readouterr().err == "error: expected --output, found none\n"


@pytest.mark.parametrize(
    ("module", "code", "found"),
    [
        (
            "_cpu",
            "import cnn_engine",
            "found none; install the package first (in a clone: pip install -e .)",
        ),
        (
            "_cuda",
            "import cnn_engine; cnn_engine.Engine('cifar10', device='cuda')",
            "found one built without them; install again with nvcc on PATH",
        ),
    ],
)
def test_an_installation_without_a_module(module, code, found):
    """Python's own words, such as "most likely due to a circular import", would mislead."""
    words = [sys.executable, "-c", f"import sys; sys.modules['cnn_engine.{module}'] = None; {code}"]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 1
    assert found in done.stderr.splitlines()[-1]
    assert "circular" not in done.stderr.splitlines()[-1]
