"""Peers of ``benchmarks.low_batch`` that run the ONNX file: one that is absent is left out, and named."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from benchmarks import low_batch_configuration as cell
from benchmarks.low_batch_onnx import OnnxRuntime, TensorRT
from cnn_engine.errors import UnsupportedError

MODEL = SimpleNamespace(path=Path("network.onnx"))
IMAGES = np.zeros((2, 3, 8, 8), np.float32)
CPU, CUDA, TENSORRT = "CPUExecutionProvider", "CUDAExecutionProvider", "TensorrtExecutionProvider"


@pytest.fixture
def runtime(monkeypatch):
    """Stands in for ONNX Runtime: ``there`` are its providers, ``used`` those of a session."""
    made = SimpleNamespace(there=[CUDA, TENSORRT, CPU], used=[CUDA, CPU], sessions=[])

    class Options:
        def add_session_config_entry(self, name, value):
            setattr(self, name.rpartition(".")[2], value)

    def session(path, options, providers):
        made.sessions.append((path, options, providers))
        return SimpleNamespace(get_providers=lambda: made.used)

    made.SessionOptions, made.InferenceSession = Options, session
    made.get_available_providers = lambda: made.there
    monkeypatch.setitem(sys.modules, "onnxruntime", made)
    return made


def test_a_provider_that_is_not_there_is_named(runtime):
    runtime.there = [CPU]
    for peer, provider in (("ort-cuda", CUDA), ("ort-tensorrt", TENSORRT)):
        with pytest.raises(UnsupportedError, match=f"expected {provider}, not found: {CPU}"):
            OnnxRuntime(MODEL, "tf32", peer)


def test_a_session_on_another_provider_takes_no_part(runtime):
    runtime.used = [CPU]
    with pytest.raises(UnsupportedError, match=f"expected {CUDA}, found {CPU}"):
        OnnxRuntime(MODEL, "tf32", "ort-cuda").compile(IMAGES)


@pytest.mark.parametrize(("dtype", "wanted"), [("tf32", "1"), ("float32", "0")])
def test_products_are_of_the_data_type(runtime, dtype, wanted):
    OnnxRuntime(MODEL, dtype, "ort-cuda").compile(IMAGES)
    ((path, options, [(provider, settings)]),) = runtime.sessions
    assert (path, provider, settings["use_tf32"]) == ("network.onnx", CUDA, wanted)
    assert options.disable_cpu_ep_fallback == "1"


def test_a_data_type_that_a_library_would_replace_is_refused(runtime):
    with pytest.raises(UnsupportedError, match="expected float16 or tf32"):
        OnnxRuntime(MODEL, "float32", "ort-tensorrt")
    with pytest.raises(UnsupportedError, match="found bfloat16"):
        OnnxRuntime(MODEL, "bfloat16", "ort-cuda")


def test_peers_that_are_not_installed_are_left_out_by_name(monkeypatch):
    for module in ("onnxruntime", "tensorrt"):
        monkeypatch.setitem(sys.modules, module, None)
    group = SimpleNamespace(
        model=SimpleNamespace(images=lambda _: IMAGES, exact=lambda x: x, path=MODEL.path),
        own=SimpleNamespace(contestant=lambda _: SimpleNamespace(run=lambda: None)),
        options=SimpleNamespace(peers=["ort-cuda", "ort-tensorrt", "tensorrt"]),
        dtype="tf32", wanted={}, left_out={}, others={},
    )  # fmt: skip
    cell.Group.prepare(group, 2)
    assert list(group.left_out[2]) == [
        "ONNX Runtime CUDA", "ONNX Runtime TensorRT", "TensorRT",
    ]  # fmt: skip
    assert all("not found" in why for why in group.left_out[2].values())
    assert not group.others


def test_tensorrt_has_the_types_of_the_file(monkeypatch):
    calls = []

    class Recorder:
        """Answers every call with itself, and notes it."""

        def __init__(self, name):
            self.name = name

        def __getattr__(self, name):
            return Recorder(name)

        def __call__(self, *arguments):
            calls.append((self.name, arguments))
            return self

        def __int__(self):
            return 3

    monkeypatch.setitem(sys.modules, "tensorrt", Recorder("tensorrt"))
    for dtype, wanted in (("tf32", "set_flag"), ("float32", "clear_flag")):
        calls.clear()
        TensorRT(MODEL, dtype).compile(IMAGES)
        names = [name for name, _ in calls]
        assert ("create_network", (1 << 3,)) in calls
        assert wanted in names
        assert len({"set_flag", "clear_flag"} & set(names)) == 1
        shapes = next(arguments for name, arguments in calls if name == "set_shape")
        assert shapes[1:] == (IMAGES.shape,) * 3
